"""Python's callables as tools: their arguments as a schema, their results as JSON."""
