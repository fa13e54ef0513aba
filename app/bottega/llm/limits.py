"""A worker's share of a model server's limits, and the line of calls that wait for it.

The limits hold for all workers together: the database grants calls, requests and tokens to shares.
What a share holds serves its calls without a query.

The shares that a worker has of model servers' limits, kept in step with the database.

Places of tenants' asynchronous sub-agents over all workers, granted like calls of servers.
"""

import asyncio
import contextlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import structlog
from pydantic_core import from_json, to_json

from bottega.clock import monotonic
from bottega.events.listener import happens

_CALLS, _REQUESTS, _TOKENS = range(3)
_NAMES = ("max_concurrent", "requests_per_minute", "tokens_per_minute")


class ServerKey(NamedTuple):
    """A model server, for the calls of a tenant.

    Attributes:
        is_operators: it is the operator's, whose limits all tenants share.
    """

    tenant_id: UUID
    is_operators: bool
    provider: str


class ServerLimits(NamedTuple):
    """Limits of a server; ``None``: none. Requests and tokens are per minute."""

    calls: int | None
    requests: int | None
    tokens: int | None

    @classmethod
    def of(cls, provider: Mapping[str, Any]) -> "ServerLimits | None":
        """Return the limits that a provider's definition sets; ``None``: it sets none."""
        found = cls(*(provider.get(name) for name in _NAMES))
        return None if found == (None, None, None) else found

    @property
    def text(self) -> str:
        """The limits for people, such as ``max_concurrent 4``."""
        given = zip(_NAMES, self, strict=True)
        return ", ".join(f"{name} {limit}" for name, limit in given if limit is not None)


class Admission(NamedTuple):
    """Reservation of an admitted call, which ends with it; its request is spent.

    What was not limited then is 0: limits may change while the call goes on.
    """

    calls: int
    tokens: int


@dataclass(order=True, slots=True)
class _Place:
    """A call's place in the line: the one that waits longest comes first.

    Attributes:
        is_brief: the call waits no longer than for the database's answer.
    """

    since: float
    number: int
    tokens: int = field(compare=False)
    is_brief: bool = field(compare=False)
    admitted: "asyncio.Future[Admission | None]" = field(compare=False)


