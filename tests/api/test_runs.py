"""The fields of runs, and the filters of their list."""

import json
from typing import Any

import httpx2
import pytest

from bottega.settings import Settings
from tests.service import Running, running

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
AGENT = {"name": "a", "system_message": "x"}
RUN: dict[str, Any] = {"agent": "a", "input": "x"}


async def start(client: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/runs", json=RUN | fields)
    assert answer.status_code == 202, answer.text
    run: dict[str, Any] = answer.json()
    return run


async def test_a_run_returns_its_limits(client: httpx2.AsyncClient) -> None:
    await client.post("/v1/agents", json=AGENT)
    plain = await start(client)
    assert plain["timeout_s"] == 3600
    assert plain["queue_timeout_s"] == 86_400
    assert [plain[name] for name in ("token_budget", "webhook", "retry_of")] == [None] * 3
    own = await start(client, timeout_s=7, queue_timeout_s=60, token_budget=5000)
    stored = (await client.get(f"/v1/runs/{own['id']}")).json()
    assert stored == own | {"effective_limits": None, "tasks": None}
    shown = [stored[name] for name in ("timeout_s", "queue_timeout_s", "token_budget")]
    assert shown == [7, 60, 5000]


async def test_a_webhook_is_pending_until_the_end_and_hides_its_query(
    settings: Settings, database_url: str
) -> None:
    configured = settings.model_copy(
        update={"webhook_secret": SECRET, "egress_allow": ["10.1.0.0/16"]}
    )
    async with running(configured, database_url) as server:
        client = server.client
        await client.post("/v1/agents", json=AGENT)
        run = await start(client, webhook_url="https://hooks.example.com/run?token=hidden")
        assert run["webhook"] == {
            "url": "https://hooks.example.com/run",
            "status": "pending",
            "tries": 0,
            "answer": None,
            "error": None,
            "next_at": None,
            "ended_at": None,
        }
        assert "hidden" not in (await client.get("/v1/runs")).text
        await client.post(f"/v1/runs/{run['id']}/cancel")
        ended = (await client.get(f"/v1/runs/{run['id']}")).json()["webhook"]
        assert (ended["status"], ended["tries"]) == ("pending", 0)
        assert ended["next_at"] is not None
        assert (await start(client, webhook_url="http://10.1.2.3/"))["webhook"] is not None
        for inside in ("127.0.0.1", "10.2.0.1", "[::1]", "169.254.169.254", "[::ffff:127.0.0.1]"):
            refused = await client.post("/v1/runs", json=RUN | {"webhook_url": f"http://{inside}/"})
            assert refused.status_code == 422, inside
            assert refused.json()["code"] == "egress_refused"
            assert refused.json()["errors"][0]["pointer"] == "/webhook_url"


@pytest.mark.parametrize("secret", ["", "whsec_c2hvcnQ=", "whsec_no base64!", "x" * 500])
def test_a_secret_without_a_webhook_is_refused(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOTTEGA_WEBHOOK_SECRET", secret)
    if not secret:
        assert Settings(_env_file=None).webhook_secret is None
        return
    with pytest.raises(ValueError, match="BOTTEGA_WEBHOOK_SECRET") as refused:
        Settings(_env_file=None)
    assert secret not in str(refused.value)


async def found(client: httpx2.AsyncClient, **query: Any) -> list[str]:
    """Return the inputs of all runs that a list returns, over all its pages."""
    inputs: list[str] = []
    answer = await client.get("/v1/runs", params={"limit": 2, "view": "full", **query})
    while True:
        assert answer.status_code == 200, answer.text
        inputs += [run["input"] for run in answer.json()["items"]]
        if "next" not in answer.links:
            return inputs
        answer = await client.get(answer.links["next"]["url"])


async def test_runs_are_found_by_metadata(client: httpx2.AsyncClient) -> None:
    await client.post("/v1/agents", json=AGENT)
    for name, metadata in {
        "none": {},
        "text": {"customer": "acme", "n": "3"},
        "number": {"customer": "acme", "n": 3, "deep": {"customer": "other"}},
        "truth": {"customer": "other", "ok": True, "url": "http://x:1"},
        "nothing": {"ok": None, "quote": 'it\'s % "odd"'},
    }.items():
        await start(client, input=name, metadata=metadata)
    assert await found(client, metadata="customer:acme") == ["text", "number"]
    assert await found(client, metadata="customer:acme", order="desc") == ["number", "text"]
    assert await found(client, metadata="n:3") == ["text", "number"]
    assert await found(client, metadata=["customer:other", "ok:true"]) == ["truth"]
    assert await found(client, metadata="ok:null") == ["nothing"]
    assert await found(client, metadata="url:http://x:1") == ["truth"]
    assert await found(client, metadata='quote:it\'s % "odd"') == ["nothing"]
    for absent in ("customer:acm", "customer:", "deep:{}", "n:[3]", "n:1e400", "ok:NaN"):
        assert await found(client, metadata=absent) == [], absent
    assert len(await found(client)) == 5


async def test_runs_are_found_by_their_creation_time(server_: Running) -> None:
    client = server_.client
    await client.post("/v1/agents", json=AGENT)
    runs = [await start(client, input=str(number)) for number in range(5)]
    times = [run["created_at"] for run in runs]
    assert times == sorted(set(times))
    assert await found(client, created_after=times[1]) == ["2", "3", "4"]
    assert await found(client, created_before=times[1]) == ["0"]
    assert await found(client, created_after=times[0], created_before=times[4], order="desc") == [
        "3",
        "2",
        "1",
    ]
    assert await found(client, created_after="2000-01-01T00:00:00Z") == list("01234")
    assert await found(client, created_after="2999-01-01T00:00:00+02:00") == []
    # Its transaction was slow: its time is that of the beginning, its id that of the end.
    await server_.owner.execute(
        "UPDATE runs SET created_at = created_at - interval '30 min' WHERE id = $1", runs[4]["id"]
    )
    assert await found(client, created_before=times[0]) == ["4"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", "y"),
        ("input", 7),
        ("priority", 11),
        ("unknown", 1),
        ("metadata", {"a": [1.5, None]}),
    ],
)
async def test_a_plain_request_gets_the_answer_of_any_other(
    client: httpx2.AsyncClient, field: str, value: Any
) -> None:
    await client.post("/v1/agents", json=AGENT)
    body = json.dumps(RUN | {field: value})
    plain, other = [
        await client.post("/v1/runs", content=body, headers={"content-type": kind})
        for kind in ("application/json", "application/json; charset=utf-8")
    ]
    assert plain.status_code == other.status_code
    assert plain.headers["content-type"] == other.headers["content-type"]
    if plain.is_success:
        assert plain.headers["location"] == f"/v1/runs/{plain.json()['id']}"
        stored = (await client.get(plain.headers["location"])).json()
        assert stored == plain.json() | {"effective_limits": None, "tasks": None}
    own = ("id", "created_at")
    assert {**plain.json(), **dict.fromkeys(own)} == {**other.json(), **dict.fromkeys(own)}


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'{"agent": "a", "input": "\xff"}', b"NaN"])
async def test_a_plain_request_that_is_not_json_gets_the_answer_of_any_other(
    client: httpx2.AsyncClient, body: bytes
) -> None:
    answers = [
        await client.post(path, content=body, headers={"content-type": "application/json"})
        for path in ("/v1/runs", "/v1/runs?wait=0")
    ]
    assert answers[0].status_code in (400, 422)
    assert answers[0].json() == answers[1].json()
