"""Asynchronous sub-agents: registry, scheduler and the three tools (spec page 3).

A library like :mod:`bottega.agents`: knows nothing of HTTP, SQL or settings.
"""
