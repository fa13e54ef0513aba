"""The linked runs that this worker's runs await: stored, cancelled and read, many at a time."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from uuid import UUID, uuid5

import asyncpg
import structlog
from pydantic_core import from_json

from bottega.agents.messages import AgentUsage
from bottega.db.failures import is_transient, persist
from bottega.errors import FencedError
from bottega.events.listener import NotifyListener, happens
from bottega.subagents.child import EMPTY
from bottega.subagents.handle import SubagentOutcome
from bottega.subagents.linked.work import LinkedEnd
from bottega.subagents.states import SubagentStatus

CHANNEL = "bottega_linked"
_LINK = "SELECT link_runs($1, $2, $3, $4)"
_ENDS = "SELECT run_id, status, ending FROM linked_ends($1, $2)"
_CANCEL = "SELECT cancel_linked($1, $2)"
_TELL = """
SELECT send_message($1::uuid, $2, $3, NULL, '{}', $4)
FROM set_config('bottega.tenant', $1::uuid::text, true)
"""
_BATCH = 100
_LINGER_S = 0.003
"""Time in which requests and notices come together."""
_NET_S = 5.0
"""Longest time until an end is read whose notice was lost."""
_PATIENCE_S = 10.0

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Linking:
    """The run that awaits linked runs, as this worker claimed it."""

    tenant_id: UUID
    run_id: UUID
    attempt: int


def linked_id(task_root: UUID, run_id: UUID, task_id: UUID) -> UUID:
    """Return the id of a task's linked run: the task's own, but for a run that repeats another."""
    return task_id if task_root == run_id else uuid5(run_id, str(task_id))


@dataclass(slots=True)
class _New:
    """A linked run that is to be stored.

    Attributes:
        is_sent: the statement that stores it has begun.
    """

    about: str
    is_sent: bool = False
    stored: asyncio.Event = field(default_factory=asyncio.Event)


class LinkedRuns:
    """The linked runs that this worker awaits.

    All requests of a moment are one statement for each run, and one for all ends.
    """

    def __init__(self, pool: asyncpg.Pool, listener: NotifyListener) -> None:
        self._pool = pool
        self._awaited: dict[UUID, tuple[Linking, asyncio.Future[LinkedEnd]]] = {}
        self._new: dict[UUID, _New] = {}
        self._cancelled: dict[UUID, UUID] = {}
        self._ended: set[UUID] = set()
        self._wake = asyncio.Event()
        listener.subscribe(CHANNEL, self._notice)

    def resting(self) -> int:
        """Return the number of runs here that await linked runs: they need little of a worker."""
        return len({linking.run_id for linking, _ in self._awaited.values()})

    def end_of(
        self,
        linking: Linking,
        run_id: UUID,
        new: str,
        told: Mapping[str, str] = MappingProxyType({}),
    ) -> "asyncio.Future[LinkedEnd]":
        """Start a linked run, unless it exists already; return the future of its end.

        Args:
            new: what ``link_runs`` stores of it, as JSON.
            told: messages to it by id, as JSON; those that it has got are not sent again.

        Raises:
            FencedError: another worker has the run that awaits it.
        """
        future: asyncio.Future[LinkedEnd] = asyncio.get_running_loop().create_future()
        self._awaited[run_id] = linking, future
        self._new[run_id] = asked = _New(new)
        self._wake.set()

        async def end() -> LinkedEnd:
            for message_id, content in told.items():
                await self.tell(linking, run_id, message_id, content)
            return await future

        ending = asyncio.ensure_future(end())
        # Not in the coroutine, which never begins if it is cancelled at once.
        ending.add_done_callback(lambda _: self._forget(run_id, future, asked))
        return ending

    def _forget(self, run_id: UUID, future: "asyncio.Future[LinkedEnd]", asked: _New) -> None:
        if self._awaited.get(run_id, (None, None))[1] is future:
            del self._awaited[run_id]
        asked.stored.set()
        if self._new.get(run_id) is asked:
            del self._new[run_id]

    async def tell(self, linking: Linking, run_id: UUID, message_id: str, content: str) -> bool:
        """Send a message, as JSON, to a linked run, once; return false if that is over."""
        if (new := self._new.get(run_id)) is not None:
            await new.stored.wait()
        about = linking.tenant_id, run_id, content, message_id
        answer = await persist(lambda: self._pool.fetchval(_TELL, *about))
        return "id" in from_json(answer)

    def cancel(self, linking: Linking, run_id: UUID) -> None:
        """Cancel a linked run. If it is not stored yet, it never is."""
        new = self._new.get(run_id)
        if new is not None and not new.is_sent:
            del self._new[run_id]
            new.stored.set()
            _settle(self._awaited[run_id][1], LinkedEnd(_NOT_BEGUN))
        else:
            self._cancelled[run_id] = linking.tenant_id
            self._wake.set()

    async def ends(self, tenant_id: UUID, ids: Sequence[UUID]) -> dict[UUID, LinkedEnd]:
        """Return the ends of linked runs that are over."""
        about = [tenant_id] * len(ids), ids
        rows = await persist(lambda: self._pool.fetch(_ENDS, *about))
        return {row["run_id"]: _end(row["status"], row["ending"]) for row in rows}

    async def run(self) -> None:
        """Carry out what was asked for, until cancelled."""
        self._wake.set()  # what an error has left is done first
        while True:
            if not await happens(self._wake, _NET_S):
                self._ended |= self._awaited.keys()
            self._wake.clear()
            await asyncio.sleep(_LINGER_S)
            async with asyncio.timeout(_PATIENCE_S):
                await self._link()
                await self._cancel()
                await self._read_ends()

    def _notice(self, payload: str | None) -> None:
        if payload is None:  # some may have been missed
            self._ended |= self._awaited.keys()
        elif (run_id := UUID(payload)) in self._awaited:
            self._ended.add(run_id)
        if self._ended:
            self._wake.set()

    async def _link(self) -> None:
        groups: defaultdict[Linking, list[UUID]] = defaultdict(list)
        for run_id in self._new:
            groups[self._awaited[run_id][0]].append(run_id)
        for linking, ids in groups.items():
            for first in range(0, len(ids), _BATCH):
                some = ids[first : first + _BATCH]
                try:
                    await self._link_some(linking, some)
                except Exception as error:
                    if is_transient(error):
                        raise
                    logger.exception("linked_runs.not_stored", run_id=str(linking.run_id))
                    self._fail(some, error)  # one run's must not stop those of the others

    async def _link_some(self, linking: Linking, ids: Sequence[UUID]) -> None:
        sent = {run_id: self._new[run_id] for run_id in ids if run_id in self._new}
        for one in sent.values():
            one.is_sent = True
        new = f"[{','.join(one.about for one in sent.values())}]"
        about = linking.tenant_id, linking.run_id, linking.attempt
        known = await self._pool.fetchval(_LINK, *about, new)
        if known is None:
            self._fail(ids, FencedError(f"run {linking.run_id} is another worker's now"))
            return
        for run_id, one in sent.items():
            one.stored.set()
            self._new.pop(run_id, None)
        self._ended |= set(known) & self._awaited.keys()

    def _fail(self, ids: Sequence[UUID], error: Exception) -> None:
        for run_id in ids:
            if (new := self._new.pop(run_id, None)) is not None:
                new.stored.set()
            if (awaited := self._awaited.get(run_id)) is not None:
                _settle(awaited[1], error)

    async def _cancel(self) -> None:
        if not self._cancelled:
            return
        cancelled = dict(self._cancelled)
        await self._pool.execute(_CANCEL, list(cancelled.values()), list(cancelled))
        for run_id in cancelled:
            del self._cancelled[run_id]

    async def _read_ends(self) -> None:
        asked = {each: self._awaited[each] for each in self._ended if each in self._awaited}
        if asked:
            tenants = [linking.tenant_id for linking, _ in asked.values()]
            for row in await self._pool.fetch(_ENDS, tenants, list(asked)):
                _settle(asked[row["run_id"]][1], _end(row["status"], row["ending"]))
        self._ended -= asked.keys()
        self._ended &= self._awaited.keys()


def _settle(future: "asyncio.Future[LinkedEnd]", result: LinkedEnd | Exception) -> None:
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


def _end(status: str | None, ending: str) -> LinkedEnd:
    """Return a task's end from that of its linked run. ``None``: it was deleted."""
    told = from_json(ending)
    is_cancelled = status == "cancelled"
    error = _DELETED if status is None else _CANCELLED if is_cancelled else told["error"] or {}
    if status == "completed":
        output = told["output"] or EMPTY
        outcome = SubagentOutcome(
            SubagentStatus.COMPLETED, output=output, stop_reason=told["stop_reason"]
        )
    else:
        outcome = SubagentOutcome(
            _STATUSES.get(status or "", SubagentStatus.FAILED),
            error=error.get("message"),
            error_code=error.get("code"),
            stop_reason=told["stop_reason"],
        )
    usage = AgentUsage() if told["usage"] is None else AgentUsage.from_dict(told["usage"])
    return LinkedEnd(outcome, usage, told["files"] or {})
