"""Tokens that each tenant may spend in a day, for all model calls of a worker.

Workers take tokens from the database in slices, so that few model calls need a query. A slice
counts as used until it is returned, or until it lapses because its dead worker no longer renews it.
Tokens that such a worker spent and did not report are never counted.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from uuid import UUID, uuid4

import asyncpg
import structlog

from bottega.clock import monotonic
from bottega.events import log
from bottega.subagents.budget import TokenAccount

logger = structlog.get_logger(__name__)

LAPSES_S = 60.0
_RENEWED_S = 20.0
_IDLE_S = 5.0
_LOOK_S = 2.0
_ASK_AGAIN_S = 1.0
_SHARE = 100  # a slice is at most this fraction of the day's tokens, or one call

_DRAW = "SELECT held, others FROM draw_tokens($1, $2, $3, $4, $5, $6)"

Draw = Callable[[int, int, int], Awaitable[tuple[int, int]]]
"""From (tokens spent, part of it reported, slice wanted) to (slice, slices of other workers)."""


class DayAccount(TokenAccount):
    """A worker's share of a tenant's tokens of today; its limit is the sum of its slices."""

    def __init__(self, draw: Draw, slice_: int) -> None:
        super().__init__("the tenant's token limit for today (UTC)", limit=0)
        self.runs = 0
        self._draw = draw
        self._slice = slice_
        self._reported = 0
        self._others = 0
        self._is_dry = False
        self._used_at = self._synced_at = monotonic()
        self._lock = asyncio.Lock()

    @property
    def held(self) -> int:
        """The slice: tokens taken and not spent."""
        return max(0, (self.limit or 0) - self.spent)

    @property
    def is_exhausted(self) -> bool:
        return self._is_dry and super().is_exhausted

    @property
    def may_grow(self) -> bool:
        """True if other workers hold tokens, which they may return."""
        return self._others > 0

    def used_up(self, sent: int) -> str:
        return (
            f"{self.name} is used up: the next model call takes about {sent} tokens; start the run "
            "again tomorrow"
        )

    async def fill(self, tokens: int) -> None:
        self._used_at = monotonic()
        async with self._lock:
            if (self.left or 0) < tokens:
                await self._sync(self.reserved + max(tokens, self._slice))

    async def changed(self) -> None:
        """Wait until tokens were returned here, or may have been elsewhere.

        If no call is under way, the slice is returned meanwhile. Otherwise two workers with too few
        tokens for their next calls would wait for each other.
        """
        wait_s = None
        if self.may_grow:
            async with self._lock:
                if not self.reserved:
                    await self._sync(0)
            wait_s = _ASK_AGAIN_S if self._others else 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await super().changed()

    async def report(self) -> None:
        """Report the tokens spent; return the slice if no run uses it."""
        async with self._lock:
            wanted = self.held if self.runs else 0
            if self.spent != self._reported or self.held != wanted:
                await self._sync(wanted)

    async def tend(self) -> None:
        """Return the slice if it is idle, or renew it in time."""
        async with self._lock:
            now = monotonic()
            if self.held and not self.reserved and now - self._used_at >= _IDLE_S:
                await self._sync(0)
            elif self.held and now - self._synced_at >= _RENEWED_S:
                await self._sync(self.held)

    async def _sync(self, wanted: int) -> None:
        spent = self.spent
        held, self._others = await self._draw(spent, self._reported, wanted)
        self._reported, self.limit = spent, spent + held
        self._is_dry = held < wanted and not self._others
        self._synced_at = monotonic()


class DayBudgets:
    """The accounts of the tenants whose runs this worker executes.

    Args:
        tokens_per_day: of each tenant; ``None``: no limit and no accounts.
    """

    def __init__(self, pool: asyncpg.Pool, tokens_per_day: int | None) -> None:
        self._pool = pool
        self._limit = tokens_per_day
        self._worker_id = uuid4()
        self._accounts: dict[UUID, DayAccount] = {}

    def open(self, tenant_id: UUID) -> DayAccount | None:
        """Return the account that pays for a run; close it when the run is over."""
        if self._limit is None:
            return None
        account = self._accounts.get(tenant_id)
        if account is None:
            draw = self._drawing(tenant_id)
            account = self._accounts[tenant_id] = DayAccount(draw, self._limit // _SHARE)
        account.runs += 1
        return account

    async def close(self, account: DayAccount) -> None:
        """Release an account when its run is over, or lost."""
        account.runs -= 1
        try:
            await account.report()
        except Exception:
            logger.exception("tokens.not_reported")

    async def run(self) -> None:
        """Return idle slices, renew the rest, and drop tenants without runs."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for tenant_id, account in list(self._accounts.items()):
                try:
                    await account.tend()
                except Exception as error:
                    logger.warning("tokens.not_renewed", error=str(error))
                if not (account.runs or account.held):
                    del self._accounts[tenant_id]

    def _drawing(self, tenant_id: UUID) -> Draw:
        async def draw(spent: int, reported: int, wanted: int) -> tuple[int, int]:
            about = (tenant_id, self._worker_id, spent, reported, wanted, LAPSES_S)
            row = await log.persist(lambda: self._pool.fetchrow(_DRAW, *about))
            assert row is not None
            return row["held"], row["others"]

        return draw
