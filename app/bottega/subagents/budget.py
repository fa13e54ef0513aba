"""Budgets of tokens and money for several concurrent tasks.

Each account that pays for a model call first reserves the maximum amount of the call. After the
call, the account releases the reservation and records the used amount. So the tasks exceed a
budget only if a call uses more than its estimate.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from bottega.agents.messages import Usage, decimal_text, tokens_sent
from bottega.agents.provider import LLMProvider, ModelPrices, Permit, prices_of
from bottega.agents.query import Query
from bottega.errors import BudgetExhaustedError, ModelError

MAX_OUTPUT = 4096
"""Tokens of the longest expected answer, for calls without a limit."""
_BILLION = Decimal(10**9)


class _Tokens:
    name = "tokens"
    key: Final = "tokens"

    def amount(self, usage: Usage) -> int:
        return usage.total_tokens

    def price(self, sent: int, prices: ModelPrices | None) -> tuple[int, int]:
        """Return two amounts to reserve: for ``sent`` input tokens, and for one output token."""
        return sent, 1

    def text(self, amount: int) -> str:
        """Return an amount as a text for people, without the unit."""
        return str(amount)


class _Dollars:
    """Unit of money: billionths of US dollars. A call of a model without a known price costs 0."""

    name = "US dollars"
    key: Final = "cost"

    def amount(self, usage: Usage) -> int:
        return 0 if usage.cost is None else billionths(usage.cost)

    def price(self, input_tokens: int, prices: ModelPrices | None) -> tuple[int, int]:
        if prices is None:
            return 0, 0
        base = prices.cost(Usage(input=input_tokens, written=input_tokens))
        longest = prices.cost(Usage(input=input_tokens, written=input_tokens, output=MAX_OUTPUT))
        return billionths(base), billionths((longest - base) / MAX_OUTPUT)

    def text(self, amount: int) -> str:
        return decimal_text(amount / _BILLION)


TOKENS, DOLLARS = _Tokens(), _Dollars()
Unit = _Tokens | _Dollars


def billionths(dollars: Decimal) -> int:
    """Convert an amount in US dollars to billionths of a dollar, rounded up."""
    return math.ceil(dollars * _BILLION)


@dataclass(slots=True, eq=False)
class Account:
    """A budget of tokens or money; ``limit`` None: no limit.

    Attributes:
        name: name of the budget in error texts.
        reserved: amount that running model calls have reserved.
        is_operators: true if the operator pays; then calls to a tenant's own model servers are
            free.
        needs_price: true if the account refuses calls of models without a known price; false if
            such calls cost the account nothing.
    """

    name: str
    limit: int | None = None
    spent: int = 0
    reserved: int = 0
    unit: Unit = TOKENS
    is_operators: bool = False
    needs_price: bool = False
    _returned: asyncio.Future[None] | None = None

    @property
    def left(self) -> int | None:
        """Amount that is neither spent nor reserved; ``None``: the account has no limit."""
        return None if self.limit is None else self.limit - self.spent - self.reserved

    @property
    def is_exhausted(self) -> bool:
        return self.limit is not None and self.spent >= self.limit

    def spend(self, usage: Usage) -> None:
        if not (self.is_operators and usage.is_own):
            self.spent += self.unit.amount(usage)

    @property
    def state(self) -> str:
        spent, limit = self.unit.text(self.spent), self.unit.text(self.limit or 0)
        return f"{self.name} is used up: {spent} of {limit} {self.unit.name} are spent"

    def used_up(self, more: int) -> str:
        """Return the error text for a refused call; ``more``: estimated amount for its input."""
        return f"{self.state}, and the next model call takes about {self.unit.text(more)}"

    def give_back(self, amount: int) -> None:
        """Release a reservation and wake the waiting calls."""
        self.reserved -= amount
        if self._returned is not None:
            self._returned.set_result(None)
            self._returned = None

    async def changed(self) -> None:
        """Wait until a call releases its reservation in this account."""
        if self._returned is None:
            self._returned = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._returned)

    async def fill(self, amount: int) -> None:
        """Claim a further part of a shared budget if less than ``amount`` remains.

        The method does nothing for an account that belongs to this process alone.
        """

    @property
    def may_grow(self) -> bool:
        """True if other workers may give back amounts of a shared budget."""
        return False


def estimate(query: Query) -> int:
    """Estimate the input tokens of a query's next model call."""
    if query.composed is not None:
        return query.composed["tokens"]
    agent = query.agent
    return tokens_sent(agent.conversation_history, len(agent.registered_tools))


