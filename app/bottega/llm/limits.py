"""This worker's shares of the limits of model servers.

A limit applies to all workers together. The database distributes calls, requests and tokens to
workers as shares. A worker admits calls from its share without a database query, and soon gives
back the unused part of the share. Requests and tokens count towards a limit for one minute.
"""

import asyncio
import contextlib
import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
from pydantic_core import to_json

from bottega.clock import monotonic
from bottega.events.listener import happens

_NAMES = ("max_concurrent", "requests_per_minute", "tokens_per_minute")
_IDLE_S = 0.5
"""Seconds after which a worker returns the unused part of its share."""
_PAUSE_S = 0.25
"""Seconds between two regular claims. Claims for waiting calls come earlier."""
_LINGER_S = 0.002
"""Seconds that a claim waits, so that calls that arrive together share one SQL statement."""
_MOST = 500
"""Maximum number of shares in one SQL statement."""
_CLAIM = "SELECT * FROM claim_shares($1, $2)"


class ServerKey(NamedTuple):
    """A model server, for the calls of a tenant.

    Attributes:
        is_operators: true if the operator owns the server. Then all tenants share its limits.
    """

    tenant_id: UUID
    is_operators: bool
    provider: str


class ServerLimits(NamedTuple):
    """Limits of a server; ``None``: no limit. Requests and tokens are counted per minute."""

    calls: int | None
    requests: int | None
    tokens: int | None

    @classmethod
    def of(cls, provider: Mapping[str, Any]) -> "ServerLimits | None":
        """Return the limits in a provider's definition; ``None``: the definition has no limits."""
        limits = cls(*(provider.get(name) for name in _NAMES))
        return None if limits == (None, None, None) else limits

    @property
    def text(self) -> str:
        """The limits as a text for people, such as ``max_concurrent 4``."""
        pairs = zip(_NAMES, self, strict=True)
        return ", ".join(f"{name} {limit}" for name, limit in pairs if limit is not None)


class LimitPermit(NamedTuple):
    """Amounts that an admitted call uses until its end; 0: the server had no limit of this kind."""

    calls: int
    tokens: int


@dataclass(order=True, slots=True)
class _WaitingCall:
    """A call that waits for admission. The share first admits the call that has waited longest.

    Attributes:
        is_brief: true if the call waits only until the database answers the next claim.
    """

    since: float
    number: int
    tokens: int = field(compare=False)
    is_brief: bool = field(compare=False)
    permit: "asyncio.Future[LimitPermit | None]" = field(compare=False)


class _LastMinute:
    """Sum of the amounts that were used in the last minute."""

    def __init__(self) -> None:
        self._sum = 0
        self._amounts: deque[tuple[float, int]] = deque()

    def add(self, amount: int) -> None:
        if amount:
            self._sum += amount
            self._amounts.append((monotonic(), amount))

    def total(self) -> int:
        due = monotonic() - 60
        while self._amounts and self._amounts[0][0] <= due:
            self._sum -= self._amounts.popleft()[1]
        return self._sum


