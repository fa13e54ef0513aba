"""Servers that refuse what vendors refuse, over a real socket."""
