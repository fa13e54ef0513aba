"""Figures over time, over HTTP, of runs that a worker executed."""

from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any, get_args

import pytest

from bottega.api.routes.series import Grouping, Metric
from tests.fake_model import FakeModel, calls, chunk, http_error, sse
from tests.flows.test_usage import ended, sums
from tests.service import Running
from tests.team import define, start
from tests.waiting import until

REPORTED = {"prompt_tokens": 70, "completion_tokens": 30}
ANSWER = sse(chunk("R", finish_reason="stop"), {"choices": [], "usage": REPORTED})


def around(moment: datetime, minutes: int = 10) -> dict[str, str]:
    width = timedelta(minutes=minutes)
    return {"from": (moment - width).isoformat(), "to": (moment + width).isoformat()}


async def rolled_up(bottega: Running) -> None:
    """Do what is due every few seconds at once."""
    await bottega.owner.execute("DELETE FROM last_sum")
    await bottega.owner.execute("SELECT sum_storage(0)")


async def series(bottega: Running, metric: str, **query: Any) -> dict[str, list[Any]]:
    """Return the values of a metric that are not empty, by key."""
    about = {"step": "1m", **around(datetime.now(UTC)), **query}
    answer = await bottega.client.get("/v1/metrics/series", params={"metric": metric, **about})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert (told["metric"], told["by"]) == (metric, query.get("by"))
    assert [each["key"] for each in told["series"]] == sorted(e["key"] for e in told["series"])
    return {
        each["key"]: [point["value"] for point in each["points"] if point["value"]]
        for each in told["series"]
    }


async def totals(bottega: Running, **query: Any) -> dict[str, dict[str, Any]]:
    answer = await bottega.client.get("/v1/metrics/totals", params=query)
    assert answer.status_code == 200, answer.text
    return {each["key"]: each for each in answer.json()["items"]}


async def test_figures_agree_with_the_runs(bottega: Running, model: FakeModel) -> None:
    await define(bottega.client)
    agent = {"description": "Codes.", "system_message": "You code."}
    changed = await bottega.client.put("/v1/agents/requirements", json=agent)
    assert changed.status_code == 200, changed.text
    one = {"agent": "requirements", "graph": None}
    model.script(ANSWER, ANSWER, http_error(400))
    runs = [await ended(bottega, **one), await ended(bottega, **one), await ended(bottega, **one)]
    assert [run["status"] for run in runs] == ["completed", "completed", "failed"]
    code = runs[2]["error"]["code"]
    await rolled_up(bottega)

    for by, key in (
        *((None, "all"), ("agent", "requirements"), ("version", "requirements@2")),
        ("model", "gpt-5-mini"),
    ):
        about = {} if by is None else {"by": by}
        assert sum((await series(bottega, "runs", **about))[key]) == 3
        assert sum((await series(bottega, "errors", **about))[key]) == 1
        assert sum((await series(bottega, "tokens", **about))[key]) == 200
    assert await series(bottega, "errors", by="code") == {code: [1]}
    (spent,) = await sums(bottega, "agent")
    assert spent["input"] + spent["output"] == 200
    seconds = sorted(
        (datetime.fromisoformat(run["ended_at"]) - datetime.fromisoformat(run["started_at"]))
        / timedelta(seconds=1)
        for run in runs
    )
    whole = {**around(datetime.now(UTC)), "step": "1d"}
    for name, exact in (("p50", seconds[1]), ("p95", seconds[2])):
        (told,) = (await series(bottega, f"duration_{name}", **whole))["all"]
        assert told == pytest.approx(exact, rel=0.1)
    events = (await bottega.client.get(f"/v1/runs/{runs[0]['id']}/events")).json()["items"]
    (call,) = (each["data"] for each in events if each["type"] == "llm.completed")
    assert 0 <= call["first_token_ms"] <= call["duration_ms"]
    assert (await series(bottega, "first_token_p50", by="version", **whole))["requirements@2"]

    told = (await totals(bottega, by="version", agent="requirements"))["requirements@2"]
    assert (told["runs"], told["errors"], told["tokens"], told["cost"]) == (3, 1, 200, 0)
    assert told["duration_p95"] == pytest.approx(seconds[2], rel=0.1)
    assert told["queue_wait_p95"] > 0
    assert told["first_token_p50"] > 0
    assert await totals(bottega, by="version", agent="someone") == {}


