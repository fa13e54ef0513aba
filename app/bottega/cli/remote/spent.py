"""Sums of tokens and costs, as text. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any


@dataclass(frozen=True, slots=True)
class Spent:
    """Sum of what model calls took.

    Attributes:
        tokens: input and output.
        amount: US dollars.
        complete: false if some of the tokens have no known price.
    """

    tokens: int = 0
    amount: Decimal = Decimal(0)
    complete: bool = True

    @classmethod
    def of(cls, usage: Mapping[str, Any]) -> "Spent":
        """Read the ``usage`` of an event or a run."""
        tokens = usage["input"] + usage["output"]
        cost = usage.get("cost")
        if cost is None:
            return cls(tokens, complete=not tokens)
        return cls(tokens, Decimal(cost["amount"]), cost["complete"])

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(
            self.tokens + other.tokens,
            self.amount + other.amount,
            self.complete and other.complete,
        )

    def __str__(self) -> str:
        tokens = f"{self.tokens:,} tokens"
        if not self.amount:
            return tokens
        return f"{tokens}, ${self.amount:.4f}{'' if self.complete else ' or more'}"
