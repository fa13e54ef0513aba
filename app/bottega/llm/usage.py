"""Tokens of a model call: the server's numbers if they are plausible, and estimates otherwise.

A server may report wrong numbers. So a server's numbers can never lower the amount that an account
has paid, and never overflow a database column.

Each provider and embedder of the service has an account. An account reserves a call's tokens before
the call is sent. After the call, the account pays for the tokens that the call used.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit
from uuid import UUID

from pydantic_core import to_json

from bottega.agents.messages import ToolCall, Usage
from bottega.agents.parts import MOST_FILE_TOKENS, size_of, tokens_in
from bottega.agents.provider import Permit
from bottega.errors import BottegaError

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, Provider

MOST_TOKENS = MOST_FILE_TOKENS
"""Maximum number of tokens that a server may report for one call."""


@dataclass(frozen=True, slots=True)
class Reported:
    """Numbers of tokens of one call, as the server has reported them.

    Attributes:
        input, output: 0 to :data:`MOST_TOKENS`; ``None``: the server reported no such number.
        cached, written: input tokens that the server read from, or wrote to, its cache.
        reasoning: number of output tokens that were reasoning.
        is_odd: true if the server reported an impossible number.
    """

    input: int | None = None
    output: int | None = None
    cached: int = 0
    reasoning: int = 0
    written: int = 0
    is_odd: bool = False

    def usage(self, sent: Callable[[], int], arrived: int, hidden: int) -> Usage:
        """Return the usage. Estimates replace missing numbers.

        ``cached`` and ``written`` count as 0 if the input is an estimate, or if both together
        exceed the input, because wrong values would lower the price.

        Args:
            sent: function that returns the request's size, in bytes of text.
            arrived: size of the answer in bytes, including hidden bytes.
            hidden: size of the answer's reasoning and other hidden fields, in bytes.
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
    """Reader of the numbers in one report of a server.

    Attributes:
        is_odd: true if the report contains an impossible number.
    """

    def __init__(self, report: Any) -> None:
        self._report = report if isinstance(report, Mapping) else {}
        self.is_odd = report is not None and not isinstance(report, Mapping)

    def part(self, name: str, within: str | None = None) -> int:
        """Return an optional number of the report; 0: the number is missing.

        Args:
            within: name of the report's field that contains the number.
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
        """Return the sum of a reported number and ``more``; ``None``: the number is missing."""
        value = self._report.get(name)
        first = None if value is None else self._bounded(value)
        return None if first is None else self._bounded(first + sum(more))

    def _bounded(self, value: Any) -> int | None:
        if type(value) is int and 0 <= value <= MOST_TOKENS:
            return value
        self.is_odd = True
        return None


def reported(used: Any, read: str, written: str) -> Reported:
    """Read the tokens from a report in the form of OpenAI's APIs.

    Args:
        read, written: the API's words for input and output, such as ``prompt``.
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
    """Return the usage of a complete answer.

    Args:
        sent: function that returns the request's size, in bytes of text.
        hidden: function that returns the size of reasoning and other hidden fields, in bytes.
    """
    thought = spoken = 0
    if report.output is None:
        thought = hidden()
        spoken = size_of(text) + sum(map(_size_of_call, calls))
    return report.usage(sent, spoken + thought, thought)


def usage_of_lost(report: Reported, sent: Callable[[], int], arrived: int) -> Usage:
    """Return the usage of an answer that ended too early.

    Some servers report the output tokens only at the end of the answer. So the usage contains at
    least the tokens of the text that has arrived.
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
    """Error: nobody reserved tokens for a model call. This is a bug. The call was not sent."""

    code = "unpaid_call"


class Charge(Protocol):
    """A call for which an account has reserved tokens."""

    permit: Permit

    def pay(self, model: str, usage: Usage) -> None:
        """Pay for one answer of the call, complete or not. A call may have several answers."""


class ModelAccount(Protocol):
    """An account that pays for model calls."""

    def call(
        self, sent: int, provider: object | None, longest: int | None
    ) -> AbstractAsyncContextManager[Charge]:
        """Reserve tokens for a call until the ``async with`` block ends.

        Args:
            sent: estimate of the input tokens.
            provider: the model's client, which knows the model's prices.
            longest: maximum number of the answer's tokens; ``None``: no limit.

        Raises:
            BudgetExhaustedError: the account has too little money or too few tokens left.
        """


class TenantAccounts(Protocol):
    """The accounts of tenants for calls outside of runs."""

    def of(self, tenant_id: UUID) -> ModelAccount:
        """Return a tenant's account."""


