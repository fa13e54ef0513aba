"""Recorder of a run, which makes, records and replays model calls and tool calls of agents.

The recorder also records the texts that agents publish and receive. After a failed tool call, the
recorder appends help from earlier runs to the error in the tool message. The text of the help comes
from the events ``context.recalled``, so a resumed run has the same message.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import datetime
from functools import partial
from uuid import UUID

from pydantic_core import to_json

from bottega.agents.approval import Interrupt, Resolution
from bottega.agents.context import Caller
from bottega.agents.hooks import AgentEvent
from bottega.agents.messages import (
    AgentUsage,
    AssistantMessage,
    AssistantResponse,
    StandardMessage,
    ToolCall,
    ToolMessage,
    ToolResult,
    ToolStatus,
    Usage,
)
from bottega.agents.provider import FailedTry, Failing, ModelTarget, OnDelta, Permit
from bottega.agents.query import CurrentCall, Invoke, Path, Query, Recorder, current_call
from bottega.agents.subagent import AGENT_FAILED, SubAgentWrapper
from bottega.agents.tools import ToolBase, error_result
from bottega.clock import monotonic
from bottega.engine.budget import DayAccount, RunAccounts
from bottega.engine.claim import ClaimedRun
from bottega.engine.journal import CANCELLED, Journal, RunObserver, Tasks, is_answered, name_of
from bottega.engine.live_text import LiveText, ShownCalls
from bottega.engine.parts import RunParts
from bottega.engine.replay import (
    Key,
    ToolCallReplay,
    data_of,
    data_of_result,
    tool_error_of,
    usage_of,
)
from bottega.engine.retrieval import FailureMemory, ToolFailure, help_after
from bottega.engine.waiting import Inbox, ModelCall, OpenInterrupts, RunActivity, served_by
from bottega.errors import ModelError
from bottega.events.data import (
    AgentCompletedData,
    AgentFailedData,
    AgentStartedData,
    AnswerReferenceData,
    AnswerRejectedData,
    ContextRecalledData,
    Failure,
    LlmCancelledData,
    LlmFailedData,
    LlmStartedData,
    MemoryInjectedData,
    PublicationData,
    StoredLlmCompletedData,
    ToolCallData,
    ToolErrorData,
    ToolStartedData,
    WarningData,
)
from bottega.events.log import as_stored
from bottega.events.types import Data, EventError, EventType
from bottega.files.inputs import RunFiles
from bottega.graph.shared_memory import MemoryItem, Publication
from bottega.subagents.budget import Account, Reservation, size_of_call

_AT_ONCE = 64  # a pass stores its steps together; with 8, the database needs 14 % more CPU time
"""Maximum number of model calls and answers, each 0.3 ms of work, per pass of the event loop."""


class FairQueue:
    """Fair queue in which the runs of tenants take turns on the event loop.

    The answers to a large fan-out may arrive at once. Without the queue, the event loop would
    process all these answers before a run of another tenant continues. The queue lets only
    ``_AT_ONCE`` pieces of work begin in each pass of the event loop, and a tenant's second piece
    waits for the first pieces of other tenants.
    """

    def __init__(self) -> None:
        self._waiting: dict[UUID, deque[asyncio.Future[None]]] = {}
        self._rounds_left = _AT_ONCE
        self._next_pass: asyncio.Handle | None = None
        self.is_held = False

    async def enter(self, tenant_id: UUID) -> None:
        """Wait for the tenant's turn before work of 0.3 ms or more."""
        loop = asyncio.get_running_loop()
        if self._next_pass is None:
            self._next_pass = loop.call_soon(self._begin_pass)
        if self._rounds_left and not self._waiting:
            self._rounds_left -= 1
            return
        turn = loop.create_future()
        self._waiting.setdefault(tenant_id, deque()).append(turn)
        await turn

    def _begin_pass(self) -> None:
        self._next_pass = None
        self._rounds_left = _AT_ONCE
        while self._rounds_left and self._waiting:
            tenant_id = next(iter(self._waiting))
            line = self._waiting.pop(tenant_id)
            turn = line.popleft()
            if line:
                self._waiting[tenant_id] = line  # now the last of the waiting tenants
            if not turn.done():  # a cancelled call is done
                turn.set_result(None)
                self._rounds_left -= 1
        if self._rounds_left < _AT_ONCE:
            self._next_pass = asyncio.get_running_loop().call_soon(self._begin_pass)


