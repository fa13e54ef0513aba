"""Outcomes of judged runs, and the effect of memory, over HTTP."""

from functools import partial
from typing import Any

from tests.api.test_patterns import add
from tests.fake_model import FakeModel, http_error, text
from tests.flows.test_episodes import judge
from tests.flows.test_learning import define, done
from tests.service import Running
from tests.waiting import until

JUDGES = [{"type": "judge", "criteria": "Is it right?"}]
WORDS = [{"type": "contains", "value": "3"}]


async def outcomes(bottega: Running, **query: Any) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Return good, partly and bad runs by key and source."""
    answer = await bottega.client.get("/v1/metrics/outcomes", params=query)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["complete"]
    return {
        (each["key"], each["source"]): (each["good"], each["partly"], each["bad"])
        for each in told["items"]
    }


async def test_outcomes_are_told_by_who_judged_the_runs(bottega: Running, model: FakeModel) -> None:
    await define(bottega.client)
    for check, answers in ((None, ("3", "5")), (WORDS, ("3", "4")), (JUDGES, ("3",))):
        if check is not None:
            body = {"system_message": "You add.", "success_check": check}
            (await bottega.client.put("/v1/agents/a", json=body)).raise_for_status()
        for answer in answers:
            verdict = [text('{"passed": true, "reason": "so"}')] if check == JUDGES else []
            model.script(text(answer), *verdict)
            run = await done(bottega, memory="off")
            if check is None:
                outcome = "PARTIAL" if answer == "3" else "SUCCESS"
                await judge(bottega.client, run["id"], outcome=outcome)

    async def by_version() -> dict[tuple[str, str], tuple[int, int, int]]:
        return await outcomes(bottega, by="version", agent="a")

    await until(by_version, lambda each: len(each) == 3)
    model.script(http_error(400))
    body = {"agent": "a", "input": "?", "memory": "off"}
    failed = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
    found = await until(by_version, lambda each: len(each) == 4)
    assert found == {
        ("a@1", "feedback"): (1, 1, 0),
        ("a@2", "check"): (1, 0, 1),
        ("a@3", "judge"): (1, 0, 0),
        ("a@3", "status"): (0, 0, 1),
    }
    for source, good, bad in (
        ("feedback", 1, 0),
        ("check", 1, 1),
        ("judge", 1, 0),
        ("status", 0, 1),
    ):
        for outcome, number in (("SUCCESS", good), ("FAILURE", bad)):
            query = {"judged_by": source, "outcome": outcome}
            listed = (await bottega.client.get("/v1/runs", params=query)).json()["items"]
            assert [each["judged_by"]["source"] for each in listed] == [source] * number, query
    (rated,) = (await bottega.client.get("/v1/runs?outcome=PARTIAL")).json()["items"]
    assert rated["judged_by"] == {"source": "feedback", "author": "local"}
    assert failed["judged_by"] == {"source": "status", "author": None}
    await judge(bottega.client, failed["id"], outcome="PARTIAL")
    assert ("a@3", "status") not in await by_version(), "a person's outcome replaces the status"
    assert await outcomes(bottega, agent="b") == {}
    by_memory = await outcomes(bottega, by="memory")
    assert by_memory[("without", "check")] == (1, 0, 1)
    assert {key for key, _ in by_memory} == {"without"}
    (day,) = {key for key, _ in await outcomes(bottega)}
    (newest, *_) = (await bottega.client.get("/v1/runs?order=desc")).json()["items"]
    assert newest["created_at"].startswith(day)
    before = {"from": "2020-01-01T00:00:00Z", "to": "2020-02-01T00:00:00Z"}
    assert await outcomes(bottega, **before) == {}
    swapped = {"from": before["to"], "to": before["from"]}
    refused = await bottega.client.get("/v1/metrics/outcomes", params=swapped)
    assert refused.status_code == 422


async def test_memory_is_judged_by_the_runs_drawn_to_go_without(bottega: Running) -> None:
    async def effect(**query: Any) -> dict[str, Any]:
        answer = await bottega.client.get("/v1/metrics/memory-effect", params=query)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    nothing = {"good": 0, "runs": 0}
    unknown = {"difference": None, "low": None, "high": None, "patterns": 0, "complete": True}
    none: dict[str, Any] = {"by_pattern": [], "by_version": []}
    assert await effect() == {"given": nothing, "without": nothing, **unknown, **none}
    pattern = await add(bottega.client, name="ask first")
    alone = await add(bottega.client, name="never withheld")
    await bottega.owner.execute(
        """
        INSERT INTO pattern_applications (tenant_id, pattern_id, version, arm, at, good)
        SELECT p.tenant_id, p.id, 1, n.arm, now(), n.good
        FROM patterns p CROSS JOIN (
            SELECT arm, place <= of AS good FROM (VALUES
                ('trial', 9), ('control', 5), ('reported', 10)) AS v(arm, of),
                generate_series(1, 10) AS place) AS n
        WHERE p.id = $1 OR p.id = $2 AND n.arm = 'trial'
    """,
        pattern["id"],
        alone["id"],
    )
    found = await effect()
    assert found["given"] == {"good": 9, "runs": 10}
    assert found["without"] == {"good": 5, "runs": 10}
    assert (found["difference"], found["patterns"]) == (0.4, 1)
    assert -0.1 < found["low"] < 0.1 < 0.5 < found["high"] < 0.8
    (one,) = found["by_pattern"]
    assert (one["name"], one["pattern_id"], one["on_trial"]) == ("ask first", pattern["id"], True)
    assert (one["given"], one["without"], one["difference"]) == (
        *(found["given"], found["without"]),
        0.4,
    )
    assert found["by_version"] == []
    assert (await effect(agent="a"))["patterns"] == 0


async def test_the_effect_of_memory_is_told_for_each_version_of_an_agent(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    ran = []
    for number in range(1, 5):
        model.script(text("3"))
        ran.append((await done(bottega))["id"])
        await until(partial(_episode_of, bottega, ran[-1]))
        if number == 2:
            body = {"system_message": "You add well."}
            (await bottega.client.put("/v1/agents/a", json=body)).raise_for_status()
    pattern = await add(bottega.client, name="ask first")
    drawn = (("trial", True), ("control", False), ("trial", True), ("control", True))
    for run, (arm, good) in zip(ran, drawn, strict=True):
        await bottega.owner.execute(
            """
            INSERT INTO pattern_applications
                (tenant_id, pattern_id, version, episode_id, arm, at, good)
            SELECT tenant_id, $1, 1, id, $3, now(), $4 FROM episodes WHERE run_id = $2
        """,
            *(pattern["id"], run, arm, good),
        )
    answer = await bottega.client.get("/v1/metrics/memory-effect", params={"agent": "a"})
    found = answer.json()
    assert [
        (each["version"], each["given"]["runs"], each["without"]["good"], each["difference"])
        for each in found["by_version"]
    ] == [(1, 1, 0, 1.0), (2, 1, 1, 0.0)]
    assert (found["patterns"], found["difference"]) == (1, 0.5)
    (one,) = found["by_pattern"]
    assert (one["given"], one["without"]) == ({"good": 2, "runs": 2}, {"good": 1, "runs": 2})
    for draw, numbers in (("with", {0, 2}), ("without", {1, 3})):
        listed = (await bottega.client.get("/v1/runs", params={"memory_draw": draw})).json()[
            "items"
        ]
        assert {(each["id"], each["memory_draw"]) for each in listed} == {
            (ran[number], draw) for number in numbers
        }
    for run in ran[:2]:
        await judge(bottega.client, run, outcome="SUCCESS")
    query = {"agent": "a", "judged_by": "feedback"}
    narrow = (await bottega.client.get("/v1/metrics/memory-effect", params=query)).json()
    assert [(each["version"], each["given"]["runs"]) for each in narrow["by_version"]] == [(1, 1)]
    query["judged_by"] = "judge"
    narrow = (await bottega.client.get("/v1/metrics/memory-effect", params=query)).json()
    assert narrow["patterns"] == 0


async def _episode_of(bottega: Running, run: str) -> Any:
    query = "SELECT id FROM episodes WHERE run_id = $1"
    return await bottega.owner.fetchval(query, run)
