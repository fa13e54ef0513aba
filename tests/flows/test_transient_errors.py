"""Errors of the database that pass: no run ends because of one, and no request gets 500."""

import re
from collections.abc import AsyncIterator, Iterator
from itertools import cycle, product
from typing import Any
from uuid import UUID

import asyncpg
import httpx2
import pytest

from bottega.db import failures
from bottega.errors import DatabaseAwayError
from bottega.settings import Settings
from tests.fake_model import FakeModel
from tests.faults import ENDED, LOST, Faults, faults
from tests.flows.conftest import asking
from tests.flows.test_schedules import make_due
from tests.service import Running, running
from tests.team import RUN, define, start
from tests.waiting import until

STATES = (
    *("40001", "40P01", "53200", "53300", "55P03", "57014", ENDED, "57P03", "58030", LOST),
    "25P03",
)
OF_REQUESTS = {
    "acting as a tenant": "set_config('role'",
    "a new run": "submit_run(",
    "a run": "FROM runs",
    "a page of events": "FROM run_events",
    "a stream": "run_cursor(",
    "events of a stream": "read_logs(",
    "a cancel": "cancel_run(",
}
OF_WORKERS = {
    "a claim": "FROM claim(",
    "a step": "append_steps(",
    "earlier runs": "search_episodes(",
    "a notice": "pg_notify(",
    "leased work": "claim_due(",
    "a vector": "INSERT INTO episode_vectors",
    "the lease": "FROM report(",
    "the sweep": "sweep(",
}
UNSURE = (ENDED, "57P03", LOST)
"""States after which nobody knows if a transaction was committed."""
TIMES, FAR = 2, 1000


def matrix(kinds: dict[str, str]) -> list[Any]:
    """Return each statement with each state; the gate has one state of each statement."""
    sample = set(zip(kinds, cycle(STATES), strict=False))
    return [
        pytest.param(
            kinds[kind],
            state,
            id=f"{kind}-{state}",
            marks=() if (kind, state) in sample else pytest.mark.deep,
        )
        for kind, state in product(kinds, STATES)
    ]


@pytest.fixture(scope="module")
def planned() -> Iterator[Faults]:
    with faults() as planned:
        yield planned


@pytest.fixture(scope="module")
async def served(
    module_settings: Settings, shared_url: str, shared_model: FakeModel, planned: Faults
) -> AsyncIterator[Running]:
    settings = asking(shared_model, module_settings).model_copy(update={"takeover_s": 6.0})
    async with running(settings, shared_url, worker=True) as server:
        await define(server.client)
        yield server


async def send(client: httpx2.AsyncClient, method: str, path: str, **body: Any) -> httpx2.Response:
    """Send a request as a client does: again while the service says that it is unavailable."""

    async def once() -> httpx2.Response:
        answer = await client.request(method, path, **body)
        if answer.status_code == 503:
            assert answer.headers["retry-after"] == "1"
        return answer

    answer = await until(once, lambda answer: answer.status_code != 503)
    assert answer.status_code < 500, answer.text
    return answer


async def ended(client: httpx2.AsyncClient, run_id: str) -> dict[str, Any]:
    async def look() -> dict[str, Any]:
        run: dict[str, Any] = (await send(client, "GET", f"/v1/runs/{run_id}")).json()
        return run

    return await until(look, lambda run: run["status"] not in ("queued", "running"))


@pytest.mark.parametrize(("part", "state"), matrix(OF_REQUESTS))
async def test_a_request_is_repeated_or_gets_503(
    served: Running, planned: Faults, part: str, state: str
) -> None:
    client = served.client
    planned.plan(part, state=state, times=TIMES)

    async def post(path: str, **body: Any) -> dict[str, Any]:
        answer = await client.post(path, **body)
        if answer.status_code == 503:
            assert state in UNSURE, "the server rolled it back for sure"
            answer = await send(client, "POST", path, **body)
        assert answer.status_code in (200, 202)
        made: dict[str, Any] = answer.json()
        return made

    run_id = (await post("/v1/runs", json=RUN))["id"]
    assert (await ended(client, run_id))["status"] == "completed"
    for path in ("/v1/runs", f"/v1/runs/{run_id}/events", f"/v1/runs/{run_id}/tasks"):
        assert (await client.get(path)).status_code == 200
    assert (await served.watch(run_id))[-1]["type"] == "run.completed"
    await post(f"/v1/runs/{run_id}/cancel")
    assert planned.raised.total() == TIMES
    planned.end()


@pytest.mark.parametrize(("part", "state"), matrix(OF_WORKERS))
async def test_no_run_ends_because_of_an_error_that_passes(
    served: Running, planned: Faults, part: str, state: str
) -> None:
    planned.plan(part, state=state, times=TIMES)
    runs = [await ended(served.client, await start(served.client)) for _ in range(2)]
    assert [run["status"] for run in runs] == ["completed"] * 2
    causes = [attempt["cause"] for run in runs for attempt in run["attempts"]]
    assert "crash" not in causes
    await until(lambda: planned.raised.total() == TIMES)


COLD = ("pinned_definitions(", "FROM secrets", "read_pins(")


