"""What a run under way shows to operators: its log lines and metrics."""
