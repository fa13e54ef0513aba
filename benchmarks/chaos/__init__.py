"""Faults on purpose; see ``__main__``."""
