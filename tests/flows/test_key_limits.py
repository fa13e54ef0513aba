"""Limits of keys: of agents, models, addresses, rates and tokens of a day; of their tokens too."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
import websockets

from bottega.settings import Settings
from tests.fake_model import FakeModel, chunk, http_error, sse
from tests.service import Running, client_of, running
from tests.tenants import holder
from tests.waiting import until

RUN = {"agent": "a", "input": "x", "memory": "off"}
CALL_TOKENS = 1000
TOLD = {"choices": [], "usage": {"prompt_tokens": 900, "completion_tokens": 100}}


@dataclass(frozen=True, slots=True)
class Office:
    """A tenant with the agents a, b and lead (over b), and with an administrator's client."""

    server: Running
    admin: httpx2.AsyncClient

    async def key(self, **limits: Any) -> dict[str, Any]:
        """Make a key with limits."""
        answer = await self.admin.post(
            "/v1/keys", json={"name": "x", "role": "admin", "limits": limits}
        )
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def client(self, key: str) -> httpx2.AsyncClient:
        """Return a client of a key or a token; the caller closes it."""
        return client_of(self.server.port, headers={"Authorization": f"Bearer {key}"})


@pytest.fixture
async def office(settings: Settings, database_url: str, model: FakeModel) -> AsyncIterator[Office]:
    model.decide = lambda request: sse(chunk("blue", finish_reason="stop"), TOLD)
    administrator = await holder(database_url)
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with (
        running(configured, database_url, worker=True) as server,
        administrator.client(server) as admin,
    ):
        for name, more in (("b", {}), ("a", {}), ("lead", {"subagents": {"names": ["b"]}})):
            body = {"name": name, "description": "x", "system_message": "x", "model": "m-" + name}
            answer = await admin.post("/v1/agents", json=body | more)
            assert answer.status_code == 201, answer.text
        yield Office(server, admin)


async def token_of(client: httpx2.AsyncClient) -> str:
    body = {"user": "ada", "actions": ["run", "read"], "expires_in": 600}
    answer = await client.post("/v1/tokens", json=body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["token"])


@pytest.mark.deep
async def test_a_key_and_its_tokens_run_only_the_agents_and_models_of_its_limits(
    office: Office,
) -> None:
    cases: tuple[tuple[dict[str, Any], set[str]], ...] = (
        ({"agents": ["a", "lead"]}, {"a"}),  # the lead would call b
        ({"agents": ["b", "lead"]}, {"b", "lead"}),
        ({"models": ["m-a"]}, {"a"}),
        ({"models": ["m-lead", "m-b"]}, {"b", "lead"}),
        ({"agents": []}, set()),
    )
    for limits, allowed in cases:
        made = await office.key(**limits)
        assert made["limits"] == limits
        async with office.client(made["key"]) as client:
            assert (await client.get("/v1/me")).json()["limits"] == limits
            token = await token_of(client)
        for bearer in (made["key"], token):
            async with office.client(bearer) as client:
                for agent in ("a", "b", "lead"):
                    said = {"model": agent, "messages": [{"role": "user", "content": "x"}]}
                    for path, body in (
                        ("/v1/runs", {"agent": agent, "input": "x"}),
                        ("/openai/v1/chat/completions", said),
                        ("/openai/v1/responses", {"model": agent, "input": "x"}),
                    ):
                        answer = await client.post(path, json=body)
                        is_allowed = answer.status_code in (200, 202)
                        assert is_allowed == (agent in allowed), (limits, agent, answer.text)
                        assert is_allowed or answer.status_code == 403


async def test_runs_that_others_started_evade_no_limit(office: Office) -> None:
    runs = {
        agent: (await office.admin.post("/v1/runs?wait=30", json=RUN | {"agent": agent})).json()
        for agent in ("a", "b")
    }
    limited = await office.key(agents=["a"])
    async with office.client(limited["key"]) as client:
        for agent, status in (("a", 202), ("b", 403)):
            answer = await client.post(f"/v1/runs/{runs[agent]['id']}/retry", json={})
            assert answer.status_code == status, answer.text
        schedule = {"name": "s", "cron": "0 3 * * *", "run": {"agent": "b", "input": "x"}}
        plain = {name: value for name, value in schedule.items() if name != "name"}
        for method, path, body in (
            ("POST", "/v1/schedules", schedule),
            ("PUT", "/v1/schedules/s", plain),
            ("POST", "/v1/apply", {"schedules": [schedule]}),
        ):
            answer = await client.request(method, path, json=body)
            assert (answer.status_code, answer.json()["code"]) == (403, "beyond_limits"), path
    async with office.client((await office.key(models=["m-a"]))["key"]) as client:
        answer = await client.post(f"/v1/runs/{runs['a']['id']}/retry", json={})
        assert (answer.status_code, answer.json()["code"]) == (403, "beyond_limits")


