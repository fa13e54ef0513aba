"""Daily budgets of tenants in tokens and money, for all model calls of a process.

A process reserves slices of a budget in the database, so that few model calls need a query. A slice
counts as used until the process gives back the slice. If a process dies and no longer renews its
slice, the slice counts as spent. While the database is away, a process keeps its unreported usage
and reports the usage later. Model calls that need a new slice wait.

Calls to a tenant's own model servers count only towards the run's budgets, because the operator
does not pay for these calls.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID, uuid4

import asyncpg
from pydantic_core import to_json

from bottega.agents.messages import Usage
from bottega.agents.provider import Permit
from bottega.clock import monotonic
from bottega.db.failures import persist
from bottega.errors import BudgetBusyError
from bottega.logger import Logger
from bottega.services import Services
from bottega.subagents.budget import DOLLARS, TOKENS, Account, Reservation, Unit, billionths
from bottega.tenants.limits import Payer

if TYPE_CHECKING:
    from bottega.engine.claim import ClaimedRun

logger = Logger(__name__)

LAPSES_S = 60.0
_IDLE_S = 5.0
_LOOK_S = 2.0
_ASK_AGAIN_S = 1.0
_LAST_S = 5.0
"""Timeout in seconds for the last reports of a process that ends."""
_SHARE = 100  # a slice is 1 / _SHARE of the day's limit; more if a call needs more
_WAIT_S = 20.0
"""Longest wait of a call for the daily budget, in seconds. A judge's timeout must be longer."""
_EMBEDDING_WAIT_S = 1.0  # short, because vectors can be computed later

EMBEDDING = "memory:embedding"
"""Name that the usage shows for an embedder's calls, in place of an agent's name."""

_COUNT = "SELECT count_call($1, $2, $3)"
_DRAW = "SELECT held, others FROM draw_budget($1, $2, $3, $4, $5, $6, $7, $8)"

Draw = Callable[[int, int, int], Awaitable[tuple[int, int]]]
"""Function from (spent, already reported, wanted slice) to (slice, other workers' slices)."""


class _Day(NamedTuple):
    """Daily limit of a tenant or of an API key's runs, in tokens or money.

    Attributes:
        key_id: id of the API key; ``None``: the limit applies to the tenant.
    """

    tenant_id: UUID
    unit: Unit
    limit: int
    key_id: str | None = None


class DayAccount(Account):
    """A worker's account for a daily budget. The limit is what the worker has reserved."""

    def __init__(
        self, draw: Draw, slice_: int, unit: Unit = TOKENS, whose: str = "the tenant's"
    ) -> None:
        name = f"{whose} limit of {unit.name} for today (UTC)"
        super().__init__(name, limit=0, unit=unit, is_operators=True)
        self.runs = 0
        self._draw = draw
        self._slice = slice_
        self._reported = 0
        self._by_others = 0
        self._is_dry = False
        self._used_at = self._synced_at = monotonic()
        self._lock = asyncio.Lock()

    @property
    def held(self) -> int:
        """Amount that this worker has reserved and not yet spent."""
        return max(0, (self.limit or 0) - self.spent)

    @property
    def is_reported(self) -> bool:
        return self.spent == self._reported

    @property
    def is_idle(self) -> bool:
        """True if no run uses the account, it has no slice, and all its spending is reported."""
        return not (self.runs or self.held or self.reserved) and self.is_reported

    @property
    def is_exhausted(self) -> bool:
        return self._is_dry and super().is_exhausted

    @property
    def may_grow(self) -> bool:
        """True if other workers have slices of the budget, which these workers may give back."""
        return self._by_others > 0

    def used_up(self, more: int) -> str:
        return (
            f"{self.name} is used up: the next model call takes about {self.unit.text(more)} "
            f"{self.unit.name}; wait for tomorrow's budget"
        )

    async def fill(self, amount: int) -> None:
        """Reserve a larger slice if less than ``amount`` is left. Retry until that succeeds."""
        self._used_at = monotonic()
        while (self.left or 0) < amount:
            async with self._lock:
                missing = (self.left or 0) < amount
                amount_wanted = self.reserved + max(amount, self._slice)
                if not missing or await self._is_synced(amount_wanted):
                    return
            await asyncio.sleep(_ASK_AGAIN_S)

    async def changed(self) -> None:
        """Wait until a call releases its reservation or another worker may have given back a slice.

        A worker without calls under way first gives back its slice. So two workers whose slices are
        too small for their next calls do not wait for each other.
        """
        wait_s = None
        if self.may_grow:
            async with self._lock:
                is_read = self.reserved > 0 or await self._is_synced(0)
            wait_s = _ASK_AGAIN_S if self._by_others or not is_read else 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await super().changed()

    async def report(self) -> None:
        """Report the spending to the database. If no run uses the account, give back the slice."""
        async with self._lock:
            amount = self.held if self.runs else 0
            if self.spent != self._reported or self.held != amount:
                await self._sync(amount)

    async def tend(self) -> None:
        """Give back an idle slice, renew an expiring slice, and report what ended runs spent."""
        async with self._lock:
            now = monotonic()
            is_left = not (self.runs or self.reserved)
            if is_left and not self.is_reported:
                await self._sync(self.held)
            elif self.held and not self.reserved and now - self._used_at >= _IDLE_S:
                await self._sync(0)
            elif self.held and now - self._synced_at >= LAPSES_S / 3:
                await self._sync(self.held)

    async def _is_synced(self, amount: int) -> bool:
        try:
            await self._sync(amount)
        except asyncpg.ForeignKeyViolationError:  # the tenant is deleted
            raise
        except Exception as error:
            logger.warning("budget.unreadable", error=str(error) or type(error).__name__)
            return False
        return True

    async def _sync(self, amount: int) -> None:
        spent = self.spent
        held, self._by_others = await self._draw(spent, self._reported, amount)
        self._reported, self.limit = spent, spent + held
        self._is_dry = held < amount and not self._by_others
        self._synced_at = monotonic()


