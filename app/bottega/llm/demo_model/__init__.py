"""The demo model: a small, deterministic OpenAI-compatible server on loopback.

The answers depend on the tools, the awareness message and the shared context of a request. So an
answer shows if the context arrived at the model. The demo model runs in its own process; see
:mod:`bottega.llm.demo_process`.
"""
