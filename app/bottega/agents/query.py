"""The state of a query, and the :class:`Recorder` port, which observes queries and may replay them.

The class ``Recorder`` records nothing. The service's journal, a subclass, writes events and replays
recorded calls.

Providers mark an incomplete answer in the message's metadata: ``finish_reason`` is ``length`` (cut
off) or ``content_filter``, or ``refusal`` is set. Any other answer that is not empty is complete.
"""

import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import partial, reduce
from json import JSONDecoder
from typing import Any, Literal, NamedTuple, Protocol
from uuid import UUID, uuid5

from pydantic_core import from_json

from bottega.agents.approval import Interrupt, Resolution
from bottega.agents.context import Caller, QueryScopePort
from bottega.agents.hooks import AgentEvent, AgentStatus, Hook, HookDecision, HookOutcome, run_hooks
from bottega.agents.messages import (
    AgentUsage,
    AssistantMessage,
    AssistantResponse,
    HumanMessage,
    StandardMessage,
    SystemMessage,
    ToolCall,
    ToolResult,
    Usage,
)
from bottega.agents.output import AnswerSchema, ToolRequirement
from bottega.agents.params import ModelParams, ToolChoiceScope
from bottega.agents.parts import FileLoader
from bottega.agents.provider import (
    FailedTry,
    Failing,
    LLMProvider,
    ModelOptions,
    ModelTarget,
    OnDelta,
    Permit,
    ToolSchema,
)
from bottega.agents.tools import AgentState, ToolBase
from bottega.events.data import ShortenedPrompt
from bottega.graph.shared_memory import MemoryItem, Publication

OnLength = Literal["continue", "fail", "accept"]
"""The policy for an answer that the model cut off at its limit."""


class FinalAnswer(NamedTuple):
    """Decision after an iteration of the loop: the query ends with this answer.

    Attributes:
        reason: the response's ``stop_reason``.
        deferred: messages that hooks injected; the history gets them after the answer.
    """

    message: AssistantMessage
    reason: str
    deferred: Sequence[StandardMessage] = ()


class RunAgain(NamedTuple):
    """Decision after an iteration of the loop: the loop calls the model again."""


RUN_AGAIN = RunAgain()
NextStep = FinalAnswer | RunAgain
"""Decision after an iteration of the loop. A failed iteration raises an exception. Tool calls that
wait for people suspend the whole run in the middle of an iteration."""


class Ending(StrEnum):
    """Reason why an answer is incomplete; also the failed query's ``stop_reason``."""

    LENGTH = "length"
    FILTER = "content_filter"
    REFUSAL = "refusal"
    EMPTY = "empty"

    @property
    def code(self) -> str:
        return _CODES[self]

    @property
    def text(self) -> str:
        return _TEXTS[self]


_CODES = {
    Ending.LENGTH: "model_length",
    Ending.FILTER: "model_filtered",
    Ending.REFUSAL: "model_refused",
    Ending.EMPTY: "model_empty",
}
_TEXTS = {
    Ending.LENGTH: "the model's answer was cut off at its limit; raise its maximum of output "
    "tokens, lower its reasoning effort, or ask for less",
    Ending.FILTER: "the model's answer was withheld by its content filter; rephrase the request",
    Ending.REFUSAL: "the model refused to answer; rephrase the request",
    Ending.EMPTY: "the model's answer is empty; rephrase the request, or use another model",
}
_NUDGES = {
    Ending.LENGTH: "Your answer was cut off at its limit. Go on exactly where it stops: repeat "
    "nothing, and say nothing about this.",
    Ending.EMPTY: "Your answer was empty. Please answer.",
}
_DECODER = JSONDecoder()
_CUT_OFF = frozenset(("length", "max_tokens", "incomplete"))
_OVERLAP_LETTERS = 5
_LETTER = re.compile(r"[^\W\d_]")
_WORD = re.compile(r"(?<!\w)\S|[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]")
"""Positions where an overlap may begin: the start of a word, or any character of a script that
writes no spaces between words."""


def ending_of(message: AssistantMessage) -> Ending | None:
    """Return why an answer is incomplete, or ``None`` if it is complete or calls tools."""
    reason = str(message.metadata.get("finish_reason"))
    if reason.startswith("content_filter"):
        return Ending.FILTER
    if message.metadata.get("refusal") and not message.tool_calls:
        return Ending.REFUSAL
    if reason in _CUT_OFF:
        return Ending.LENGTH
    is_empty = not message.tool_calls and not message.content.strip()
    return Ending.EMPTY if is_empty else None