def grant(
    accounts: Sequence[Account],
    input_tokens: int,
    prices: ModelPrices | None = None,
    longest: int = MAX_OUTPUT,
) -> int | Account:
    """Return the maximum output tokens of a call, or the account whose remainder is too small.

    Args:
        longest: maximum output tokens if the accounts have enough.

    Raises:
        BudgetExhaustedError: an account's remainder would be too small even without reservations.
    """
    tightest: Account | None = None
    free, least = longest, min(longest, 16)  # an answer of fewer than 16 tokens would be useless
    for account in accounts:
        if account.limit is None:
            continue
        base, per_token = account.unit.price(input_tokens, prices)
        amount_left = account.limit - account.spent - base
        if amount_left < least * per_token and not account.may_grow:
            raise BudgetExhaustedError(account.used_up(base))
        amount_left -= account.reserved
        room = amount_left // per_token if per_token else longest
        if room < free:
            free, tightest = room, account
    if tightest is not None and free < least:
        return tightest
    return free


class Reservation:
    """Reserves a model call's tokens and cost; waits while other calls have reserved too much.

    The permit has a limit of output tokens if the accounts cannot pay for ``longest`` tokens.

    Args:
        sent: number of input tokens.
        provider: client of the model, which knows the prices and the server's owner.
        longest: maximum number of the call's output tokens; ``None``: :data:`MAX_OUTPUT`.

    Raises:
        BudgetExhaustedError: see :func:`grant`.
        ModelError: a money budget needs the model's price, which is unknown (``unpriced_model``).
    """

    __slots__ = ("_accounts", "_amounts", "_input_tokens", "_longest", "_permit", "_provider")

    def __init__(
        self,
        accounts: Sequence[Account],
        input_tokens: int,
        provider: object | None = None,
        longest: int | None = None,
    ) -> None:
        is_own = getattr(provider, "is_own", False)
        self._accounts = [
            account
            for account in accounts
            if account.limit is not None and not (account.is_operators and is_own)
        ]
        self._input_tokens = input_tokens
        self._provider = provider
        self._longest = MAX_OUTPUT if longest is None else longest
        self._permit = Permit()
        self._amounts: list[int] = []

    async def __aenter__(self) -> Permit:
        accounts, input_tokens, longest = self._accounts, self._input_tokens, self._longest
        prices = await _prices(accounts, self._provider)
        while True:
            for account in accounts:
                base, per_token = account.unit.price(input_tokens, prices)
                await account.fill(base + longest * per_token)
            most = grant(accounts, input_tokens, prices, longest)
            if not isinstance(most, Account):
                break
            await most.changed()
        for account in accounts:
            base, per_token = account.unit.price(input_tokens, prices)
            self._amounts.append(base + most * per_token)
            account.reserved += self._amounts[-1]
        if most < longest:
            self._permit.most = most
        return self._permit

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self._permit.is_open = False
        for account, amount in zip(self._accounts, self._amounts, strict=True):
            account.give_back(amount)


async def _prices(limited: Sequence[Account], provider: object | None) -> ModelPrices | None:
    if all(account.unit is not DOLLARS for account in limited):
        return None
    prices = await prices_of(provider)
    unpriced = None if prices else next((one for one in limited if one.needs_price), None)
    if unpriced is not None:
        raise ModelError(
            f"{unpriced.name} cannot be enforced: the model has no known price. Set the model's "
            "price in its provider, or remove the budget",
            code="unpriced_model",
        )
    return prices


def size_of_call(query: Query) -> tuple[int, LLMProvider | None, int | None]:
    """Return ``sent``, ``provider`` and ``longest`` of a query's next model call."""
    agent = query.agent
    longest = None if agent.params is None else agent.params.max_output_tokens
    return estimate(query), agent.provider, longest
