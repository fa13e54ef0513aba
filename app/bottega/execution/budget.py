"""Tokens and money that each tenant may spend in a day, for all model calls of a worker.

Workers take slices of them from the database, so that few model calls need a query. A slice counts
as used until it is returned, or until it lapses because its dead worker no longer renews it. What
such a worker spent and did not report is never counted.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from uuid import UUID, uuid4

import asyncpg
import structlog
from pydantic_core import to_json

from bottega.agents.messages import Usage
from bottega.clock import monotonic
from bottega.events import log
from bottega.execution.claim import ClaimedRun
from bottega.subagents.budget import DOLLARS, TOKENS, Account, Unit, billionths

logger = structlog.get_logger(__name__)

LAPSES_S = 60.0
_RENEWED_S = 20.0
_IDLE_S = 5.0
_LOOK_S = 2.0
_ASK_AGAIN_S = 1.0
_SHARE = 100  # a slice is at most this fraction of the day's limit, or one call

_COUNT_BESIDE = "SELECT count_beside($1, $2, $3)"
_DRAW = "SELECT held, others FROM draw_budget($1, $2, $3, $4, $5, $6, $7)"

Draw = Callable[[int, int, int], Awaitable[tuple[int, int]]]
"""From (spent, part of it reported, slice wanted) to (slice, slices of other workers)."""


class DayAccount(Account):
    """A worker's share of a tenant's budget of today; its limit is the sum of its slices."""

    def __init__(self, draw: Draw, slice_: int, unit: Unit = TOKENS) -> None:
        super().__init__(f"the tenant's limit of {unit.name} for today (UTC)", limit=0, unit=unit)
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
        """The slice: taken and not spent."""
        return max(0, (self.limit or 0) - self.spent)

    @property
    def is_exhausted(self) -> bool:
        return self._is_dry and super().is_exhausted

    @property
    def may_grow(self) -> bool:
        """True if other workers hold slices, which they may return."""
        return self._others > 0

    def used_up(self, more: int) -> str:
        return (
            f"{self.name} is used up: the next model call takes about {self.unit.text(more)} "
            f"{self.unit.name}; start the run again tomorrow"
        )

    async def fill(self, amount: int) -> None:
        self._used_at = monotonic()
        async with self._lock:
            if (self.left or 0) < amount:
                await self._sync(self.reserved + max(amount, self._slice))

    async def changed(self) -> None:
        """Wait until a reservation was released here, or a slice may have been returned elsewhere.

        If no call is under way, the slice is returned meanwhile. Otherwise two workers with too
        little for their next calls would wait for each other.
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
        """Report what was spent; return the slice if no run uses it."""
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


async def count_beside(
    pool: asyncpg.Pool, run: tuple[UUID, UUID], name: str, model: str, usage: Usage
) -> None:
    """Count a model call for a run that none of its agents made.

    Args:
        run: tenant and id; it may be over or deleted.
        name: in place of an agent's.
    """
    spent = to_json([{"agent": name, "model": model, **usage.to_dict()}]).decode()
    await log.persist(lambda: pool.execute(_COUNT_BESIDE, *run, spent))


class RunAccounts:
    """The budgets that pay for a run's model calls.

    Attributes:
        day: the accounts of the tenant's day, until the run is over.
        all: these, and the run's own.
    """

    def __init__(self, run: ClaimedRun, day: Sequence[DayAccount]) -> None:
        self._own = [Account("the run's token_budget", run.token_budget)]
        if run.cost_budget is not None:
            limit = billionths(Decimal(run.cost_budget["amount"]))
            budget = Account("the run's cost_budget", limit, unit=DOLLARS, needs_price=True)
            self._own.append(budget)
        self.day = day
        self.all: tuple[Account, ...] = (*self._own, *day)

    @property
    def are_limited(self) -> bool:
        return any(account.limit is not None for account in self.all)

    def pay(self, usage: Usage) -> None:
        """Count what a model call took now."""
        self.paid_before(usage)
        for account in self.day:
            account.spend(usage)

    def paid_before(self, usage: Usage) -> None:
        """Count what the run paid for in an earlier attempt."""
        for account in self._own:
            account.spend(usage)


class DayBudgets:
    """The accounts of the tenants whose runs this worker executes.

    Args:
        limits: of each tenant, with ``tokens_per_day`` and ``cost_per_day``; ``None``: no limit.
    """

    def __init__(self, pool: asyncpg.Pool, limits: Mapping[str, int | None]) -> None:
        self._pool = pool
        self._limits = {
            unit: limit
            for unit in (TOKENS, DOLLARS)
            if (limit := limits[f"{unit.key}_per_day"]) is not None
        }
        self._worker_id = uuid4()
        self._accounts: dict[tuple[UUID, Unit], DayAccount] = {}

    def open(self, tenant_id: UUID) -> Sequence[DayAccount]:
        """Return the accounts that pay for a run; close them when the run is over."""
        opened = [self._account(tenant_id, unit) for unit in self._limits]
        for account in opened:
            account.runs += 1
        return opened

    def _account(self, tenant_id: UUID, unit: Unit) -> DayAccount:
        account = self._accounts.get((tenant_id, unit))
        if account is None:
            draw = self._drawing(tenant_id, unit)
            account = DayAccount(draw, self._limits[unit] // _SHARE, unit)
            self._accounts[tenant_id, unit] = account
        return account

    async def close(self, accounts: Iterable[DayAccount]) -> None:
        """Release accounts when their run is over, or lost."""
        for account in accounts:
            account.runs -= 1
            try:
                await account.report()
            except Exception:
                logger.exception("budget.not_reported")

    async def run(self) -> None:
        """Return idle slices, renew the rest, and drop tenants without runs."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for key, account in list(self._accounts.items()):
                try:
                    await account.tend()
                except Exception as error:
                    logger.warning("budget.not_renewed", error=str(error))
                if not (account.runs or account.held):
                    del self._accounts[key]

    def _drawing(self, tenant_id: UUID, unit: Unit) -> Draw:
        async def draw(spent: int, reported: int, wanted: int) -> tuple[int, int]:
            about = (tenant_id, self._worker_id, unit.key, spent, reported, wanted, LAPSES_S)
            row = await log.persist(lambda: self._pool.fetchrow(_DRAW, *about))
            assert row is not None
            return row["held"], row["others"]

        return draw
