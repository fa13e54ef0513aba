"""Cancelling a call disconnects at once; connections end with their loop and provider."""

import asyncio
import gc
from typing import Any

import pytest

from bottega.agents.messages import HumanMessage, Usage
from bottega.agents.provider import LLMProvider, ModelOptions
from bottega.errors import ModelError
from bottega.llm.vendors import OpenAIProvider
from tests.fake_model import (
    FakeModel,
    chunk,
    gated,
    gated_within,
    http_error,
    sse_until,
    text,
)
from tests.llm.conftest import KEY, Asking, provider_for

ANSWER = text("one two three")


@pytest.mark.parametrize("late", [True, False], ids=["within the answer", "before the answer"])
async def test_cancelling_closes_the_stream_at_the_server(
    model: FakeModel, asking: Asking, late: bool
) -> None:
    never = asyncio.Event()
    model.script(gated_within(never, ANSWER, events=2) if late else gated(never, ANSWER))
    task = asyncio.ensure_future(asking("hi"))
    await model.received()

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await model.disconnected()
    assert asking.failed == []


async def test_usage_that_was_reported_before_is_told(model: FakeModel, asking: Asking) -> None:
    used = {"prompt_tokens": 9, "completion_tokens": 1}
    model.script(sse_until(asyncio.Event(), {**chunk("x" * 400), "usage": used}))
    heard, lost = asyncio.Event(), list[Usage]()
    task = asyncio.ensure_future(
        asking.provider.invoke(
            [HumanMessage(content="hi")],
            options=ModelOptions(on_lost=lost.append),
            on_delta=lambda piece: heard.set(),
        )
    )
    await heard.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert lost == [Usage(input=9, output=100, estimated=True)], "at least what has arrived"


@pytest.mark.parametrize("events", [0, 2])
async def test_a_cancelled_request_counts_by_estimates(
    model: FakeModel, asking: Asking, events: int
) -> None:
    never, heard, lost = asyncio.Event(), asyncio.Event(), list[Usage]()
    answer = text("x" * 400)
    model.script(gated_within(never, answer, events=events) if events else gated(never, answer))
    task = asyncio.ensure_future(
        asking.provider.invoke(
            [HumanMessage(content="y" * 1000)],
            options=ModelOptions(on_lost=lost.append),
            on_delta=lambda piece: heard.set(),
        )
    )
    await (heard.wait() if events else model.received())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (usage,) = lost
    assert (250 < usage.input < 1000, usage.output > 0, usage.estimated) == (
        True,
        events > 0,
        True,
    )


async def test_cancelling_within_a_delta(model: FakeModel, asking: Asking) -> None:
    model.script(gated_within(asyncio.Event(), ANSWER, events=2))
    heard = asyncio.Event()

    async def listen(piece: str) -> None:
        heard.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(
        asking.provider.invoke([HumanMessage(content="hi")], on_delta=listen)
    )
    await heard.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await model.disconnected()


async def test_cancelling_during_the_wait_for_the_next_try(model: FakeModel) -> None:
    model.script(http_error(500))
    waiting = asyncio.Event()

    async def sleep(seconds: float) -> None:
        waiting.set()
        await asyncio.Event().wait()

    provider = OpenAIProvider("m", api_key=KEY, base_url=model.base_url, sleep=sleep)
    task = asyncio.ensure_future(provider.invoke([HumanMessage(content="hi")]))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await provider.aclose()
    assert len(model.requests) == 1


async def test_timeout_around_the_call_disconnects_too(model: FakeModel, asking: Asking) -> None:
    model.script(gated_within(asyncio.Event(), ANSWER, events=2))
    limit = asyncio.timeout(None)

    async def ask() -> None:
        async with limit:
            await asking("hi")

    task = asyncio.ensure_future(ask())
    await model.received()
    limit.reschedule(0)
    with pytest.raises(TimeoutError):
        await task
    await model.disconnected()


async def test_one_connection_serves_call_after_call(model: FakeModel, asking: Asking) -> None:
    ports = set()
    for _ in range(3):
        await asking("hi")
        ports.add(await _client_port(asking))
    assert len(ports) == 1


async def test_many_calls_side_by_side(model: FakeModel, asking: Asking) -> None:
    answers = await asyncio.gather(*(asking(f"number {number}") for number in range(50)))
    assert [f'"number {number}"' in answer.content for number, answer in enumerate(answers)] == (
        [True] * 50
    )


async def test_closed_provider_opens_again(model: FakeModel, asking: Asking) -> None:
    await asking("hi")
    await asking.provider.aclose()
    await asking.provider.aclose()
    await asking("hi")
    assert len(model.requests) == 2


async def test_provider_for_another_model_shares_connections(
    model: FakeModel, asking: Asking
) -> None:
    other: LLMProvider = asking.provider.for_model("other")
    await asking("hi")
    port = await _client_port(asking)
    await other.invoke([HumanMessage(content="hi")])
    assert await _client_port(asking) == port
    assert [request["model"] for request in model.requests] == ["some-model", "other"]
    assert asking.provider.for_model("some-model") is asking.provider


async def test_each_event_loop_has_its_own_connections(model: FakeModel) -> None:
    async with provider_for(model) as asking:
        await asking("hi")

        async def ask_and_close() -> str:
            answer = await asking("hi")
            await asking.provider.aclose()
            return str(answer.content)

        def in_another_loop() -> str:
            return asyncio.run(ask_and_close())

        assert await asyncio.to_thread(in_another_loop)
        assert await asyncio.to_thread(in_another_loop)
        await asking("hi")
    gc.collect()
    assert len(model.requests) == 4


async def test_closing_fails_running_calls(model: FakeModel) -> None:
    model.script(gated_within(asyncio.Event(), ANSWER, events=2))
    async with provider_for(model, patience_s=0) as asking:
        task = asyncio.ensure_future(asking("hi"))
        await model.received()
        await asking.provider.aclose()
        with pytest.raises(ModelError):
            await task
    await model.disconnected()


async def _client_port(asking: Asking) -> int:
    """Return the local port of the one idle connection."""
    connector: Any = (await asking.provider._client._session()).connector
    ((connection, _),) = next(iter(connector._conns.values()))
    port: int = connection.transport.get_extra_info("sockname")[1]
    return port
