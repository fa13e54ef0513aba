"""What a run may spend."""

from dataclasses import dataclass

from app.errors import BudgetExhaustedError


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens that a run may spend; ``None`` is no limit.

    Attributes:
        of_run: that its client set.
        of_day: that its tenant's other runs had left of the day when this one was claimed.
    """

    of_run: int | None = None
    of_day: int | None = None

    def check(self, spent: int) -> None:
        """Refuse another model call once all is spent.

        Raises:
            BudgetExhaustedError: one of them is spent.
        """
        if self.of_run is not None and spent >= self.of_run:
            raise BudgetExhaustedError(
                f"the run has spent {spent} tokens, and its token_budget is {self.of_run}"
            )
        if self.of_day is not None and spent >= self.of_day:
            raise BudgetExhaustedError(
                "the tokens of this day (UTC) are spent: start the run again tomorrow"
            )
