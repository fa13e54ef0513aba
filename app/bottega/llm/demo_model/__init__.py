"""The demo model: a small, deterministic OpenAI-compatible server on loopback.

It reads the tools, the awareness message and the shared context it is sent, so that its answers
show whether context flowed. It runs as a process of its own (``python -m bottega.llm.demo_model``).
"""