class MemoryLog:
    """Writer of publications and received context to a run's log.

    Args:
        in_session: true if the publications are also stored in the run's session.

    Attributes:
        names: names of sub-graphs' nodes, by the paths of the nodes' queries.
    """

    def __init__(self, journal: Journal, tasks: Tasks, *, in_session: bool) -> None:
        self._journal = journal
        self._tasks = tasks
        self._in_session = in_session
        self.names: dict[Path, str] = {}
        self._published: dict[Query, Publication] = {}
        self._answers: dict[tuple[str, str], int] = {}  # seq, by (the run's node, text)

    def published(self, query: Query, publication: Publication) -> None:
        """Store a query's publication in memory until the query ends."""
        self._published[query] = publication

    def ended(self, query: Query, output: str | None, seq: int | None) -> None:
        """Write the publication of an ended query, if the query's agent has published.

        If the published text is the answer's text, the event only refers to the answer's event. The
        texts differ if a QUERY_END hook changed or rejected the answer later.

        Args:
            output: text of the answer; ``None``: the query failed.
            seq: ``seq`` of the answer's event; ``None``: the query failed.
        """
        published = self._published.pop(query, None)
        if published is None:
            return
        data = PublicationData(version=published.version)
        if (node := self.node_of(query)) != name_of(query.agent):
            data["node"] = node
        source = _of_run(node)
        if seq is not None and published.content == output:
            self._answers[source, published.content] = seq
        self._add_text(data, source, published.content)
        if published.metadata:
            data["metadata"] = dict(published.metadata)
        written = self._tasks.add(query, EventType.MEMORY_PUBLISHED, data)
        self._answers.setdefault((source, published.content), written)
        is_inner = query.path in self.names
        if not self._in_session or is_inner or not self._journal.is_new(written):
            return  # an earlier attempt stored the publication, or the session must not have it
        fields = published.to_dict()
        self._journal.publication(
            agent=published.agent_id,
            version=published.version,
            content=published.content,
            details={key: fields[key] for key in ("tool_results", "messages", "metadata")},
        )

    def injected(self, query: Query, items: Sequence[MemoryItem]) -> None:
        for item in items:
            data = MemoryInjectedData(
                source=item.source_id,
                version=item.version,
                edge=[self._source(query, item), self.node_of(query) or ""],
                policy=item.policy,
            )
            self._add_item(data, query, item)
            self._tasks.add(query, EventType.MEMORY_INJECTED, data)

    def recalled(self, query: Query, items: Sequence[tuple[MemoryItem, float | None]]) -> None:
        """Write the memory items that a query recalled, with each item's cosine similarity."""
        for item, score in items:
            data = ContextRecalledData(source=item.source_id, version=item.version)
            if score is not None:
                data["score"] = score
            self._add_item(data, query, item)
            self._tasks.add(query, EventType.CONTEXT_RECALLED, data)

    def node_of(self, query: Query) -> str | None:
        """Return the name of a query's node; in a sub-graph, the full name ``draft/2/write``."""
        return self.names.get(query.path, query.agent.agent_id)

    def _source(self, query: Query, item: MemoryItem) -> str:
        graph, name = query.agent.memory_graph, self.names.get(query.path)
        if name is None or graph is None or not graph.has_node(item.source_id):
            return item.source_id
        return f"{name.rpartition('/')[0]}/{item.source_id}"

    def _add_item(self, data: PublicationData, query: Query, item: MemoryItem) -> None:
        """Add a memory item's metadata and text."""
        if item.metadata:
            data["metadata"] = dict(item.metadata)
        self._add_text(data, _of_run(self._source(query, item)), item.content)

    def _add_text(self, data: PublicationData, source: str, content: str) -> None:
        """Add a text, or a reference to an event with this text from the same node.

        If only another node's event has the text, add the text. A reference would lose the text
        when a fork executes the other node again.
        """
        seq = self._answers.get((source, content))
        if seq is None:
            data["content"] = content
        else:
            data["answer_seq"] = seq


def _of_run(name: str | None) -> str:
    """Return the first node of a full name: ``draft`` for ``draft/2/write``."""
    return (name or "").partition("/")[0]


