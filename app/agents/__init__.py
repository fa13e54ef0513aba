"""Agents, tools, hooks and shared memory: all there is to build a team of agents in Python.

Knows nothing of HTTP, SQL or settings (spec pages 1 and 2).
"""

from app.agents.base import BaseAgent
from app.agents.factory import AgentFactory
from app.agents.hooks import AgentEvent, AgentStatus, EventContract, Hook, HookDecision
from app.agents.messages import (
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
from app.agents.policy import ToolRequirement
from app.agents.prompting import PromptMemory
from app.agents.provider import LLMProvider, ModelOptions, ToolSchema, set_default_provider
from app.agents.recall import Embedder, Recall
from app.agents.recording import Query, Recorder
from app.agents.subagent import SubAgentWrapper
from app.agents.tools import ToolBase, tool
from app.errors import (
    CycleError,
    HistoryError,
    HookContractError,
    InvalidQueryError,
    ModelError,
    NoProviderError,
    UnknownAgentError,
)
from app.graph.drawing import draw_svg
from app.graph.shared_memory import MemoryItem, PropagationPolicy, Publication, SharedMemoryGraph

__all__ = [
    "AgentEvent",
    "AgentFactory",
    "AgentStatus",
    "AgentUsage",
    "AssistantMessage",
    "AssistantResponse",
    "BaseAgent",
    "CycleError",
    "Embedder",
    "EventContract",
    "HistoryError",
    "Hook",
    "HookContractError",
    "HookDecision",
    "HumanMessage",
    "InvalidQueryError",
    "LLMProvider",
    "MemoryItem",
    "ModelError",
    "ModelOptions",
    "NoProviderError",
    "PromptMemory",
    "PropagationPolicy",
    "Publication",
    "Query",
    "Recall",
    "Recorder",
    "SharedMemoryGraph",
    "StandardMessage",
    "SubAgentWrapper",
    "SystemMessage",
    "ToolBase",
    "ToolCall",
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
]