class RunAccounts:
    """The budgets that pay for a run's model calls.

    Attributes:
        day: the accounts of daily budgets; empty after the end of the run.
        all: the accounts of daily budgets and of the run's own budgets.
    """

    def __init__(self, run: "ClaimedRun", day: Sequence[DayAccount]) -> None:
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
        """Charge a model call of this attempt to the run's budgets and to the daily budgets."""
        self.paid_before(usage)
        for account in self.day:
            account.spend(usage)

    def paid_before(self, usage: Usage) -> None:
        """Charge only the run's budgets, because the daily budgets already include the usage."""
        for account in self._own:
            account.spend(usage)


@dataclass(frozen=True, slots=True)
class _Call:
    """Key under which the usage of calls that no agent makes is added up.

    Attributes:
        run_id: the run whose usage includes the calls; ``None``: no run's usage includes the calls.
        name: name that the usage shows in place of an agent's name.
    """

    tenant_id: UUID
    run_id: UUID | None
    name: str
    model: str
    is_own: bool


@dataclass(slots=True)
class TenantCharge:
    """A tenant's reserved model call; see :class:`bottega.llm.usage.Charge`."""

    permit: Permit
    accounts: Sequence[DayAccount]
    paid: dict[tuple[str, bool], Usage] = field(default_factory=dict)

    def pay(self, model: str, usage: Usage) -> None:
        for account in self.accounts:
            account.spend(usage)
        before = self.paid.get((model, usage.is_own))
        self.paid[model, usage.is_own] = usage if before is None else before + usage


@dataclass(frozen=True, slots=True)
class TenantAccount:
    """A tenant's account for model calls that no agent of a run makes.

    Attributes:
        run_id, name: see :class:`_Call`.
        wait_s: maximum number of seconds for which a call waits for the tenant's daily budget.
    """

    budgets: "DayBudgets"
    tenant_id: UUID
    run_id: UUID | None
    name: str
    wait_s: float

    @asynccontextmanager
    async def call(
        self, input_tokens: int, provider: object | None, longest: int | None
    ) -> AsyncIterator[TenantCharge]:
        """Reserve a call; see :class:`bottega.llm.usage.ModelAccount`."""
        accounts = self.budgets.open(self.tenant_id)
        paid: dict[tuple[str, bool], Usage] = {}
        try:
            async with AsyncExitStack() as reservation:
                try:
                    async with asyncio.timeout(self.wait_s):
                        call = Reservation(accounts, input_tokens, provider, longest)
                        permit = await reservation.enter_async_context(call)
                except TimeoutError:
                    raise BudgetBusyError(
                        f"for {self.wait_s:g} s, the tenant's daily budget had too little left: "
                        "other calls reserved the rest, or the database is away. Try again later"
                    ) from None
                yield TenantCharge(permit, accounts, paid)
        finally:
            self.budgets.release(accounts)
            for (model, is_own), usage in paid.items():
                made = _Call(self.tenant_id, self.run_id, self.name, model, is_own)
                self.budgets.count(made, usage)
            if paid and self.run_id is not None:
                await self.budgets.show()


