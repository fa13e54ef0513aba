"""Check that the price of a run's models is known, for runs that may only cost so much."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bottega.definitions.models import KnownProvider
from bottega.errors import InvalidInputError
from bottega.llm.prices import prices_of
from bottega.llm.server import VENDORS


class UsedModel(NamedTuple):
    """A model that an agent may call.

    Attributes:
        address: URL of its server.
        is_priced: its provider has a price for it.
    """

    name: str
    address: str
    is_priced: bool

    @classmethod
    def of(cls, provider: KnownProvider, model: str | None, default: str) -> "UsedModel":
        """Build it from a reference.

        Args:
            model: ``None``: the provider's first one, or ``default``.
        """
        name = model or (provider.models[0] if provider.models else default)
        address = provider.base_url or VENDORS[provider.dialect]
        return cls(name, address, name in (provider.prices or ()))


async def refuse_unpriced(models: Mapping[str, Sequence[UsedModel]]) -> None:
    """Refuse models without a known price.

    Args:
        models: of each agent.

    Raises:
        InvalidInputError: ``unpriced_model``.
    """
    for agent, used in models.items():
        for model in used:
            if model.is_priced:
                continue
            # In a thread: the first search loads the public lists.
            prices = await asyncio.to_thread(prices_of, model.name, model.address)
            if prices is None:
                raise InvalidInputError(
                    f"cost_budget cannot be kept: no price is known for the model '{model.name}' "
                    f"of the agent '{agent}'. Give its provider prices, or leave the budget out",
                    code="unpriced_model",
                    pointer="/cost_budget",
                )
