"""Quality and cost of memory. ``python -m benchmarks.memory``."""