class DayBudgets:
    """The daily accounts of all tenants for which this process makes model calls.

    Args:
        limits: ``tokens_per_day`` and ``cost_per_day`` of every tenant; ``None``: no limit.
    """

    def __init__(self, pool: asyncpg.Pool, limits: Mapping[str, int | None]) -> None:
        self._pool = pool
        self._limits = {
            unit: limit
            for unit in (TOKENS, DOLLARS)
            if (limit := limits.get(f"{unit.key}_per_day")) is not None
        }
        self._accounts: dict[_Day, DayAccount] = {}
        self._to_show: dict[_Call, Usage] = {}

    def open(self, tenant_id: UUID, payer: Payer | None = None) -> Sequence[DayAccount]:
        """Return the accounts that pay for a run. The caller must close or release the accounts.

        Args:
            payer: the API key that started the run, if the key has a daily limit.
        """
        days = [_Day(tenant_id, unit, limit) for unit, limit in self._limits.items()]
        if payer is not None:
            days.append(_Day(tenant_id, TOKENS, payer.tokens_per_day, payer.key))
        opened = [self._account(day) for day in days]
        for account in opened:
            account.runs += 1
        return opened

    def _account(self, day: _Day) -> DayAccount:
        account = self._accounts.get(day)
        if account is None:
            whose = "the tenant's" if day.key_id is None else "the key's"
            account = DayAccount(self._drawing(day), day.limit // _SHARE, day.unit, whose)
            self._accounts[day] = account
        return account

    def release(self, accounts: Iterable[DayAccount]) -> None:
        """Release accounts that :meth:`open` returned. :meth:`run` reports their spending."""
        for account in accounts:
            account.runs -= 1

    async def close(self, accounts: Sequence[DayAccount]) -> None:
        """Release the accounts of an ended or lost run, and report their spending."""
        self.release(accounts)
        for account in accounts:
            try:
                await account.report()
            except Exception:  # run() reports the spending later
                logger.exception("budget.not_reported")

    def of(self, tenant_id: UUID) -> TenantAccount:
        """Return a tenant's account for the calls of an embedder."""
        return TenantAccount(self, tenant_id, None, EMBEDDING, _EMBEDDING_WAIT_S)

    def account_for(self, tenant_id: UUID, run_id: UUID | None, name: str) -> TenantAccount:
        """Return the account for calls that no agent of a run makes.

        Args:
            run_id: the run whose usage includes the calls, even after its end; ``None``: no run.
            name: name that the usage shows in place of an agent's name.
        """
        return TenantAccount(self, tenant_id, run_id, name, _WAIT_S)

    def count(self, call: _Call, usage: Usage) -> None:
        """Add a call's usage to the usage that :meth:`show` stores."""
        if call.run_id is None and (call.is_own or len(self._limits) == len((TOKENS, DOLLARS))):
            return  # do not count the call: daily accounts count it, or the tenant pays for it
        before = self._to_show.get(call)
        self._to_show[call] = usage if before is None else before + usage

    async def show(self) -> None:
        """Store usage that :meth:`count` added. After a failure, the next call stores the rest."""
        for call in list(self._to_show):
            usage = self._to_show.pop(call, None)
            if usage is None:
                continue  # another task stores the usage
            entry = {"agent": call.name, "model": call.model, **usage.to_dict()}
            spent = to_json([entry | ({"own": True} if call.is_own else {})]).decode()
            try:
                await self._pool.execute(_COUNT, call.tenant_id, call.run_id, spent)
            except asyncpg.ForeignKeyViolationError:
                pass  # the tenant is deleted
            except BaseException as error:
                self.count(call, usage)
                if not isinstance(error, Exception):
                    raise
                logger.warning("usage.not_stored", error=str(error) or type(error).__name__)

    async def run(self) -> None:
        """Give back or renew slices, report spending, and drop idle accounts, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.show()
            for key, account in list(self._accounts.items()):
                is_gone = False
                try:
                    await account.tend()
                except asyncpg.ForeignKeyViolationError:  # the tenant is deleted
                    is_gone = not account.runs
                except Exception as error:
                    logger.warning("budget.not_renewed", error=str(error))
                if is_gone or account.is_idle:
                    del self._accounts[key]

    @asynccontextmanager
    async def kept(self, services: Services) -> AsyncIterator["DayBudgets"]:
        """Call :meth:`run` during the block. After the block, report all unreported spending."""
        try:
            async with services.running(budgets=self.run):
                yield self
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_S):
                    await self.show()
                    for account in list(self._accounts.values()):
                        account.runs = 0
                        with contextlib.suppress(Exception):
                            await account.report()

    def _drawing(self, day: _Day) -> Draw:
        # No id is used for two accounts, because the sums of each account begin at 0.
        account_id = uuid4()
        unit = day.unit.key if day.key_id is None else f"{day.unit.key}:{day.key_id}"
        limit = None if day.key_id is None else day.limit

        async def draw(spent: int, reported: int, amount: int) -> tuple[int, int]:
            about = (day.tenant_id, account_id, unit, spent, reported, amount, LAPSES_S, limit)
            row = await persist(lambda: self._pool.fetchrow(_DRAW, *about))
            assert row is not None
            return row["held"], row["others"]

        return draw
