"""Asynchronous sub-agents: registry, scheduler and tools.

A library like :mod:`bottega.agents`, independent of HTTP, SQL and settings.
"""
