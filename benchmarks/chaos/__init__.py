"""Fault injection; see ``__main__``."""
