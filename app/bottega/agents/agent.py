"""Class and factory of agents. An agent has a system message, a history, tools and hooks.

The constructor checks the types of its arguments at run time, because many programs use no type
checker.
"""

import asyncio
import copy
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Self, get_args

from bottega.agents.context import Caller
from bottega.agents.hooks import AgentEvent, Hook
from bottega.agents.loop import QueryLoop
from bottega.agents.messages import (
    AgentUsage,
    AssistantResponse,
    QueryInput,
    StandardMessage,
    SystemMessage,
    query_messages,
    split_turns,
)
from bottega.agents.output import ToolRequirement, answer_schema
from bottega.agents.params import ModelParams, ToolChoiceScope
from bottega.agents.provider import LLMProvider, default_provider
from bottega.agents.query import (
    OnLength,
    PromptMemory,
    Query,
    RecallPort,
    Recorder,
    take_next_query,
)
from bottega.agents.shared_memory import awareness_message
from bottega.agents.stream import QueryEvent, events_of
from bottega.agents.subagent import FreshCopies, SubAgentWrapper
from bottega.agents.tools import ToolBase
from bottega.errors import AgentBusyError, CycleError, InvalidInputError, UnknownAgentError
from bottega.graph.shared_memory import SharedMemoryGraph

_Fits = Callable[[object], bool]


def _is_policy(value: object) -> bool:
    return isinstance(value, Sequence) and all(isinstance(one, ToolRequirement) for one in value)


_PARTS: Mapping[str, tuple[_Fits, str]] = {
    "system_message": (lambda value: isinstance(value, str | SystemMessage), "a text"),
    "provider": (
        lambda value: hasattr(value, "invoke"),
        "an object with `invoke`, such as OpenAIProvider('gpt-5-mini')",
    ),
    "tools": (lambda value: isinstance(value, Iterable), "a list of tools"),
    "tool_policy": (_is_policy, "a list of ToolRequirement(…)"),
    "exit_on_success": (
        lambda value: isinstance(value, Iterable) and not isinstance(value, str),
        "a list of names of tools",
    ),
    "params": (lambda value: isinstance(value, ModelParams), "ModelParams(…)"),
    "output_schema": (
        lambda value: isinstance(value, Mapping),
        "a JSON Schema as a dict (for a Pydantic model: {name}.model_json_schema())",
    ),
}


def refuse_wrong_parts(**parts: object) -> None:
    """Check the types of an agent's constructor arguments; accept ``None`` for each argument.

    Raises:
        TypeError: an argument has a wrong type. The error text names the right type.
    """
    for name, value in parts.items():
        fits, what = _PARTS[name]
        if value is not None and not fits(value):
            described = what.format(name=value.__name__ if isinstance(value, type) else "MODEL")
            raise TypeError(f"an agent's {name} must be {described}, not {_kind(value)}")


def refuse_no_tool(value: object) -> None:
    """Check that a value is a tool, or a class of tools.

    Raises:
        TypeError: the value is neither a tool nor a class of tools. The error text says how to
            write a tool.
    """
    if not (
        isinstance(value, ToolBase) or (isinstance(value, type) and issubclass(value, ToolBase))
    ):
        how = (
            "add it by register_agent(agent, name=…, description=…)"
            if hasattr(value, "execute_query")
            else "make it a tool with @tool(name=…, description=…)"
        )
        raise TypeError(f"{_kind(value)} is not a tool: {how}")


def _kind(value: object) -> str:
    named = getattr(value, "__qualname__", None)
    return f"'{named}'" if isinstance(named, str) else type(value).__name__


_claiming = threading.Lock()


