"""Agreement of events with their schemas in the documents."""

from typing import Any

from pydantic_core import to_json

from bottega.api.schemas.events import EVENTS
from bottega.events.types import EventType


def check_event(event: dict[str, Any]) -> None:
    """Check that the schema of an event's type has all of its data, at any depth."""
    model = EVENTS[EventType(event["type"])]
    read = model.model_validate_json(to_json(event), strict=True)
    shown = read.model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert shown["data"] == event["data"], event["type"]