class Share:
    """The part of a server's limits that this worker may use for the calls of one tenant."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self._may_hold: Sequence[int] = (0, 0, 0)
        self._calls_kept: int | None = None
        self._calls = self._reserved = 0
        self._requests, self._tokens = _LastMinute(), _LastMinute()
        self._line: list[_WaitingCall] = []
        self._number = count()
        self._claimed_by: Sequence[_WaitingCall] = ()
        self._stored = (0, 0, 0)
        self._used_at = monotonic()

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def in_use(self) -> tuple[int, int, int]:
        """Numbers of running calls, the last minute's requests, and used or reserved tokens."""
        return self._calls, self._requests.total(), self._reserved + self._tokens.total()

    @property
    def is_over(self) -> bool:
        """True if no call waits, the worker uses no amount, and the database stores no amount."""
        return not (self._line or any(self.in_use) or any(self._stored))

    @property
    def is_urgent(self) -> bool:
        """True if calls of any worker wait for amounts of the share."""
        return bool(self._line) or (self._calls_kept is not None and self.is_changed)

    @property
    def is_changed(self) -> bool:
        """True if the worker must send a claim, because calls wait or the share has changed."""
        return bool(self._line) or self._held() != self._stored

    def admit(self, tokens: int) -> LimitPermit | None:
        """Admit a call at once if the share is large enough and no call waits."""
        return None if self._line else self._take(tokens)

    async def wait(self, tokens: int, since: float, wait_s: float) -> LimitPermit | None:
        """Wait in the queue for admission; ``None``: the share did not admit the call in time.

        Args:
            since: time when the call began to wait, by the monotonic clock.
            wait_s: maximum wait in seconds; 0: the call waits only for the database's answer.
        """
        permit: asyncio.Future[LimitPermit | None] = asyncio.get_running_loop().create_future()
        call = _WaitingCall(since, next(self._number), tokens, wait_s <= 0, permit)
        heapq.heappush(self._line, call)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s if wait_s > 0 else 5.0):
                    return await asyncio.shield(permit)
            return permit.result() if permit.done() else None
        except asyncio.CancelledError:
            if permit.done() and (admitted := permit.result()) is not None:
                self.release(admitted, 0)
            raise
        finally:
            if call in self._line:
                self._line.remove(call)
                heapq.heapify(self._line)

    def release(self, permit: LimitPermit, tokens: int | None) -> None:
        """End an admitted call.

        Args:
            tokens: tokens that the call used; ``None``: unknown, so the estimate counts.
        """
        self._calls -= permit.calls
        if permit.tokens:
            self._reserved -= permit.tokens
            self._tokens.add(permit.tokens if tokens is None else tokens)
        self._used_at = monotonic()
        if self._calls_kept is not None:  # other workers wait: keep at most ``calls_kept``
            calls, *rates = self._may_hold
            self._may_hold = max(self._calls, min(calls, self._calls_kept)), *rates
        self._serve()

    def claim(self, *, is_last: bool = False) -> dict[str, Any]:
        """Return the held and the needed amounts, as an argument for ``claim_shares``."""
        self._stored = self.in_use if is_last else self._held()
        self._claimed_by = tuple(self._line)
        tokens = self._line[0].tokens if self._line else 1
        return {
            "limits": self.limits,
            "held": self._stored,
            "needs": (1, 1, self._needed_tokens(tokens) or 1),
            "waiting": len(self._line),
        }

    def apply_answer(self, may_hold: Sequence[int], calls_kept: int | None) -> None:
        """Store the database's answer to the last claim, and admit calls."""
        self._may_hold, self._calls_kept = may_hold, calls_kept
        self._stored = (may_hold[0], may_hold[1], may_hold[2])
        self._serve()
        for call in self._claimed_by:
            if call.is_brief and not call.permit.done():
                call.permit.set_result(None)

    def _held(self) -> tuple[int, int, int]:
        """Return the amounts to keep: those in use and, for ``_IDLE_S`` seconds, the idle amounts.

        While calls wait, a share keeps no idle amounts, because two shares with idle amounts could
        wait for each other.
        """
        is_idle = monotonic() - self._used_at >= _IDLE_S
        if is_idle or self._line or self._calls_kept is not None:
            return self.in_use
        calls, requests, tokens = map(max, self.in_use, self._may_hold)
        return calls, requests, tokens

    def _serve(self) -> None:
        while self._line:
            first = self._line[0]
            if not first.permit.done():
                if (permit := self._take(first.tokens)) is None:
                    return
                first.permit.set_result(permit)
            heapq.heappop(self._line)

    def _needed_tokens(self, tokens: int) -> int:
        limit = self.limits.tokens
        return 0 if limit is None else max(1, min(tokens, limit))

    def _take(self, tokens: int) -> LimitPermit | None:
        tokens = self._needed_tokens(tokens)
        needs = zip(self.limits, self._may_hold, self.in_use, (1, 1, tokens), strict=True)
        for limit, most, used, needed in needs:
            if limit is not None and most - used < needed:
                return None
        calls = 0 if self.limits.calls is None else 1
        self._calls += calls
        self._reserved += tokens
        if self.limits.requests is not None:
            self._requests.add(1)
        self._used_at = monotonic()
        return LimitPermit(calls, tokens)