def storable_result(result: ToolResult) -> ToolResult:
    """Return a tool's result in a form that the log can store and that the model reads."""
    outcome = {"result": result.result, "error": result.error}
    content = as_stored(outcome)
    return result if content is outcome else result.model_copy(update=content)


def heard_in(history: Sequence[StandardMessage], logged: dict[str, ToolResult]) -> dict[str, str]:
    """Return the field ``results`` of ``llm.started``: tool messages that differ from the log.

    Args:
        logged: the tool results since the last model call, by tool call. This function empties it.
    """
    texts: dict[str, str] = {}
    for message in reversed(history):
        if not logged:
            break
        for result in message.tool_results if isinstance(message, ToolMessage) else ():
            known = logged.pop(result.tool_call_id, result)
            if result is not known and message.content != ToolMessage.answering(known).content:
                texts[result.tool_call_id] = message.content
    return texts


_FAILED_ENDS = (EventType.SUBAGENT_FAILED, EventType.SUBAGENT_TIMEOUT)


class FailedTasks(RunObserver):
    """Observer that collects failures of asynchronous tasks, for searches in memory."""

    def __init__(self) -> None:
        self._failed: dict[str, ToolErrorData] = {}

    def event(self, event_type: str, task_id: UUID | None, agent: str | None, data: Data) -> None:
        if event_type in _FAILED_ENDS:
            code, message = EventError.of(data)
            failed = ToolErrorData(type=code or "error", message=message or "")
            self._failed[agent or ""] = failed

    def take(self) -> list[ToolFailure]:
        failed, self._failed = self._failed, {}
        return [ToolFailure(name, error) for name, error in failed.items()]


_MOST_FAILURES = 3
"""Maximum number of concurrent failures for which memory is searched."""


