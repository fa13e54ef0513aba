"""Hooks: code that observes and controls a query at fixed points."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Self

from bottega.agents.context import annotated
from bottega.agents.messages import (
    AssistantMessage,
    AssistantResponse,
    Message,
    StandardMessage,
    ToolCall,
    ToolMessage,
    ToolResult,
)
from bottega.agents.tools import AgentState
from bottega.errors import FencedError, HistoryError, HookContractError

logger = logging.getLogger(__name__)


class AgentEvent(StrEnum):
    """The points of a query at which hooks run."""

    QUERY_START = "query_start"
    BEFORE_LLM_CALL = "before_llm_call"
    AFTER_LLM_CALL = "after_llm_call"
    BEFORE_TOOL_EXECUTION = "before_tool_execution"
    AFTER_TOOL_EXECUTION = "after_tool_execution"
    ON_TOOL_ERROR = "on_tool_error"
    BEFORE_HISTORY_UPDATE = "before_history_update"
    BEFORE_FINAL_RESPONSE = "before_final_response"
    ON_MAX_ITERATIONS = "on_max_iterations"
    QUERY_END = "query_end"


class HookDecision(StrEnum):
    """Decision of a hook: continue, ask the model again, end with an error or with an answer."""

    CONTINUE = "continue"
    RETRY = "retry"
    FAIL = "fail"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """The state of a query for hooks. The event determines which fields are set.

    If a hook changes the agent, it must change ``status.agent``, not an agent from an outer scope:
    a stateless sub-agent runs on a copy of the agent, and the copy has the same hooks.

    Attributes:
        iteration: number of the loop's iteration, from 1; 0 at QUERY_START.
        deferred: injected messages that must wait until the tool calls are answered, or ``None`` if
            the history accepts messages at once.
        replayed: true if a resumed run replays the event's model call, tool call or query end from
            an earlier attempt. The hook may have run for this event in the earlier attempt.
        annotations: metadata that :meth:`annotate` collected in this query.
    """

    event: AgentEvent
    agent: AgentState
    iteration: int = 0
    tool_call: ToolCall | None = None
    tool_result: ToolResult | None = None
    assistant_message: AssistantMessage | None = None
    error: str | None = None
    deferred: list[StandardMessage] | None = field(default=None, repr=False)
    replayed: bool = False
    annotations: dict[str, Any] = field(default_factory=dict)

    def annotate(self, **metadata: Any) -> None:
        """Add metadata to the answer that the agent publishes in the shared memory after the query.

        Raises:
            InvalidInputError: JSON cannot represent a value, or all values together exceed 8,192
                bytes.
        """
        self.annotations.update(annotated(self.annotations, metadata))

    @property
    def conversation_history(self) -> list[StandardMessage]:
        return self.agent.conversation_history


@dataclass(frozen=True, slots=True)
class EventContract:
    """The values and decisions that an event allows.

    Attributes:
        input_type: type of the event's value, or ``None`` if the event has no value.
        output_type: type of a replacement value.
        retry: true if RETRY is allowed.
        stop_type: type of the value of a STOP decision, or ``None`` if STOP is not allowed.
        status_field: field of :class:`AgentStatus` that contains the current value.
        optional: true if the value may be ``None``.
    """

    input_type: type | None = None
    output_type: type | None = None
    retry: bool = False
    stop_type: type | None = None
    status_field: str | None = None
    optional: bool = False


def _result_contract() -> EventContract:
    return EventContract(ToolResult, ToolResult, status_field="tool_result")


CONTRACTS: Mapping[AgentEvent, EventContract] = MappingProxyType(
    {
        AgentEvent.QUERY_START: EventContract(stop_type=AssistantMessage),
        AgentEvent.BEFORE_LLM_CALL: EventContract(stop_type=AssistantMessage),
        AgentEvent.AFTER_LLM_CALL: EventContract(
            AssistantMessage, AssistantMessage, True, AssistantMessage, "assistant_message"
        ),
        AgentEvent.BEFORE_TOOL_EXECUTION: EventContract(
            ToolCall, ToolCall, stop_type=ToolResult, status_field="tool_call"
        ),
        AgentEvent.AFTER_TOOL_EXECUTION: _result_contract(),
        AgentEvent.ON_TOOL_ERROR: _result_contract(),
        AgentEvent.BEFORE_HISTORY_UPDATE: _result_contract(),
        AgentEvent.BEFORE_FINAL_RESPONSE: EventContract(
            AssistantMessage, AssistantMessage, True, AssistantMessage, "assistant_message"
        ),
        AgentEvent.ON_MAX_ITERATIONS: EventContract(stop_type=AssistantMessage),
        AgentEvent.QUERY_END: EventContract(AssistantResponse, AssistantResponse, optional=True),
    }
)

Condition = Callable[[AgentStatus], bool | Awaitable[bool]]
Effect = Callable[[AgentStatus], Any]
Position = int | Callable[[AgentStatus], int | Awaitable[int]]
MessageFactory = Callable[[AgentStatus], StandardMessage | Awaitable[StandardMessage]]
Transformer = Callable[[Any, AgentStatus], Any]


@dataclass(frozen=True, slots=True)
class HookOutcome:
    decision: HookDecision
    value: Any = None


@dataclass(frozen=True, slots=True)
class _Step:
    decision: HookDecision
    value: Any
    effects: tuple[Effect, ...]


class Hook:
    """Hook on an event: a list of actions. ``agent.on(event)`` returns a new hook.

    Conditions, actions and effects may be sync or async. A hook runs its actions in the order in
    which the program added the actions.

    Attributes:
        plugin: name of the entry point that added the hook, or ``None`` for the program's own
            hooks.
    """

    def __init__(self, event: AgentEvent) -> None:
        self.event = event
        self.plugin: str | None = None
        self._conditions: list[Condition] = []
        self._steps: list[_Step] = []

    def when(self, condition: Condition) -> Self:
        """Run the hook only if ``condition(status)`` and the hook's other conditions are true."""
        self._conditions.append(condition)
        return self

    def handle(
        self, decision: HookDecision, value: Any = None, effects: Iterable[Effect] | None = None
    ) -> Self:
        """Add an action: run the effects, replace the event's value and return the decision.

        Args:
            value: a constant or ``fn(value, status)``; the constant ``None`` keeps the event's
                value. With FAIL, ``value`` is the error's text.
            effects: functions, called as ``fn(status)``.
        """
        self._steps.append(_Step(HookDecision(decision), value, tuple(effects or ())))
        return self

    def do(self, action: Effect) -> Self:
        """Add an action: call ``action(status)`` and continue."""
        return self.handle(HookDecision.CONTINUE, effects=[action])

    def transform(self, transformer: Transformer) -> Self:
        """Add an action: replace the value by ``transformer(value, status)`` and continue."""
        return self.handle(HookDecision.CONTINUE, value=transformer)

    def inject(self, factory: MessageFactory) -> Self:
        """Add an action: append the message ``factory(status)`` to the history."""

        async def effect(status: AgentStatus) -> None:
            _place(await _made(factory, status), None, status)

        return self.do(effect)

    def inject_at(self, position: Position, factory: MessageFactory) -> Self:
        """Add an action: insert the message ``factory(status)`` at an index of the history.

        The index works as in ``list.insert``. If the index is between answers to tool calls, the
        message is inserted after these answers.
        """

        async def effect(status: AgentStatus) -> None:
            index = await settled(position(status)) if callable(position) else position
            _place(await _made(factory, status), index, status)

        return self.do(effect)

    def __str__(self) -> str:
        owner = "" if self.plugin is None else f" of the plugin '{self.plugin}'"
        return f"hook{owner} on {self.event}"

    async def run(self, status: AgentStatus, value: Any) -> tuple[HookOutcome, AgentStatus]:
        """Run the hook on an event; return the outcome, and the status with the new value.

        Raises:
            HookContractError: the hook's decision or value breaks the event's contract.
        """
        for condition in self._conditions:
            if not await settled(condition(status)):
                return HookOutcome(HookDecision.CONTINUE, value), status
        for step in self._steps:
            for effect in step.effects:
                await settled(effect(status))
            if step.value is not None:
                old = value
                given = step.value
                value = await settled(given(value, status)) if callable(given) else given
                if step.decision is HookDecision.CONTINUE and value is None:
                    value = _unchanged(self.event, old)
            _check(self, step, value)
            if step.decision is not HookDecision.CONTINUE:
                return HookOutcome(step.decision, value), status
            if step.value is not None:
                status = _with_value(status, value)
        return HookOutcome(HookDecision.CONTINUE, value), status


