"""Export of an end user's data, in pages."""

from base64 import b64decode
from typing import Any

import pytest

from bottega import users as user_data
from tests.fake_model import FakeModel, text
from tests.flows.test_tenant_deletion import AGENT
from tests.flows.test_user_erasure import lines_of, settled, stalled, tenant_of
from tests.service import Running


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


def lasting(line: dict[str, Any]) -> str:
    """Return a line as a text, without the counts of reading that are stored later."""
    data = line.get("data", {})
    return str(
        {**line, "data": data.get("episode_id")} if line["type"] == "episode_state" else line
    )


@pytest.mark.deep
async def test_an_export_is_read_in_pages(
    bottega: Running, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = bottega.client
    model.decide = lambda request: text("fine")
    assert (await client.post("/v1/agents", json=AGENT)).status_code == 201
    for session in ("s", "t"):
        said = {"agent": "solo", "input": "x", "user": "ada", "session_id": session}
        await client.post("/v1/runs?wait=30", json=said)
    sent = {"file": ("notes", bytes(1_500_000))}
    await client.post("/v1/files", files=sent, data={"session_id": "s"})
    await settled(bottega.owner)
    whole = await lines_of(client, "ada")
    pieces = [line["data"] for line in whole if line["type"] == "content"]
    assert [(piece["of"], piece["piece"]) for piece in pieces] == [("files", 0), ("files", 1)]
    assert b"".join(b64decode(piece["base64"]) for piece in pieces) == sent["file"][1]
    events = [line["data"]["events"] for line in whole if line["type"] == "run_steps"]
    assert sum(step[0]["type"] == "run.queued" for step in events) == 2
    for name, least in (("_ROWS", 1), ("_BYTES", 1), ("_OWNERS", 1)):
        monkeypatch.setattr(user_data, name, least)
        again = await lines_of(client, "ada")
        assert sorted(map(lasting, again)) == sorted(map(lasting, whole))
        monkeypatch.undo()


async def test_an_export_that_breaks_off_has_no_end(
    bottega: Running, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, tenant = bottega.client, await tenant_of(bottega)
    await client.post("/v1/sessions", json={"user": "ada"})
    exported = user_data.UserExport(bottega.service.database, _objects(bottega), tenant, "ada")
    lines = exported.lines()
    assert b'"type":"sessions"' in await anext(lines)
    await stalled(bottega, "ada")
    assert [line async for line in lines] == []


def _objects(bottega: Running) -> Any:
    return bottega.service.files.objects