class Shares:
    """All shares of this worker.

    One SQL statement claims needed amounts and gives back idle amounts.

    Args:
        worker_id: id of the worker that claims the shares.
    """

    def __init__(self, pool: asyncpg.Pool, worker_id: UUID) -> None:
        self._pool = pool
        self._worker_id = worker_id
        self._shares: dict[ServerKey, Share] = {}
        self._any = asyncio.Event()
        self._urgent = asyncio.Event()

    async def enter(
        self, key: ServerKey, limits: ServerLimits, tokens: int, since: float, wait_s: float
    ) -> LimitPermit | None:
        """Admit a call; ``None``: the server's limits had no room during the whole wait.

        Args:
            tokens: estimate of the call's tokens.
            since: time when the call began to wait, by the monotonic clock.
            wait_s: maximum wait in seconds; 0: the call waits only for the database's answer.
        """
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = Share(limits)
        share.limits = limits
        self._any.set()
        if (permit := share.admit(tokens)) is not None:
            return permit
        self._urgent.set()
        return await share.wait(tokens, since, wait_s)

    def admit(self, key: ServerKey) -> LimitPermit | None:
        """Admit a call that uses no tokens, if this worker's share has room. Send no query."""
        share = self._shares.get(key)
        return None if share is None else share.admit(0)

    def leave(self, key: ServerKey, permit: LimitPermit, tokens: int | None) -> None:
        """End a call; see :meth:`Share.release`."""
        share = self._shares.get(key)
        if share is not None:  # ``None``: the share was removed, because it had no used amounts
            share.release(permit, tokens)
            if share.is_urgent:
                self._urgent.set()

    async def run(self) -> None:
        """Claim and give back amounts until cancelled. Then give back all idle amounts."""
        claimed_at = monotonic()
        try:
            while True:
                await self._any.wait()
                await happens(self._urgent, _PAUSE_S)
                await asyncio.sleep(_LINGER_S)
                self._urgent.clear()
                # A claim between two regular claims contains only shares for which calls wait.
                is_regular = monotonic() - claimed_at >= _PAUSE_S
                claimed_at = monotonic() if is_regular else claimed_at
                await self._claim(only_urgent=not is_regular)
                if not self._shares:
                    self._any.clear()
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await asyncio.shield(self._claim(is_last=True))
            raise

    async def _claim(self, *, only_urgent: bool = False, is_last: bool = False) -> None:
        for key, share in list(self._shares.items()):
            if share.is_over:
                del self._shares[key]
        shares = [
            (key, share)
            for key, share in sorted(self._shares.items(), key=_lock_order)
            if is_last or (share.is_urgent if only_urgent else share.is_changed)
        ]
        for at in range(0, len(shares), _MOST):
            page = shares[at : at + _MOST]
            claims = [_columns(key) | share.claim(is_last=is_last) for key, share in page]
            async with asyncio.timeout(5.0):
                answers = await self._pool.fetch(_CLAIM, self._worker_id, to_json(claims).decode())
            for (_, share), answer in zip(page, answers, strict=True):
                share.apply_answer(answer["may_hold"], answer["calls_kept"])


def _lock_order(item: tuple[ServerKey, Share]) -> tuple[str, str]:
    key = item[0]
    return "" if key.is_operators else str(key.tenant_id), key.provider


def _columns(key: ServerKey) -> dict[str, Any]:
    return {
        "tenant": key.tenant_id,
        "is_operators": key.is_operators,
        "provider": key.provider,
    }


SUBAGENTS = "*subagents"
"""Name of the tasks' limit, in place of a provider's name, which never begins with ``*``."""
_PLACE = LimitPermit(calls=1, tokens=0)


class TaskPlaces:
    """Places of asynchronous tasks. A task runs only while it has a place.

    The limit of places applies to all workers together, like the limits of calls.

    Args:
        most: maximum number of a tenant's places.
    """

    def __init__(self, shares: Shares, most: int) -> None:
        self._shares = shares
        self._limits = ServerLimits(most, None, None)

    def take(self, tenant: UUID) -> bool:
        """Take a place without a database query; return false if this worker has no free place."""
        return self._shares.admit(_key(tenant)) is not None

    async def wait(self, tenant: UUID) -> None:
        """Wait for a place and take it. A cancelled wait takes no place."""
        since = monotonic()
        while not await self._shares.enter(_key(tenant), self._limits, 0, since, wait_s=60.0):
            pass

    def give_back(self, tenant: UUID) -> None:
        self._shares.leave(_key(tenant), _PLACE, 0)


def _key(tenant: UUID) -> ServerKey:
    return ServerKey(tenant, False, SUBAGENTS)
