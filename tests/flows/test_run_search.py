"""Searching the list of runs by their question, end, cost and rating."""

from typing import Any
from urllib.parse import urlencode

import pytest

from tests.fake_model import FakeModel, http_error, text
from tests.flows.test_outcomes import define, finished
from tests.service import Running
from tests.waiting import until


async def found(bottega: Running, **query: Any) -> list[str]:
    """Return the questions of the runs that a search finds, newest last."""
    answer = await bottega.client.get(f"/v1/runs?{urlencode(query, doseq=True)}")
    assert answer.status_code == 200, answer.text
    return [run["question"] for run in answer.json()["items"]]


@pytest.mark.parametrize(
    ("searched", "there"),
    [
        ("refund", ["My REFUND, please"]),
        ("cafe", ["Where is the Café?", "cafe menu"]),
        ("CAFÉ", ["Where is the Café?", "cafe menu"]),
        ("100%", ["100% off"]),
        ("%", ["100% off"]),
        ("_", []),
        ("nothing of it", []),
    ],
)
async def test_runs_are_found_by_their_question(
    guest: Running, searched: str, there: list[str]
) -> None:
    await define(guest, None)
    for question in ("My REFUND, please", "Where is the Café?", "100% off", "cafe menu"):
        await finished(guest, input=question)
    assert await found(guest, q=searched) == there
    assert await found(guest, q=searched, order="desc") == there[::-1]


async def test_the_question_is_the_users_last_text(guest: Running) -> None:
    await define(guest, None)
    parts = [{"type": "text", "text": "of parts"}]
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": parts},
    ]
    run = await finished(guest, input=messages)
    assert run["question"] == "of parts"
    assert (await finished(guest, input="x" * 400))["question"] == "x" * 200
    assert await found(guest, q="x" * 300) == ["x" * 200]
    assert await found(guest, q="x" * 301) == []
    assert await found(guest, q="first") == []


async def test_pages_of_a_search_are_those_of_the_list(guest: Running) -> None:
    await define(guest, None)
    for number in range(5):
        await finished(guest, input=f"{'odd' if number % 2 else 'even'} {number}")
    first = (await guest.client.get("/v1/runs?q=even&limit=2")).json()
    assert [run["question"] for run in first["items"]] == ["even 0", "even 2"]
    cursor = first["next_cursor"]
    last = (await guest.client.get(f"/v1/runs?q=even&limit=2&cursor={cursor}")).json()
    assert [run["question"] for run in last["items"]] == ["even 4"]
    assert last["next_cursor"] is None


async def test_runs_are_found_by_how_they_ended(guest: Running, guest_model: FakeModel) -> None:
    await define(guest, [{"type": "contains", "value": "blue"}], model_patience_s=0.1)
    guest_model.decide = lambda request: text("blue")
    await finished(guest, input="good", metadata={"team": "a"})
    guest_model.decide = lambda request: text("red")
    await finished(guest, input="bad", metadata={"team": "a"})
    guest_model.decide = lambda request: http_error(400)
    failed = await finished(guest, input="broken")
    rating = {"outcome": "SUCCESS", "comment": "as wanted"}
    path = f"/v1/runs/{failed['id']}/feedback"
    code = failed["error"]["code"]

    async def judged() -> bool:
        return await found(guest, outcome="FAILURE") == ["bad", "broken"]

    await until(judged)
    assert (await guest.client.post(path, json=rating)).is_success
    assert await found(guest, outcome="SUCCESS") == ["good", "broken"]
    assert await found(guest, rated="true") == ["broken"]
    assert await found(guest, rated="false") == ["good", "bad"]
    assert await found(guest, error_code=code) == ["broken"]
    assert await found(guest, error_code="other") == []
    assert await found(guest, status=["failed", "completed"], q="b") == ["bad", "broken"]
    assert await found(guest, status=["failed", "waiting"]) == ["broken"]
    assert await found(guest, agent=["a", "nobody"], outcome="FAILURE") == ["bad"]
    assert await found(guest, agent=["nobody", "other"]) == []
    assert await found(guest, outcome="FAILURE", metadata="team:a") == ["bad"]
    assert await found(guest, outcome="FAILURE", metadata="team:b") == []
    assert await found(guest, version=1) == ["good", "bad", "broken"]
    assert await found(guest, version=2) == []
    assert (
        failed["version"],
        (await guest.client.get("/v1/runs")).json()["items"][0]["version"],
    ) == (1, 1)
    assert await found(guest, longer_than_s=0) == ["good", "bad", "broken"]
    assert await found(guest, longer_than_s=600) == []
    assert await found(guest, cost_over=1000) == []
    assert await found(guest, retrying="false") == ["good", "bad", "broken"]


