"""Routes of MCP servers that tenants use, and of the MCP server that Bottega itself is."""
