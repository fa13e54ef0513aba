"""The tools of an agent in mode ``async``."""

from bottega.subagents.tools.calls import DispatchTool, use_async_subagents, use_defined_subagents

__all__ = ["DispatchTool", "use_async_subagents", "use_defined_subagents"]
