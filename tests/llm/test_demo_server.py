"""The demo model over a real socket, as any OpenAI-compatible client sees it."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from bottega.errors import ModelError
from bottega.llm.demo_model.server import create_app
from tests.fake_model import FakeModel, gated, serving, text
from tests.llm.conftest import provider_for

HELLO: Any = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    async with serving(create_app(), listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


@pytest.fixture
async def http(base_url: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=base_url, trust_env=False) as client:
        yield client


async def post(http: httpx2.AsyncClient, body: Any) -> tuple[int, Any]:
    answer = await http.post("/chat/completions", json=body)
    return answer.status_code, answer.json()


async def test_openai_sdk_can_talk_to_it(base_url: str) -> None:
    async with openai.AsyncOpenAI(api_key="none", base_url=base_url) as client:
        whole = await client.chat.completions.create(**HELLO)
        stream = await client.chat.completions.create(
            **HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        models = [item.id async for item in client.models.list()]

    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 5
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens == 2  # five characters
    assert models == ["demo"]


async def test_tool_calls_in_one_piece(http: httpx2.AsyncClient) -> None:
    properties = {"expression": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["expression"]}
    tool = {"type": "function", "function": {"name": "calculator", "parameters": schema}}
    body = {**HELLO, "messages": [{"role": "user", "content": "1+1"}], "tools": [tool]}

    status, answer = await post(http, body)

    assert status == 200
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "calculator", "arguments": '{"expression":"1+1"}'}
    assert (await post(http, body))[1] == answer  # deterministic, ids included


async def test_usage_is_sent_only_on_request(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/chat/completions", json={**HELLO, "stream": True})
    assert "usage" not in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "content",
    [
        b"{oops",
        b"\xff\xfe",
        b"[" * 5000,
        b"1",
        b"{}",
        b'{"messages": 1}',
        b'{"messages": [1]}',
        b'{"messages": [{}]}',
    ],
)
async def test_what_is_no_chat_is_refused_in_openai_form(
    http: httpx2.AsyncClient, content: bytes
) -> None:
    answer = await http.post("/chat/completions", content=content)

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]


async def test_fake_model_reports_a_script_that_fails() -> None:
    def decide(request: dict[str, Any]) -> Any:
        raise LookupError("no such line")

    async def use() -> None:
        async with FakeModel(decide) as model, provider_for(model, patience_s=0) as asking:
            with pytest.raises(ModelError):
                await asking("hi")

    with pytest.raises(AssertionError) as caught:
        await use()
    assert "no such line" in repr(caught.value.__cause__)


async def test_fake_model_ends_with_open_requests() -> None:
    gate = asyncio.Event()
    async with httpx2.AsyncClient(trust_env=False) as http:
        async with FakeModel() as model:
            model.script(gated(gate, text("never")))
            url = f"{model.base_url}/chat/completions"
            open_request = asyncio.ensure_future(http.post(url, json=HELLO))
            await model.received()
        with pytest.raises(httpx2.HTTPError):
            await open_request
