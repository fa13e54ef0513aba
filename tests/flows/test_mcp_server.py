"""The official MCP client calls agents as tools, in both eras of the protocol."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import mcp.types
import pytest
from mcp import Client, MCPError

from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, gated, http_error, text
from tests.flows.conftest import asking
from tests.flows.test_conversations import define
from tests.mcp.clients import ERAS, connected, said
from tests.service import Running, client_of, running
from tests.tenants import holder
from tests.waiting import until

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALCULATOR = {"type": "builtin", "name": "calculator", "approval": "always"}
ASK = {"type": "builtin", "name": "ask_user"}


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


@pytest.fixture(params=ERAS)
def era(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def client(bottega: Running, era: str) -> AsyncIterator[Client]:
    async with connected(bottega.port, bottega.headers, era) as client:
        yield client


async def exposed(bottega: Running, name: str = "clerk", **more: Any) -> None:
    await define(bottega, name, expose=["mcp"], **more)


async def runs(bottega: Running) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await bottega.client.get("/v1/runs?view=full")).json()["items"]
    return found


async def test_exposed_agents_are_tools(client: Client, bottega: Running) -> None:
    await exposed(bottega, description="Knows where people are.", output_schema=CITY)
    await define(bottega, "hidden")
    (tool,) = (await client.list_tools()).tools
    assert (tool.name, tool.description) == ("clerk", "Knows where people are.")
    assert tool.input_schema["required"] == ["input"]
    assert tool.output_schema == CITY
    with pytest.raises(MCPError, match="Unknown tool: hidden"):
        await client.call_tool("hidden", {"input": "?"})
    assert await runs(bottega) == []


async def test_a_call_is_a_run(client: Client, bottega: Running, model: FakeModel) -> None:
    await exposed(bottega)
    model.script(text("In Rome."))
    meta: Any = {"bottega/user": "ada", "bottega/session": "chat-1"}
    result = await client.call_tool("clerk", {"input": "Where is Ada?"}, meta=meta)
    assert (said(result), result.is_error) == ("In Rome.", False)
    (run,) = await runs(bottega)
    assert (run["input"], run["user"], run["session_id"]) == ("Where is Ada?", "ada", "chat-1")
    assert (result.meta or {})["bottega/run_id"] == run["id"]


async def test_an_answer_that_fits_a_schema_is_structured(
    client: Client, bottega: Running, model: FakeModel
) -> None:
    await exposed(bottega, output_schema=CITY)
    model.script(text('{"city": "Rome"}'))
    result = await client.call_tool("clerk", {"input": "Where is Ada?"})
    assert result.structured_content == {"city": "Rome"}


async def test_failures_and_wrong_arguments_are_results(
    client: Client, bottega: Running, model: FakeModel
) -> None:
    await exposed(bottega)
    model.script(http_error(400))
    failed = await client.call_tool("clerk", {"input": "?"})
    (run,) = await runs(bottega)
    assert failed.is_error
    assert run["error"]["message"] in said(failed)
    for wrong in ({}, {"input": 7}, {"input": "?", "more": 1}, {"input": "\x00"}):
        refused = await client.call_tool("clerk", wrong)
        assert refused.is_error
    assert len(await runs(bottega)) == 1


async def test_progress_comes_only_if_asked_for(
    client: Client, bottega: Running, model: FakeModel
) -> None:
    await exposed(bottega, tools=[{"type": "builtin", "name": "calculator"}])
    seen: list[tuple[float, str | None]] = []
    go_on = asyncio.Event()

    async def progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, message))
        go_on.set()

    model.script(calls(("calculator", {"expression": "6*7"})), gated(go_on, text("42")))
    result = await client.call_tool("clerk", {"input": "6*7?"}, progress_callback=progress)
    assert said(result) == "42"
    assert seen == sorted(seen)
    assert "run.started" in str(seen[0])


async def test_a_person_approves_or_denies(bottega: Running, model: FakeModel, era: str) -> None:
    await exposed(bottega, tools=[CALCULATOR])
    asked: list[str] = []

    async def ask(params: mcp.types.ElicitRequestFormParams) -> mcp.types.ElicitResult:
        asked.append(params.message)
        content: dict[str, Any] = {"decision": "approve" if len(asked) == 1 else "deny"}
        return mcp.types.ElicitResult(action="accept", content=content)

    model.script(
        calls(("calculator", {"expression": "6*7"})),
        calls(("calculator", {"expression": "6*8"})),
        text("42, and I may not say more."),
    )
    async with connected(bottega.port, bottega.headers, era, ask) as client:
        result = await client.call_tool("clerk", {"input": "6*7? 6*8?"})
    assert said(result) == "42, and I may not say more."
    assert asked[0].startswith('clerk wants to call calculator with {"expression": "6*7"}')
    told = [m["content"] for m in model.requests[-1]["messages"] if m["role"] == "tool"]
    assert told[0] == "42"
    assert "denied" in told[1]


@pytest.mark.parametrize(
    ("schema", "content", "answer"),
    [
        (None, {"answer": "red"}, "red"),
        ({"type": "string", "enum": ["red", "blue"]}, {"answer": "blue"}, "blue"),
        (CITY, {"city": "Rome"}, '{"city":"Rome"}'),
    ],
)
async def test_a_person_answers_questions(
    bottega: Running, model: FakeModel, era: str, schema: Any, content: Any, answer: str
) -> None:
    await exposed(bottega, tools=[ASK])
    question = {"question": "Which?"} | ({} if schema is None else {"schema": schema})

    async def ask(params: mcp.types.ElicitRequestFormParams) -> mcp.types.ElicitResult:
        assert params.message == "Which?"
        return mcp.types.ElicitResult(action="accept", content=content)

    model.script(calls(("ask_user", question), ("ask_user", question)), text("Good."))
    async with connected(bottega.port, bottega.headers, era, ask) as client:
        result = await client.call_tool("clerk", {"input": "?"})
    assert said(result) == "Good."
    told = [m["content"] for m in model.requests[-1]["messages"] if m["role"] == "tool"]
    assert told == [answer, answer]


async def test_each_question_has_a_state_of_its_own(bottega: Running, model: FakeModel) -> None:
    await exposed(bottega, tools=[ASK])
    questions = [calls(("ask_user", {"question": asked})) for asked in ("Who?", "Which?")]
    model.script(*questions, text("Good."))
    name = "io.modelcontextprotocol/"
    meta = {f"{name}protocolVersion": ERAS[1], f"{name}clientCapabilities": {"elicitation": {}}}
    more: dict[str, Any] = {"arguments": {"input": "?"}}
    states = []
    for _ in questions:
        result = await called(bottega, name="clerk", _meta=meta, **more)
        (asked,) = result["inputRequests"]
        answers = {asked: {"action": "accept", "content": {"answer": "Ann"}}}
        more = {"requestState": result["requestState"], "inputResponses": answers}
        states.append(result["requestState"])
    result = await called(bottega, name="clerk", _meta=meta, **more)
    assert result["content"] == [{"type": "text", "text": "Good."}]
    assert len(set(states)) == 2


async def called(bottega: Running, **params: Any) -> Any:
    """Call a tool by one request of the protocol without sessions; return its result."""
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    headers = {
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": ERAS[1],
        "mcp-method": "tools/call",
        "mcp-name": str(params["name"]),
    }
    answer = await bottega.client.post("/mcp", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["result"]


async def test_a_person_who_dismisses_the_question_ends_the_run(
    bottega: Running, model: FakeModel, era: str
) -> None:
    await exposed(bottega, tools=[ASK])

    async def ask(params: mcp.types.ElicitRequestFormParams) -> mcp.types.ElicitResult:
        return mcp.types.ElicitResult(action="cancel")

    model.script(calls(("ask_user", {"question": "Which?"})))
    async with connected(bottega.port, bottega.headers, era, ask) as client:
        result = await client.call_tool("clerk", {"input": "?"})
    assert result.is_error
    assert "cancelled" in said(result)


async def test_without_a_person_the_result_names_what_waits(
    client: Client, bottega: Running, model: FakeModel
) -> None:
    await exposed(bottega, tools=[ASK])
    model.script(calls(("ask_user", {"question": "Which?"})), text("Good."))
    result = await client.call_tool("clerk", {"input": "?"})
    (waiting,) = (await bottega.client.get("/v1/interrupts?status=pending")).json()["items"]
    assert result.is_error
    path = f"/v1/interrupts/{waiting['id']}/resolve"
    assert f"POST {path}" in said(result)
    assert (await bottega.client.post(path, json={"answer": "red"})).status_code == 200

    async def status() -> Any:
        return (await bottega.client.get(f"/v1/runs/{waiting['run_id']}")).json()["status"]

    await until(status, lambda seen: seen == "completed")


async def test_only_keys_that_may_approve_are_asked(
    bottega: Running, model: FakeModel, era: str
) -> None:
    """Ask no client with a ``run`` key: its model could approve by itself."""
    await exposed(bottega, tools=[CALCULATOR])
    model.script(calls(("calculator", {"expression": "6*7"})))

    async def ask(params: mcp.types.ElicitRequestFormParams) -> mcp.types.ElicitResult:
        raise AssertionError(params.message)

    made = await bottega.client.post("/v1/keys", json={"name": "weak", "scopes": ["run"]})
    assert made.status_code == 201, made.text
    headers = {"Authorization": f"Bearer {made.json()['key']}"}
    async with connected(bottega.port, headers, era, ask) as client:
        result = await client.call_tool("clerk", {"input": "?"})
    assert result.is_error
    assert "approval" in said(result)


async def test_a_client_that_stops_waiting_cancels_its_run(
    client: Client, bottega: Running, model: FakeModel
) -> None:
    await exposed(bottega)
    model.script(gated(asyncio.Event(), text("never")))
    call = asyncio.ensure_future(client.call_tool("clerk", {"input": "?"}))
    await until(lambda: model.requests)
    call.cancel()

    async def status() -> Any:
        return (await runs(bottega))[0]["status"]

    await until(status, lambda seen: seen == "cancelled")


async def test_tenants_and_scopes_are_kept_apart(
    bottega: Running, model: FakeModel, era: str, shared_url: str
) -> None:
    await exposed(bottega)
    other = await holder(shared_url, "mcp-other")
    async with connected(bottega.port, other.headers, era) as client:
        assert (await client.list_tools()).tools == []
        with pytest.raises(MCPError, match="Unknown tool"):
            await client.call_tool("clerk", {"input": "?"})
    made = await bottega.client.post("/v1/keys", json={"name": "reader", "scopes": ["read"]})
    headers = {"Authorization": f"Bearer {made.json()['key']}"}
    async with connected(bottega.port, headers, era) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["clerk"]
        with pytest.raises(MCPError, match="scope 'run'"):
            await client.call_tool("clerk", {"input": "?"})
    assert await runs(bottega) == []


@pytest.mark.parametrize("starts", [0, 1])
async def test_each_message_may_come_to_another_process(
    bottega: Running, model: FakeModel, settings: Settings, shared_url: str, era: str, starts: int
) -> None:
    """Send the call, what a person says of it, and its cancellation to processes in turn."""
    await exposed(bottega, tools=[ASK])
    model.script(
        calls(("ask_user", {"question": "Which?"})), text("Good."), gated(asyncio.Event(), text(""))
    )

    async def ask(params: mcp.types.ElicitRequestFormParams) -> mcp.types.ElicitResult:
        return mcp.types.ElicitResult(action="accept", content={"answer": "red"})

    async with running(asking(model, settings), shared_url) as other:
        ports = [bottega.port, other.port]
        if starts:
            ports.reverse()
        async with connected(ports, bottega.headers, era, ask) as client:
            result = await client.call_tool("clerk", {"input": "?"})
            assert said(result) == "Good."
            call = asyncio.ensure_future(client.call_tool("clerk", {"input": "?"}))
            await model.received(3)
            call.cancel()
            await until(lambda: newest(bottega), lambda run: run["status"] == "cancelled")


async def newest(bottega: Running) -> dict[str, Any]:
    return (await runs(bottega))[-1]


async def test_a_notification_cancels_the_run_of_its_call(
    bottega: Running, model: FakeModel
) -> None:
    """Older clients keep the connection of a call that they cancel."""
    await exposed(bottega)
    model.script(gated(asyncio.Event(), text("never")))
    sent = {"accept": "application/json, text/event-stream"}

    async def post(method: str, number: Any = None, **params: Any) -> httpx2.Response:
        body = {"jsonrpc": "2.0", "method": method, "params": params}
        body |= {} if number is None else {"id": number}
        return await bottega.client.post("/mcp/", json=body, headers=sent)

    begun = await post("initialize", 0, protocolVersion="2025-11-25", capabilities={})
    sent["mcp-session-id"] = begun.headers["mcp-session-id"]
    call = asyncio.ensure_future(
        post("tools/call", "7", name="clerk", arguments={"input": "?"}, _meta={})
    )
    await model.received()
    for other in (7, "8"):
        await post("notifications/cancelled", requestId=other)
    assert (await newest(bottega))["status"] == "running"
    await post("notifications/cancelled", requestId="7")
    assert "cancelled" in (await call).text


@pytest.mark.parametrize("accept", ["text/event-stream", "application/json"])
async def test_a_client_that_hangs_up_cancels_its_run(
    bottega: Running, model: FakeModel, accept: str
) -> None:
    await exposed(bottega)
    model.script(gated(asyncio.Event(), text("never")))
    call = {"name": "clerk", "arguments": {"input": "?"}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
    async with client_of(bottega.port, headers=bottega.headers) as client:
        posting = asyncio.ensure_future(client.post("/mcp", json=body, headers={"accept": accept}))
        await model.received()
        posting.cancel()
    await until(lambda: newest(bottega), lambda run: run["status"] == "cancelled")
