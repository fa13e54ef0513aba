"""Shared memory in a run's log: publications, and what agents received."""
