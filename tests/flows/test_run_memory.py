"""Episodes of runs, and memory of earlier runs in later ones."""

import asyncio
from datetime import datetime
from typing import Any
from uuid import UUID

import pytest

from bottega.memory.episodes.episode import episode_id_of
from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, gated, http_error, text
from tests.flows.test_agent_data import create
from tests.service import Running, running
from tests.team import CALLS, define, define_graph, start, systems


async def stored(bottega: Running, run_id: str) -> dict[str, Any] | None:
    """Return the episode of a run from its table."""
    row = await bottega.owner.fetchrow("SELECT * FROM episodes WHERE run_id = $1", UUID(run_id))
    return None if row is None else dict(row)


async def ended(bottega: Running, run_id: str) -> list[dict[str, Any]]:
    return await bottega.frames(f"/v1/runs/{run_id}/ws")


async def test_an_episode_is_stored_just_before_the_final_event(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    run_id = await start(bottega.client, session_id="s", metadata={"domain": "software"})
    frames = await ended(bottega, run_id)
    assert [frame["type"] for frame in frames[-2:]] == ["episode.stored", "run.completed"]
    episode_id = str(episode_id_of(UUID(run_id)))
    assert frames[-2]["data"] == {"episode_id": episode_id, "outcome": "UNKNOWN"}
    episode = await stored(bottega, run_id)
    assert episode is not None
    assert (str(episode["id"]), episode["outcome"]) == (episode_id, "UNKNOWN")
    assert (episode["domain"], episode["session_id"], episode["trust"]) == ("software", "s", 3)
    run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    assert episode["at"] == datetime.fromisoformat(run["ended_at"])
    trace = await bottega.owner.fetchval(
        "SELECT jsonb_path_query_array(content, '$[*].tool') FROM episode_bodies"
        " WHERE episode_id = $1 AND part = 'trace'",
        episode["id"],
    )
    assert trace == '["requirements", "designer", "implementer"]'


async def test_the_final_event_and_the_episode_are_stored_atomically(
    bottega: Running, model: FakeModel
) -> None:
    await bottega.owner.execute("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION 'not at all'; END $$;
        CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON run_steps DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW WHEN (NEW.events LIKE '%"run.completed"%') EXECUTE FUNCTION refuse();
    """)
    await define(bottega.client)
    run_id = await start(bottega.client)
    frames = await ended(bottega, run_id)
    assert [frame["type"] for frame in frames[-2:]] == ["episode.stored", "run.failed"]
    assert (await stored(bottega, run_id) or {})["outcome"] == "FAILURE"


async def test_each_end_has_its_outcome(bottega: Running, model: FakeModel) -> None:
    await define(bottega.client)
    ends: dict[str, str] = {}
    model.script(calls(("requirements", {"query": "x"})), http_error(400), text("Without it."))
    ends[await start(bottega.client)] = "UNKNOWN"
    await ended(bottega, next(iter(ends)))
    model.script(http_error(401))
    ends[failed := await start(bottega.client)] = "FAILURE"
    await ended(bottega, failed)
    model.script(gated(asyncio.Event(), text("never")))
    ends[late := await start(bottega.client, timeout_s=0.2)] = "FAILURE"
    await ended(bottega, late)
    before = len(model.requests)
    model.script(gated(asyncio.Event(), text("never")))
    ends[cancelled := await start(bottega.client)] = "CANCELLED"
    await model.received(before + 1)
    await bottega.client.post(f"/v1/runs/{cancelled}/cancel")
    await ended(bottega, cancelled)
    for run_id, outcome in ends.items():
        episode = await stored(bottega, run_id)
        assert episode is not None
        assert episode["outcome"] == outcome
    signatures = [(await stored(bottega, run_id) or {})["failure_signature"] for run_id in ends]
    assert "model_bad_request" in signatures[0]
    assert "model_unauthorized" in signatures[1]
    assert "timeout" in signatures[2]


async def test_a_run_that_no_worker_had_leaves_no_episode(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with running(configured, database_url) as bottega:
        await define(bottega.client)
        run_id = await start(bottega.client)
        assert (await bottega.client.post(f"/v1/runs/{run_id}/cancel")).status_code == 202
        frames = await ended(bottega, run_id)
        assert [frame["type"] for frame in frames] == ["run.queued", "run.cancelled"]
        assert await stored(bottega, run_id) is None


@pytest.mark.parametrize("where", ["run", "agent"])
async def test_runs_with_memory_off_or_read_leave_no_episode(
    bottega: Running, model: FakeModel, where: str
) -> None:
    for mode in ("off", "read"):
        agent = {"memory": mode} if where == "agent" else {}
        await create(bottega, f"{mode}-one", **agent)
        body = {"agent": f"{mode}-one", "input": "x"} | ({"memory": mode} if not agent else {})
        answer = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
        assert (answer["status"], answer["memory"]) == ("completed", mode)
        assert await stored(bottega, answer["id"]) is None


async def test_a_later_run_gets_memory_of_an_earlier_one(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    first = await start(bottega.client, input="Build a todo app with offline sync.")
    await ended(bottega, first)
    second = await start(bottega.client, input="Build a todo app.")
    frames = await ended(bottega, second)
    (given,) = [
        each for each in frames if each["type"] == "context.recalled" and each["task_id"] is None
    ]
    source = f"episode:{episode_id_of(UUID(first))}"
    assert (given["data"]["source"], given["task_id"]) == (source, None)
    assert "offline sync" in given["data"]["content"]
    told = [r for r in model.requests[CALLS:] if "offline sync" in str(systems(r))]
    roots = [r for r in told if len(r["messages"]) > 1 and "coordinat" in systems(r)[1]]
    assert len(roots) == 4  # each call of the coordinator
    assert all(len(systems(request)) == 3 for request in roots)  # own, awareness, memory
    assert len(told) == 7  # and of its three sub-agents, each with its own part
    # It is stored with the first model call: nothing waited for it.
    steps = "SELECT count(DISTINCT step) FROM run_events WHERE run_id = $1 AND seq = ANY($2)"
    asked = next(frame for frame in frames if frame["type"] == "llm.started")
    seqs = [given["seq"], asked["seq"]]
    assert await bottega.owner.fetchval(steps, UUID(second), seqs) == 1
    items = (await bottega.client.get(f"/v1/runs/{second}/context/coordinator")).json()["items"]
    assert [item["source"] for item in items] == [source]
    off = await start(bottega.client, input="Build a todo app.", memory="off")
    assert "context.recalled" not in [frame["type"] for frame in await ended(bottega, off)]


async def test_a_resumed_run_gets_the_same_memory_and_has_a_whole_episode(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    configured = settings.model_copy(
        update={"openai_base_url": model.base_url, "drain_grace_s": 0.0}
    )
    gate = asyncio.Event()
    async with running(configured, database_url, worker=True) as bottega:
        await define(bottega.client)
        await ended(bottega, await start(bottega.client))
        model.script(calls(("requirements", {"query": "x"})), text("R1"), gated(gate, text("no")))
        run_id = await start(bottega.client)
        await model.received(CALLS + 3)
    before = model.requests[-1]["messages"]
    async with running(configured, database_url) as bottega:
        # A new search would find something else.
        await bottega.owner.execute("DELETE FROM episode_search")
    model.script(text("Done."))
    async with running(configured, database_url, worker=True) as bottega:
        frames = await ended(bottega, run_id)
        assert model.requests[-1]["messages"] == before
        recalled = [each for each in frames if each["type"] == "context.recalled"]
        assert [each["agent"] for each in recalled] == ["coordinator", "requirements"]
        trace = await bottega.owner.fetchval(
            "SELECT jsonb_path_query_array(content, '$[*].tool') FROM episode_bodies"
            " WHERE episode_id = $1 AND part = 'trace'",
            episode_id_of(UUID(run_id)),
        )
        assert trace == '["requirements"]'


async def test_a_dag_leaves_an_episode(bottega: Running, model: FakeModel) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    body = {"mode": "dag", "graph": "g", "input": "x"}
    run = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
    episode = await stored(bottega, run["id"])
    assert episode is not None
    assert (episode["task_type"], episode["outcome"]) == ("g", "UNKNOWN")


async def test_a_run_ends_although_its_episode_cannot_be_stored(
    bottega: Running, model: FakeModel
) -> None:
    await bottega.owner.execute("ALTER TABLE episodes ADD CONSTRAINT never CHECK (false)")
    await define(bottega.client)
    frames = await ended(bottega, await start(bottega.client))
    assert [frame["type"] for frame in frames[-2:]] == ["warning", "run.completed"]
    assert frames[-2]["data"]["code"] == "episode_not_stored"


async def test_operators_choose_how_episodes_are_scored(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    update = {"openai_base_url": model.base_url, "memory_weights": {"success": 1.0}}
    async with running(settings.model_copy(update=update), database_url, worker=True) as bottega:
        await define(bottega.client)
        await ended(bottega, run_id := await start(bottega.client))
        good = {"outcome": "SUCCESS"}
        await bottega.client.post(f"/v1/runs/{run_id}/feedback", json=good)
        asked = {"query": "todo app", "explain": True, "user": "me"}
        (hit,) = (await bottega.client.post("/v1/episodes/search", json=asked)).json()["items"]
    assert hit["parts"]["success"] == 1.0


async def test_operators_choose_how_long_prompts_may_be(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    update = {"openai_base_url": model.base_url, "memory_prompt_tokens": 4000}
    asked, told = calls(("requirements", {"query": "x"})), text("word " * 1500)
    model.script(asked, told, asked, told, asked, told, text("Done."))
    async with running(settings.model_copy(update=update), database_url, worker=True) as bottega:
        await define(bottega.client)
        frames = await ended(bottega, await start(bottega.client))
    begun = [f["data"] for f in frames if f["type"] == "llm.started" and f["task_id"] is None]
    assert [data.get("memory", {}).get("shrunk", 0) > 0 for data in begun] == [False] * 2 + [
        True
    ] * 2
    assert all(data["memory"]["tokens"] <= 4000 for data in begun[2:])
