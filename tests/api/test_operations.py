"""Routes for operators."""

import asyncpg
import pytest

from bottega import __version__
from tests.service import Running

FULL_DISK = """
CREATE FUNCTION full_disk_{kind}() RETURNS {kind} LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full';
END $$
"""


async def test_the_root_names_the_service_and_its_documentation(server_: Running) -> None:
    answer = await server_.client.get("/")
    assert answer.status_code == 200
    assert answer.json() == {"name": "bottega", "version": __version__, "docs": "/docs"}
    assert (await server_.client.get(answer.json()["docs"])).status_code == 200


@pytest.fixture
async def full_disk(server_: Running) -> asyncpg.Pool:
    """Let the database fail each new agent and each new table as on a full disk."""
    owner = server_.owner
    await owner.execute(FULL_DISK.format(kind="trigger"))
    await owner.execute(
        "CREATE TRIGGER full_disk BEFORE INSERT ON agents EXECUTE FUNCTION full_disk_trigger()"
    )
    await owner.execute(FULL_DISK.format(kind="event_trigger"))
    await owner.execute(
        "CREATE EVENT TRIGGER full_disk ON ddl_command_start "
        "EXECUTE FUNCTION full_disk_event_trigger()"
    )
    return owner


async def test_a_full_disk_is_named_until_a_write_succeeds(
    server_: Running, full_disk: asyncpg.Pool
) -> None:
    client, agent = server_.client, {"name": "a", "system_message": "x"}
    assert (await client.get("/readyz")).status_code == 200  # no write has failed yet
    refused = await client.post("/v1/agents", json=agent)
    assert (refused.status_code, refused.json()["code"]) == (503, "storage_full")
    assert refused.headers["retry-after"] == "30"
    for _ in range(2):
        waiting = await client.get("/readyz")
        assert (waiting.status_code, waiting.json()["code"]) == (503, "storage_full")
    assert (await client.get("/v1/agents")).json()["items"] == []  # reading still works
    await full_disk.execute("ALTER EVENT TRIGGER full_disk DISABLE")
    assert (await client.get("/readyz")).status_code == 200
    await full_disk.execute("DROP TRIGGER full_disk ON agents")
    assert (await client.post("/v1/agents", json=agent)).status_code == 201