class Share:
    """Part of a server's limits that this worker holds, for one tenant.

    Totals only grow, so a report whose answer is lost can be repeated: ``granted`` is the
    database's word; what is ``gone`` was used or returned.

    Attributes:
        again_s: seconds after which a waiting share asks again; ``None``: no sooner than usual.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.again_s: float | None = None
        self._granted = [0, 0, 0]
        self._gone = [0, 0, 0]
        self._busy = [0, 0, 0]
        self._used = [0, 0]
        self._told = [0, 0]
        self._sent: tuple[Sequence[int], Sequence[_Place]] = ((0, 0), ())
        self._line: list[_Place] = []
        self._number = count()
        self._others_wait = False
        self._used_at = monotonic()

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def is_idle(self) -> bool:
        """True if the share holds nothing, waits for nothing and has nothing to tell."""
        held = any(gone < granted for gone, granted in zip(self._gone, self._granted, strict=True))
        waits = self._line or self._sent[1]  # what was asked for may have been granted since
        return not (held or waits or any(self._busy) or self._used != self._told)

    @property
    def is_wanted(self) -> bool:
        """True if others wait for what the share could return now."""
        return self._others_wait and (bool(self._line) or self._idle() != (0, 0, 0))

    def admit(self, tokens: int) -> Admission | None:
        """Admit a call at once if the share holds enough and no call waits."""
        return None if self._line else self._take(tokens)

    async def wait(self, tokens: int, since: float, wait_s: float) -> Admission | None:
        """Wait in line; return ``None`` if the call is not admitted in time.

        Args:
            since: when the call began to wait, by the monotonic clock.
            wait_s: 0: as long as the database needs to answer.
        """
        longest_s = wait_s if wait_s > 0 else 5.0
        admitted: asyncio.Future[Admission | None] = asyncio.get_running_loop().create_future()
        place = _Place(since, next(self._number), tokens, wait_s <= 0, admitted)
        heapq.heappush(self._line, place)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(longest_s):
                    return await asyncio.shield(admitted)
            return admitted.result() if admitted.done() else None
        except asyncio.CancelledError:
            if admitted.done() and (admission := admitted.result()) is not None:
                self.release(admission, 0)
            raise
        finally:
            if place in self._line:
                self._line.remove(place)
                heapq.heapify(self._line)

    def release(self, admission: Admission, tokens: int | None) -> None:
        """End an admitted call.

        Args:
            tokens: those that it really took; ``None``: unknown, the estimate counts.
        """
        reserved = admission.tokens
        spent = reserved if tokens is None else tokens
        if reserved > 0:
            self._busy[_TOKENS] -= reserved
            self._gone[_TOKENS] += min(spent, reserved)
            self._used[1] += spent
        self._busy[_CALLS] -= admission.calls
        self._used_at = monotonic()
        if not self._others_wait:
            self._serve()

    def report(self, *, is_last: bool = False) -> dict[str, Any]:
        """Return what the database is to hear; idle parts go back.

        A share that waits returns all it has: otherwise two could wait for each other.
        """
        now = monotonic()
        # It returns what no call used for so long.
        is_idle = now - self._used_at >= 0.5
        if is_last or is_idle or self._line or self._others_wait:
            for each, idle in enumerate(self._idle()):
                self._gone[each] += idle
        self._sent = tuple(self._used), tuple(self._line)
        first = self._line[0] if self._line else None
        return {
            "limits": self.limits,
            "gone": self._gone,
            "busy": self._busy,
            "used": self._used,
            "told": self._told,
            "waiting": len(self._line),
            "tokens": 1 if first is None else max(1, first.tokens),
            "waited_s": 0.0 if first is None else max(0.0, now - first.since),
        }

    def settle(self, answer: Mapping[str, Any]) -> None:
        """Take the database's answer to the last report, and admit calls."""
        used, asked = self._sent
        self._told = list(used)
        self._granted = list(answer["granted"])
        self._others_wait = answer["others"]
        self.again_s = answer["again_s"]
        self._serve()
        for place in asked:
            if place.is_brief and not place.admitted.done():
                place.admitted.set_result(None)

    def _idle(self) -> tuple[int, int, int]:
        calls, requests, tokens = (
            max(0, granted - gone - busy)
            for granted, gone, busy in zip(self._granted, self._gone, self._busy, strict=True)
        )
        return calls, requests, tokens

    def _serve(self) -> None:
        while self._line:
            first = self._line[0]
            if first.admitted.done():
                heapq.heappop(self._line)
            elif (admission := self._take(first.tokens)) is None:
                return
            else:
                heapq.heappop(self._line)
                first.admitted.set_result(admission)

    def _take(self, tokens: int) -> Admission | None:
        limit = self.limits.tokens
        tokens = 0 if limit is None else max(1, min(tokens, limit))
        calls = 0 if self.limits.calls is None else 1
        needs = (1, 1, tokens)
        for limit, idle, needed in zip(self.limits, self._idle(), needs, strict=True):
            if limit is not None and idle < needed:
                return None
        self._busy[_CALLS] += calls
        if self.limits.requests is not None:
            self._gone[_REQUESTS] += 1
            self._used[0] += 1
        self._busy[_TOKENS] += tokens
        self._used_at = monotonic()
        return Admission(calls, tokens)


_LOOK_S = 0.4
"""Seconds between two reports of shares that hold or wait for something."""
_MOST = 500
"""Shares in one report."""
_SHARE = "SELECT share_limits($1, $2)::text"

log = structlog.get_logger(__name__)


