"""Episodes given to a run: never those of another user or session."""

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from bottega.llm.demo_model.rules import Answer
from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, text
from tests.service import Running, running
from tests.waiting import until

CARD = "4111 1111 1111 1111"
TOOLS = [{"type": "builtin", "name": "calculator"}]
SCOPES = (None, "run", "session", "agent", "user", "tenant")


async def define(client: httpx2.AsyncClient, name: str, **fields: Any) -> None:
    body = {"name": name, "system_message": f"You are {name}.", "tools": TOOLS, **fields}
    answer = await client.post("/v1/agents", json=body)
    assert answer.status_code == 201, answer.text
    assert answer.json()["memory_scope"] == fields.get("memory_scope")


async def run(client: httpx2.AsyncClient, agent: str, said: str, **more: Any) -> dict[str, Any]:
    """Execute a run to its end."""
    answer = await client.post("/v1/runs?wait=30", json={"agent": agent, "input": said, **more})
    assert answer.status_code == 202, answer.text
    found: dict[str, Any] = answer.json()
    assert found["status"] == "completed", found
    return found


def looks_around(request: dict[str, Any]) -> Answer:
    """Return a model whose agents search memory, have a failing call, and answer."""
    if request["messages"][-1]["role"] == "tool":
        return text("done")
    asked = {"query": "pay the invoice with the card"}
    return calls(("search_memory", asked), ("calculator", {"expression": "1 / 0"}))


async def test_a_session_gets_no_episodes_of_another(bottega: Running, model: FakeModel) -> None:
    await define(bottega.client, "clerk")
    model.decide = looks_around
    pay = "Pay the invoice with my card"
    await run(bottega.client, "clerk", f"{pay} {CARD}.", session_id="alice")
    before = len(model.requests)
    again = await run(bottega.client, "clerk", f"{pay}.", session_id="bob")
    assert CARD not in str(model.requests[before:])
    events = (await bottega.client.get(f"/v1/runs/{again['id']}/events?limit=100")).json()
    assert CARD not in str(events)
    before = len(model.requests)
    await run(bottega.client, "clerk", f"{pay}.", session_id="alice")
    assert CARD in str(model.requests[before]), "in its own session it is remembered"


@dataclass(frozen=True)
class Who:
    """User, session and settings of a run."""

    user: str | None = None
    session: str | None = None
    agent: str = "clerk"

    @property
    def secret(self) -> str:
        return f"code-{self.user}-{self.session}-{self.agent}-end"

    @property
    def named(self) -> dict[str, str]:
        given = {"user": self.user, "session_id": self.session}
        named = {name: value for name, value in given.items() if value is not None}
        return named | {"conversation": "none"}


LEFT = (
    Who("alice", "s1"),
    Who("alice", "s2"),
    Who("alice", None, "other"),
    Who("bob", "s3"),
    Who(None, "s4"),
    Who(),
)


def allowed(reader: Who, scope: str | None, left: Who, *, shared: bool) -> bool:
    """Return true if a run of this reader, of agent ``clerk``, may be given the episode."""
    if scope == "run" or (scope == "session" and reader.session is None):
        return False
    if scope == "tenant" and shared and left.user is None:
        return True
    if reader.user is None and reader.session is None:
        return False
    if left.user != reader.user:
        return False
    if scope == "agent" and left.agent != "clerk":
        return False
    same_session = left.session == reader.session
    return same_session if scope == "session" or reader.user is None else True


@pytest.mark.deep
@pytest.mark.parametrize("shared", [False, True])
async def test_every_reader_gets_exactly_the_episodes_in_its_scope(
    settings: Settings, database_url: str, model: FakeModel, shared: bool
) -> None:
    update = {"openai_base_url": model.base_url, "shared_memory": shared}
    async with running(settings.model_copy(update=update), database_url, worker=True) as bottega:
        client = bottega.client
        model.decide = looks_around
        await define(client, "clerk")
        await define(client, "other")
        for left in LEFT:
            said = f"Pay the invoice with the card {left.secret}"
            await run(client, left.agent, said, **left.named)
        embedded = "SELECT NOT EXISTS (SELECT FROM episode_work)"
        await until(lambda: bottega.owner.fetchval(embedded))
        version = {}
        for scope in SCOPES:
            body = {"system_message": "You are clerk.", "tools": TOOLS, "memory_scope": scope}
            version[scope] = (await client.put("/v1/agents/clerk", json=body)).json()["version"]
            for reader in (Who("alice", "s1"), Who("alice"), Who("bob"), Who(None, "s4"), Who()):
                before = len(model.requests)
                said = "Pay the invoice with the card"
                await run(client, "clerk", said, memory="read", **reader.named)
                first, second = map(str, model.requests[before:])
                own = {each for each in LEFT if allowed(reader, scope, each, shared=shared)}
                case = (scope, reader, shared)
                for what, sent in (("start", first), ("all", second)):
                    given = {each for each in LEFT if each.secret in sent}
                    assert given == own, (case, what)


