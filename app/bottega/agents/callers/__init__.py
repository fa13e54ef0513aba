"""Context of tool calls, for the tools' code."""
