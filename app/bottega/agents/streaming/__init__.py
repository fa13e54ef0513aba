"""Queries as streams of events."""
