"""Asynchronous sub-agents: registry, scheduler and tools.

This is a library like :mod:`bottega.agents`, independent of HTTP, SQL and settings.
"""
