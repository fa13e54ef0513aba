"""Budgets of tokens and of money that several tasks spend at once.

A model call first reserves what it may take in every account that pays for it, and returns the rest
afterwards. So tasks together overspend at most by the error of one call's estimate.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final

from bottega.agents.messages import AssistantMessage, Usage, decimal_text
from bottega.agents.parts import parts_tokens
from bottega.agents.provider import LLMProvider, ModelPrices, prices_of
from bottega.agents.query import Query
from bottega.errors import BudgetExhaustedError, ModelError

MAX_OUTPUT = 4096
"""Expected maximum of tokens in an answer."""
MIN_OUTPUT = 16
_BILLION = Decimal(10**9)
_CHARACTERS_PER_TOKEN = 3
_PER_MESSAGE = 4
_PER_TOOL = 100


class _Tokens:
    """Tokens, of input and output together."""

    name = "tokens"
    key: Final = "tokens"

    def amount(self, usage: Usage) -> int:
        """Return the amount of a model call."""
        return usage.total_tokens

    def price(self, sent: int, prices: ModelPrices | None) -> tuple[int, int]:
        """Return the amount of a call's input of ``sent`` tokens, and of each token of output."""
        return sent, 1

    def text(self, amount: int) -> str:
        """Return an amount for people, without the unit's name."""
        return str(amount)


class _Dollars:
    """US dollars, in billionths. Calls of models without a known price cost nothing."""

    name = "US dollars"
    key: Final = "cost"

    def amount(self, usage: Usage) -> int:
        return 0 if usage.cost is None else billionths(usage.cost)

    def price(self, sent: int, prices: ModelPrices | None) -> tuple[int, int]:
        if prices is None:
            return 0, 0
        base = prices.cost(Usage(input=sent, written=sent))
        longest = prices.cost(Usage(input=sent, written=sent, output=MAX_OUTPUT))
        return billionths(base), billionths((longest - base) / MAX_OUTPUT)

    def text(self, amount: int) -> str:
        return decimal_text(amount / _BILLION)


TOKENS, DOLLARS = _Tokens(), _Dollars()
Unit = _Tokens | _Dollars


def billionths(dollars: Decimal) -> int:
    """Return an amount in US dollars in billionths, rounded up."""
    return math.ceil(dollars * _BILLION)


@dataclass(slots=True, eq=False)
class Account:
    """A budget; without a ``limit`` it is unlimited.

    Attributes:
        name: used in error texts.
        reserved: by running model calls.
        needs_price: refuse calls of models without a known price, instead of counting them as free.
    """

    name: str
    limit: int | None = None
    spent: int = 0
    reserved: int = 0
    unit: Unit = TOKENS
    needs_price: bool = False
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def left(self) -> int | None:
        """Amount neither spent nor reserved; ``None``: unlimited."""
        return None if self.limit is None else self.limit - self.spent - self.reserved

    @property
    def is_exhausted(self) -> bool:
        """True if the whole limit is spent."""
        return self.limit is not None and self.spent >= self.limit

    def spend(self, usage: Usage) -> None:
        """Count the usage of a model call."""
        self.spent += self.unit.amount(usage)

    @property
    def state(self) -> str:
        """Text that says how much is spent."""
        spent, limit = self.unit.text(self.spent), self.unit.text(self.limit or 0)
        return f"{self.name} is used up: {spent} of {limit} {self.unit.name} are spent"

    def used_up(self, more: int) -> str:
        """Return the error text for a call whose input takes ``more``."""
        return f"{self.state}, and the next model call takes about {self.unit.text(more)}"

    def give_back(self, amount: int) -> None:
        """Release a reservation and wake the waiting calls."""
        self.reserved -= amount
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    async def changed(self) -> None:
        """Wait until a reservation is released."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(future)

    async def fill(self, amount: int) -> None:
        """Get more from a shared budget if less than ``amount`` is left; nothing here."""

    @property
    def may_grow(self) -> bool:
        """True if the limit may grow later, without a release here."""
        return False


def estimate(query: Query) -> int:
    """Estimate the tokens that the next model call of a query sends."""
    if query.composed is not None:
        return query.composed["tokens"]
    history = query.agent.conversation_history
    text = sum(len(message.content) for message in history) + sum(
        len(str(call.arguments))  # large if a tool call wrote a file
        for message in history
        if isinstance(message, AssistantMessage)
        for call in message.tool_calls
    )
    return (
        text // _CHARACTERS_PER_TOKEN
        + sum(parts_tokens(message.parts) for message in history if message.parts)
        + _PER_MESSAGE * len(history)
        + _PER_TOOL * len(query.agent.registered_tools)
    )


def grant(
    accounts: Sequence[Account], sent: int, prices: ModelPrices | None = None
) -> int | Account:
    """Return the tokens that a call may produce, or the account to wait for. Pure.

    Raises:
        BudgetExhaustedError: an account would not have enough even without reservations.
    """
    tightest: Account | None = None
    free = MAX_OUTPUT
    for account in accounts:
        if account.limit is None:
            continue
        base, each = account.unit.price(sent, prices)
        left = account.limit - account.spent - base
        if left < MIN_OUTPUT * each and not account.may_grow:
            raise BudgetExhaustedError(account.used_up(base))
        left -= account.reserved
        room = left // each if each else MAX_OUTPUT
        if room < free:
            free, tightest = room, account
    if tightest is not None and free < MIN_OUTPUT:
        return tightest
    return free


@asynccontextmanager
async def reserved(
    accounts: Sequence[Account], sent: int, provider: LLMProvider | None = None
) -> AsyncIterator[int | None]:
    """Reserve a model call's tokens and cost; yield the tokens that it may produce.

    ``None``: there is no bound, since an answer of ``MAX_OUTPUT`` fits. Waits while only other
    calls' reservations leave too little.

    Args:
        sent: tokens of the input.
        provider: of the model, for its prices.

    Raises:
        BudgetExhaustedError: as :func:`grant`.
        ModelError: ``unpriced_model``.
    """
    limited = [account for account in accounts if account.limit is not None]
    prices = None
    if any(account.unit is DOLLARS for account in limited):
        prices = await prices_of(provider)
        unpriced = None if prices else next((one for one in limited if one.needs_price), None)
        if unpriced is not None:
            raise ModelError(
                f"{unpriced.name} cannot be kept: the model has no known price. Give its provider "
                "prices, or leave the budget out",
                code="unpriced_model",
            )
    while True:
        for account in limited:
            base, each = account.unit.price(sent, prices)
            await account.fill(base + MAX_OUTPUT * each)
        most = grant(limited, sent, prices)
        if not isinstance(most, Account):
            break
        await most.changed()
    amounts = []
    for account in limited:
        base, each = account.unit.price(sent, prices)
        amounts.append(base + most * each)
        account.reserved += amounts[-1]
    try:
        yield most if most < MAX_OUTPUT else None
    finally:
        for account, amount in zip(limited, amounts, strict=True):
            account.give_back(amount)
