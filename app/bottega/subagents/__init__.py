"""Asynchronous sub-agents: registry, scheduler and tools.

The package is a library like :mod:`bottega.agents`, independent of HTTP, SQL and settings.
"""
