"""Routes of MCP servers that tenants use."""