class JournalRecorder(Recorder):
    """Recorder that makes the model and tool calls of a run's agents, or replays recorded calls.

    Args:
        fair: queue in which this worker's tenants take turns.
        day: accounts of the tenant's daily budgets.
        live_text: writer of the models' live text.
        run_files: the run's access to files.
        waits: called when the run may have begun to wait.

    Attributes:
        answer_seq: ``seq`` of the root's accepted answer; ``None``: no accepted answer yet.
        answered: ``seq`` of the event with an asynchronous task's answer, by task.
        child_usage: usage of child runs, by task.
        accounts: budgets of the run and daily budgets of the tenant.
        node_accounts: budgets of a graph's nodes, by the paths of the nodes' queries.
        spent: usage of all agents of the run in all attempts.
        spent_below: the part of ``spent`` that a node has used, by the node's path.
        memory: writer of published and received texts.
        claimed_at: time of this attempt's claim.
        lessons: memory for the root agent after failures; ``None``: the run has no memory.
        parts: memory of nodes and sub-agents; ``None``: the run has no memory.
    """

    def __init__(
        self,
        journal: Journal,
        run: ClaimedRun,
        *,
        fair: FairQueue,
        day: Sequence[DayAccount] = (),
        live_text: LiveText | None = None,
        run_files: RunFiles | None = None,
        waits: Callable[[], None] = lambda: None,
    ) -> None:
        self.journal = journal
        self._fair = fair
        self.answer_seq: int | None = None
        self.spent = AgentUsage()
        self.spent_below: dict[Path, AgentUsage] = {}
        self.lessons: FailureMemory | None = None
        self.parts: RunParts | None = None
        self._failed_tasks = FailedTasks()
        journal.observers.append(self._failed_tasks)
        self.answered: dict[UUID | None, int] = {}
        self.child_usage: dict[UUID, AgentUsage] = {}
        self.accounts = RunAccounts(run, day)
        self.node_accounts: dict[Path, Sequence[Account]] = {}
        self.tasks = Tasks(journal, run.task_root, run.cancelled_tasks)
        self._calls: dict[Query, ModelCall] = {}
        self.loops = RunActivity(self.tasks.open, self._calls)
        self.interrupts = OpenInterrupts(self.tasks, run.run_id, self.loops, waits)
        self.inbox: Inbox = Inbox(self.tasks)
        self.check_suspend = waits
        self._observers = journal.observers
        if live_text is not None:
            self._observers.append(ShownCalls(live_text, self.tasks))
        self._run_files = run_files
        self.files = None if run_files is None else run_files.load
        self.memory = MemoryLog(journal, self.tasks, in_session=run.session_id is not None)
        self.caller = Caller(run.run_id, run.tenant, run.user, run.session_id)
        self.claimed_at, self._began = run.claimed_at, monotonic()
        self._answers: dict[Key, int] = {}
        # By query. _last_answers: the last answer, and the seq of the answer's event. _logged: the
        # tool results since the last model call.
        self._last_answers: dict[Query, tuple[str | None, int]] = {}
        self._logged: dict[Query, dict[str, ToolResult]] = {}

    async def add_recalled(self, query: Query) -> None:
        if self.parts is not None:
            await self.parts.add_recalled(query)

    def task_id(self, query: Query) -> UUID | None:
        return self.tasks.id_of(query)

    def is_replayed(self, query: Query, event: AgentEvent, tool_call_id: str | None) -> bool:
        task = self.tasks.id_of(query)
        return self.journal.replay.has(event, task, query.model_calls, tool_call_id)

    def query_started(self, query: Query) -> None:
        self.tasks.open[query] = None
        for observer in self._observers:
            observer.query_started(query)
        self.tasks.add(query, EventType.AGENT_STARTED, AgentStartedData(depth=query.depth))

    def query_ended(self, query: Query, response: AssistantResponse) -> None:
        self.tasks.open.pop(query, None)
        self._logged.pop(query, None)
        for observer in self._observers:
            observer.query_ended(query, response)
        if not query.path:
            self.journal.hold()
        usage = response.usage.to_dict()
        text, at = self._last_answers.pop(query, (None, 0))
        if not is_answered(query, response):
            code = response.error_code or AGENT_FAILED
            error = Failure(code=code, message=response.error or "")
            failed = AgentFailedData(error=error, usage=usage)
            self.tasks.add(query, EventType.AGENT_FAILED, failed)
            self.memory.ended(query, None, None)
            return
        completed: AgentCompletedData | AnswerReferenceData
        if text and text == response.content:
            completed = AnswerReferenceData(usage=usage, answer_seq=at)
        else:
            completed = AgentCompletedData(usage=usage, output=response.content)
        seq = self.tasks.add(query, EventType.AGENT_COMPLETED, completed)
        if query.parent is None:
            self.answer_seq = seq
        elif query.tool_call is None:  # asynchronous
            self.answered[self.tasks.id_at(query.path)] = seq
        else:
            call = (self.tasks.id_of(query.parent), query.path[-1][0], query.tool_call.id)
            self._answers[call] = seq
        self.memory.ended(query, response.content, seq)

    def query_escaped(self, query: Query, error: BaseException) -> None:
        super().query_escaped(query, error)
        for observer in self._observers:
            observer.query_escaped(query, error)

    async def model_call(self, query: Query, invoke: Invoke) -> AssistantMessage:
        call = self.journal.replay.model_call(self.tasks.id_of(query), query.model_calls)
        if call.lost is not None:
            super().answer_lost(query, call.lost)
            self.repeat(AgentUsage().plus(call.lost), call.lost, query.path)
        if call.answer is not None:
            if not call.is_carried:  # else the run that this run repeats has paid
                self.accounts.paid_before(call.answer.usage)
                self._spend_of_node(query, call.answer.usage)
            self.count(query.path, usage_of(call.answer))
            self._last_answers[query] = call.answer.content, call.seq
            return call.answer
        if call.failure is not None:
            raise call.failure
        with self.loops.admission(query) as admitted:
            async with self._admission(query) as permit:
                admitted()
                return await self._recorded_call(query, partial(invoke, permit))

    def _admission(self, query: Query) -> AbstractAsyncContextManager[Permit | None]:
        """Reserve a model call in the budgets of the run, the day, the nodes and the task."""
        if query.task is not None:
            return query.admission()
        of_node = self.accounts_of(query.path)
        if not (of_node or self.accounts.are_limited):
            return nullcontext(Permit())
        return Reservation((*self.accounts.all, *of_node), *size_of_call(query))

    def accounts_of(self, path: Path) -> Sequence[Account]:
        """Return the budgets of all nodes on a path."""
        if not self.node_accounts:
            return ()
        above = (path[:length] for length in range(1, len(path) + 1))
        return [account for each in above for account in self.node_accounts.get(each, ())]

    async def _recorded_call(
        self, query: Query, invoke: Callable[[], Awaitable[AssistantMessage]]
    ) -> AssistantMessage:
        if self._fair.is_held:
            self._calls[query] = ModelCall(None, goes_on_at=math.inf)
            self.check_suspend()  # hands the run back if all its calls wait
            try:
                await asyncio.Future()
            finally:
                del self._calls[query]
        about = LlmStartedData(call=query.model_calls, attempt=self.journal.attempt)
        if query.composed:
            about["memory"] = query.composed
        target = getattr(query.agent.provider, "target", None)  # a provider may lack the attribute
        messages = heard_in(query.agent.conversation_history, self._logged.pop(query, {}))
        if messages:
            about["results"] = messages
        started = self._started(query, about, target)
        await self.journal.commit_if_binding()
        await self._fair.enter(self.journal.tenant_id)
        began = monotonic()
        call = self._calls[query] = ModelCall(target, began)
        if failing := self.failing(query):
            call.failing_since, call.failed_tries = began - failing.since_s, failing.tries
        for observer in self._observers:
            observer.model_call_began(query, target, started)
        try:
            message = await invoke()
        except BaseException as error:
            del self._calls[query]
            self._call_failed(query, call, error)
            raise
        del self._calls[query]
        first_ms = message.metadata.get("first_token_ms")
        completed: StoredLlmCompletedData = {
            "call": query.model_calls,
            "attempt": self.journal.attempt,
            "try": call.failed_tries + 1,
            "message": data_of(message),
            "usage": message.usage.to_dict(),
            "duration_ms": round((monotonic() - began) * 1000),
        }
        served_by(completed, call.target)
        if first_ms is not None:
            completed["first_token_ms"] = first_ms
        if message.state:
            completed["server_state"] = to_json(message.state).decode()
        seq = self.tasks.add(query, EventType.LLM_COMPLETED, completed)
        self._spend(query, message.metadata.get("model", ""), message.usage, first_ms)
        self.count(query.path, usage_of(message))
        self._last_answers[query] = message.content, seq
        for observer in self._observers:
            observer.model_call_ended(query, message)
        return message

    def _call_failed(self, query: Query, call: ModelCall, error: BaseException) -> None:
        if isinstance(error, ModelError):
            data = _llm_failed(query.model_calls, self.journal.attempt, error)
            self.tasks.add(query, EventType.LLM_FAILED, call.with_lost(data))
        elif isinstance(error, asyncio.CancelledError) and call.lost is not None:
            cancelled = LlmCancelledData(call=query.model_calls, attempt=self.journal.attempt)
            self.tasks.add(query, EventType.LLM_CANCELLED, call.with_lost(cancelled))
        for observer in self._observers:
            observer.model_call_ended(query, error)

    async def wait_turn(self, query: Query) -> None:
        await self._fair.enter(self.journal.tenant_id)

    def _spend(
        self, query: Query, model: str, usage: Usage, first_token_ms: int | None = None
    ) -> None:
        self.journal.spend(name_of(query.agent), model, usage, first_token_ms)
        self.accounts.pay(usage)
        self._spend_of_node(query, usage)

    def _spend_of_node(self, query: Query, usage: Usage) -> None:
        for account in self.accounts_of(query.path):
            account.spend(usage)

    def answer_lost(self, query: Query, usage: Usage) -> None:
        super().answer_lost(query, usage)
        call = self._calls[query]
        call.lost = usage
        self._spend(query, "" if call.target is None else call.target.model, usage)
        self.count(query.path, AgentUsage().plus(usage))

    def count(self, path: Path, usage: AgentUsage) -> None:
        """Add usage to the usage of the run and of the nodes on the path."""
        self.spent += usage
        for above in self.spent_below:
            if path[: len(above)] == above:
                self.spent_below[above] += usage

    def _started(self, query: Query, about: LlmStartedData, target: ModelTarget | None) -> int:
        if query.task and not query.tool_call:
            about["beside"] = True  # the live text is also the task's output so far
        served_by(about, target)
        return self.tasks.add(query, EventType.LLM_STARTED, about)

    def delta_listener(self, query: Query) -> OnDelta | None:
        listeners = (observer.delta_listener(query) for observer in self._observers)
        return next(filter(None, listeners), None)

    def repeat(self, usage: AgentUsage, paid: Usage, path: Path = ()) -> None:
        """Add the usage of work that is not done again. ``paid``: the part that this run paid."""
        self.accounts.paid_before(paid)
        self.count(path, usage)

    def model_try_began(self, query: Query, target: ModelTarget) -> None:
        call = self._calls[query]
        call.goes_on_at = 0.0  # the model call no longer waits
        if call.target != target:
            call.target = target
            about = LlmStartedData(call=query.model_calls, attempt=self.journal.attempt)
            about["try"] = call.failed_tries + 1
            self._started(query, about, target)
        for observer in self._observers:
            observer.model_try_began(query, target)

    def model_try_failed(self, query: Query, failed: FailedTry) -> None:
        call = self._calls[query]
        call.failed_tries = failed.number
        now = monotonic()
        call.goes_on_at = now + failed.delay_s
        if failed.delay_s and call.failing_since is None:
            call.failing_since = now
        for observer in self._observers:
            observer.model_try_failed(query, failed)
        retry = failed.number, round(failed.delay_s * 1000)
        data = _llm_failed(query.model_calls, self.journal.attempt, failed.error, retry)
        self.tasks.add(query, EventType.LLM_FAILED, call.with_lost(data))
        self.check_suspend()

    def failing(self, query: Query) -> Failing | None:
        call = self.journal.replay.model_call(self.tasks.id_of(query), query.model_calls)
        if call.failing is None:
            return None
        tries, since = call.failing
        return Failing(tries, max(0.0, self.seconds_since(since)))

    def seconds_since(self, at: datetime) -> float:
        """Return the seconds between an event of an earlier attempt and now."""
        return (self.claimed_at - at).total_seconds() + monotonic() - self._began

    async def tool_call(
        self,
        query: Query,
        tool_call: ToolCall,
        tool: ToolBase | None,
        execute: Callable[[], Awaitable[ToolResult]],
    ) -> ToolResult:
        known = self.known_call(query, tool_call)
        recorded = known.result
        if recorded is not None and not isinstance(tool, SubAgentWrapper):
            if tool is not None:
                tool.replayed(tool_call)
            self._logged.setdefault(query, {})[tool_call.id] = recorded
            return await self._with_help(query, tool_call, recorded)
        call = current_call.get()
        assert call is not None
        with self.loops.tool_call(query, tool, call):
            result = await self._observed(call, tool_call, tool, execute)
            result = await self._with_help(query, tool_call, result)
        self.check_suspend()
        return result

    def known_call(self, query: Query, tool_call: ToolCall) -> ToolCallReplay:
        task_id = self.tasks.id_of(query)
        return self.journal.replay.tool_call(task_id, query.model_calls, tool_call.id)

    async def _observed(
        self,
        call: CurrentCall,
        tool_call: ToolCall,
        tool: ToolBase | None,
        execute: Callable[[], Awaitable[ToolResult]],
    ) -> ToolResult:
        for observer in self._observers:
            observer.tool_call_began(call, tool_call, tool)
        outcome: ToolResult | BaseException
        try:
            outcome = result = await self._act(call, tool_call, tool, execute)
        except BaseException as error:
            outcome = error
            raise
        finally:
            for observer in self._observers:
                observer.tool_call_ended(call, tool, outcome)
        return result

    async def _act(
        self,
        call: CurrentCall,
        tool_call: ToolCall,
        tool: ToolBase | None,
        execute: Callable[[], Awaitable[ToolResult]],
    ) -> ToolResult:
        query, number = call.query, call.query.model_calls
        about = ToolCallData(call=number, tool_call_id=tool_call.id, name=tool_call.name)
        known = self.known_call(query, tool_call)
        started: ToolStartedData = {**about, "arguments": tool_call.arguments}
        self.tasks.add(query, EventType.TOOL_STARTED, started)
        if isinstance(tool, SubAgentWrapper):
            # A sub-agent runs again with replayed calls. The sub-agent's result is not replayed,
            # because the sub-agent must publish again.
            path = (*query.path, (number, call.index))
            answered = await self.tasks.cancellable(path, tool.agent, execute)
            result = answered or error_result(tool_call, CANCELLED["message"], CANCELLED["code"])
        elif known.started is not None and not (tool is None or tool.idempotent):
            text = "interrupted by a restart; this call may have had its effect, or not"
            result = error_result(tool_call, text, "interrupted")
        else:
            if tool is None or not tool.local:
                await self.journal.commit()
            result = await execute()
            if result.parts and self._run_files is not None:
                result = await self._run_files.stored(tool_call, result)
        result = storable_result(result)
        self._tool_ended(query, about, result)
        return result

    async def decision(self, query: Query, tool_call: ToolCall, interrupt: Interrupt) -> Resolution:
        return await self.interrupts.decision(query, tool_call, interrupt)

    async def _with_help(self, query: Query, tool_call: ToolCall, result: ToolResult) -> ToolResult:
        """Return a tool's result for the root's model. If the call failed, add help from memory."""
        if self.lessons is None or query.parent is not None or query.task is not None:
            return result
        failed = result.status is ToolStatus.ERROR
        failures: list[ToolFailure] = []
        if query.model_calls >= self.journal.replay.asked:
            failures = self._failed_tasks.take()
            error = tool_error_of(result)
            if error is not None and error["type"] != CANCELLED["code"]:
                failures.insert(0, ToolFailure(tool_call.name, error))
        failures = failures[:_MOST_FAILURES]
        recalled = await self.lessons.failed(query.model_calls, tool_call.id, failures)
        if not failed:  # the help is for asynchronous tasks that failed
            self.lessons.take(recalled)
        elif text := help_after(recalled):
            return result.model_copy(update={"error": f"{result.error or ''}\n\n{text}"})
        return result

    def _tool_ended(self, query: Query, about: ToolCallData, result: ToolResult) -> None:
        failed = result.status is ToolStatus.ERROR
        data = data_of_result(about, result)
        call = (self.tasks.id_of(query), about["call"], about["tool_call_id"])
        if (answer := self._answers.pop(call, None)) and not failed:
            data["result"], data["answer_seq"] = None, answer
        self._logged.setdefault(query, {})[about["tool_call_id"]] = result
        self.tasks.add(query, EventType.TOOL_FAILED if failed else EventType.TOOL_COMPLETED, data)

    def injected(self, query: Query, items: Sequence[MemoryItem]) -> None:
        self.memory.injected(query, items)

    def recalled(self, query: Query, items: Sequence[tuple[MemoryItem, float | None]]) -> None:
        self.memory.recalled(query, items)

    def sources_of(self, query: Query) -> Collection[str] | None:
        return self.journal.replay.task(self.tasks.id_of(query)).sources

    def published_at(self, query: Query) -> datetime | None:
        published = self.journal.replay.task(self.tasks.id_of(query)).published
        return None if published is None else published.at

    def version_of(self, query: Query) -> int | None:
        """Return a publication's logged version, because a replay may end queries in any order."""
        node = self.memory.node_of(query)
        version = self.journal.replay.versions.get(node)
        if version is None or (graph := query.agent.memory_graph) is None:
            return None
        last = graph.publication(query.agent.agent_id or "")
        newest = max(*version.values(), last.version if last else 0)
        return version.get(self.tasks.id_of(query), newest + 1)

    def published(self, query: Query, publication: Publication) -> None:
        self.memory.published(query, publication)

    def publications_ended(self, query: Query) -> None:
        """Record the publication of a node that is no agent."""
        self.memory.ended(query, None, None)

    def answer_rejected(self, query: Query, code: str, message: str) -> None:
        data = AnswerRejectedData(call=query.model_calls, code=code, message=message)
        self.tasks.add(query, EventType.ANSWER_REJECTED, data)

    def warning(self, query: Query, code: str, message: str) -> None:
        self.tasks.add(query, EventType.WARNING, WarningData(code=code, message=message))


def _llm_failed(
    call: int, attempt: int, failure: ModelError, retry: tuple[int, int] | None = None
) -> LlmFailedData:
    """Return the data of ``llm.failed``.

    Args:
        retry: number of the failed try and milliseconds until the next try; ``None``: no try
            follows.
    """
    error = Failure(code=failure.code, message=failure.detail)
    data = LlmFailedData(call=call, attempt=attempt, error=error)
    if retry is not None:
        data["try"], data["retry_in_ms"] = retry
    return data
