"""Patterns in runs: rendering, random assignment, and advice after failures."""

import asyncio
from typing import Any
from uuid import UUID, uuid4

import pytest
import websockets
from pydantic_core import from_json, to_json

from bottega.db.tables import DEFAULT_TENANT
from bottega.memory.episodes.episode import episode_id_of
from bottega.memory.episodes.scope import LearningOptions
from bottega.memory.patterns.pattern import Applicability, Category, Content, ContentKind, Pattern
from bottega.memory.text.signature import failure_signature
from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, gated, http_error, text
from tests.flows.test_run_memory import ended
from tests.service import Running, running
from tests.team import CALLS, define, start, systems

ABOUT = {"task_type": "build", "domain": "software"}
ORDER = ("requirements", "designer", "implementer")


def decomposition(name: str = "in that order") -> Pattern:
    return Pattern(
        name=name,
        category=Category.DECOMPOSITION,
        content=Content(
            ContentKind.TEMPLATE, {"steps": [{"do": each, "uses": each} for each in ORDER]}, ORDER
        ),
        applicability=Applicability(problem_types=("build",)),
        summary="Ask them in that order.",
        trust=3,
    )


async def plant(bottega: Running, pattern: Pattern, state: str = "VALIDATED") -> UUID:
    """Store a pattern as it is after several maintenance jobs."""
    found: UUID = uuid4()
    async with bottega.owner.acquire() as connection, connection.transaction():
        await connection.execute(
            "INSERT INTO patterns (tenant_id, id, name, category, state, trust, document,"
            " confidence, success_rate, applications, validated_at)"
            " VALUES ($1, $2, $3, $4, $5, $6, $7::jsonb, 0.8, 0.9, 20, now())",
            DEFAULT_TENANT,
            found,
            pattern.name,
            pattern.category,
            state,
            pattern.trust,
            to_json(pattern.document).decode(),
        )
        await connection.execute("SELECT pg_notify('bottega_patterns', $1)", str(DEFAULT_TENANT))
    return found


def of_patterns(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        frame["data"]
        for frame in frames
        if frame["type"] == "context.recalled" and frame["data"]["source"].startswith("pattern:")
    ]


async def episode_patterns(bottega: Running, run_id: str) -> dict[str, Any]:
    """Return the patterns and the plan of the run's episode."""
    row = await bottega.owner.fetchrow(
        "SELECT metadata, execution, task FROM episodes WHERE id = $1", episode_id_of(UUID(run_id))
    )
    assert row is not None
    return {name: from_json(value) for name, value in row.items()}


def with_shares(monkeypatch: pytest.MonkeyPatch, trial: float, withheld: float) -> None:
    """Assign patterns on trial, and withhold validated patterns, in these shares of runs."""
    options = LearningOptions(trial_share=trial, withheld_share=withheld)
    monkeypatch.setattr(Settings, "learning_options", options)


