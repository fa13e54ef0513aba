"""Client of MCP servers: their tools, calls of them, and their questions to people."""
