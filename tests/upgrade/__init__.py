"""The baseline that is released, and a database of it with data."""
