"""Client of MCP servers: lists and calls a server's tools, and answers a server's questions."""
