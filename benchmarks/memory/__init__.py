"""What memory finds, and what that costs. ``python -m benchmarks.memory``."""