def stop_reason_of(code: str) -> str:
    return next((ending for ending, known in _CODES.items() if known == code), "error")


class PendingAnswer:
    """An answer that may take several model calls: at most one continuation and one retry.

    Attributes:
        kept: messages that the caller removes from the history when the answer is complete: parts
            of the answer, and requests to continue.
    """

    def __init__(self) -> None:
        self.kept: list[StandardMessage] = []
        self._parts: list[AssistantMessage] = []
        self._tried: set[Ending] = set()

    def nudge(
        self, message: AssistantMessage, ending: Ending, on_length: OnLength
    ) -> list[StandardMessage]:
        """Return messages that ask the model to continue the answer; ``[]``: this is impossible."""
        if ending in self._tried or ending not in _NUDGES:
            return []
        added: list[StandardMessage] = [
            HumanMessage(content=_NUDGES[ending], metadata={"nudge": str(ending)})
        ]
        if ending is Ending.LENGTH:
            if on_length != "continue" or not is_text(self.joined(message)):
                return []
            self._parts.append(message)
            added.insert(0, message)
        self._tried.add(ending)
        self.kept += added
        return added

    def repeats(self, message: AssistantMessage) -> bool:
        """Return true if a continuation adds nothing, because the text was already complete."""
        said = self.joined(self._parts[-1]) if self._parts else None
        return said is not None and self.joined(message).content.strip() == said.content.strip()

    def joined(self, message: AssistantMessage) -> AssistantMessage:
        """Return the whole answer; ``message`` is its last part."""
        if not self._parts:
            return message
        text = reduce(continued, [part.content for part in (*self._parts, message)])
        return message.model_copy(update={"content": text, "state": {}})


def continued(text: str, more: str) -> str:
    """Join a cut-off text and its continuation, which may repeat some or all of the text.

    A repeated part is an overlap if it is the whole text, or if it begins where a word begins and
    has at least five letters. A shorter repetition may be a coincidence, as in ``Bana`` and ``na``.
    """
    begun, said = more.lstrip(), text.strip()
    if begun.startswith(said):
        margin = text[: len(text) - len(text.lstrip())]
        return margin + begun if len(begun.rstrip()) > len(said) else text
    if said.startswith(begun.rstrip()) and len(_LETTER.findall(begun)) >= _OVERLAP_LETTERS:
        return text
    # The search is limited, because a search in 4,000 characters already takes some milliseconds.
    for start in _WORD.finditer(text, max(0, len(text) - 4_000)):
        rest = text[start.start() :]
        if begun.startswith(rest) and len(_LETTER.findall(rest)) >= _OVERLAP_LETTERS:
            return text[: start.start()] + begun
    return text + more


def is_text(message: AssistantMessage) -> bool:
    """Return true if a cut-off message can be continued: plain text, without calls or JSON."""
    text = message.content.strip()
    if message.tool_calls or not text:
        return False
    text = text.removeprefix("```json").lstrip()
    if not text.startswith(("{", "[")):
        return bool(text)
    try:
        _, end = _DECODER.raw_decode(text)
    except ValueError:
        return not _begins_json(text)
    return bool(text[end:].strip(" \n`"))  # text follows the JSON


def _begins_json(text: str) -> bool:
    try:
        from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return False
    return True


