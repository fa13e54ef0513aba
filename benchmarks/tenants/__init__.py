"""Effect on a tenant of a neighbour that does its worst."""