class PermitsOnly:
    """Account of runs' agents. It refuses calls for which the run's recorder reserved no tokens."""

    def call(
        self, sent: int, provider: object | None, longest: int | None
    ) -> AbstractAsyncContextManager[Charge]:
        raise UnpaidCallError("the run's recorder did not reserve tokens for a model call")


LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_MILLION = Decimal(1_000_000)


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """A model's prices, in US dollars per million tokens.

    Attributes:
        cached: price of input tokens that the server read from its cache.
        written: price of input tokens that the server wrote to its cache.
    """

    input: Decimal
    cached: Decimal
    written: Decimal
    output: Decimal

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TokenPrices":
        """Build prices from ``input``, ``output`` and optionally ``cached``: numbers or texts."""
        prices = {name: Decimal(str(value)) for name, value in data.items() if value is not None}
        price = prices["input"]
        return cls(price, prices.get("cached", price), price, prices["output"])

    def cost(self, usage: Usage) -> Decimal:
        """Return the price of one call, in US dollars."""
        cached = min(usage.cached, usage.input)
        cache_write = min(usage.written, usage.input - cached)
        total = (
            (usage.input - cached - cache_write) * self.input
            + cached * self.cached
            + cache_write * self.written
            + usage.output * self.output
        )
        return total / _MILLION


@dataclass(frozen=True, slots=True)
class _StepPrices:
    """Prices that depend on the input's length or the time of day. They are slow to compute."""

    provider: "Provider"
    model: "ModelInfo"

    def cost(self, usage: Usage) -> Decimal:
        from genai_prices import Usage as Reported

        cached = min(usage.cached, usage.input)
        reported = Reported(
            input_tokens=usage.input,
            cache_read_tokens=cached,
            cache_write_tokens=min(usage.written, usage.input - cached),
            output_tokens=usage.output,
        )
        price: Decimal = self.model.calc_price(reported, self.provider).total_price
        return price


OwnPrices = Mapping[str, TokenPrices]
"""A server's own prices, by model."""


ModelPrices = TokenPrices | _StepPrices


def prices_of(model: str, address: str, own: OwnPrices | None = None) -> ModelPrices | None:
    """Return a model's prices; ``None``: unknown. The first call may take half a second.

    Args:
        address: the server's URL.
        own: the server's own prices, which replace the public prices.
    """
    if own and (prices := own.get(model)):
        return prices
    if urlsplit(address).hostname in LOOPBACK:
        return None  # returned early, because loading the lists is slow
    return _listed(model, address)


@lru_cache(maxsize=1000)
def _listed(model: str, address: str) -> ModelPrices | None:
    """Find a model in the public lists. The first search takes half a second."""
    from genai_prices.data_snapshot import get_snapshot
    from genai_prices.types import ModelPrice

    try:
        provider, found = get_snapshot().find_provider_model(model, None, None, address)
    except LookupError:
        return None
    listed = found.prices
    if not isinstance(listed, ModelPrice):
        return _StepPrices(provider, found)
    rates = vars(listed)
    price, output = rates.get("input_mtok"), rates.get("output_mtok") or Decimal(0)
    read, written = (rates.get(f"cache_{each}_mtok") or price for each in ("read", "write"))
    flat = [each for each in (price, read, written, output) if isinstance(each, Decimal)]
    return TokenPrices(*flat) if len(flat) == 4 else _StepPrices(provider, found)
