"""Tokens of a model call: the server's numbers within bounds, and estimates in place of others.

A server is a counterparty: its numbers never lower an account, and never overflow a column.

No provider and no embedder of the service is made without an account. A call is reserved before it
is sent, and what it took is paid afterwards.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from uuid import UUID

from pydantic_core import to_json

from bottega.agents.messages import ToolCall, Usage
from bottega.agents.parts import size_of, tokens_in
from bottega.agents.provider import Permit
from bottega.errors import BottegaError

MOST_TOKENS = 10_000_000
"""Largest number of tokens that a server may report for one call."""


@dataclass(frozen=True, slots=True)
class Reported:
    """Tokens of one call, as its server reports them.

    Attributes:
        input, output: ``None``: not reported, or no number from 0 to :data:`MOST_TOKENS`.
        cached, written: parts of the input.
        reasoning: a part of the output.
        is_odd: a number was reported that cannot be taken as it is.
    """

    input: int | None = None
    output: int | None = None
    cached: int = 0
    reasoning: int = 0
    written: int = 0
    is_odd: bool = False

    def usage(self, sent: Callable[[], int], arrived: int, hidden: int) -> Usage:
        """Return the usage, with estimates of what is missing.

        Parts of an estimated input, or parts larger than the whole input, count as nothing: they
        would lower the price.

        Args:
            sent: measures the request, in bytes of text.
            arrived: bytes of the answer, hidden ones included.
            hidden: bytes of the answer's reasoning and the like.
        """
        sent_tokens = tokens_in(sent()) if self.input is None else self.input
        has_output = self.output is not None
        output_tokens = tokens_in(arrived) if self.output is None else self.output
        reasoning = min(output_tokens, self.reasoning if has_output else tokens_in(hidden))
        is_lowering = self.input is None or self.cached + self.written > self.input
        cached, written = (0, 0) if is_lowering else (self.cached, self.written)
        is_clamped = is_lowering or (has_output and reasoning != self.reasoning)
        is_missing = not has_output and arrived > 0
        return Usage(
            sent_tokens,
            output_tokens,
            cached,
            reasoning,
            estimated=self.is_odd or is_clamped or is_missing,
            written=written,
        )


class Counts:
    """Reader of the numbers of one report.

    Attributes:
        is_odd: a number was read that cannot be taken as it is.
    """

    def __init__(self, report: Any) -> None:
        self._report = report if isinstance(report, Mapping) else {}
        self.is_odd = report is not None and not isinstance(report, Mapping)

    def part(self, name: str, within: str | None = None) -> int:
        """Return a number that servers may leave out; 0 if it is missing.

        Args:
            within: the field of the report that holds it.
        """
        found = self._report
        if within is not None:
            found = found.get(within) or {}
            if not isinstance(found, Mapping):
                self.is_odd = True
                return 0
        value = found.get(name)
        return 0 if value is None else self._bounded(value) or 0

    def total(self, name: str, *more: int) -> int | None:
        """Return a number and what is to be added to it; ``None``: there is no such number."""
        value = self._report.get(name)
        first = None if value is None else self._bounded(value)
        return None if first is None else self._bounded(first + sum(more))

    def _bounded(self, value: Any) -> int | None:
        if type(value) is int and 0 <= value <= MOST_TOKENS:
            return value
        self.is_odd = True
        return None


def reported(used: Any, read: str, written: str) -> Reported:
    """Return the tokens that a report in the form of OpenAI's APIs names.

    Args:
        read, written: the API's words for input and output tokens.
    """
    counts = Counts(used)
    return Reported(
        counts.total(f"{read}_tokens"),
        counts.total(f"{written}_tokens"),
        counts.part("cached_tokens", f"{read}_tokens_details"),
        counts.part("reasoning_tokens", f"{written}_tokens_details"),
        is_odd=counts.is_odd,
    )


def usage_of(
    report: Reported,
    sent: Callable[[], int],
    text: str,
    calls: Sequence[ToolCall],
    hidden: Callable[[], int],
) -> Usage:
    """Return the usage of a whole answer.

    Args:
        report: the server's report.
        sent: measures the request, in bytes of text.
        hidden: measures reasoning and the like, beside text and calls, in bytes.
    """
    thought = spoken = 0
    if report.output is None:
        thought = hidden()
        spoken = size_of(text) + sum(map(_size_of_call, calls))
    return report.usage(sent, spoken + thought, thought)


def usage_of_lost(report: Reported, sent: Callable[[], int], arrived: int) -> Usage:
    """Return the usage of an answer that broke off.

    Some servers report the output at its end only: it is at least what has arrived.
    """
    usage = report.usage(sent, arrived, 0)
    if tokens_in(arrived) > usage.output:
        return replace(usage, output=tokens_in(arrived), estimated=True)
    return usage


def _size_of_call(call: ToolCall) -> int:
    if call.malformed is not None:
        return size_of(call.name) + size_of(call.malformed)
    return size_of(call.name) + len(to_json(call.arguments))


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
