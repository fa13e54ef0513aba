"""The demo model: a small, deterministic OpenAI-compatible server on loopback.

Its answers depend on the tools, the awareness message and the shared context of a request. So they
show whether context arrived. It runs in its own process, see :mod:`bottega.llm.demo_process`.
"""
