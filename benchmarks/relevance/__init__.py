"""Relevance of what memory gives to agents, in six languages."""