class BaseAgent:
    """Agent that calls a model, and the tools that the model requests, until the model answers.

    Args:
        provider: client of the model; by default the client set by :func:`set_default_provider`.
        agent_name: name of the agent; by default the name of its class.
        description: the agent's abilities. The model of a parent agent reads this text.
        max_iterations: limit of model calls per query.
        tool_policy: tool calls required before an answer is accepted.
        exit_on_success: names of tools. The result of their first successful call is the answer.
        agent_comment: if true, the model reads the tool results and then answers; if false, the
            tool results are the answer.
        on_length: policy for a text cut off at the model's limit: ``continue`` asks once for the
            rest, ``fail`` fails the query, ``accept`` takes the text as the answer.
        params: parameters of the agent's model calls; by default the model's default values.
        tool_choice_scope: the model calls of a query that use ``params.tool_choice``: ``first`` or
            ``all``.
        output_schema: JSON Schema of the agent's answers. The agent sends an invalid answer back to
            the model at most twice. After a third invalid answer the query fails with
            ``output_invalid``.

    Raises:
        TypeError: an argument has a wrong type.
        InvalidInputError: a number, name or schema is not valid.

    Attributes:
        conversation_history: the live history; starts with the system message.
        first_history: the history before the first query, or ``None`` until the first query begins.
        hooks: hooks by event. An event without hooks has no entry.
        memory_graph: the shared memory, or ``None`` if the agent has no shared memory.
        agent_id: the agent's name in the shared memory, or ``None`` without shared memory.
        output: the checked schema of the agent's answers.
        recall: if set, adds publications of the agent's indirect ancestors to the prompt. This
            needs ``memory_graph`` and ``agent_id``.
        memory: selects the messages of the history for each prompt. Copies of the agent have no
            memory.
        usage: usage of all queries, including the usage of sub-agents.
    """

    def __init__(
        self,
        system_message: str | SystemMessage,
        provider: LLMProvider | None = None,
        agent_name: str | None = None,
        description: str | None = None,
        max_iterations: int = 15,
        tools: Iterable[ToolBase | type[ToolBase]] | None = None,
        tool_policy: Sequence[ToolRequirement] | None = None,
        exit_on_success: Iterable[str] | None = None,
        agent_comment: bool = True,
        on_length: OnLength = "continue",
        params: ModelParams | None = None,
        tool_choice_scope: ToolChoiceScope = "first",
        output_schema: Mapping[str, Any] | None = None,
    ) -> None:
        refuse_wrong_parts(
            system_message=system_message,
            provider=provider,
            tools=tools,
            tool_policy=tool_policy,
            exit_on_success=exit_on_success,
            params=params,
            output_schema=output_schema,
        )
        if max_iterations < 1:
            raise InvalidInputError(f"max_iterations must be at least 1, not {max_iterations}")
        if on_length not in get_args(OnLength):
            raise InvalidInputError(f"on_length must be one of: {', '.join(get_args(OnLength))}")
        if isinstance(system_message, str):
            system_message = SystemMessage(content=system_message)
        self.system_message = system_message
        self.provider = provider
        self.agent_name = agent_name or type(self).__name__
        self.description = description
        self.max_iterations = max_iterations
        self.tool_policy = list(tool_policy or ())
        self.exit_on_success = list(exit_on_success or ())
        self.agent_comment = agent_comment
        self.on_length = on_length
        self.params = params
        self.tool_choice_scope = tool_choice_scope
        self.output = None if output_schema is None else answer_schema(output_schema)
        self.conversation_history: list[StandardMessage] = [system_message]
        self.first_history: tuple[StandardMessage, ...] | None = None
        self.registered_tools: list[ToolBase] = []
        self.hooks: dict[AgentEvent, list[Hook]] = {}
        self.memory_graph: SharedMemoryGraph | None = None
        self.agent_id: str | None = None
        self.recall: RecallPort | None = None
        self.memory: PromptMemory | None = None
        self.usage = AgentUsage()
        self._turn: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        self._is_busy = False
        for tool in tools or ():
            self.register_tool(tool)

    # Set-up

    def on(self, event: AgentEvent) -> Hook:
        """Add a new hook on ``event`` after the existing hooks, and return the new hook."""
        hook = Hook(AgentEvent(event))
        self.hooks.setdefault(hook.event, []).append(hook)
        return hook

    def off(self, hook: Hook) -> None:
        """Remove a hook; do nothing if the agent does not have the hook."""
        hooks = self.hooks.get(hook.event, [])
        if hook in hooks:
            hooks.remove(hook)
        if not hooks:
            self.hooks.pop(hook.event, None)

    def register_tool(self, tool: ToolBase | type[ToolBase]) -> None:
        """Add a tool. If ``tool`` is a class, create its instance without arguments.

        Raises:
            InvalidInputError: the tool has no name, or the agent already has a tool or sub-agent
                with this name (``duplicate_tool``).
            TypeError: the argument is not a tool.
        """
        refuse_no_tool(tool)
        if isinstance(tool, type):
            tool = tool()
        if not tool.name.strip():
            raise InvalidInputError("a tool needs a name, because models call tools by name")
        for known in self.registered_tools:
            if known is tool:
                return
            if known.name == tool.name:
                raise InvalidInputError(
                    f"{self.agent_name} already has another tool with the name '{tool.name}'",
                    code="duplicate_tool",
                )
        self.registered_tools.append(tool)

    def register_agent(
        self, agent: "BaseAgent", *, name: str, description: str, stateless: bool = False
    ) -> None:
        """Add another agent as a tool of this agent; see :class:`SubAgentWrapper`.

        Raises:
            CycleError: ``agent`` is this agent, or has this agent as a direct or indirect
                sub-agent.
        """
        if path := agent.path_to(self):
            names = [member.agent_id or member.agent_name for member in (self, *path)]
            raise CycleError(names, what="sub-agent")
        self.register_tool(SubAgentWrapper(agent, name, description, stateless))

    @property
    def subagents(self) -> list["BaseAgent"]:
        agents = (agent for tool in self.registered_tools for agent in tool.subagents)
        return [agent for agent in agents if isinstance(agent, BaseAgent)]

    def path_to(self, other: "BaseAgent", passed: "set[int] | None" = None) -> list["BaseAgent"]:
        """Return the path of sub-agents from this agent to ``other``; ``[]``: there is no path."""
        passed = set() if passed is None else passed
        if self is other:
            return [self]
        passed.add(id(self))
        for child in self.subagents:
            if id(child) not in passed and (path := child.path_to(other, passed)):
                return [self, *path]
        return []

    # Copies

    def copy_for_call(self) -> Self:
        """Return a copy with the same hooks and graph, a separate history, and no memory."""
        agent = copy.copy(self)
        agent.conversation_history = list(self.conversation_history)
        agent.registered_tools = list(self.registered_tools)
        agent.usage = AgentUsage()
        agent.memory = None
        agent._is_busy = False
        return agent

    def fresh_copy(self, made: FreshCopies | None = None) -> Self:
        """Copy the agent and its sub-agents; copies have the history before the first query."""
        made = {} if made is None else made
        made[self] = new = self.copy_for_call()
        if self.first_history is not None:
            new.conversation_history = list(self.first_history)
        new.first_history = new._turn = None
        new.registered_tools = [
            tool.fresh_copy(made) if isinstance(tool, SubAgentWrapper) else tool
            for tool in self.registered_tools
        ]
        return new

    # Queries

    def execute_query(
        self,
        query: QueryInput,
        *,
        recorder: Recorder | None = None,
        caller: Caller | None = None,
    ) -> AssistantResponse:
        """Run :meth:`execute_query_async` in a new event loop.

        Raises:
            RuntimeError: an event loop already runs in this thread.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.execute_query_async(query, recorder=recorder, caller=caller))
        raise RuntimeError(
            "execute_query() cannot run inside an event loop; use "
            "`await agent.execute_query_async(...)` there"
        )

    async def execute_query_async(
        self,
        query: QueryInput,
        *,
        recorder: Recorder | None = None,
        caller: Caller | None = None,
    ) -> AssistantResponse:
        """Answer a query. An agent runs one query at a time; copies of an agent run concurrently.

        Args:
            query: a text, or messages of one or several turns. The last message must be a
                ``HumanMessage``, or the result of a tool call that the model made after the last
                ``HumanMessage``.
            recorder: observes the query; a sub-agent uses its parent's recorder.
            caller: tenant, end user and session of the query; tools read the caller in their
                :class:`ToolContext`. By default, the caller of the recorder.

        Raises:
            AgentBusyError: another query of this agent is still running.
            InvalidQueryError: the query is neither a text nor a valid list of messages (see
                ``query``).
            NoProviderError: the agent has no provider, and the program has set no default provider.
            HookContractError, HistoryError: a hook, or other code of the program, has a bug.
            Exception: the recorder raised an error that is not a ``ModelError``.
        """
        history, messages = split_turns(query_messages(query))
        with self._claimed():
            if self.first_history is None:
                self.first_history = tuple(self.conversation_history)
            provider = default_provider() if self.provider is None else self.provider
            state = take_next_query(self)
            if state is None:
                recorder = recorder or Recorder()
                recorder.caller = caller or recorder.caller
                state = Query(agent=self, messages=tuple(messages), recorder=recorder)
            else:
                state.messages = tuple(messages)
            self.conversation_history += history
            return await QueryLoop(state, provider).run()

    def stream(
        self,
        query: QueryInput,
        *,
        most_waiting: int = 100,
        caller: Caller | None = None,
    ) -> AsyncGenerator[QueryEvent, None]:
        """Answer a query and yield its events while it runs; the last event is ``QueryAnswered``.

        The query starts when the reader requests the first event, and pauses while the reader is
        slow. Closing the generator cancels the query. Call ``aclose()`` to close the generator.
        ``break`` in ``async for`` also closes it, if the program has no other reference to it.

        Args:
            query: see :meth:`execute_query_async`. The generator raises the same errors.
            most_waiting: number of unread events (at least 1) at which the query pauses.
            caller: see :meth:`execute_query_async`.

        Raises:
            InvalidInputError: ``most_waiting`` is below 1.
        """
        if most_waiting < 1:
            raise InvalidInputError(f"most_waiting must be at least 1, not {most_waiting}")
        name = self.agent_id or self.agent_name
        return events_of(
            name,
            lambda recorder: self.execute_query_async(query, recorder=recorder, caller=caller),
            most_waiting,
        )

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        with _claiming:  # queries may come from several threads
            if self._is_busy:
                raise AgentBusyError(self.agent_id or self.agent_name)
            self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def turn(self) -> asyncio.Lock:
        """Return the lock that lets the agent run one query at a time in the current event loop."""
        loop = asyncio.get_running_loop()
        if self._turn is None or self._turn[0] is not loop:
            self._turn = (loop, asyncio.Lock())
        return self._turn[1]


logger = logging.getLogger(__name__)

Config = Mapping[str, Any]
"""Arguments of an agent's constructor."""


