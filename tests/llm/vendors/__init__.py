"""Servers with vendors' strict rules, over a real socket."""
