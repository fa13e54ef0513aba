"""Child runs: any worker may execute a task of a run as a separate run.

One statement stores, cancels or reads many child runs. A child run gets budgets, agents and files
from its task. The child run's end is the task's end.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any
from uuid import UUID, uuid5

import asyncpg
from pydantic_core import from_json

from bottega.agents.agent import BaseAgent
from bottega.agents.messages import AgentUsage
from bottega.agents.query import Path
from bottega.clock import monotonic
from bottega.db.failures import is_transient, persist
from bottega.db.pool import acting_as
from bottega.engine.claim import ClaimedRun
from bottega.engine.recorder import JournalRecorder
from bottega.engine.waiting import AwaitedRuns
from bottega.errors import BudgetExhaustedError, FencedError
from bottega.events.log import encoded
from bottega.events.nats import LONGEST_END, NatsSignals
from bottega.events.types import EventError
from bottega.graph.publication import as_text
from bottega.logger import Logger
from bottega.subagents.budget import DOLLARS, TOKENS, Account, Unit
from bottega.subagents.child import EMPTY, copy_for_task, helper_of
from bottega.subagents.handle import Parent, SubagentHandle, SubagentOutcome, SubagentStatus
from bottega.subagents.shared_context import folder_of
from bottega.subagents.swarm import ChildEnd, ChildWork, Swarm

_ADD = "SELECT add_children($1, $2, $3, $4, $5)"
_ENDS = "SELECT run_id, status, ending FROM ended_children($1, $2)"
_CANCEL = "SELECT request_cancel($1, $2)"
_TELL_HELD = """
UPDATE run_children SET request = request || jsonb_build_object(
    'messages', coalesce(request -> 'messages', '[]')
        || jsonb_build_object('id', $4::uuid, 'content', $3::jsonb))
