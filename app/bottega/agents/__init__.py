"""Library for teams of agents: agents, tools, hooks and shared memory.

The library is independent of HTTP, SQL and settings.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bottega.agents.agent import AgentFactory, BaseAgent
from bottega.agents.approval import Approval, Interrupt, Resolution
from bottega.agents.context import Caller, CancelScope, ToolContext
from bottega.agents.hooks import AgentEvent, AgentStatus, EventContract, Hook, HookDecision
from bottega.agents.messages import (
    AgentUsage,
    AssistantMessage,
    AssistantResponse,
    HumanMessage,
    StandardMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    ToolResult,
    ToolStatus,
    Usage,
)
from bottega.agents.output import ToolRequirement
from bottega.agents.params import ModelParams, NamedTool
from bottega.agents.parts import FileContent, FileLoader, Part
from bottega.agents.provider import LLMProvider, ModelOptions, ToolSchema, set_default_provider
from bottega.agents.query import PromptMemory, Query, Recorder
from bottega.agents.shared_memory import AncestorRecall, Recall, RecallEmbedder
from bottega.agents.stream import (
    QueryAnswered,
    QueryEvent,
    SubAgentEnded,
    SubAgentStarted,
    TextDelta,
    TextRestarted,
    ToolAnswered,
    ToolCalled,
)
from bottega.agents.subagent import SubAgentWrapper
from bottega.agents.tools import ToolBase, tool
from bottega.errors import (
    AgentBusyError,
    CycleError,
    HistoryError,
    HookContractError,
    InvalidQueryError,
    ModelError,
    NoProviderError,
    UnknownAgentError,
)
from bottega.graph.shared_memory import (
    MemoryItem,
    PropagationPolicy,
    Publication,
    SharedMemoryGraph,
)
from bottega.graph.svg import draw_svg

if TYPE_CHECKING:
    from bottega.subagents.limits import SchedulerOptions, SubagentLimits
    from bottega.subagents.registry import SubagentRegistry
    from bottega.subagents.scheduler import SubagentScheduler
    from bottega.subagents.tools import use_async_subagents

_ABOVE = {
    "SchedulerOptions": "limits",
    "SubagentLimits": "limits",
    "SubagentRegistry": "registry",
    "SubagentScheduler": "scheduler",
    "use_async_subagents": "tools",
}
"""The module of each name of ``bottega.subagents``. That package imports ``bottega.agents``, so
these names are imported late."""


def __getattr__(name: str) -> Any:
    """Import a name of ``bottega.subagents`` when a program first uses the name."""
    if (module := _ABOVE.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"bottega.subagents.{module}"), name)


__all__ = [
    "AgentBusyError",
    "AgentEvent",
    "AgentFactory",
    "AgentStatus",
    "AgentUsage",
    "AncestorRecall",
    "Approval",
    "AssistantMessage",
    "AssistantResponse",
    "BaseAgent",
    "Caller",
    "CancelScope",
    "CycleError",
    "EventContract",
    "FileContent",
    "FileLoader",
    "HistoryError",
    "Hook",
    "HookContractError",
    "HookDecision",
    "HumanMessage",
    "Interrupt",
    "InvalidQueryError",
    "LLMProvider",
    "MemoryItem",
    "ModelError",
    "ModelOptions",
    "ModelParams",
    "NamedTool",
    "NoProviderError",
    "Part",
    "PromptMemory",
    "PropagationPolicy",
    "Publication",
    "Query",
    "QueryAnswered",
    "QueryEvent",
    "Recall",
    "RecallEmbedder",
    "Recorder",
    "Resolution",
    "SchedulerOptions",
    "SharedMemoryGraph",
    "StandardMessage",
    "SubAgentEnded",
    "SubAgentStarted",
    "SubAgentWrapper",
    "SubagentLimits",
    "SubagentRegistry",
    "SubagentScheduler",
    "SystemMessage",
    "TextDelta",
    "TextRestarted",
    "ToolAnswered",
    "ToolBase",
    "ToolCall",
    "ToolCalled",
    "ToolContext",
    "ToolMessage",
    "ToolRequirement",
    "ToolResult",
    "ToolSchema",
    "ToolStatus",
    "UnknownAgentError",
    "Usage",
    "draw_svg",
    "set_default_provider",
    "tool",
    "use_async_subagents",
]
