"""Routes of the MCP servers that tenants use, and of Bottega's own MCP server."""
