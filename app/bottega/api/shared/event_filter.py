"""Query parameters for watching a run: pages, SSE and the WebSocket."""

from typing import Annotated

from fastapi import Query
from pydantic import BaseModel, StringConstraints, field_validator
from pydantic_core import PydanticCustomError

from bottega.api.schemas.base import NAME_PATTERN
from bottega.events.frames import LLM_DELTA, OUTPUT_CHUNK, TOOL_PROGRESS, Filter
from bottega.events.types import EventType

MAX_SEQ = 2**62
_MOST = 50
_TYPES = frozenset([*EventType, LLM_DELTA, OUTPUT_CHUNK, TOOL_PROGRESS])
_NAMES = rf"^{NAME_PATTERN[1:-1]}(,{NAME_PATTERN[1:-1]}){{0,{_MOST - 1}}}$"


class WatchQuery(BaseModel):
    """Query parameters: the place to start from, and filters."""

    after: Annotated[
        int, Query(ge=0, le=MAX_SEQ, description="Only events with a higher `seq`.")
    ] = 0
    agents: Annotated[
        Annotated[str, StringConstraints(pattern=_NAMES, max_length=4000)] | None,
        Query(description=f"Only events of these agents: names with commas, at most {_MOST}."),
    ] = None
    types: Annotated[
        Annotated[str, StringConstraints(min_length=1, max_length=2000)] | None,
        Query(description="Only events of these types, separated by commas."),
    ] = None
    depth: Annotated[
        int | None,
        Query(
            ge=0,
            le=1000,
            description=(
                "Only events of the run's own agent and of tasks up to this `depth` (as in "
                "`/tasks`: 0 for tasks that the run's own agent called)."
            ),
        ),
    ] = None

    @field_validator("types")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        for name in (value or "").split(",") if value else ():
            if name not in _TYPES:
                raise PydanticCustomError(
                    "unknown_type",
                    "'{name}' is not a type of event: docs/events.md lists them",
                    {"name": name[:60]},
                )
        return value

    @property
    def only(self) -> Filter:
        """Filter of events; the final event always passes."""
        return Filter(
            agents=None if self.agents is None else frozenset(self.agents.split(",")),
            types=None if self.types is None else frozenset(self.types.split(",")),
            depth=self.depth,
        )
