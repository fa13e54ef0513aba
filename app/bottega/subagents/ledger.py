"""Token budgets that many tasks spend from at once (spec page 3, S14).

Before a model call its tokens are reserved in every account that pays for it, and what was not
used goes back. So together they overspend by no more than one call's estimate was wrong.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bottega.agents.messages import AssistantMessage
from bottega.agents.recording import Query
from bottega.errors import BudgetExhaustedError

MAX_OUTPUT = 4096
"""Tokens that an answer is expected to have at most."""
MIN_OUTPUT = 16
_CHARACTERS_PER_TOKEN = 3
_PER_MESSAGE = 4
_PER_TOOL = 100


@dataclass(slots=True, eq=False)
class Account:
    """Tokens that somebody may spend; ``limit`` ``None``: as many as wanted.

    Attributes:
        name: in texts.
        reserved: by model calls that are under way.
    """

    name: str
    limit: int | None = None
    spent: int = 0
    reserved: int = 0
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def left(self) -> int | None:
        """Neither spent nor reserved."""
        return None if self.limit is None else self.limit - self.spent - self.reserved

    @property
    def is_exhausted(self) -> bool:
        """All of it was spent."""
        return self.limit is not None and self.spent >= self.limit

    def used_up(self, sent: int) -> str:
        """Say why a call cannot be made that sends about so many tokens."""
        return (
            f"{self.name} is used up: {self.spent} of {self.limit} tokens are spent, and the next "
            f"model call takes about {sent}"
        )

    def give_back(self, tokens: int) -> None:
        """What was reserved is not any more."""
        self.reserved -= tokens
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    async def changed(self) -> None:
        """Return when something was given back."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(future)

    async def fill(self, tokens: int) -> None:
        """Get more, where there is more, if fewer than so many tokens are left."""

    @property
    def may_grow(self) -> bool:
        """True if it may have more later, though nothing is given back here."""
        return False


def estimate(query: Query) -> int:
    """Estimate how many tokens the next model call of a query sends."""
    if query.composed is not None:
        return query.composed["tokens"]
    history = query.agent.conversation_history
    text = sum(len(message.content) for message in history) + sum(
        len(str(call.arguments))  # a file that was written goes along with every call
        for message in history
        if isinstance(message, AssistantMessage)
        for call in message.tool_calls
    )
    return (
        text // _CHARACTERS_PER_TOKEN
        + _PER_MESSAGE * len(history)
        + _PER_TOOL * len(query.agent.registered_tools)
    )


def grant(accounts: Sequence[Account], sent: int) -> int | Account:
    """How many tokens a call may produce that sends ``sent``, or the account to wait for. Pure.

    Raises:
        BudgetExhaustedError: however long it waited, an account has not enough.
    """
    tightest: Account | None = None
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
async def reserved(accounts: Sequence[Account], sent: int) -> AsyncIterator[int | None]:
    """Hold tokens for a model call; answers how many it may produce, ``None``: as it likes.

    It may produce as many as it likes if an expected answer fits. Waits while it is only others'
    reservations that leave too little.

    Raises:
        BudgetExhaustedError: as :func:`grant`.
    """
    while True:
        for account in accounts:
            await account.fill(sent + MAX_OUTPUT)
        most = grant(accounts, sent)
        if not isinstance(most, Account):
            break
        await most.changed()
    for account in accounts:
        account.reserved += sent + most
    try:
        yield most if most < MAX_OUTPUT else None
    finally:
        for account in accounts:
            account.give_back(sent + most)
