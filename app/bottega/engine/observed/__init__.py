"""Log lines and metrics of runs under way."""
