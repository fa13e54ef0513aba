"""Planted bugs: each patch here breaks one decision, and the test that it names must fail."""