async def test_a_batch_is_nobody_s_and_of_the_key_that_starts_or_repeats_it(
    office: Office, database_url: str, model: FakeModel
) -> None:
    strict = await holder(database_url, scope="run", require_user=True)
    batch = {"agent": "b", "items": [{"input": "x"}]}
    async with strict.client(office.server) as client:
        answer = await client.post("/v1/batches", json=batch)
        assert (answer.status_code, answer.json()["code"]) == (422, "user_required")
    sent = {"file": ("x", b'{"input": "secret"}', "application/x-ndjson")}
    body = {"user": "ada", "actions": ["upload"], "expires_in": 60}
    token = (await office.admin.post("/v1/tokens", json=body)).json()["token"]
    async with office.client(token) as ada:
        hers = await ada.post("/v1/files", files=sent)
    assert hers.status_code == 201, hers.text
    answer = await office.admin.post("/v1/batches", json={"agent": "b", "file": hers.json()["id"]})
    assert (answer.status_code, answer.json()["code"]) == (422, "unknown_file")
    model.decide = lambda request: http_error(400)
    made = (await office.admin.post("/v1/batches", json=batch)).json()

    async def over() -> bool:
        return bool((await office.admin.get(f"/v1/batches/{made['id']}")).json()["ended_at"])

    await until(over)
    async with office.client((await office.key(agents=["a"]))["key"]) as client:
        assert (await client.post("/v1/batches", json=batch)).status_code == 403
        answer = await client.post(f"/v1/batches/{made['id']}/retry")
        assert (answer.status_code, answer.json()["code"]) == (403, "beyond_limits")


