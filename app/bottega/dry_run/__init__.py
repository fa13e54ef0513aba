"""Dry runs: a team answers with the demo model, in a process of its own that stores nothing."""
