"""An account for tests: it has enough for all calls, and lists what they took."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

from bottega.agents.messages import Usage
from bottega.agents.provider import Permit


class Purse:
    """An account without a limit.

    Attributes:
        paid: (model, usage) of each answer.
        reserved: estimated input of each call.
    """

    def __init__(self) -> None:
        self.permit = Permit()
        self.paid: list[tuple[str, Usage]] = []
        self.reserved: list[int] = []

    def of(self, tenant_id: UUID) -> "Purse":
        return self

    @asynccontextmanager
    async def call(
        self, sent: int, provider: object | None, longest: int | None
    ) -> AsyncIterator["Purse"]:
        self.reserved.append(sent)
        yield self

    def pay(self, model: str, usage: Usage) -> None:
        self.paid.append((model, usage))
