"""Bottega: teams of LLM agents on Postgres, with every step visible."""

__version__ = "0.1.0"