async def test_waits_for_people_are_no_time_of_a_run(bottega: Running, model: FakeModel) -> None:
    ask = {"type": "builtin", "name": "ask_user"}
    agent = {"name": "asker", "system_message": "You ask.", "tools": [ask]}
    (await bottega.client.post("/v1/agents", json=agent)).raise_for_status()
    model.script(calls(("ask_user", {"question": "Which?"})), ANSWER)
    run_id = await start(bottega.client, agent="asker", graph=None)

    async def status() -> str:
        return str((await bottega.client.get(f"/v1/runs/{run_id}")).json()["status"])

    await until(status, lambda seen: seen == "waiting")
    await bottega.owner.execute("UPDATE run_waits SET since = since - interval '1 hour'")
    await bottega.owner.execute(
        "UPDATE runs SET started_at = started_at - interval '1 hour',"
        " deadline = deadline - interval '1 hour'"
    )
    (asked,) = (await bottega.client.get("/v1/interrupts?status=pending")).json()["items"]
    said = await bottega.client.post(f"/v1/interrupts/{asked['id']}/resolve", json={"answer": "B"})
    assert said.status_code == 200, said.text
    await until(status, lambda seen: seen == "completed")
    await rolled_up(bottega)
    whole = {**around(datetime.now(UTC), 120), "step": "1d"}
    (told,) = (await series(bottega, "duration_p95", **whole))["all"]
    assert told < 600


async def test_a_run_of_a_team_counts_once_and_its_calls_for_who_made_them(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    model.script(*[ANSWER] * 3)
    await ended(bottega)
    await rolled_up(bottega)
    await rolled_up(bottega)  # a second time changes nothing
    runs = await series(bottega, "runs", by="agent")
    spent = {each["agent"]: each for each in await sums(bottega, "agent")}
    tokens = await series(bottega, "tokens", by="agent")
    assert sum(map(sum, runs.values())) == 1
    assert {key: sum(values) for key, values in tokens.items()} == {
        name: each["input"] + each["output"] for name, each in spent.items()
    }


async def test_every_combination_answers(bottega: Running) -> None:
    for metric, by in product(get_args(Metric), get_args(Grouping)):
        assert await series(bottega, metric, by=by) == {}
    for metric in get_args(Metric):
        assert await series(bottega, metric) == {"all": []}


async def test_points_are_whole_steps_and_say_what_is_not_known(bottega: Running) -> None:
    now = datetime.now(UTC)
    start = now - timedelta(minutes=3)
    for step, number in (("1m", range(7, 9)), ("5m", range(2, 4)), ("1h", (1, 2)), ("1d", (1, 2))):
        query = {"metric": "runs", "step": step, "from": start.isoformat()}
        query["to"] = (now + timedelta(minutes=4)).isoformat()
        told = (await bottega.client.get("/v1/metrics/series", params=query)).json()
        (points,) = [each["points"] for each in told["series"]]
        assert len(points) in number
        first = datetime.fromisoformat(points[0]["at"])
        assert first <= start
        assert first.second == 0
    old = {"metric": "runs", "step": "1m", "from": "2020-01-01T00:00:00Z"}
    answer = await bottega.client.get(
        "/v1/metrics/series", params=old | {"to": "2020-01-01T00:02:00Z"}
    )
    assert [point["value"] for point in answer.json()["series"][0]["points"]] == [None, None]


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ({}, "metric"),
        ({"metric": "colour"}, "metric"),
        ({"metric": "runs", "by": "user"}, "by"),
        ({"metric": "runs", "step": "2m"}, "step"),
        ({"metric": "runs", "colour": "red"}, "colour"),
        ({"metric": "runs", "since": "2026-11-01T00:00:00Z"}, "since"),
        ({"metric": "runs", "from": "yesterday"}, "from"),
        ({"metric": "runs", "from": "2026-11-02T00:00:00Z", "to": "2026-11-01T00:00:00Z"}, "to"),
        (
            {"metric": "runs", "step": "1m", "from": "2026-10-01T00:00:00Z"}
            | {"to": "2026-10-31T00:00:00Z"},
            "step",
        ),
    ],
)
async def test_what_has_no_answer_is_refused(
    bottega: Running, query: dict[str, str], name: str
) -> None:
    answer = await bottega.client.get("/v1/metrics/series", params=query)
    assert answer.status_code == 422, answer.text
    assert name in {
        each.get("parameter") or each["pointer"].removeprefix("/")
        for each in answer.json()["errors"]
    }


async def test_usual_bound_is_eleven_thousand_points(bottega: Running) -> None:
    start = datetime(2026, 11, 1, tzinfo=UTC)
    for minutes, expected in ((11_000, 200), (11_001, 422)):
        until = (start + timedelta(minutes=minutes)).isoformat()
        query = {"metric": "runs", "step": "1m", "from": start.isoformat(), "to": until}
        answer = await bottega.client.get("/v1/metrics/series", params=query)
        assert answer.status_code == expected