class Shares:
    """Asks the database for what calls need, in one statement for all; returns what is idle.

    Args:
        worker_id: the shares belong to its lease.
    """

    def __init__(self, pool: asyncpg.Pool, worker_id: UUID) -> None:
        self._pool = pool
        self._worker_id = worker_id
        self._shares: dict[ServerKey, Share] = {}
        self._any = asyncio.Event()
        self._urgent = asyncio.Event()

    async def enter(
        self, key: ServerKey, limits: ServerLimits, tokens: int, since: float, wait_s: float
    ) -> Admission | None:
        """Admit a call; ``None``: its server is over its limit, and the wait is over.

        Args:
            tokens: those that it may take, estimated.
            since: when it began to wait, by the monotonic clock.
            wait_s: longest wait; 0: as long as the database needs to answer.
        """
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = Share(limits)
        share.limits = limits
        self._any.set()
        if (admission := share.admit(tokens)) is not None:
            return admission
        self._urgent.set()
        return await share.wait(tokens, since, wait_s)

    def admit(self, key: ServerKey) -> Admission | None:
        """Admit a call without tokens if this worker holds what it needs; ask nobody."""
        share = self._shares.get(key)
        return None if share is None else share.admit(0)

    def leave(self, key: ServerKey, admission: Admission, tokens: int | None) -> None:
        """End a call; see :meth:`Share.release`."""
        share = self._shares.get(key)
        if share is not None:  # otherwise only requests are limited, and this one is told
            share.release(admission, tokens)
            if share.is_wanted:
                self._urgent.set()

    def wake(self) -> None:
        """Ask the database at once: it granted something, or a notice may be lost."""
        if self._shares:
            self._urgent.set()

    async def run(self) -> None:
        """Keep the shares in step until cancelled; return them then."""
        looked_at = monotonic()
        try:
            while True:
                await self._any.wait()
                await happens(self._urgent, self._pause_s())
                self._urgent.clear()
                # Between two looks at all only those that somebody waits for.
                is_look = monotonic() - looked_at >= _LOOK_S
                looked_at = monotonic() if is_look else looked_at
                await self._exchange(only_wanted=not is_look)
                if not self._shares:
                    self._any.clear()
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await asyncio.shield(self._exchange(is_last=True))
            raise

    def _pause_s(self) -> float:
        soon = [each.again_s for each in self._shares.values() if each.waiting and each.again_s]
        return max(0.02, min((_LOOK_S, *soon)))

    async def _exchange(self, *, only_wanted: bool = False, is_last: bool = False) -> None:
        for key, share in list(self._shares.items()):
            if share.is_idle:
                del self._shares[key]
        shares = [
            (key, share)
            for key, share in self._shares.items()
            if share.waiting or share.is_wanted or not only_wanted
        ]
        for at in range(0, len(shares), _MOST):
            page = shares[at : at + _MOST]
            news = [_about(key) | share.report(is_last=is_last) for key, share in page]
            sent = to_json(news).decode()
            async with asyncio.timeout(5.0):
                answers = await self._pool.fetchval(_SHARE, self._worker_id, sent)
            for (_, share), answer in zip(page, from_json(answers), strict=True):
                share.settle(answer)


def _about(key: ServerKey) -> dict[str, Any]:
    return {
        "tenant": key.tenant_id,
        "is_operators": key.is_operators,
        "provider": key.provider,
    }


SUBAGENTS = "*subagents"
"""Stands for a provider's name, which never begins so."""
_PLACE = Admission(calls=1, tokens=0)


class TaskPlaces:
    """Places of tasks in this worker's share of each tenant's limit.

    Args:
        most: tasks of one tenant that hold a slot, over all workers.
    """

    def __init__(self, shares: Shares, most: int) -> None:
        self._shares = shares
        self._limits = ServerLimits(most, None, None)

    def take(self, tenant: UUID) -> bool:
        """Take a place that this worker already holds; return false if there is none."""
        return self._shares.admit(_key(tenant)) is not None

    async def wait(self, tenant: UUID) -> None:
        """Return with a place; a cancelled wait has none."""
        since = monotonic()
        while not await self._shares.enter(_key(tenant), self._limits, 0, since, wait_s=60.0):
            pass

    def give_back(self, tenant: UUID) -> None:
        self._shares.leave(_key(tenant), _PLACE, 0)


def _key(tenant: UUID) -> ServerKey:
    return ServerKey(tenant, False, SUBAGENTS)
