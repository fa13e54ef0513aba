"""Built-in and user-defined tools, and the guarded HTTP client of the service."""
