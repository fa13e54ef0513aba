"""Calls of tools, and messages between calls of models."""
