"""The WebSocket's document says what really comes."""

from app.api.asyncapi import DATA
from app.events.types import EventType
from tests.fake_model import FakeModel, http_error, text
from tests.service import Running
from tests.team import define, start


async def test_every_event_has_only_the_data_that_is_documented(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    runs = [await start(bottega.client)]
    await bottega.frames(f"/v1/runs/{runs[0]}/ws")
    model.script(http_error(500), text("second try"), http_error(400))
    runs += [await start(bottega.client, agent="requirements", graph=None)]
    await bottega.frames(f"/v1/runs/{runs[1]}/ws")
    runs += [await start(bottega.client, agent="requirements", graph=None)]
    seen = set()
    for run_id in runs:
        for event in await bottega.frames(f"/v1/runs/{run_id}/ws"):
            kind = EventType(event["type"])
            seen.add(kind)
            assert set(event["data"]) <= set(DATA[kind].split()), kind
    assert {EventType.RUN_FAILED, EventType.LLM_FAILED, EventType.MEMORY_INJECTED} <= seen


async def test_the_document_is_served_and_its_references_lead_somewhere(bottega: Running) -> None:
    document = (await bottega.client.get("/asyncapi.json")).json()
    references = list(_references(document))
    assert references
    for reference in references:
        place = document
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]
    assert set(DATA) == set(EventType)


def _references(value: object) -> list[str]:
    if isinstance(value, list):
        return [found for item in value for found in _references(item)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if "$ref" in value else []
    return own + [found for item in value.values() for found in _references(item)]
