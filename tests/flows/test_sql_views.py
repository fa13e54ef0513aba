"""Views for people who read the database with SQL."""

from uuid import UUID

import asyncpg
import pytest

from bottega.db.pool import acting_as
from tests.fake_model import FakeModel, text
from tests.service import Running
from tests.team import define_graph


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


async def test_views_show_a_tenant_its_own(bottega: Running, guest_model: FakeModel) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    guest_model.script(text("A"), text("B"))
    body = {"mode": "dag", "graph": "g", "input": "x"}
    run = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
    tenant = await bottega.owner.fetchval(
        "SELECT tenant_id FROM runs WHERE id = $1", UUID(run["id"])
    )
    for who, seen in ((tenant, True), (UUID(int=7), False)):
        async with acting_as(bottega.service.database.pool, who) as connection:
            snapshots = await connection.fetch(
                "SELECT seq, agent, version, content, published_at FROM graph_snapshots"
                " WHERE run_id = $1 ORDER BY seq",
                UUID(run["id"]),
            )
            answers = await connection.fetch(
                "SELECT status, answer, graph FROM run_answers WHERE run_id = $1", UUID(run["id"])
            )
        published = [(row["agent"], row["version"], row["content"]) for row in snapshots]
        assert published == ([("a", 1, "A"), ("b", 1, "B")] if seen else [])
        assert [tuple(row) for row in answers] == ([("completed", '"B"', "g")] if seen else [])
        if seen:
            shown = await bottega.client.get(
                f"/v1/runs/{run['id']}/graph?seq={snapshots[0]['seq']}"
            )
            nodes = {each["name"]: each["published"] for each in shown.json()["nodes"]}
            assert (nodes["a"]["content"], nodes["b"]) == ("A", None)


async def test_views_need_a_tenant(bottega: Running) -> None:
    async with bottega.service.database.pool.acquire() as connection:
        for view in ("graph_snapshots", "run_answers"):
            with pytest.raises(asyncpg.PostgresError):
                await connection.fetch(f"SELECT * FROM {view}")
