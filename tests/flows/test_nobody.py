"""Runs without an identity read nothing of other runs, by whichever door they come."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from bottega.llm.demo_model.rules import Answer
from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, text
from tests.flows.conftest import asking
from tests.flows.test_memory_scopes import CARD, define, run
from tests.mcp.clients import connected
from tests.service import Running, running
from tests.waiting import until

ASKED = "Pay the invoice with my card"
HEADER = "x-bottega-memory"
NONE = "none (no user)"


def looks_around(request: dict[str, Any]) -> Answer:
    """Return a model whose agents search memory, have a failing call, and answer."""
    if request["messages"][-1]["role"] == "tool" or not request.get("tools"):
        return text("done")
    return calls(("search_memory", {"query": ASKED}), ("calculator", {"expression": "1 / 0"}))


@pytest.fixture
async def taught(settings: Settings, database_url: str, model: FakeModel) -> AsyncIterator[Running]:
    """A service whose memory has an episode of nobody's, of ada's, and of a session."""
    model.decide = looks_around
    async with running(asking(model, settings), database_url, worker=True) as server:
        await define(server.client, "clerk", expose=["openai", "mcp"])
        graph = {"name": "alone", "nodes": ["clerk"], "edges": []}
        assert (await server.client.post("/v1/graphs", json=graph)).status_code == 201
        for more in ({}, {"user": "ada"}, {"session_id": "s", "conversation": "none"}):
            await run(server.client, "clerk", f"{ASKED} {CARD}.", **more)
        embedded = "SELECT NOT EXISTS (SELECT FROM episode_work)"
        await until(lambda: server.owner.fetchval(embedded))
        yield server


def client_of(server: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/openai/v1", api_key="none")


async def last_run(server: Running) -> dict[str, Any]:
    found: dict[str, Any] = (
        await server.client.get("/v1/runs?order=desc&limit=1&view=full")
    ).json()["items"][0]
    return found


async def test_a_run_of_nobody_reads_no_episode_and_says_so(
    taught: Running, model: FakeModel
) -> None:
    before = len(model.requests)
    nobody = await run(taught.client, "clerk", f"{ASKED}.")
    assert CARD not in str(model.requests[before:])
    assert nobody["memory_used"] == NONE
    events = (await taught.client.get(f"/v1/runs/{nobody['id']}/events?limit=100")).json()
    assert CARD not in str(events)
    assert (await taught.client.get("/v1/episodes")).json()["items"], "it may write"

    for named, used in (({"user": "ada"}, "user"), ({"session_id": "s"}, "session")):
        before = len(model.requests)
        own = await run(taught.client, "clerk", f"{ASKED}.", **named, conversation="none")
        assert CARD in str(model.requests[before]), named
        assert own["memory_used"] == used
    off = await run(taught.client, "clerk", "x", user="ada", memory="off")
    assert off["memory_used"] == "none (off)"


async def test_a_graph_a_retry_and_mcp_follow_the_same_rule(
    taught: Running, model: FakeModel
) -> None:
    before = len(model.requests)
    body = {"mode": "dag", "graph": "alone", "input": f"{ASKED}."}
    made = (await taught.client.post("/v1/runs?wait=30", json=body)).json()
    assert (made["status"], made["memory_used"]) == ("completed", NONE)
    again = await taught.client.post(f"/v1/runs/{made['id']}/retry", json={"from": "start"})
    assert again.json()["memory_used"] == NONE
    async with connected(taught.port, taught.headers, "auto") as client:
        await client.call_tool("clerk", {"input": f"{ASKED}."})
        assert (await last_run(taught))["memory_used"] == NONE
        assert CARD not in str(model.requests[before:])
        meta: Any = {"bottega/user": "ada"}
        await client.call_tool("clerk", {"input": f"{ASKED}."}, meta=meta)
    assert (await last_run(taught))["memory_used"] == "user"
    assert CARD in str(model.requests[before:])


NAMED: tuple[tuple[dict[str, str], dict[str, Any], str | None], ...] = (
    ({}, {}, None),
    ({}, {"user": ""}, None),
    ({"X-OpenWebUI-User-Id": ""}, {"metadata": {"user_id": " "}}, None),
    ({}, {"metadata": {"user_id": "ada"}}, "ada"),
    ({}, {"safety_identifier": "ada", "metadata": {"user_id": "bob"}}, "ada"),
    ({}, {"user": "ada", "safety_identifier": "bob"}, "ada"),
    ({}, {"user": "", "safety_identifier": "ada"}, "ada"),
    ({"X-OpenWebUI-User-Id": "ada"}, {"user": "bob"}, "ada"),
    ({"X-User-Id": "bob", "X-OpenWebUI-User-Id": "ada"}, {}, "ada"),
    ({"X-Product-User": "bob"}, {"user": "ada"}, "ada"),
)


@pytest.mark.deep
async def test_the_facades_take_the_first_user_and_say_if_there_is_none(
    taught: Running, model: FakeModel
) -> None:
    said = [{"role": "user", "content": f"{ASKED}."}]
    doors: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/openai/v1/chat/completions", {"messages": said}),
        ("/openai/v1/responses", {"input": f"{ASKED}."}),
    )
    model.decide = lambda request: text(f"Their card is {CARD}.")  # so is in each later episode
    for number, (headers, body, user) in enumerate(NAMED):
        for path, asked in doors:
            before = len(model.requests)
            sent = {"model": "clerk", "stream": bool(number % 2), **asked, **body}
            answer = await taught.client.post(path, json=sent, headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.headers[HEADER] == ("off; no user" if user is None else "user")
            made = await last_run(taught)
            assert (made["user"], made["memory_used"]) == (user, "user" if user else NONE)
            assert (CARD in str(model.requests[before:])) == (user is not None), (path, body)
    for body, param in (
        ({"user": "x" * 129}, "user"),
        ({"safety_identifier": "a\x00b"}, "safety_identifier"),
        ({"metadata": {"user_id": "x" * 129}}, "metadata.user_id"),
    ):
        answer = await taught.client.post(doors[1][0], json={"model": "clerk", "input": "x"} | body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_the_operator_names_the_headers(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    model.decide = lambda request: text("done")
    own = asking(model, settings).model_copy(update={"user_headers": ["X-Product-User"]})
    async with running(own, database_url, worker=True) as server:
        await define(server.client, "clerk")
        for headers, user in (
            ({"x-product-user": "ada"}, "ada"),
            ({"x-openwebui-user-id": "ada"}, None),
        ):
            body = {"model": "clerk", "input": "x"}
            answer = await server.client.post("/openai/v1/responses", json=body, headers=headers)
            assert answer.headers[HEADER] == ("user" if user else "off; no user")
            assert (await last_run(server))["user"] == user


async def test_a_shared_agent_of_one_purpose_reads_what_names_no_user(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    model.decide = looks_around
    shared = asking(model, settings).model_copy(update={"shared_memory": True})
    async with running(shared, database_url, worker=True) as server:
        await define(server.client, "clerk", memory_scope="tenant")
        await define(server.client, "other")
        await run(server.client, "clerk", f"{ASKED} {CARD}.")
        before = len(model.requests)
        done = await run(server.client, "clerk", f"{ASKED}.")
        assert done["memory_used"] == "tenant"
        assert CARD in str(model.requests[before:])
        assert (await run(server.client, "other", f"{ASKED}."))["memory_used"] == NONE


@pytest.mark.deep
async def test_a_refused_continuation_leaves_no_session(taught: Running) -> None:
    """Check each refusal that comes after a response was found that others have followed."""
    client, owner = client_of(taught), taught.owner
    first = await client.responses.create(model="clerk", input="one", user="ada")
    await client.responses.create(
        model="clerk", input="two", user="ada", previous_response_id=first.id
    )
    count = "SELECT (SELECT count(*) FROM sessions), (SELECT count(*) FROM runs)"
    before = await owner.fetchrow(count)
    missing = {"type": "input_file", "file_id": "01a1fdb7-6ff4-7105-ba5d-4c99da8e1434"}
    for more in (
        {"model": "nobody-knows-it"},
        {"model": "graph:unknown"},
        {"user": "bob"},
        {"user": openai.NOT_GIVEN},
        {"input": [{"role": "user", "content": [missing]}]},
        {"temperature": 9.0},
    ):
        asked: Any = {"model": "clerk", "input": "else", "user": "ada", **more}
        with pytest.raises((openai.NotFoundError, openai.BadRequestError)) as refused:
            await client.responses.create(previous_response_id=first.id, **asked)
        assert await owner.fetchrow(count) == before, (more, refused.value)
    await client.close()
