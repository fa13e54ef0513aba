"""Asynchronous sub-agents: registry, scheduler and the three tools.

A library like :mod:`bottega.agents`, independent of HTTP, SQL and settings.
"""