@dataclass(frozen=True, slots=True)
class AgentSpec:
    cls: Callable[..., BaseAgent]
    subagent_name: str | None = None
    subagent_description: str | None = None
    stateless: bool = False
    defaults: Config = field(default_factory=dict)


class AgentFactory:
    """Factory that creates agents, attaches sub-agents and connects shared memory.

    Args:
        global_defaults: constructor arguments of all agents.

    Attributes:
        warnings: pairs (code, message), oldest first.
    """

    def __init__(self, global_defaults: Config | None = None) -> None:
        self.warnings: list[tuple[str, str]] = []
        self._defaults = dict(global_defaults or {})
        self._specs: dict[str, AgentSpec] = {}
        self._graph: SharedMemoryGraph | None = None

    def with_memory_graph(self, graph: SharedMemoryGraph) -> Self:
        """Set the shared memory of all agents that the factory creates later."""
        self._graph = graph
        return self

    def register(
        self,
        name: str,
        cls: Callable[..., BaseAgent],
        *,
        subagent_name: str | None = None,
        subagent_description: str | None = None,
        stateless: bool = False,
        defaults: Config | None = None,
    ) -> Self:
        """Register a class under ``name``; replace the class that had this name, if any.

        Args:
            subagent_name: name of the tool by which other agents call this agent; by default
                ``name``.
            subagent_description: description of the tool; by default the agent's description.
            stateless: if true, each call of the tool runs on a new copy of the agent.
            defaults: constructor arguments of the class. They override ``global_defaults``.
        """
        self._specs[name] = AgentSpec(
            cls, subagent_name, subagent_description, stateless, dict(defaults or {})
        )
        return self

    def create(
        self,
        name: str,
        *,
        subagents: Sequence[str | BaseAgent] | None = None,
        subagent_config: Mapping[str, Config] | None = None,
        **overrides: Any,
    ) -> BaseAgent:
        """Create an agent with its sub-agents.

        Args:
            subagents: agents, or registered names. The factory creates an agent for each name.
            subagent_config: constructor arguments of the created sub-agents, by registered name.
            overrides: constructor arguments of the agent, but not of the sub-agents.

        Raises:
            UnknownAgentError: a name is not registered.
            CycleError: an agent would be its own direct or indirect sub-agent.
            InvalidInputError: a sub-agent has no description (``missing_description``).
        """
        agent = self._make(name, overrides)
        config = dict(subagent_config or {})
        children = [
            child if isinstance(child, BaseAgent) else self._make(child, config.pop(child, {}))
            for child in subagents or ()
        ]
        if config:
            raise UnknownAgentError(
                f"subagent_config has names that are not in subagents: {', '.join(config)}"
            )
        for child in children:
            self._attach(agent, child)
        refuse_circle(agent)
        self._make_aware(agent)
        return agent

    def _spec(self, name: str) -> AgentSpec:
        spec = self._specs.get(name)
        if spec is None:
            near = get_close_matches(name, self._specs, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            known = ", ".join(self._specs) or "none"
            raise UnknownAgentError(f"there is no agent '{name}'.{hint} Known agents: {known}")
        return spec

    def _make(self, name: str, config: Config) -> BaseAgent:
        spec = self._spec(name)
        agent = spec.cls(**{**self._defaults, **spec.defaults, **config})
        agent.agent_id = name
        agent.memory_graph = self._graph
        return agent

    def _attach(self, agent: BaseAgent, child: BaseAgent) -> None:
        if child.memory_graph is None:
            child.memory_graph = self._graph
        name = child.agent_id or child.agent_name
        if self._graph is not None and self._graph.has_node(name):
            child.agent_id = name
        spec = self._specs.get(name)
        description = (spec.subagent_description if spec else None) or child.description
        if not description:
            raise InvalidInputError(
                f"the sub-agent '{name}' needs a description, so that models know when to call it",
                code="missing_description",
            )
        if self._graph is not None and not self._graph.has_node(name):
            self._warn(
                "subagent_not_in_graph",
                f"the sub-agent '{name}' is not in the memory graph, so it shares no memory",
            )
        agent.register_agent(
            child,
            name=(spec.subagent_name if spec else None) or name,
            description=description,
            stateless=spec.stateless if spec else False,
        )

    def _make_aware(self, agent: BaseAgent) -> None:
        if self._graph is None:
            return
        names = {
            tool.agent.agent_id: tool.name
            for tool in agent.registered_tools
            if isinstance(tool, SubAgentWrapper) and tool.agent.agent_id is not None
        }
        message = awareness_message(self._graph, names)
        if message is not None:
            agent.conversation_history.insert(1, message)

    def _warn(self, code: str, message: str) -> None:
        logger.warning(message)
        self.warnings.append((code, message))


def refuse_circle(
    agent: BaseAgent, above: tuple[BaseAgent, ...] = (), checked: set[int] | None = None
) -> None:
    """Check that no agent calls itself or an agent with the same id, directly or indirectly.

    Raises:
        CycleError: an agent has the same id as an agent that calls it, directly or indirectly.
    """
    checked = set() if checked is None else checked
    line = (*above, agent)
    for index, member in enumerate(above):
        if member is agent or (agent.agent_id is not None and member.agent_id == agent.agent_id):
            names = [each.agent_id or each.agent_name for each in line[index:]]
            raise CycleError(names, what="sub-agent")
    if id(agent) not in checked:
        checked.add(id(agent))
        for child in agent.subagents:
            refuse_circle(child, line, checked)
