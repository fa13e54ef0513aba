"""Built-in and user-defined tools, and the guarded HTTP client for tenants' URLs."""