async def run_hooks(hooks: Iterable[Hook], status: AgentStatus, value: Any) -> HookOutcome:
    """Run an event's hooks in order; each hook gets the value that the previous hook returned.

    If a hook raises an exception, the decision is FAIL with the exception's text.

    Raises:
        HookContractError: a hook's decision or value breaks the event's contract.
    """
    for hook in tuple(hooks):
        try:
            outcome, status = await hook.run(status, value)
        except (HookContractError, HistoryError, FencedError):
            raise
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the query itself is cancelled, not just a task that the hook awaits
            if hook.plugin is not None:
                logger.warning("plugin '%s' failed: %s", hook.plugin, hook, exc_info=error)
            return HookOutcome(
                HookDecision.FAIL, f"a {hook} raised {type(error).__name__}: {error}"
            )
        if outcome.decision is not HookDecision.CONTINUE:
            return outcome
        value = outcome.value
    return HookOutcome(HookDecision.CONTINUE, value)


async def settled(value: Any) -> Any:
    """Return ``value``; await it first if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


def _unchanged(event: AgentEvent, old: Any) -> Any:
    return old if CONTRACTS[event].optional else None


def _check(hook: Hook, step: _Step, value: Any) -> None:
    contract = CONTRACTS[hook.event]
    decision = step.decision
    if decision is HookDecision.FAIL:
        return
    if decision is HookDecision.STOP:
        wanted, allowed = contract.stop_type, contract.stop_type is not None
    else:
        wanted = contract.output_type
        allowed = contract.retry or decision is HookDecision.CONTINUE
    if not allowed:
        rule = "this event does not allow that decision"
    elif wanted is None:
        if value is None:
            return
        rule = "this event takes no value"
    elif isinstance(value, wanted) or (value is None and contract.optional):
        return
    else:
        rule = f"it must be {wanted.__name__}"
    raise HookContractError(
        f"{hook}: {decision.name} with a value of type {type(value).__name__}: {rule}"
    )


def _with_value(status: AgentStatus, value: Any) -> AgentStatus:
    name = CONTRACTS[status.event].status_field
    if name is None:
        return status
    if name == "tool_result" and status.event is AgentEvent.ON_TOOL_ERROR:
        return replace(status, tool_result=value, error=value.error)
    return replace(status, **{name: value})


async def _made(factory: MessageFactory, status: AgentStatus) -> StandardMessage:
    message: StandardMessage = await settled(factory(status))
    if not isinstance(message, Message):
        raise TypeError(f"an injected message must be a Message, not {type(message).__name__}")
    return message


def _place(message: StandardMessage, index: int | None, status: AgentStatus) -> None:
    """Insert a message at or after ``index``, so that a model's API still accepts the history."""
    history = status.conversation_history
    index = len(history) if index is None else index
    if index < 0:
        index = max(0, len(history) + index)
    while index < len(history) and isinstance(history[index], ToolMessage):
        index += 1
    if index >= len(history) and status.deferred is not None:
        status.deferred.append(message)
    else:
        history.insert(index, message)
