"""Placeholder texts where a chat template requires a turn or a text and the history has none."""

GO_ON = "Please go on."
"""The user's, before a first answer or between two answers."""
UNDERSTOOD = "Understood."
"""The model's, between a tool's result and the user's next message."""
EMPTY = "(empty)"
"""The tool's, for an empty result."""