async def test_a_session_has_one_user(bottega: Running, model: FakeModel) -> None:
    client = bottega.client
    await define(client, "clerk")
    model.decide = lambda request: text("done")
    first = await run(client, "clerk", "x", session_id="s", user="alice")
    assert first["user"] == "alice"
    assert (await client.get("/v1/sessions/s")).json()["user"] == "alice"
    listed = (await client.get("/v1/sessions")).json()["items"]
    assert [each["user"] for each in listed] == ["alice"]
    again = await client.post(f"/v1/runs/{first['id']}/retry", json={"from": "start"})
    assert (again.status_code, again.json()["user"]) == (202, "alice")
    body = {"agent": "clerk", "input": "x", "session_id": "s", "user": "bob"}
    refused = await client.post("/v1/runs", json=body)
    assert (refused.status_code, refused.json()["code"]) == (409, "session_user")
    assert (await run(client, "clerk", "x", session_id="s"))["user"] == "alice"
    found = (await client.get("/v1/runs", params={"user": "alice"})).json()["items"]
    assert len(found) == 3
    assert (await client.get("/v1/runs?user=bob")).json()["items"] == []
    by_metadata = {"user": "alice", "metadata": "a:b"}
    assert (await client.get("/v1/runs", params=by_metadata)).json()["items"] == []
    # A session that began without a user stays without one.
    await run(client, "clerk", "x", session_id="open")
    late = await client.post("/v1/runs", json=body | {"session_id": "open"})
    assert (late.status_code, late.json()["code"]) == (409, "session_user")
    assert (await client.get("/v1/sessions/open")).json()["user"] is None


async def test_of_two_concurrent_first_runs_one_user_gets_the_session(
    bottega: Running, model: FakeModel
) -> None:
    client = bottega.client
    await define(client, "clerk")
    model.decide = lambda request: text("done")
    for number in range(10):
        body = {"agent": "clerk", "input": "x", "session_id": f"s{number}"}
        users = ("alice", "bob", None)
        answers = await asyncio.gather(
            *(client.post("/v1/runs", json=body | {"user": user}) for user in users)
        )
        owner = (await client.get(f"/v1/sessions/s{number}")).json()["user"]
        for user, answer in zip(users, answers, strict=True):
            if user == owner or (user is None and answer.is_success):
                assert (answer.status_code, answer.json()["user"]) == (202, owner)
            else:
                assert (answer.status_code, answer.json()["code"]) == (409, "session_user")


@pytest.mark.parametrize("user", ["", "x" * 129, "a\x00b", 7])
async def test_a_user_is_a_text_that_can_be_stored(
    bottega: Running, model: FakeModel, user: Any
) -> None:
    await define(bottega.client, "clerk")
    body = {"agent": "clerk", "input": "x", "user": user}
    answer = await bottega.client.post("/v1/runs", json=body)
    assert answer.status_code == 422
    asked = await bottega.client.get("/v1/runs", params={"user": user})
    assert asked.status_code == (200 if user == 7 else 422)
    fine = await bottega.client.post("/v1/runs", json=body | {"user": "Zoë O'Neil <z@example.com>"})
    assert (fine.status_code, fine.json()["user"]) == (202, "Zoë O'Neil <z@example.com>")


async def mined(bottega: Running) -> str:
    """Return all patterns as texts, after a maintenance job."""
    await bottega.client.post("/v1/memory/maintenance")
    await until(lambda: bottega.owner.fetchval("SELECT bool_and(status = 'done') FROM memory_jobs"))
    return (await bottega.client.get("/v1/patterns?limit=100")).text


@pytest.mark.deep
async def test_a_pattern_names_no_tool_invented_for_one_user(
    bottega: Running, model: FakeModel
) -> None:
    client = bottega.client
    await define(client, "clerk")

    def decide(request: dict[str, Any]) -> Answer:
        results = sum(message["role"] == "tool" for message in request["messages"])
        if results == 1 and "cure" in str(request["messages"]):
            return calls(("calculator", {"expression": "1 + 1"}))
        if results:
            return text("done")
        if "alice" in str(request["messages"]):
            return calls(("send_card_4111", {}))
        return calls(("calculator", {"expression": "1 +"}))

    model.decide = decide
    for number in range(12):
        for user in (f"bob {number % 3}", "alice"):
            asked = f"I am {user}, {'cure' if number % 2 else 'leave'} it"
            done = await run(client, "clerk", asked, user=user)
            await client.post(f"/v1/runs/{done['id']}/feedback", json={"outcome": "SUCCESS"})
    patterns = await mined(bottega)
    assert "calculator" in patterns
    assert "send_card" not in patterns
