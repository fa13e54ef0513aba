"""Texts that stand where a chat template wants a turn or a text, and a history has none."""

GO_ON = "Please go on."
"""Of a user, after an answer that nobody replied to, or before the first one."""
UNDERSTOOD = "Understood."
"""Of the model, between a tool's result and a user who speaks next."""
EMPTY = "(empty)"
"""Of a tool whose result is empty."""