WHERE tenant_id = $1 AND child_id = $2 AND is_held RETURNING true
"""
"""Adds a message to the request of a child run that is not queued yet."""
_TELL = "SELECT send_message($1, $2, $3, NULL, '{}', $4)"
_TEXTS = "SELECT id, partial_output($1, id, NULL) FROM unnest($2::uuid[]) AS id"
_BATCH = 100
_LINGER_S = 0.003
"""Seconds for which requests are collected, so that one SQL statement handles many."""
_PATIENCE_S = 10.0

logger = Logger(__name__)


@dataclass(frozen=True, slots=True)
class ParentRun:
    """A run that awaits child runs, with the attempt that this worker claimed.

    Attributes:
        limit: maximum number of the run's child runs that are queued or running at the same time.
    """

    tenant_id: UUID
    run_id: UUID
    attempt: int
    limit: int


def child_id(task_root: UUID, run_id: UUID, task_id: UUID) -> UUID:
    """Return the id of a task's child run: the task's id; if the run is a repetition, a hash."""
    return task_id if task_root == run_id else uuid5(run_id, str(task_id))


@dataclass(slots=True)
class _New:
    """A child run that is not stored yet.

    Attributes:
        is_sent: true if the SQL statement that stores the child run has begun.
        on_stored: function that is called after the child run has been stored.
    """

    about: str
    on_stored: Callable[[], object] = lambda: None
    is_sent: bool = False
    stored: asyncio.Event = field(default_factory=asyncio.Event)


class ChildRuns:
    """The child runs that this worker awaits.

    One SQL statement stores all new child runs of a parent run.

    Args:
        nats: source of the runs' live text; ``None``: the database is the source.
    """

    def __init__(self, pool: asyncpg.Pool, nats: NatsSignals | None = None) -> None:
        self._pool = pool
        self._nats = nats
        self._awaited: dict[UUID, tuple[ParentRun, asyncio.Future[ChildEnd]]] = {}
        self._new: dict[UUID, _New] = {}
        self._cancelled: dict[UUID, UUID] = {}
        self._ended: set[UUID] = set()
        self._stored: list[Callable[[], object]] = []
        self._wake = asyncio.Event()

    def resting(self) -> int:
        """Return how many of this worker's runs wait for child runs."""
        return len({parent.run_id for parent, _ in self._awaited.values()})

    def end_of(
        self,
        parent: ParentRun,
        run_id: UUID,
        new: str,
        unread: Mapping[str, str] = MappingProxyType({}),
        on_stored: Callable[[], object] = lambda: None,
        on_ended: Callable[[], object] = lambda: None,
    ) -> "asyncio.Future[ChildEnd]":
        """Start a child run if it does not exist yet. Return a future of the child run's end.

        Args:
            new: JSON from which the SQL function ``add_children`` creates the child run.
            unread: JSON messages to the child run, by id. The child run ignores repeated messages.
            on_stored: called when the child run is stored and, if it is over, its end was read.
            on_ended: called after the child run's end.

        Raises:
            FencedError: another worker executes the parent run.
        """
        future: asyncio.Future[ChildEnd] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: on_ended())
        self._awaited[run_id] = parent, future
        self._new[run_id] = child = _New(new, on_stored)
        self._wake.set()

        async def end() -> ChildEnd:
            for message_id, content in unread.items():
                await self.tell(parent.tenant_id, run_id, message_id, content)
            return await future

        ending = asyncio.ensure_future(end())
        # A callback, because the coroutine runs no code if it is cancelled before its first step.
        ending.add_done_callback(lambda _: self._forget(run_id, future, child))
        return ending

    def _forget(self, run_id: UUID, future: "asyncio.Future[ChildEnd]", child: _New) -> None:
        if self._awaited.get(run_id, (None, None))[1] is future:
            del self._awaited[run_id]
        child.stored.set()
        if self._new.get(run_id) is child:
            del self._new[run_id]

    async def tell(self, tenant_id: UUID, run_id: UUID, message_id: str, content: str) -> bool:
        """Send a JSON message to a child run, at most once. Return false if the run is over."""
        if (new := self._new.get(run_id)) is not None:
            await new.stored.wait()
        return await persist(lambda: self._send(tenant_id, run_id, content, message_id))

    async def _send(self, *message: Any) -> bool:
        async with acting_as(self._pool, message[0]) as connection:
            if await connection.fetchval(_TELL_HELD, *message):
                return True
            return "id" in from_json(await connection.fetchval(_TELL, *message))

    def cancel(self, tenant_id: UUID, run_id: UUID) -> None:
        """Cancel a child run. If the child run is not stored yet, drop the child run."""
        new = self._new.get(run_id)
        if new is not None and not new.is_sent:
            del self._new[run_id]
            new.stored.set()
            _set_end(self._awaited[run_id][1], ChildEnd(_NOT_BEGUN))
        else:
            self._cancelled[run_id] = tenant_id
            self._wake.set()

    async def texts(self, tenant_id: UUID, ids: Sequence[UUID]) -> dict[UUID, str]:
        """Return the last part of the present model call's live text, by child run."""
        if self._nats is not None:
            found = await asyncio.gather(*(self._nats.text_of(tenant_id, each) for each in ids))
            return {each: texts.get(None, "") for each, texts in zip(ids, found, strict=True)}
        async with acting_as(self._pool, tenant_id) as connection:
            rows = await connection.fetch(_TEXTS, tenant_id, ids)
        return {run_id: text or "" for run_id, text in rows}

    async def ends(self, tenant_id: UUID, ids: Sequence[UUID]) -> dict[UUID, ChildEnd]:
        """Return the ends of the child runs that are over, by id."""
        about = [tenant_id] * len(ids), ids
        rows = await persist(lambda: self._pool.fetch(_ENDS, *about))
        return {row["run_id"]: _end(row["status"], row["ending"]) for row in rows}

    def note_end(self, run_id: UUID) -> None:
        """Record that an awaited child run has ended, so that :meth:`run` reads the end."""
        if run_id in self._awaited:
            self._ended.add(run_id)
            self._wake.set()

    async def run(self) -> None:
        """Store and cancel child runs, and read the ends of child runs, until cancelled."""
        self._wake.set()  # after a failed call of run(), requests may still wait
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(_LINGER_S)
            async with asyncio.timeout(_PATIENCE_S):
                await self._add()
                await self._cancel()
                await self._read_ends()

    async def _add(self) -> None:
        groups: defaultdict[ParentRun, list[UUID]] = defaultdict(list)
        for run_id in self._new:
            groups[self._awaited[run_id][0]].append(run_id)
        for parent, ids in groups.items():
            for first in range(0, len(ids), _BATCH):
                some = ids[first : first + _BATCH]
                try:
                    await self._add_some(parent, some)
                except Exception as error:
                    if is_transient(error):
                        raise
                    logger.exception("child_runs.not_stored", run_id=str(parent.run_id))
                    self._fail(some, error)  # the child runs of other parents must still be stored

    async def _add_some(self, parent: ParentRun, ids: Sequence[UUID]) -> None:
        children = {run_id: self._new[run_id] for run_id in ids if run_id in self._new}
        for one in children.values():
            one.is_sent = True
        new = f"[{','.join(one.about for one in children.values())}]"
        about = parent.tenant_id, parent.run_id, parent.attempt, parent.limit
        rows = await self._pool.fetchval(_ADD, *about, new)
        if rows is None:
            self._fail(ids, FencedError(f"another worker executes the run {parent.run_id}"))
            return
        for run_id, one in children.items():
            one.stored.set()
            self._stored.append(one.on_stored)  # _read_ends calls the function
            self._new.pop(run_id, None)
        self._ended |= set(rows) & self._awaited.keys()

    def _fail(self, ids: Sequence[UUID], error: Exception) -> None:
        for run_id in ids:
            if (new := self._new.pop(run_id, None)) is not None:
                new.stored.set()
            if (awaited := self._awaited.get(run_id)) is not None:
                _set_end(awaited[1], error)

    async def _cancel(self) -> None:
        if not self._cancelled:
            return
        cancelled = dict(self._cancelled)
        for tenant_id in set(cancelled.values()):
            ids = [run_id for run_id, of in cancelled.items() if of == tenant_id]
            async with acting_as(self._pool, tenant_id) as connection:
                await connection.execute(_CANCEL, tenant_id, ids)
        for run_id in cancelled:
            del self._cancelled[run_id]
        # The cancellation itself has ended those child runs that no worker executed.
        self._ended |= cancelled.keys() & self._awaited.keys()

    async def _read_ends(self) -> None:
        awaited = {each: self._awaited[each] for each in self._ended if each in self._awaited}
        if awaited:
            tenants = [parent.tenant_id for parent, _ in awaited.values()]
            for row in await self._pool.fetch(_ENDS, tenants, list(awaited)):
                _set_end(awaited[row["run_id"]][1], _end(row["status"], row["ending"]))
        self._ended -= awaited.keys()
        self._ended &= self._awaited.keys()
        callbacks, self._stored = self._stored, []
        for call in callbacks:
            call()


