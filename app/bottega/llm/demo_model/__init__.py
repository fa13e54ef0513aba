"""The demo model: a small, deterministic OpenAI-compatible server on loopback.

The answers depend on the request's tools and shared context, so an answer shows if the shared
context arrived at the model. The demo model runs in a separate process; see
:mod:`bottega.llm.demo_process`.
"""
