"""Token budgets that several tasks spend at once.

A model call first reserves its tokens in every account that pays for it, and returns the unused
ones afterwards. So tasks together overspend at most by the error of one call's estimate.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bottega.agents.messages import AssistantMessage
from bottega.agents.parts import parts_tokens
from bottega.agents.query import Query
from bottega.errors import BudgetExhaustedError

MAX_OUTPUT = 4096
"""Expected maximum of tokens in an answer."""
MIN_OUTPUT = 16
_CHARACTERS_PER_TOKEN = 3
_PER_MESSAGE = 4
_PER_TOOL = 100


@dataclass(slots=True, eq=False)
class TokenAccount:
    """A token budget; without a ``limit`` it is unlimited.

    Attributes:
        name: used in error texts.
        reserved: tokens reserved by running model calls.
    """

    name: str
    limit: int | None = None
    spent: int = 0
    reserved: int = 0
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def left(self) -> int | None:
        """Tokens neither spent nor reserved; ``None``: unlimited."""
        return None if self.limit is None else self.limit - self.spent - self.reserved

    @property
    def is_exhausted(self) -> bool:
        """True if the whole limit is spent."""
        return self.limit is not None and self.spent >= self.limit

    def used_up(self, sent: int) -> str:
        """Return the error text for a call that would send about ``sent`` tokens."""
        return (
            f"{self.name} is used up: {self.spent} of {self.limit} tokens are spent, and the next "
            f"model call takes about {sent}"
        )

    def give_back(self, tokens: int) -> None:
        """Release reserved tokens and wake the waiting calls."""
        self.reserved -= tokens
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    async def changed(self) -> None:
        """Wait until reserved tokens are released."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(future)

    async def fill(self, tokens: int) -> None:
        """Get more tokens from a shared budget if fewer than ``tokens`` are left; none here."""

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


def grant(accounts: Sequence[TokenAccount], sent: int) -> int | TokenAccount:
    """Return the tokens that a call may produce, or the account to wait for. Pure.

    Raises:
        BudgetExhaustedError: an account would not have enough even without reservations.
    """
    tightest: TokenAccount | None = None
    free = MAX_OUTPUT
    for account in accounts:
        if account.limit is None:
            continue
        if account.limit - account.spent < sent + MIN_OUTPUT and not account.may_grow:
            raise BudgetExhaustedError(account.used_up(sent))
        left = account.limit - account.spent - account.reserved - sent
        if left < free:
            free, tightest = left, account
    if tightest is not None and free < MIN_OUTPUT:
        return tightest
    return free


@asynccontextmanager
async def reserved(accounts: Sequence[TokenAccount], sent: int) -> AsyncIterator[int | None]:
    """Reserve tokens for a model call; yield the tokens that it may produce, ``None``: no bound.

    There is no bound if an answer of ``MAX_OUTPUT`` fits. Waits while only other calls'
    reservations leave too little.

    Raises:
        BudgetExhaustedError: as :func:`grant`.
    """
    while True:
        for account in accounts:
            await account.fill(sent + MAX_OUTPUT)
        most = grant(accounts, sent)
        if not isinstance(most, TokenAccount):
            break
        await most.changed()
    for account in accounts:
        account.reserved += sent + most
    try:
        yield most if most < MAX_OUTPUT else None
    finally:
        for account in accounts:
            account.give_back(sent + most)
