"""Agreement of events and problems with the documents."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
from pydantic_core import to_json

from bottega.api.documents import event_models
from bottega.events.types import EventType


def check_event(event: dict[str, Any]) -> None:
    """Check that the schema of an event's type has all of its data, at any depth."""
    model = event_models()[EventType(event["type"])]
    read = model.model_validate_json(to_json(event), strict=True)
    shown = read.model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert shown["data"] == event["data"], event["type"]


@cache
def operations() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    """Return a pattern of each documented path with its methods, paths without parameters first."""
    path = Path(__file__).parent / "contract/snapshots/openapi.json"
    found = json.loads(path.read_text())["paths"]
    exact_first = sorted(found, key=lambda each: "{" in each)
    return [(re.compile(re.sub(r"\{\w+\}", "[^/]+", each)), found[each]) for each in exact_first]


async def check_problem(answer: httpx2.Response) -> None:
    """Check that the operation lists the code of a problem among its ``x-error-codes``."""
    if answer.headers.get("content-type") != "application/problem+json":
        return
    path = answer.request.url.path  # decoded: with a %2F in a name it is another path
    method = answer.request.method.lower()
    found = (
        each[method] for known, each in operations() if known.fullmatch(path) and method in each
    )
    operation = next(found, None)
    if operation is not None and "x-error-codes" in operation:
        await answer.aread()
        code = answer.json()["code"]
        assert code in operation["x-error-codes"], (operation["operationId"], code)
