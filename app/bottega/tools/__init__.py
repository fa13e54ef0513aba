"""Built-in tools, user-defined tools, and the HTTP client that guards requests to tenants' URLs."""
