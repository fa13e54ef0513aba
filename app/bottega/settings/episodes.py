"""Settings of episodes: retrieval and lifecycle."""

from dataclasses import fields
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings

from bottega.errors import InvalidInputError
from bottega.memory.episodes.options import MemoryOptions
from bottega.memory.episodes.scoring import Normalisation, ScoringOptions

_Weight = Annotated[float, Field(ge=0, le=100)]
_Days = Annotated[float, Field(ge=0, le=36_500)]
_Cosine = Annotated[float, Field(ge=-1, le=1)]


class EpisodeSettings(BaseSettings):
    """A group of :class:`bottega.settings.Settings`."""

    memory_candidates: Annotated[
        int,
        Field(ge=1, le=1000, description="Least number of episodes that are scored for a query."),
    ] = 20
    memory_vector_deadline_ms: Annotated[
        float,
        Field(
            ge=0,
            le=60_000,
            description="Longest wait for a query's vector, in ms; after it only words are "
            "searched. A run's start waits 2 s for all of its memory.",
        ),
    ] = 300.0
    # Weights of the terms of a hit's score; their sum need not be 1.
    memory_similarity: Annotated[
        _Weight, Field(description="Weight of an episode's similarity to the query.")
    ] = 0.5
    memory_recency: Annotated[
        _Weight, Field(description="Weight of recency: exp(-days / recency days).")
    ] = 0.2
    memory_success: Annotated[_Weight, Field(description="Weight of success.")] = 0.15
    memory_accesses: Annotated[
        _Weight, Field(description="Weight of the number of reads: min(ln(1 + n) / 10, 1).")
    ] = 0.1
    memory_domain: Annotated[
        _Weight, Field(description="Weight of the same domain as the task.")
    ] = 0.05
    memory_recency_days: Annotated[
        float, Field(gt=0, le=36_500, description="Days in which recency falls to 1/e.")
    ] = 30.0
    memory_normalisation: Annotated[
        Normalisation,
        Field(
            description="Method that turns cosines and word ranks into a similarity from 0 to 1; "
            "raw: the plain cosine."
        ),
    ] = ScoringOptions().normalisation
    memory_active_days: Annotated[
        _Days,
        Field(description="Days until an episode is mature; similar mature ones are consolidated."),
    ] = 30.0
    memory_mature_days: Annotated[
        _Days,
        Field(description="Days until an episode is aged; its trace moves to the object store."),
    ] = 180.0
    memory_aged_days: Annotated[
        _Days, Field(description="Days until an episode is archived; then it is read only by id.")
    ] = 365.0
    memory_deleted_days: Annotated[
        _Days, Field(description="Days that a deleted episode is kept before it is erased.")
    ] = 30.0
    memory_aged_cosine: Annotated[
        _Cosine, Field(description="Least cosine at which an aged episode is found.")
    ] = 0.8
    memory_consolidate_cosine: Annotated[
        _Cosine, Field(description="Least cosine of any two consolidated episodes.")
    ] = 0.95
    memory_consolidate_days: Annotated[
        _Days, Field(description="Days within which consolidated episodes have ended.")
    ] = 7.0

    @model_validator(mode="after")
    def _ages_rise(self) -> Self:
        try:
            _ = self.memory_options
        except InvalidInputError as error:
            raise ValueError(
                f"BOTTEGA_MEMORY_ACTIVE_DAYS, …_MATURE_DAYS, …_AGED_DAYS: {error.detail}"
            ) from None
        return self

    @property
    def memory_options(self) -> MemoryOptions:
        scoring = ScoringOptions(**self._named(ScoringOptions))
        return MemoryOptions(scoring=scoring, **self._named(MemoryOptions))

    def _named(self, kind: Any) -> dict[str, Any]:
        names = [each.name for each in fields(kind) if each.name != "scoring"]
        return {name: getattr(self, f"memory_{name}") for name in names}
