"""What agents publish to their graph and read from it, in a run's log."""
