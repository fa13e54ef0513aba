"""Client of MCP servers: their tools, calls of their tools, and their questions to people."""
