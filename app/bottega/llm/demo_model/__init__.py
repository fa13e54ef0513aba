"""The demo model: a small, deterministic OpenAI-compatible server on loopback.

Its answers depend on the tools, the awareness message and the shared context of a request, so they
show if context arrived. It runs in its own process (``python -m bottega.llm.demo_model``).
"""
