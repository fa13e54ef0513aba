"""Settings of learning from runs."""

from dataclasses import fields
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings

from bottega.background.schedules import check_cron
from bottega.errors import InvalidInputError
from bottega.memory.episodes.options import LearningOptions

_Share = Annotated[float, Field(ge=0, le=1)]
_ByDefault = LearningOptions()


class LearningSettings(BaseSettings):
    """A group of :class:`bottega.settings.Settings`."""

    memory_model: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=200,
            description="Model that analyses goals and reflects on runs. Unset: rules do, "
            "without model calls.",
        ),
    ] = None
    memory_cron: Annotated[
        str,
        Field(
            description="Schedule of memory maintenance (cron, in UTC); a missed time is made up."
        ),
    ] = "0 3 * * *"
    learning_trial_share: Annotated[
        _Share,
        Field(description="Share of applicable runs that are given a candidate."),
    ] = _ByDefault.trial_share
    learning_withheld_share: Annotated[
        _Share,
        Field(description="Share of applicable runs from which a validated pattern is withheld."),
    ] = _ByDefault.withheld_share
    learning_min_applications: Annotated[
        int, Field(ge=1, le=1000, description="Least number of applications for a verdict.")
    ] = _ByDefault.min_applications
    learning_min_rate: Annotated[
        _Share, Field(description="Least success rate of a pattern's applications.")
    ] = _ByDefault.min_rate
    learning_significance: Annotated[
        float, Field(gt=0, lt=1, description="p-value that a positive verdict requires.")
    ] = _ByDefault.significance
    learning_min_confidence: Annotated[
        _Share, Field(description="Confidence that a positive verdict requires.")
    ] = _ByDefault.min_confidence
    learning_promotion_e: Annotated[
        float, Field(ge=1, le=1e9, description="e-value from which a candidate is promoted.")
    ] = _ByDefault.promotion_e
    learning_evidence_days: Annotated[
        float,
        Field(
            gt=0, le=36_500, description="Age of the oldest evidence that a verdict uses, in days."
        ),
    ] = _ByDefault.evidence_days
    learning_decline_p: Annotated[
        float, Field(gt=0, lt=1, description="p-value below which a pattern is reviewed.")
    ] = _ByDefault.decline_p
    learning_decline_each: Annotated[
        int, Field(ge=2, le=1000, description="Applications on each side of that comparison.")
    ] = _ByDefault.decline_each

    @field_validator("memory_cron")
    @classmethod
    def _is_cron(cls, value: str) -> str:
        try:
            return check_cron(value)
        except InvalidInputError as error:
            raise ValueError(error.detail) from None

    @property
    def learning_options(self) -> LearningOptions:
        names = [each.name for each in fields(LearningOptions)]
        return LearningOptions(**{name: getattr(self, f"learning_{name}") for name in names})