async def test_a_key_works_from_its_addresses_only(office: Office) -> None:
    here = await office.key(addresses=["10.0.0.0/8", "127.0.0.0/8"])
    async with office.client(here["key"]) as client:
        shown = (await client.get("/v1/me")).json()["limits"]
        assert shown == {"addresses": ["10.0.0.0/8", "127.0.0.0/8"]}
    away = await office.key(addresses=["10.0.0.0/8", "::/0"])
    forwarded: tuple[dict[str, str], ...] = (
        {},
        {"X-Forwarded-For": "10.1.2.3"},
        {"Forwarded": "for=10.1.2.3"},
    )
    async with office.client(away["key"]) as client:
        for headers in forwarded:
            answer = await client.get("/v1/me", headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (403, "address_not_allowed")
    url = f"ws://127.0.0.1:{office.server.port}/v1/runs/x/ws"
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with websockets.connect(
            url, additional_headers={"Authorization": f"Bearer {away['key']}"}
        ):
            pass
    assert refused.value.response.status_code == 403


async def test_a_key_s_rate_is_shared_with_its_tokens_and_the_keys_that_it_makes(
    office: Office,
) -> None:
    slow = await office.key(requests_per_s=2)
    async with office.client(slow["key"]) as client:
        token = await token_of(client)
        body = {"name": "x", "role": "viewer", "limits": {"requests_per_s": 50}}
        child = (await client.post("/v1/keys", json=body)).json()
    assert child["limits"] == {"requests_per_s": 2}
    answers = []
    for bearer in (slow["key"], token, child["key"]):
        async with office.client(bearer) as client:
            answers += [await client.get("/v1/me") for _ in range(4)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert 5 <= len(refused) <= 12
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert "this key" in refused[0].json()["detail"]
    assert (await office.admin.get("/v1/me")).status_code == 200


async def test_the_tokens_of_a_day_are_those_of_all_its_runs_and_its_own(
    office: Office, model: FakeModel
) -> None:
    spender = await office.key(tokens_per_day=3 * CALL_TOKENS)
    async with office.client(spender["key"]) as client:
        token = await token_of(client)
        body = {"name": "x", "role": "admin", "limits": {"tokens_per_day": 10**9}}
        child = (await client.post("/v1/keys", json=body)).json()
        assert child["limits"] == {"tokens_per_day": 3 * CALL_TOKENS}
    statuses = []
    for number in range(9):
        async with office.client((token, child["key"], spender["key"])[number % 3]) as client:
            answer = await client.post("/v1/runs?wait=30", json=RUN)
            statuses.append(answer.status_code)
            if answer.status_code == 429:
                assert answer.json()["code"] == "key_tokens_per_day"
                assert 0 < int(answer.headers["retry-after"]) <= 86_400
            elif answer.json()["status"] == "failed":
                assert "the key's limit of tokens" in answer.json()["error"]["message"]
    calls = len(model.requests)
    assert 1 <= calls <= 4
    spent = "SELECT amount FROM daily_spending WHERE unit LIKE 'tokens:%'"
    assert await office.server.owner.fetchval(spent) == CALL_TOKENS * calls
    whole = (await office.admin.post("/v1/runs?wait=30", json=RUN)).json()
    assert whole["status"] == "completed"
    # Who repeats a run pays for it.
    async with office.client(spender["key"]) as client:
        await ended(client, await client.post(f"/v1/runs/{whole['id']}/retry", json={}))
    assert len(model.requests) == calls + 1
    again = await office.admin.post(f"/v1/runs/{whole['id']}/retry", json={})
    assert await ended(office.admin, again) == "completed"
    assert await office.server.owner.fetchval(spent) == CALL_TOKENS * calls


async def ended(client: httpx2.AsyncClient, answer: httpx2.Response) -> str | None:
    """Return the status at the end of a run that was accepted; ``None``: it was not."""
    if answer.status_code != 202:
        assert answer.json()["code"] == "key_tokens_per_day"
        return None

    async def status() -> str:
        run = (await client.get(f"/v1/runs/{answer.json()['id']}")).json()
        return str(run["status"])

    found: str = await until(status, lambda found: found in ("completed", "failed"))
    return found


@pytest.mark.deep
async def test_two_processes_spend_one_day(
    settings: Settings, database_url: str, office: Office, model: FakeModel
) -> None:
    spender = await office.key(tokens_per_day=5 * CALL_TOKENS)
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with running(configured, database_url, worker=True) as other:
        headers = {"Authorization": f"Bearer {spender['key']}"}
        async with (
            client_of(office.server.port, headers=headers) as here,
            client_of(other.port, headers=headers) as there,
        ):
            await asyncio.gather(
                *(each.post("/v1/runs?wait=30", json=RUN) for each in [here, there] * 10)
            )
    assert 1 <= len(model.requests) <= 6  # by the error of one call's estimate at most


async def test_limits_that_make_no_sense_are_refused(office: Office) -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"agent": ["a"]},
        {"agents": "a"},
        {"agents": ["a"] * 21},
        {"addresses": ["10.0.0.1/8"]},
        {"addresses": ["everywhere"]},
        {"addresses": [1]},
        {"addresses": [True]},
        {"requests_per_s": 0},
        {"requests_per_s": -1},
        {"tokens_per_day": 0},
        {"tokens_per_day": 1.5},
        {"payer": "01a1fdb7-6ff4-7105-ba5d-4c99da8e1434"},
    )
    for limits in wrong:
        body = {"name": "x", "role": "runner", "limits": limits}
        assert (await office.admin.post("/v1/keys", json=body)).status_code == 422, limits


async def test_a_key_makes_none_with_wider_limits(office: Office) -> None:
    maker = await office.key(agents=["a"], addresses=["127.0.0.0/8"])
    cases: tuple[tuple[dict[str, Any], dict[str, Any] | None], ...] = (
        ({}, {"agents": ["a"], "addresses": ["127.0.0.0/8"]}),
        ({"agents": []}, {"agents": [], "addresses": ["127.0.0.0/8"]}),
        ({"addresses": ["127.0.0.1/32"]}, {"agents": ["a"], "addresses": ["127.0.0.1/32"]}),
        ({"agents": ["a", "b"]}, None),
        ({"addresses": ["0.0.0.0/0"]}, None),
        ({"addresses": ["::/0"]}, None),
    )
    async with office.client(maker["key"]) as client:
        for limits, expected in cases:
            body = {"name": "x", "role": "viewer", "limits": limits}
            answer = await client.post("/v1/keys", json=body)
            assert answer.status_code == (422 if expected is None else 201), answer.text
            if expected is not None:
                read = await client.get(f"/v1/keys/{answer.json()['id']}")
                assert read.json()["limits"] == answer.json()["limits"] == expected