async def test_runs_are_found_by_who_judged_them_and_why(
    guest: Running, guest_model: FakeModel
) -> None:
    await define(guest, [{"type": "contains", "value": "blue"}])
    guest_model.decide = lambda request: text("red")
    for question in ("checked", "also checked"):
        await finished(guest, input=question)
    run = await finished(guest, input="rated")

    async def judged() -> bool:
        return len(await found(guest, outcome="FAILURE")) == 3

    await until(judged)
    rating = {"outcome": "PARTIAL", "comment": "Wrong colour, très sombre"}
    assert (await guest.client.post(f"/v1/runs/{run['id']}/feedback", json=rating)).is_success
    assert await found(guest, judged_by="check") == ["checked", "also checked"]
    assert await found(guest, judged_by="feedback") == ["rated"]
    assert await found(guest, outcome_reason="BLUE") == ["checked", "also checked"]
    assert await found(guest, outcome_reason="tres sombre") == ["rated"]
    assert await found(guest, outcome_reason="nothing") == []
    assert await found(guest, outcome_reason="blue", q="also") == ["also checked"]


async def test_the_runs_of_a_list_are_counted_with_what_they_spent(
    guest: Running, guest_model: FakeModel
) -> None:
    await define(guest, None, model_patience_s=0.1)
    guest_model.decide = lambda request: text("yes")
    for question in ("of a", "again of a"):
        await finished(guest, input=question, user="a", metadata={"team": "a"})
    run = await finished(guest, input="of b", user="b", metadata={"team": "b"})
    guest_model.decide = lambda request: http_error(400)
    await finished(guest, input="of a, broken", user="a")

    async def totals(**query: Any) -> Any:
        answer = await guest.client.get(f"/v1/runs/totals?{urlencode(query, doseq=True)}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    every = await totals()
    listed = (await guest.client.get("/v1/runs")).json()["items"]
    used = run["usage"]["input"]
    assert (every["runs"], every["failed"], every["complete"]) == (4, 1, True)
    assert every["usage"]["input"] == sum(each["usage"]["input"] for each in listed) > 0
    assert every["usage"]["cost"]["currency"] == "USD"
    assert (await totals(user="a"))["runs"] == 3
    assert (await totals(user="a", q="broken"))["failed"] == 1
    assert (await totals(metadata="team:b"))["usage"]["input"] == used
    assert (await totals(metadata="team:b", status=["failed", "timeout"]))["runs"] == 0
    assert (await totals(created_before=run["created_at"]))["runs"] == 2
    refused = await guest.client.get("/v1/runs/totals?limit=1")
    assert refused.status_code == 422


async def test_a_run_that_retries_its_model_call_is_found(
    guest: Running, guest_model: FakeModel
) -> None:
    await define(guest, None)
    guest_model.decide = lambda request: http_error(503, {"retry-after": "6"})
    body = {"agent": "a", "input": "slow"}
    run = (await guest.client.post("/v1/runs", json=body)).json()

    async def is_found() -> bool:
        return await found(guest, retrying="true") == ["slow"]

    await until(is_found)
    assert await found(guest, retrying="false") == []
    assert (await guest.client.post(f"/v1/runs/{run['id']}/cancel")).is_success


@pytest.mark.parametrize(
    "query",
    ["q=", f"q={'x' * 501}", "outcome=GOOD", "longer_than_s=-1", "cost_over=nan", "version=0"],
)
async def test_values_that_no_search_has_are_refused(guest: Running, query: str) -> None:
    answer = await guest.client.get(f"/v1/runs?{query}")
    assert answer.status_code == 422, answer.text