def _set_end(future: "asyncio.Future[ChildEnd]", result: ChildEnd | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


_STATUSES = {
    "completed": SubagentStatus.COMPLETED,
    "timeout": SubagentStatus.TIMEOUT,
    "cancelled": SubagentStatus.CANCELLED,
}
_DELETED = {"code": "deleted", "message": "the run that did this task was deleted"}
_NOT_BEGUN = SubagentOutcome(SubagentStatus.CANCELLED, error_code="cancelled")
_CANCELLED = {"code": "cancelled", "message": "somebody cancelled the run that did this task"}


def _end(status: str | None, ending: str) -> ChildEnd:
    """Convert a child run's end to the task's end. ``status`` is ``None`` for a deleted run."""
    end = from_json(ending)
    is_cancelled = status == "cancelled"
    error = _DELETED if status is None else _CANCELLED if is_cancelled else end["error"] or {}
    if status == "completed":
        output = as_text(end["output"] or "")
        outcome = SubagentOutcome(
            SubagentStatus.COMPLETED, output=output, stop_reason=end["stop_reason"]
        )
    else:
        outcome = SubagentOutcome(
            _STATUSES.get(status or "", SubagentStatus.FAILED),
            error=error.get("message"),
            error_code=error.get("code"),
            stop_reason=end["stop_reason"],
        )
    usage = AgentUsage() if end["usage"] is None else AgentUsage.from_dict(end["usage"])
    return ChildEnd(outcome, usage, end["files"] or {}, end["output_json"])


_CANCELS_S = 2.0
"""Longest wait, in seconds, for a child run's end after its task was cancelled."""
_LEAST_TOKENS = 2_000
"""Minimum share of a budget in tokens. With less, most models cannot make a call."""


class Spreading:
    """Executor of the tasks of one run. Each task is executed as a child run."""

    def __init__(self, children: ChildRuns, recorder: JournalRecorder, run: ClaimedRun) -> None:
        self._children = children
        self._recorder = recorder
        self._run = run
        self._with_parts: defaultdict[Parent, dict[UUID, SubagentHandle]] = defaultdict(dict)
        self._texts: dict[UUID, str] = {}
        self._begun: set[UUID] = set()

    def id_of(self, task_id: UUID) -> UUID:
        return child_id(self._run.task_root, self._run.run_id, task_id)

    async def do(
        self, handle: SubagentHandle, work: ChildWork, pay: Callable[[AgentUsage], None]
    ) -> ChildEnd:
        """Execute a task as a child run: see :class:`bottega.subagents.swarm.RemoteRuns`.

        After a crash, messages that the child run may not have received are sent again. If the task
        is cancelled, its budgets stay reserved until the child run has ended, but at most
        :data:`_CANCELS_S` longer.
        """
        recorder, run_id = self._recorder, self.id_of(handle.task_id)
        redactor = recorder.journal.known
        await recorder.journal.commit()  # the task's row must exist first
        parts = None if work.is_helper else recorder.parts
        recalled = [] if parts is None else await parts.recalled_by(work.agent, handle.prompt)
        limit = handle.parent.limits.max_concurrent
        parent = ParentRun(self._run.tenant_id, self._run.run_id, self._run.attempt, limit)
        async with self._parts(handle) as (tokens, dollars):
            new = {
                "id": run_id,
                "agent": work.agent,
                "input": work.question,
                "timeout_s": handle.timeout,
                "token_budget": tokens,
                "cost_budget": _cost(dollars),
                "task": {
                    "helper_of": work.agent if work.is_helper else None,
                    "instructions": work.instructions,
                    "most_steps": work.most_steps,
                    "task_id": handle.task_id,
                    "files": work.files,
                    "recalled": recalled,
                },
            }
            unread = {} if handle.mailbox is None else handle.mailbox.unread
            messages = {key: encoded(text, redactor) for key, text in unread.items()}
            self._begun.add(handle.task_id)
            text = encoded(new, redactor)
            on_stored = partial(self._stored, handle)
            ending = self._children.end_of(parent, run_id, text, messages, on_stored)
            try:
                end = await asyncio.shield(ending)
            except asyncio.CancelledError:
                if handle.status.is_final:  # the parent cancelled the task
                    self._children.cancel(parent.tenant_id, run_id)
                    await self._pay_cancelled(run_id, ending, pay)
                raise
            finally:
                ending.cancel()
                self._texts.pop(run_id, None)
        self._paid_for(end.usage, pay)
        recorder.child_usage[handle.task_id] = end.usage
        if parts is not None:
            outcome = end.outcome
            is_done = outcome.status is SubagentStatus.COMPLETED
            error = EventError(outcome.error_code or str(outcome.status), outcome.error)
            answered = outcome.output or "" if is_done else error
            parts.child_ended(work.agent, handle.task_id, handle.prompt, answered)
        if end.outcome.output == "":  # the task's caller reads a sentence instead of an empty text
            return replace(end, outcome=replace(end.outcome, output=EMPTY))
        return end

    def _stored(self, handle: SubagentHandle) -> None:
        handle.is_stored = True
        self._recorder.check_suspend()

    async def _pay_cancelled(
        self,
        run_id: UUID,
        ending: "asyncio.Future[ChildEnd]",
        pay: Callable[[AgentUsage], None],
    ) -> None:
        try:
            async with asyncio.timeout(_CANCELS_S):
                end = await asyncio.shield(ending)
        except (TimeoutError, FencedError):
            pass
        except Exception:
            logger.exception("child_run.usage_unknown", run_id=str(run_id))
        else:
            self._paid_for(end.usage, pay)

    def _paid_for(self, usage: AgentUsage, pay: Callable[[AgentUsage], None]) -> None:
        self._recorder.accounts.paid_before(usage)
        self._recorder.spent += usage
        pay(usage)

    async def tell(self, handle: SubagentHandle, message_id: str, text: str) -> bool:
        if handle.task_id not in self._begun:
            return True  # the message is sent when the child run starts
        run_id, content = self.id_of(handle.task_id), encoded(text, self._recorder.journal.known)
        return await self._children.tell(self._run.tenant_id, run_id, message_id, content)

    async def read_texts(self, handles: Sequence[SubagentHandle]) -> None:
        runs = {
            self.id_of(handle.task_id): handle
            for handle in handles
            if handle.is_stored and not handle.status.is_final
        }
        texts = await self._children.texts(self._run.tenant_id, list(runs)) if runs else {}
        for run_id, text in texts.items():
            if text:
                runs[run_id].add_text(unread_text(self._texts.get(run_id, ""), text))
                self._texts[run_id] = text

    async def ends_of(self, tasks: Mapping[UUID, UUID | None]) -> dict[UUID, ChildEnd]:
        """Return the ends of tasks' child runs, by task. Cancel the child runs that have not ended.

        Args:
            tasks: the child run's id by task; ``None``: this run has created the child run.
        """
        runs = {run_id or self.id_of(task_id): task_id for task_id, run_id in tasks.items()}
        ends = await self._children.ends(self._run.tenant_id, list(runs)) if runs else {}
        for run_id in runs.keys() - ends.keys():
            self._children.cancel(self._run.tenant_id, run_id)
        return {runs[run_id]: end for run_id, end in ends.items()}

    @asynccontextmanager
    async def _parts(self, handle: SubagentHandle) -> AsyncIterator[tuple[int | None, int | None]]:
        """Reserve the task's share of the parent's budgets. Yield the share as tokens and money."""
        day = set(map(id, self._recorder.accounts.day))  # a child run's calls reserve these
        above = [account for account in handle.parent.accounts if id(account) not in day]
        siblings = self._with_parts[handle.parent]
        paid = sum(not other.status.is_final for other in siblings.values())
        sharers = max(1, handle.parent.remote - paid)
        siblings[handle.task_id] = handle
        try:
            async with parts_of(above, sharers, handle.account.limit) as parts:
                yield parts
        finally:
            del siblings[handle.task_id]


class ElementRuns:
    """Executor of list elements for nodes with ``for_each``. Each element is a child run."""

    def __init__(self, children: ChildRuns, recorder: JournalRecorder, run: ClaimedRun) -> None:
        self._children = children
        self._recorder = recorder
        self._run = run
        self._began = monotonic()
        self._day = set(map(id, recorder.accounts.day))  # a child run's calls reserve these
        self._under_way: set[Path] = set()

    def are_limited(self, path: Path) -> bool:
        """Return true if a budget limits the elements of the node at a path."""
        return any(account.limit is not None for account in self._accounts(path))

    def _accounts(self, path: Path) -> list[Account]:
        above = (*self._recorder.accounts.all, *self._recorder.accounts_of(path))
        return [account for account in above if id(account) not in self._day]

    async def end_of(
        self, path: Path, request: Mapping[str, Any], awaited: AwaitedRuns, limit: int
    ) -> ChildEnd:
        """Execute an element as a child run.

        Args:
            path: path of the element.
            request: ``input`` and ``task`` of the child run.
            limit: maximum number of the node's elements that run at the same time.

        Raises:
            BudgetExhaustedError: too little of the budgets is left for the element.
            FencedError: another worker executes the run.
        """
        recorder, run = self._recorder, self._run
        task_id = recorder.tasks.id_at(path)
        assert task_id is not None
        run_id = child_id(run.task_root, run.run_id, task_id)
        parent = ParentRun(run.tenant_id, run.run_id, run.attempt, limit)
        async with parts_of(self._accounts(path), limit, None) as (tokens, dollars):
            new = {
                **request,
                "id": run_id,
                "timeout_s": max(0.001, run.remaining_s - (monotonic() - self._began)),
                "token_budget": tokens,
                "cost_budget": _cost(dollars),
                "task": {**request["task"], "task_id": task_id, "files": {}},
            }
            awaited.left -= 1
            awaited.unstored += 1
            awaited.unended += 1

            def note_stored() -> None:
                awaited.unstored -= 1
                recorder.check_suspend()

            text = encoded(new, recorder.journal.known)

            def note_ended() -> None:
                awaited.unended -= 1

            ending = self._children.end_of(
                parent, run_id, text, on_stored=note_stored, on_ended=note_ended
            )
            self._under_way.add(path)
            try:
                end = await asyncio.shield(ending)
            finally:
                self._under_way.discard(path)
                ending.cancel()
        recorder.accounts.paid_before(end.usage)
        recorder.count(path, end.usage)
        for account in recorder.accounts_of(path):
            account.spend(end.usage)
        return end

    def cancel_below(self, path: Path) -> None:
        """Cancel the child runs of a node's elements, and of elements in the node's sub-graph."""
        for each in [each for each in self._under_way if each[: len(path)] == path]:
            self.cancel(each)

    def cancel(self, path: Path) -> None:
        task_id = self._recorder.tasks.id_at(path)
        assert task_id is not None
        run_id = child_id(self._run.task_root, self._run.run_id, task_id)
        self._children.cancel(self._run.tenant_id, run_id)


@asynccontextmanager
async def parts_of(
    above: Sequence[Account], sharers: int, own: int | None
) -> AsyncIterator[tuple[int | None, int | None]]:
    """Reserve a share of budgets. Yield the share in tokens and in billionths of a dollar.

    Args:
        sharers, own: see :func:`part_of`. ``own`` is in tokens.
    """
    reserved: list[tuple[Account, int]] = []
    parts = []
    try:
        for unit in (TOKENS, DOLLARS):
            accounts = [a for a in above if a.unit is unit and a.limit is not None]
            own_limit = own if unit is TOKENS else None
            part = await part_of(accounts, unit, own_limit, sharers) if accounts else own_limit
            parts.append(part)
            for account in accounts:
                account.reserved += part or 0
                reserved.append((account, part or 0))
        yield parts[0], parts[1]
    finally:
        for account, amount in reserved:
            account.give_back(amount)


async def part_of(accounts: Sequence[Account], unit: Unit, own: int | None, sharers: int) -> int:
    """Return a task's share of budgets: the task's own budget, or an equal share of the rest.

    If too little is left because other tasks have reserved shares, wait until a task ends.

    Args:
        own: the task's own budget; ``None``: the task has no budget.
        sharers: number of tasks that share the rest, including this task.

    Raises:
        BudgetExhaustedError: too little is left, and no other task has a share to give back.
    """
    least = _LEAST_TOKENS if unit is TOKENS else 1
    while True:
        tightest = min(accounts, key=lambda account: account.left or 0)
        amount_left = tightest.left or 0
        part = max(least, amount_left // sharers) if own is None else own
        if part <= amount_left:
            return part
        if own is not None and amount_left > 0 and not tightest.reserved:
            return amount_left
        if not tightest.reserved:
            raise BudgetExhaustedError(tightest.used_up(least))
        await tightest.changed()


def unread_text(text_known: str, text: str) -> str:
    """Return the part of a text that was added after an earlier reading of the text. Pure.

    Args:
        known, text: the text's last :data:`LONGEST_END` characters at the earlier reading and now.
            If ``text`` does not contain the end of ``text_known``, all of ``text`` is new.
    """
    if text.startswith(text_known):
        return text[len(text_known) :]
    sought = text_known[-LONGEST_END // 10 :]
    if len(text_known) == len(sought):  # `known` is short, so `text` may contain it twice
        return text
    _, match, new = text.partition(sought)
    return new if match else text


def _cost(billionths: int | None) -> dict[str, Any] | None:
    return None if billionths is None else {"amount": DOLLARS.text(billionths), "currency": "USD"}


def agent_of_task(
    agent: BaseAgent, run: ClaimedRun, configure: Callable[[BaseAgent], object]
) -> BaseAgent:
    """Return the agent that executes a child run's task.

    Args:
        agent: the agent that does the task, or the agent whose helper does the task.
        configure: function that is called with a new helper.
    """
    link = run.parent_task
    assert link is not None
    if link["helper_of"] is None:
        return copy_for_task(agent, link["instructions"], link["most_steps"])
    helper = helper_of(agent, link["instructions"], link["most_steps"])
    configure(helper)
    return helper


def give_files(swarm: Swarm, run: ClaimedRun) -> None:
    """Give a child run the files that the parent run shared when the parent dispatched the task."""
    for path, content in (run.parent_task or {}).get("files", {}).items():
        swarm.context.restore(path, content)


def changed_files(swarm: object, run: ClaimedRun) -> dict[str, Any]:
    """Return, by path, the files that a child run created or changed in its own folder."""
    if run.parent_task is None or run.own_task is None or not isinstance(swarm, Swarm):
        return {}
    folder, files = folder_of(run.own_task), run.parent_task["files"]
    texts = swarm.context.texts(folder)
    return {path: text for path, text in texts.items() if files.get(path) != text}
