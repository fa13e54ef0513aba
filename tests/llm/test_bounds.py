"""Bounds on a model server's answers."""

import asyncio
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from bottega.errors import ModelError
from bottega.llm import provider
from bottega.llm.dialects import answer
from bottega.llm.dialects.answer import MAX_CALLS, MAX_CHARACTERS
from tests.fake_model import FakeModel, calls, text
from tests.llm.conftest import Asking, provider_for

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 100_000 + b'"}}]}\n\n'


async def _send_for_ever(send: Send, event: bytes) -> None:
    while True:
        await send({"type": "http.response.body", "body": event, "more_body": True})
        await asyncio.sleep(0)  # once reading stops, send does not wait any more


@pytest.mark.parametrize("event", [EVENT, b"x" * 100_000, b": " + b"x" * 100_000 + b"\n\n"])
async def test_endless_answer_is_cut_off(
    model: FakeModel, asking: Asking, event: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "_COLLECT_S", 1e-6)  # 64 MB would take 7 s
    hung_up = asyncio.Event()

    def endless(request: dict[str, Any]) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            sending = asyncio.ensure_future(_send_for_ever(send, event))
            while (await receive())["type"] != "http.disconnect":
                pass
            sending.cancel()
            hung_up.set()

        return app

    model.script(endless)
    with pytest.raises(ModelError, match="more than"):
        await asking("hi")
    await hung_up.wait()


async def test_text_over_the_limit_is_refused(model: FakeModel, asking: Asking) -> None:
    long = "x" * (MAX_CHARACTERS // 4)
    model.script(text(f"{long} " * 3), text(f"{long} " * 4))
    assert len((await asking("hi")).content) > 3 * len(long)
    with pytest.raises(ModelError, match="characters"):
        await asking("hi")


async def test_arguments_count_as_text(model: FakeModel, asking: Asking) -> None:
    model.script(calls(("a", {"x": "y" * MAX_CHARACTERS})))
    with pytest.raises(ModelError, match="characters"):
        await asking("hi")


async def test_too_many_tool_calls_are_refused(model: FakeModel, asking: Asking) -> None:
    model.script(calls(*[("a", {})] * MAX_CALLS), calls(*[("a", {})] * (MAX_CALLS + 1)))
    assert len((await asking("hi")).tool_calls) == MAX_CALLS
    with pytest.raises(ModelError, match="tool calls"):
        await asking("hi")


async def test_a_provider_keeps_something_of_a_bounded_number_of_models(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider, "MOST_MODELS", 3)
    model.decide = lambda request: text("hello")
    async with provider_for(model) as asking:
        for number in range(8):
            await asking("hi", model=f"m{number % 5}")
        kept = asking.provider._dialects, asking.provider._prices
    asked = [request["model"] for request in model.requests]
    assert asked == [f"m{number % 5}" for number in range(8)]
    assert [list(each) for each in kept] == [["m0", "m1", "m2"]] * 2
