"""Accounts of model calls: no provider and no embedder of the service is made without one.

A call is reserved before it is sent, and what it took is paid afterwards.
"""

from contextlib import AbstractAsyncContextManager
from typing import Protocol
from uuid import UUID

from bottega.agents.messages import Usage
from bottega.agents.provider import Permit
from bottega.errors import BottegaError


class UnpaidCallError(BottegaError):
    """A model call that no account has reserved; it is a bug, and was not sent."""

    code = "unpaid_call"


class Charge(Protocol):
    """A reserved call."""

    permit: Permit

    def pay(self, model: str, usage: Usage) -> None:
        """Count what the call took; may be called for each answer, also of one that broke off."""


class ModelAccount(Protocol):
    """An account that pays for model calls."""

    def call(
        self, sent: int, provider: object | None, longest: int | None
    ) -> AbstractAsyncContextManager[Charge]:
        """Reserve a call for the time of the block.

        Args:
            sent: tokens of its input, estimated.
            provider: of the model, for its prices.
            longest: limit of the answer's tokens; ``None``: it has none.

        Raises:
            BudgetExhaustedError: too little is left.
        """


class TenantAccounts(Protocol):
    """The accounts of tenants for calls that no run shows."""

    def of(self, tenant_id: UUID) -> ModelAccount:
        """Return a tenant's account."""


class PermitsOnly:
    """The account of runs' agents: recorders reserve the calls, and pass their permits."""

    def call(
        self, sent: int, provider: object | None, longest: int | None
    ) -> AbstractAsyncContextManager[Charge]:
        raise UnpaidCallError("a model call of a run was not reserved")
