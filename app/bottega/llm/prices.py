"""Prices of model calls: the server's own prices, or else the public lists in ``genai-prices``.

The lists are data inside that package. A search needs the server's address and the model's
name. A server whose address is in no list, such as a server at home, has no price.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bottega.agents.messages import Usage

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, Provider

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_MILLION = Decimal(1_000_000)


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """A model's prices, in US dollars per million tokens.

    Attributes:
        cached: price of input tokens that the server read from its cache.
        written: price of input tokens that the server put into its cache.
    """

    input: Decimal
    cached: Decimal
    written: Decimal
    output: Decimal

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TokenPrices":
        """Build prices from numbers or texts: ``input``, ``output`` and optionally ``cached``."""
        given = {name: Decimal(str(value)) for name, value in data.items() if value is not None}
        price = given["input"]
        return cls(price, given.get("cached", price), price, given["output"])

    def cost(self, usage: Usage) -> Decimal:
        """Return the price of one call, in US dollars."""
        cached = min(usage.cached, usage.input)
        written = min(usage.written, usage.input - cached)
        total = (
            (usage.input - cached - written) * self.input
            + cached * self.cached
            + written * self.written
            + usage.output * self.output
        )
        return total / _MILLION


@dataclass(frozen=True, slots=True)
class _StepPrices:
    """Prices that change with the length of the input or the time of day; slow to compute."""

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
        own: prices that replace the public prices.
    """
    if own and (prices := own.get(model)):
        return prices
    if urlsplit(address).hostname in LOOPBACK:
        return None  # decided here, so that the lists are not loaded
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