@pytest.mark.deep
@pytest.mark.parametrize("state", ["40001", ENDED])
async def test_a_service_that_knows_nothing_yet_outlives_errors(
    settings: Settings, database_url: str, model: FakeModel, planned: Faults, state: str
) -> None:
    async with running(asking(model, settings), database_url, worker=True) as bottega:
        await define(bottega.client)
        planned.plan(*COLD, state=state, times=TIMES)
        created = await send(bottega.client, "POST", "/v1/runs", json=RUN)
        run = await ended(bottega.client, created.json()["id"])
    assert run["status"] == "completed"
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start"]
    assert planned.raised == dict.fromkeys(COLD, TIMES)


@pytest.mark.deep
async def test_a_run_outlives_an_outage_however_long(
    served: Running, planned: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_PERSIST_S", 0.3)
    planned.plan("append_steps(", "hand_back(", state="53300", times=FAR)
    run_id = await start(served.client)
    await until(lambda: planned.raised["hand_back("] > 3)
    planned.end()
    run = await ended(served.client, run_id)
    assert run["status"] == "completed"
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start", "drain"]


@pytest.mark.deep
async def test_a_statement_that_is_cancelled_each_time_is_tried_a_few_times_only(
    served: Running, planned: Faults
) -> None:
    planned.plan("submit_run(", state="57014", times=FAR)
    answer = await served.client.post("/v1/runs", json=RUN)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert planned.raised.total() == len(failures.PAUSES_S) + 1
    planned.plan("append_steps(", state="57014", times=FAR)
    run_id = await start(served.client)
    attempts = "SELECT attempt FROM runs WHERE id = $1"
    await until(lambda: served.owner.fetchval(attempts, UUID(run_id)), lambda n: n >= 2)
    assert planned.raised.total() <= 20
    planned.end()
    assert (await ended(served.client, run_id))["status"] == "completed"


async def test_what_is_no_error_that_passes_is_a_bug_and_says_so(
    served: Running, planned: Faults
) -> None:
    planned.plan("FROM runs", state="XX000", times=1)
    answer = await served.client.get("/v1/runs")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert re.search(
        r"the server's log says more under the number [0-9a-f]{12}$", answer.json()["detail"]
    )
    planned.plan("append_steps(", state="XX000", times=2)  # in a group, then alone
    run = await ended(served.client, await start(served.client))
    assert (run["status"], run["error"]["code"]) == ("failed", "internal")


async def test_a_run_whose_secrets_cannot_be_read_for_a_bug_ends(
    settings: Settings, database_url: str, model: FakeModel, planned: Faults
) -> None:
    async with running(asking(model, settings), database_url, worker=True) as bottega:
        await define(bottega.client)
        planned.plan("FROM secrets", state="XX000", times=1)
        run = await ended(bottega.client, await start(bottega.client))
    assert (run["status"], run["error"]["code"]) == ("failed", "internal")
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start"]


@pytest.mark.parametrize("state", ["40P01", LOST])
async def test_an_idempotent_request_is_repeated_only_if_it_was_undone(
    served: Running, planned: Faults, state: str
) -> None:
    agent = {"name": f"stored-{state}".lower(), "system_message": "x"}
    assert (await served.client.post("/v1/agents", json=agent)).status_code == 201
    planned.plan("INSERT INTO agent_versions", state=state, times=1)
    path, body = f"/v1/agents/{agent['name']}", {"system_message": "y"}
    answer = await served.client.put(path, json=body)
    assert answer.status_code == (503 if state in UNSURE else 200), answer.text
    assert planned.raised.total() == 1


@pytest.mark.deep
@pytest.mark.parametrize("state", ["40001", LOST])
async def test_a_scheduled_run_starts_after_an_error(
    served: Running, planned: Faults, state: str
) -> None:
    wanted = {"agent": "coordinator", "input": "x", "memory": "off"}
    body = {"name": f"after-{state}", "cron": "0 0 1 1 *", "run": wanted}
    assert (await served.client.post("/v1/schedules", json=body)).status_code == 201
    planned.plan("submit_run(", state=state, times=TIMES)
    await make_due(served)

    async def look() -> dict[str, Any]:
        found: dict[str, Any] = (await served.client.get(f"/v1/schedules/{body['name']}")).json()
        return found

    found = await until(look, lambda found: found["last_run_id"])
    assert (found["last_error"], planned.raised.total()) == (None, TIMES)
    await ended(served.client, found["last_run_id"])
    await served.client.delete(f"/v1/schedules/{body['name']}")


ERRORS: list[tuple[Exception, bool, bool]] = [
    (asyncpg.SerializationError("x"), True, True),
    (asyncpg.StatementCompletionUnknownError("x"), True, False),
    (asyncpg.AdminShutdownError("x"), True, False),
    (asyncpg.ConnectionDoesNotExistError("x"), True, False),
    (asyncpg.IdleInTransactionSessionTimeoutError("x"), True, True),
    (asyncpg.InterfaceError("connection is closed"), True, False),
    (asyncpg.InterfaceError("the server expects 2 arguments for this query"), False, False),
    (asyncpg.InternalServerError("x"), False, False),
    (asyncpg.UndefinedTableError("x"), False, False),
    (DatabaseAwayError("x"), True, False),
    (TimeoutError(), True, False),
    (ValueError("x"), False, False),
]


@pytest.mark.parametrize(
    ("error", "passes", "undone"),
    ERRORS,
    ids=[repr(each[0]) for each in ERRORS],
)
def test_errors_are_judged_by_class(error: Exception, passes: bool, undone: bool) -> None:
    assert (failures.is_transient(error), failures.is_undone(error)) == (passes, undone)