@pytest.fixture
def settings(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings with certain assignments."""
    with_shares(monkeypatch, 1.0, 0.0)
    return settings


async def test_all_of_a_pattern_that_helps_to_act_is_given(
    bottega: Running, model: FakeModel
) -> None:
    client = bottega.client
    await define(client)

    async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await client.post(f"/v1/patterns{path}", json=body)
        assert answer.status_code < 300, answer.text
        found: dict[str, Any] = answer.json()
        return found

    approach = {"approach": "Ship nightly.", "principles": [], "trade_offs": []}
    other = {
        "name": "Nightly",
        "category": "domain",
        "content": {"kind": "STRATEGY", "fields": approach},
        "applicability": {"problem_types": ["release"]},
    }
    procedure = {
        "steps": [{"do": "build it", "uses": ["designer"]}, {"do": "ask implementer"}],
        "branches": [{"when": "the build fails", "then": "read its log"}],
        "stop_when": "all tests pass",
    }
    body = {
        "name": "Build small",
        "category": "strategic",
        "content": {"kind": "PROCEDURE", "fields": procedure},
        "applicability": {
            "problem_types": ["build"],
            "conditions": [{"feature": "complexity", "op": "lt", "value": 0.9}],
            "anti_conditions": [{"not": {"feature": "domain", "op": "exists"}}],
        },
        "summary": "Build it in small steps.",
        "guide": {
            "when": "the task is to build something",
            "how": "Test each part.",
            "risks": ["many releases"],
            "alternatives": [(await post("", other))["id"], str(uuid4())],
        },
    }
    added = await post("", body)
    for _ in range(12):
        await post(f"/{added['id']}/applications", {"good": True, "baseline_rate": 0.3})
    assert (await post(f"/{added['id']}/validate", {}))["state"] == "VALIDATED"
    (given,) = of_patterns(await ended(bottega, await start(client, metadata=ABOUT)))
    assert given["content"].splitlines() == [
        "[pattern, strategic, validated, 100% of 12 went well, given by a person]",
        "  Build small",
        "  Build it in small steps.",
        "  Steps: build it (designer) → ask implementer",
        "  If: the build fails: read its log",
        "  Stop when: all tests pass",
        "  When: the task is to build something",
        "  Where: complexity < 0.9",
        "  Not where: not domain is known",
        "  How: Test each part.",
        "  Risks: many releases",
        "  Or instead: Nightly",
    ]
    assert any("Or instead: Nightly" in str(systems(each)) for each in model.requests)


async def test_a_given_pattern_and_its_outcome_are_in_the_episode(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    pattern_id = await plant(bottega, decomposition())
    run_id = await start(bottega.client, metadata=ABOUT)
    (given,) = of_patterns(await ended(bottega, run_id))
    assert given["source"] == f"pattern:{pattern_id}"
    assert (given["arm"], given["version"], given["category"]) == ("used", 1, "decomposition")
    shown = [r for r in model.requests if "Ask them in that order" in str(systems(r))]
    assert len(shown) == 4, "every call of the root, and nobody else's"
    metadata = (await episode_patterns(bottega, run_id))["metadata"]
    (known,) = metadata["patterns"]
    assert known == {
        "id": str(pattern_id),
        "version": 1,
        "arm": "used",
        "category": "decomposition",
        "followed": True,
        "good": None,
    }
    assert metadata["strategies_applied"] == [str(pattern_id)]
    assert metadata["features"]["task_type"] == "build"
    other = await start(bottega.client, metadata={"task_type": "other"})
    assert of_patterns(await ended(bottega, other)) == []


async def test_a_candidate_is_tried_only_in_runs_with_episodes(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    await plant(bottega, decomposition(), "CANDIDATE")
    run_id = await start(bottega.client, metadata=ABOUT)
    (given,) = of_patterns(await ended(bottega, run_id))
    assert given["arm"] == "trial"
    assert "candidate" in given["content"]
    read = await start(bottega.client, metadata=ABOUT, memory="read")
    assert of_patterns(await ended(bottega, read)) == []


async def test_a_withheld_pattern_is_in_the_log_but_in_no_prompt(
    settings: Settings, database_url: str, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_shares(monkeypatch, 0.0, 1.0)
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with running(configured, database_url, worker=True) as bottega:
        await define(bottega.client)
        await plant(bottega, decomposition("validated one"))
        await plant(bottega, decomposition("candidate one"), "CANDIDATE")
        run_id = await start(bottega.client, metadata=ABOUT)
        given = of_patterns(await ended(bottega, run_id))
        assert [(each["arm"], each["content"]) for each in given] == [
            ("withheld", ""),
            ("control", ""),
        ]
        assert not any("Ask them in that order" in str(r["messages"]) for r in model.requests)
        metadata = (await episode_patterns(bottega, run_id))["metadata"]
        assert [each["followed"] for each in metadata["patterns"]] == [True, True]
        assert metadata["strategies_applied"] == []
        memory = (await bottega.client.get(f"/v1/runs/{run_id}/working-memory")).json()
        assert "in that order" not in str(memory["sections"][-1])


async def test_resumed_and_repeated_runs_keep_their_assignments(
    settings: Settings, database_url: str, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured = settings.model_copy(
        update={"openai_base_url": model.base_url, "drain_grace_s": 0.0}
    )
    gate = asyncio.Event()
    async with running(configured, database_url, worker=True) as bottega:
        await define(bottega.client)
        await plant(bottega, decomposition())
        model.script(calls(("requirements", {"query": "x"})), text("R1"), gated(gate, text("no")))
        run_id = await start(bottega.client, metadata=ABOUT)
        await model.received(3)
    before = model.requests[-1]["messages"]
    with_shares(monkeypatch, 1.0, 1.0)
    model.script(text("Done."))
    async with running(configured, database_url, worker=True) as bottega:
        frames = await ended(bottega, run_id)
        assert model.requests[-1]["messages"] == before
        assert [each["arm"] for each in of_patterns(frames)] == ["used"]
        again = (
            await bottega.client.post(f"/v1/runs/{run_id}/retry", json={"from": "last_step"})
        ).json()
        (same,) = of_patterns(await ended(bottega, again["id"]))
        assert same["arm"] == "used"


@pytest.mark.deep
async def test_repetitions_get_the_assignment_of_the_first_run(
    settings: Settings, database_url: str, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_shares(monkeypatch, 1.0, 0.5)
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with running(configured, database_url, worker=True) as bottega:
        await define(bottega.client)
        await plant(bottega, decomposition())
        sides = set()
        for _ in range(6):
            run_id = await start(bottega.client, metadata=ABOUT)
            arms = [each["arm"] for each in of_patterns(await ended(bottega, run_id))]
            for _ in range(2):  # also the repetition of a repetition
                run_id = (await bottega.client.post(f"/v1/runs/{run_id}/retry", json={})).json()[
                    "id"
                ]
                again = [each["arm"] for each in of_patterns(await ended(bottega, run_id))]
                assert again == arms
            sides.update(arms)
        assert sides <= {"used", "withheld"}


async def test_a_failed_call_adds_advice_and_similar_failures(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    model.script(calls(("designer", {"query": "x"})), http_error(400), text("Without it."))
    first = await start(bottega.client, input="Draw a bridge.")
    failed = [f["data"] for f in await ended(bottega, first) if f["type"] == "tool.failed"]
    failure = failed[0]["error"]
    assert failure["type"] == "model_bad_request"
    signature = failure_signature(failure["type"], failure["message"], "designer")
    recovery = Pattern(
        name="ask again",
        category=Category.RECOVERY,
        content=Content(
            ContentKind.HEURISTIC,
            {"action": "Ask the requirements first."},
            uses=("requirements",),
            affects=("requirements", "designer"),
        ),
        applicability=Applicability(
            conditions=({"feature": "failure_signature", "op": "eq", "value": signature},)
        ),
        trust=3,
    )
    pattern_id = await plant(bottega, recovery)
    model.script(
        calls(("designer", {"query": "x"})),
        http_error(400),
        calls(("requirements", {"query": "x"})),
        text("R1"),
        text("Done."),
    )
    before = len(model.requests)
    second = await start(bottega.client, input="Something else entirely.", metadata=ABOUT)
    frames = await ended(bottega, second)
    (given,) = of_patterns(frames)
    assert given["source"] == f"pattern:{pattern_id}"
    failure = next(f for f in frames if f["type"] == "tool.failed")
    assert given["tool_call_id"] == failure["data"]["tool_call_id"]
    error, _, helped = model.requests[before + 2]["messages"][-1]["content"].partition("\n\n")
    assert error == f"Error: {failed[0]['error']['message']}"
    assert helped.startswith("Worked after this failure in an earlier run: requirements\n"), helped
    assert "Ask the requirements first." in helped
    assert "Draw a bridge." in helped, "who failed alike"
    assert "Ask the requirements first." not in str(model.requests[before]["messages"])
    (known,) = (await episode_patterns(bottega, second))["metadata"]["patterns"]
    assert (known["followed"], known["good"]) == (True, True)


@pytest.mark.deep
async def test_the_cure_stands_behind_the_error_also_in_a_resumed_run(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    update = {"openai_base_url": model.base_url, "drain_grace_s": 0.0}
    configured = settings.model_copy(update=update)
    broken = calls(("designer", {"query": "x"})), http_error(400)
    gate = asyncio.Event()
    async with running(configured, database_url, worker=True) as bottega:
        await define(bottega.client)
        model.script(*broken, text("Not cured."))
        await ended(bottega, await start(bottega.client, input="Draw a bridge."))
        model.script(
            *broken, calls(("requirements", {"query": "loads"})), text("R1"), text("Cured.")
        )
        await ended(bottega, await start(bottega.client, input="Draw a tunnel."))
        before = len(model.requests)
        model.script(*broken, gated(gate, text("no")))
        run_id = await start(bottega.client, input="Something else entirely.")
        await model.received(before + 3)
    asked = model.requests[-1]["messages"]
    error, _, helped = asked[-1]["content"].partition("\n\n")
    assert (asked[-1]["role"], error[:6]) == ("tool", "Error:")
    cure = 'Worked after this failure in an earlier run: requirements query="loads"\n'
    assert helped.startswith(cure), helped
    assert helped.count("loads") == 1, "the cure is said once"
    assert "Draw a tunnel." in helped
    assert "Draw a bridge." not in helped, "it has no cure"
    async with running(configured, database_url) as bottega:
        await bottega.owner.execute("DELETE FROM episode_search")
    model.script(text("Done."))
    async with running(configured, database_url, worker=True) as bottega:
        frames = await ended(bottega, run_id)
        path = f"/v1/runs/{run_id}/messages"
        messages = (await bottega.client.get(path)).json()["items"]
    assert model.requests[-1]["messages"] == asked
    assert [m["content"] for m in messages if m["role"] == "tool"] == [asked[-1]["content"]]
    (failed,) = [frame["data"] for frame in frames if frame["type"] == "tool.failed"]
    assert "Worked after" not in str(failed)


async def test_the_first_plan_is_stored_and_later_ones_are_adaptations(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    model.script(
        calls(("set_plan", {"steps": ["look", "act"]})),
        calls(("search_memory", {"query": "bridges"})),
        calls(("set_plan", {"steps": ["look", "ask", "act"]})),
        text("Done."),
    )
    run_id = await start(bottega.client)
    frames = await ended(bottega, run_id)
    names = [tool["function"]["name"] for tool in model.requests[0]["tools"]]
    assert names == [*ORDER, "set_plan", "search_memory"]
    assert "Plan:\n- look\n- ask\n- act" in systems(model.requests[-1])[-1]
    answers = [f["data"]["result"] for f in frames if f["type"] == "tool.completed"]
    assert answers[1] == "No earlier task was like that."
    found = await episode_patterns(bottega, run_id)
    assert found["execution"]["plan"] == ["look", "act"]
    assert found["execution"]["adaptations"] == [["look", "ask", "act"]]
    assert found["metadata"]["tools_used"] == [], "they do none of the work"
    memory = (await bottega.client.get(f"/v1/runs/{run_id}/working-memory")).json()
    assert "- ask" in next(s["content"] for s in memory["sections"] if s["name"] == "task")


async def test_an_agent_without_tools_is_given_none(bottega: Running, model: FakeModel) -> None:
    agent = {"name": "plain", "system_message": "x"}
    assert (await bottega.client.post("/v1/agents", json=agent)).status_code == 201
    answer = await bottega.client.post("/v1/runs?wait=30", json={"agent": "plain", "input": "x"})
    assert answer.json()["status"] == "completed"
    assert not model.requests[-1].get("tools")


async def test_without_memory_there_are_no_memory_tools(bottega: Running, model: FakeModel) -> None:
    await define(bottega.client)
    await ended(bottega, await start(bottega.client, memory="off"))
    roots = [r for r in model.requests if r.get("tools")]
    assert len(roots) == CALLS - 3
    assert all(len(request["tools"]) == 3 for request in roots)


def by_tool(**arguments: Any) -> Any:
    return calls(("answer", arguments))


async def test_a_model_extracts_the_task_s_features_once_per_run(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    configured = settings.model_copy(
        update={
            "openai_base_url": model.base_url,
            "memory_model": "thinker",
            "drain_grace_s": 0.0,
        }
    )
    gate = asyncio.Event()
    said = by_tool(goals=["a bridge"], constraints=["no nails"], criteria=[], complexity=0.9)

    def decide(request: dict[str, Any]) -> Any:
        return text("Reflected.") if request["model"] == "thinker" else text("Built.")

    model.decide = decide
    async with running(configured, database_url, worker=True) as bottega:
        await define(bottega.client)
        model.script(said, gated(gate, text("never")))
        run_id = await start(bottega.client, input="Build it.")
        await model.received(2)
    assert model.requests[0]["model"] == "thinker"
    assert "- no nails" in systems(model.requests[1])[-1]
    async with running(configured, database_url, worker=True) as bottega:
        await ended(bottega, run_id)
        asked = [r for r in model.requests[2:] if "tools" in r and r["model"] != "thinker"]
        assert systems(asked[0]) == systems(model.requests[1]), "and is not asked again"
        task = (await episode_patterns(bottega, run_id))["task"]
        assert (task["constraints"], task["complexity"]) == (["no nails"], 0.9)


async def test_a_run_works_without_the_feature_model(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    configured = settings.model_copy(
        update={"openai_base_url": model.base_url, "memory_model": "thinker"}
    )
    model.decide = lambda request: (
        http_error(400) if request["model"] == "thinker" else text("Built.")
    )
    async with running(configured, database_url, worker=True) as bottega:
        await define(bottega.client)
        run_id = await start(bottega.client, input="Build it.")
        frames = await ended(bottega, run_id)
        assert frames[-1]["type"] == "run.completed"
        warnings = [f["data"]["code"] for f in frames if f["type"] == "warning"]
        assert warnings == ["analysis_unavailable"]


async def test_advice_that_was_not_found_is_not_searched_again(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    configured = settings.model_copy(
        update={"openai_base_url": model.base_url, "drain_grace_s": 0.0}
    )
    gate = asyncio.Event()
    async with running(configured, database_url, worker=True) as bottega:
        await define(bottega.client)
        model.script(
            calls(("designer", {"query": "x"})),
            http_error(400),
            calls(("requirements", {"query": "x"})),
            text("R1"),
            gated(gate, text("no")),
        )
        run_id = await start(bottega.client, metadata=ABOUT)
        await model.received(5)
        recovery = Pattern(
            name="ask again",
            category=Category.RECOVERY,
            content=Content(ContentKind.HEURISTIC, {"action": "Ask the requirements first."}),
            applicability=Applicability(conditions=({"feature": "tool", "op": "exists"},)),
            trust=3,
        )
        await plant(bottega, recovery)
    before = model.requests[-1]["messages"]
    model.script(text("Done."))
    async with running(configured, database_url, worker=True) as bottega:
        frames = await ended(bottega, run_id)
        assert of_patterns(frames) == []
        assert model.requests[-1]["messages"] == before


async def test_advice_for_parallel_failures_is_replayed_in_order(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    configured = settings.model_copy(
        update={"openai_base_url": model.base_url, "drain_grace_s": 0.0}
    )
    slow, gate = asyncio.Event(), asyncio.Event()

    def helps(tool: str) -> Pattern:
        return Pattern(
            name=f"help with {tool}",
            category=Category.RECOVERY,
            content=Content(ContentKind.HEURISTIC, {"action": f"Do without {tool}."}),
            applicability=Applicability(
                conditions=({"feature": "tool", "op": "eq", "value": tool},)
            ),
            trust=3,
        )

    def decide(request: dict[str, Any]) -> Any:
        if not request.get("tools"):
            who = str(request["messages"])
            return gated(slow, http_error(400)) if "Y!" in who else http_error(400)
        if request["messages"][-1]["role"] == "user":
            return calls(("designer", {"query": "Y!"}), ("requirements", {"query": "x"}))
        return gated(gate, text("no"))

    model.decide = decide
    async with running(configured, database_url, worker=True) as bottega:
        await define(bottega.client)
        for tool in ("designer", "requirements"):
            await plant(bottega, helps(tool))
        run_id = await start(bottega.client, graph=None, metadata=ABOUT)
        async with websockets.connect(f"ws://127.0.0.1:{bottega.port}/v1/runs/{run_id}/ws") as log:
            while from_json(await log.recv())["type"] != "context.recalled":
                pass
            slow.set()
        await model.received(4)
    before = model.requests[-1]["messages"]
    assert "Do without designer." in str(before)
    gate.set()
    async with running(configured, database_url, worker=True) as bottega:
        frames = await ended(bottega, run_id)
        assert len(of_patterns(frames)) == 2
        assert model.requests[-1]["messages"] == before


async def test_advice_is_removed_with_its_undone_failure(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    gate = asyncio.Event()
    async with running(configured, database_url, worker=True) as bottega:
        await define(bottega.client)
        recovery = Pattern(
            name="ask again",
            category=Category.RECOVERY,
            content=Content(ContentKind.HEURISTIC, {"action": "Ask them."}, affects=("designer",)),
            applicability=Applicability(conditions=({"feature": "tool", "op": "exists"},)),
            trust=3,
        )
        await plant(bottega, recovery)
        model.script(calls(("designer", {"query": "x"})), http_error(400), gated(gate, text("no")))
        run_id = await start(bottega.client, metadata=ABOUT)
        assert "Ask them." in str((await model.received(3))["messages"])
        await bottega.client.post(f"/v1/runs/{run_id}/cancel")
        assert len(of_patterns(await ended(bottega, run_id))) == 1
        model.script(text("D1"), text("Done."))
        body = {"from": "last_step"}
        again = (await bottega.client.post(f"/v1/runs/{run_id}/retry", json=body)).json()
        frames = await ended(bottega, again["id"])
        assert frames[-1]["type"] == "run.completed"
        assert of_patterns(frames) == []
        assert "Ask them." not in str(model.requests[-1]["messages"])
        assert "patterns" not in (await episode_patterns(bottega, again["id"]))["metadata"]


async def test_a_failed_search_reveals_nothing_about_the_database(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    gate = asyncio.Event()
    model.script(gated(gate, calls(("search_memory", {"query": "bridges"}))), text("Done."))
    run_id = await start(bottega.client)
    await model.received(1)
    await bottega.owner.execute("ALTER TABLE episode_search RENAME TO elsewhere")
    gate.set()
    frames = await ended(bottega, run_id)
    assert frames[-1]["type"] == "run.completed"
    (failed,) = [f["data"] for f in frames if f["type"] == "tool.failed"]
    assert failed["error"]["type"] == "unavailable"
    assert "go on without it" in failed["error"]["message"]
    assert "episode_search" not in failed["error"]["message"]