class QueryFailed(Exception):  # noqa: N818
    """An error that ends a query with a response; the loop catches it.

    Attributes:
        reason: the response's ``stop_reason``.
        content: the response's partial text.
    """

    def __init__(self, text: str, code: str, reason: str = "error", content: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.code = code
        self.reason = reason
        self.content = content


Path = tuple[tuple[int, int], ...]
"""The position of a query in the tree: per level (model call's number, tool call's index)."""


def task_id_at(root: UUID, path: Path) -> UUID:
    """Return the id of the query at a path: a UUIDv5 of its parent's id, model call and index."""
    for call, index in path:
        root = uuid5(root, f"{call}:{index}")
    return root


class BackgroundTask(Protocol):
    """The asynchronous task to which a query belongs."""

    def model_call(self, query: "Query") -> AbstractAsyncContextManager[Permit]:
        """Hold a slot and reserve tokens for the task during a model call that is not replayed.

        Raises:
            BudgetExhaustedError: too few tokens are left.
        """

    def spent(self, usage: Usage) -> None:
        """Charge the usage of a model call, also of a replayed model call."""

    def on_text(self, query: "Query", text: str) -> None:
        """Receive a text delta of a query."""

    def messages(self, query: "Query", *, answered: bool) -> Sequence[str]:
        """Return new messages for a query's next model call.

        Args:
            answered: true if the query has an answer that becomes final unless a new message
                arrives.
        """


class PromptMemory(Protocol):
    """The working memory of one agent, which selects the messages of a prompt.

    Without a memory the prompt is the whole history. A copy of an agent has no working memory. The
    working memory never shortens the history itself.
    """

    @property
    def tools(self) -> Sequence[ToolBase]:
        """Tools that the memory adds to the agent's tools; :meth:`compose` may change this list."""

    def compose(self, query: "Query", schemas: Sequence[ToolSchema]) -> Sequence[StandardMessage]:
        """Return the prompt's messages in place of ``query.agent.conversation_history``.

        The loop calls this method before every model call, also before a replayed call. The result
        depends only on the history, so a resumed run has the same prompts. If the prompt omits a
        part of the history, the method sets ``query.composed``.

        Args:
            schemas: schemas of all tools in the prompt.
        """


class InboxPort(Protocol):
    """Messages that users send while a query runs."""

    def due(self, query: "Query", *, answered: bool) -> Sequence[StandardMessage]:
        """Return the messages to put into the history now, before the next model call.

        Args:
            answered: true if the query has an answer that becomes final unless a new message
                arrives.
        """


class RecallPort(Protocol):
    """The part of :class:`Recall` that a query needs."""

    async def inject(self, query: "Query") -> Sequence[tuple[MemoryItem, float | None]]:
        """Insert recalled publications into the history; return each publication and its cosine."""


class QueriedAgent(AgentState, Protocol):
    """An agent with the settings of its queries; :class:`BaseAgent` explains the attributes."""

    system_message: SystemMessage
    provider: LLMProvider | None
    max_iterations: int
    tool_policy: list[ToolRequirement]
    exit_on_success: list[str]
    agent_comment: bool
    on_length: OnLength
    params: ModelParams | None
    tool_choice_scope: ToolChoiceScope
    output: AnswerSchema | None
    hooks: dict[AgentEvent, list[Hook]]
    memory: PromptMemory | None

    @property
    def recall(self) -> RecallPort | None:
        """Recall, which adds publications of the agent's indirect ancestors to the prompt."""


@dataclass(slots=True, eq=False)
class Query:
    """The state of one query of one agent.

    Attributes:
        agent: the agent that runs the query; for a stateless sub-agent, the agent's copy.
        messages: messages of this query in the history, including messages that arrived during
            the query.
        parent: the query whose tool call started this query, or ``None`` for the root.
        path: position in the tree of queries, the same in every replay; empty for the root.
        iteration: number of the loop's iteration, from 1; 0 before the first iteration.
        model_calls: number of model calls that this try and earlier tries of the task started.
        earlier_calls: number of model calls in earlier tries of the task.
        tries: number of this try of the task, from 1.
        usage: usage so far, sub-agents included.
        tool_call: the parent's tool call that this query answers, or ``None`` for the root.
        memory_pulled: true after the query has read the shared memory.
        escaped: the exception that ended the query without a response, if any.
        task: the asynchronous task that the query belongs to, directly or through its parent, or
            ``None`` if the caller waits for the query.
        scope: the parallel work of the query. A tool that starts parallel work sets the scope.
        composed: sizes of a shortened prompt, or ``None`` if the prompt is the whole history.
            ``tokens`` is the size of the prompt, ``shrunk`` the number of tool results replaced by
            a summary, and ``left`` the number of omitted messages.
        annotations: metadata from hooks for the agent's publication.
    """

    agent: QueriedAgent
    messages: tuple[StandardMessage, ...]
    recorder: "Recorder"
    parent: "Query | None" = None
    path: Path = ()
    tool_call: ToolCall | None = None
    iteration: int = 0
    model_calls: int = 0
    earlier_calls: int = 0
    tries: int = 1
    usage: AgentUsage = AgentUsage()
    tool_results: tuple[ToolResult, ...] = ()
    memory_pulled: bool = False
    escaped: BaseException | None = None
    task: BackgroundTask | None = None
    scope: QueryScopePort | None = None
    composed: ShortenedPrompt | None = None
    annotations: dict[str, Any] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """0 for the root, 1 for its sub-agents, and so on."""
        return len(self.path)

    def admission(self) -> AbstractAsyncContextManager[Permit | None]:
        """Return the context in which a recorder makes a model call.

        See :meth:`BackgroundTask.model_call`.
        """
        return nullcontext() if self.task is None else self.task.model_call(self)


Invoke = Callable[[Permit | None], Awaitable[AssistantMessage]]
"""Function that makes a model call with a reservation of tokens, or with ``None``."""


def options_of(query: Query, params: ModelParams | None, permit: Permit | None) -> ModelOptions:
    """Return the options of a query's next model call; callbacks report to the recorder."""
    agent, recorder = query.agent, query.recorder
    return ModelOptions(
        on_try=partial(recorder.model_try_began, query),
        on_failed_try=partial(recorder.model_try_failed, query),
        on_lost=partial(recorder.answer_lost, query),
        failing=recorder.failing(query),
        on_warning=partial(recorder.warning, query),
        max_output_tokens=None if permit is None else permit.most,
        params=params,
        output_schema=None if agent.output is None else agent.output.schema,
        asked=next(each for each in query.messages if isinstance(each, HumanMessage)),
        files=recorder.files,
        permit=permit,
    )


class QueryObserver:
    """Observer of the events of queries; this base class does nothing.

    Methods that are not ``async`` must not block.
    """

    def query_started(self, query: Query) -> None:
        """Record a query's start: its messages are in the history, but no model was called yet."""

    def query_ended(self, query: Query, response: AssistantResponse) -> None:
        """Record the end of a query that succeeded or failed; not called after a cancellation."""

    def query_escaped(self, query: Query, error: BaseException) -> None:
        """Record that an exception or a cancellation ended a query without a response."""

    def delta_listener(self, query: Query) -> OnDelta | None:
        """Return a listener for the text deltas of the current model call, or ``None``."""
        return None

    def model_try_began(self, query: Query, target: ModelTarget) -> None:
        """Record the model that the current call tries now; a retry may use the same model."""

    def model_try_failed(self, query: Query, failed: FailedTry) -> None:
        """Record a failed try of the current model call, before the next try."""


class Recorder(QueryObserver):
    """Executor of queries' model calls and tool calls. Subclasses may record and replay the calls.

    Attributes:
        swarm: the run's ``Swarm`` of asynchronous sub-agents, or ``None`` before it exists.
        files: loads the run's stored files, or ``None`` if the run has no files.
        screen: checks a call of a sub-agent in mode ``sync``. The check returns the text for the
            sub-agent, or a result that replaces the call.
        inbox: messages of users for the root agent, or ``None`` if users cannot send messages.
        caller: run, tenant, end user and session of the query.
    """

    swarm: object = None
    inbox: InboxPort | None = None
    files: FileLoader | None = None
    screen: "Screen | None" = None
    caller: Caller = Caller()

    def task_id(self, query: Query) -> UUID | None:
        """Return the id of a sub-agent's task, or ``None`` for the root agent and outside a run."""
        run_id = self.caller.run_id
        return None if run_id is None or not query.path else task_id_at(run_id, query.path)

    async def add_recalled(self, query: Query) -> None:
        """Add memory of earlier runs to a query's agent before the first model call."""

    def is_replayed(self, query: Query, event: AgentEvent, tool_call_id: str | None) -> bool:
        """Return true if an earlier attempt recorded the event's model call, tool call or end."""
        return False

    def query_escaped(self, query: Query, error: BaseException) -> None:
        query.escaped = error

    async def model_call(self, query: Query, invoke: Invoke) -> AssistantMessage:
        """Make or replay the model call with the number ``query.model_calls``; return its answer.

        To make the call, ``await invoke(permit)`` in ``async with query.admission() as permit``.
        ``invoke`` is a function of the query's loop, and calls the provider.
        """
        async with query.admission() as permit:
            return await invoke(permit)

    def failing(self, query: Query) -> Failing | None:
        """Return the failed tries of the current model call in earlier attempts of the run."""
        return None

    def answer_lost(self, query: Query, usage: Usage) -> None:
        """Add the usage of an answer that broke off during the current model call."""
        query.usage = query.usage.plus(usage)
        if query.task is not None:
            query.task.spent(usage)

    async def wait_turn(self, query: Query) -> None:
        """Wait until the query may continue; called after an answer was recorded and counted."""

    async def tool_call(
        self,
        query: Query,
        tool_call: ToolCall,
        tool: ToolBase | None,
        execute: Callable[[], Awaitable[ToolResult]],
    ) -> ToolResult:
        """Execute a tool call by ``await execute()``, or replay the call.

        Args:
            tool: the called tool, or ``None`` if the agent has no tool of this name.
        """
        return await execute()

    async def decision(self, query: Query, tool_call: ToolCall, interrupt: Interrupt) -> Resolution:
        """Wait until people have decided on a tool call. Subclasses override this method."""
        text = "nobody can be asked, because the query's recorder has no method decision()"
        return Resolution({"decision": "deny", "comment": text})

    def injected(self, query: Query, items: Sequence[MemoryItem]) -> None:
        """Record the predecessors' publications that were added to the history, in this order."""

    def recalled(self, query: Query, items: Sequence[tuple[MemoryItem, float | None]]) -> None:
        """Record recalled publications added to the history, with their cosines (-1 to 1)."""

    def sources_of(self, query: Query) -> Collection[str] | None:
        """Return the agents whose publications an earlier attempt read; ``None``: not known."""
        return None

    def version_of(self, query: Query) -> int | None:
        """Return the version number for the query's publication; ``None``: the next number."""
        return None

    def published_at(self, query: Query) -> datetime | None:
        """Return the time at which an earlier attempt published, or ``None`` if none published."""
        return None

    def published(self, query: Query, publication: Publication) -> None:
        """Record the publication of the query's accepted answer in the shared memory."""

    def answer_rejected(self, query: Query, code: str, message: str) -> None:
        """Record that the last answer is rejected.

        After the rejection, the model answers again or the query fails.

        Args:
            code: ``tool_policy`` or ``output_invalid``.
        """

    def warning(self, query: Query, code: str, message: str) -> None:
        """Record a warning for users; the warning does not end the query."""


async def fire(query: Query, event: AgentEvent, value: Any = None, **fields: Any) -> HookOutcome:
    """Run the hooks of an event.

    Args:
        fields: the event's fields of :class:`AgentStatus`.

    Raises:
        QueryFailed: a hook decided FAIL, or raised an exception.
        HookContractError: a hook's decision or value breaks the event's contract.
    """
    hooks = query.agent.hooks.get(event)
    if not hooks:
        return HookOutcome(HookDecision.CONTINUE, value)
    of = fields.get("tool_call") or fields.get("tool_result")
    call_id = getattr(of, "id", None) or getattr(of, "tool_call_id", None)
    replayed = query.recorder.is_replayed(query, event, call_id)
    status = AgentStatus(
        event,
        query.agent,
        query.iteration,
        replayed=replayed,
        annotations=query.annotations,
        **fields,
    )
    outcome = await run_hooks(hooks, status, value)
    if outcome.decision is HookDecision.FAIL:
        text = (
            outcome.value if isinstance(outcome.value, str) else f"a hook on {event} decided FAIL"
        )
        raise QueryFailed(text, "hook_failed")
    return outcome


def delta_listener(query: Query) -> OnDelta | None:
    """Return a listener that passes text deltas to the recorder and the query's task."""
    recorded = query.recorder.delta_listener(query)
    if query.task is None:
        return recorded
    on_text = partial(query.task.on_text, query)
    if recorded is None:
        return on_text

    def both(text: str) -> Awaitable[None] | None:
        on_text(text)
        return recorded(text)

    return both


@dataclass(frozen=True, slots=True)
class CurrentCall:
    """A running tool call: its query, its index in the message, and its id from the model."""

    query: Query
    index: int
    id: str = ""


Screen = Callable[[CurrentCall, ToolCall, str], Awaitable[str | ToolResult]]
current_call: ContextVar[CurrentCall | None] = ContextVar("current_call", default=None)
next_query: ContextVar[Query | None] = ContextVar("next_query", default=None)
"""The query that a sub-agent wrapper is about to start."""


def take_next_query(agent: object) -> Query | None:
    """Return the query that was prepared for ``agent``, or ``None`` if there is none."""
    query = next_query.get()
    if query is None or query.agent is not agent or query.messages:
        return None
    return query
