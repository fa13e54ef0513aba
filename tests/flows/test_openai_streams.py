"""Streams of OpenAI's API: their pieces, joined, are what a client would have got whole."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.fake_model import DONE, FakeModel, Reply, calls, chunk, http_error, sse, sse_until, text
from tests.flows.test_conversations import define
from tests.flows.test_openai_api import client
from tests.flows.test_openai_shapes import FORMS, function
from tests.service import Running

__all__ = ["client"]

PAUSE_S = 0.05
"""Longest time that a slow model waits until the client has seen its words."""
_seen: list[asyncio.Event] = []
"""Set when a client that is watched sees words; empty: nobody is."""
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
JSON = '{"city":"Rome"}'


class Place(BaseModel):
    city: str


@pytest.fixture
async def bottega(guest: Running) -> Running:
    await define(guest, tools=[{"type": "builtin", "name": "calculator"}])
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


def _see() -> None:
    for event in _seen:
        event.set()


async def pause() -> None:
    """Wait until the client has seen something; some text it must not see yet."""
    if not _seen:
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PAUSE_S):
            await _seen[0].wait()
    _seen[0].clear()


def slow(*events: dict[str, Any], breaks: bool = False) -> Reply:
    """Stream events with pauses, in which live text is shown; ``breaks``: without an end."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in events:
            body = b"data: %b\n\n" % to_json(event)
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await pause()
        if not breaks:
            await send({"type": "http.response.body", "body": DONE})

    def reply(request: dict[str, Any]) -> ASGIApp:
        return app

    return reply


def spoken(words: str, finish: str = "stop", *, called: str | None = None) -> Reply:
    """Say a text slowly, in two pieces, and perhaps call a tool."""
    middle = len(words) // 2
    pieces = [chunk(piece) for piece in (words[:middle], words[middle:]) if piece]
    if called is not None:
        tool = {"name": called, "arguments": '{"expression": "6*7"}'}
        pieces.append(chunk(tool_calls=[{"index": 0, "id": "c", "function": tool}]))
        finish = "tool_calls"
    return slow(*pieces, chunk(finish_reason=finish))


def broken_off(words: str) -> Reply:
    return slow(chunk(words), breaks=True)


async def whole(client: openai.AsyncOpenAI, form: str, **more: Any) -> tuple[str, list[str]]:
    """Return text and calls of an answer."""
    _seen.clear()
    if form == "chat":
        asked: Any = [{"role": "user", "content": "?"}]
        made = await client.chat.completions.create(model="clerk", messages=asked, **more)
        message = made.choices[0].message
        called = [call.function.name for call in message.tool_calls or ()]
        return message.content or "", called
    response = await client.responses.create(model="clerk", input="?", **more)
    return response.output_text, [
        item.name for item in response.output if item.type == "function_call"
    ]


async def streamed(
    client: openai.AsyncOpenAI, form: str, *, watched: bool = True, **more: Any
) -> tuple[str, list[str]]:
    """Return the same, joined from the pieces of a stream.

    Args:
        watched: a slow model waits for this client.
    """
    _seen[:] = [asyncio.Event()] if watched else []
    said, called = [], []
    if form == "chat":
        asked: Any = [{"role": "user", "content": "?"}]
        stream: Any = await client.chat.completions.create(
            model="clerk", messages=asked, stream=True, **more
        )
        async for part in stream:
            delta = part.choices[0].delta
            said.append(delta.content or "")
            if delta.content:
                _see()
            called += [call.function.name for call in delta.tool_calls or ()]
        return "".join(said), called
    stream = await client.responses.create(model="clerk", input="?", stream=True, **more)
    last = None
    async for event in stream:
        if event.type == "response.output_text.delta":
            said.append(event.delta)
            _see()
        last = event
    assert last is not None
    assert last.type == "response.completed", last
    assert last.response.output_text == "".join(said)
    return "".join(said), [i.name for i in last.response.output if i.type == "function_call"]


def schema_fields(form: str, schema: dict[str, Any] = CITY) -> dict[str, Any]:
    """Return the fields that ask for JSON."""
    named = {"name": "place", "schema": schema}
    if form == "chat":
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    return {"text": {"format": {"type": "json_schema", **named}}}


PLANS: list[tuple[str, Sequence[Reply], str]] = [
    ("continued", [spoken("Once upon a", "length"), spoken(" time.")], "Once upon a time."),
    (
        "repeated",
        [spoken("Once upon a", "length"), spoken("Once upon a time.")],
        "Once upon a time.",
    ),
    ("cut with a blank", [spoken("Once \n", "length"), spoken("Once more.")], "Once more."),
    ("led by a blank", [spoken("  Once", "length"), spoken("Once more.")], "  Once more."),
    ("whole twice", [spoken("Done.", "length"), spoken("Done.", "length")], "Done."),
    ("blank first", [spoken("  \n "), spoken("Done.")], "Done."),
    ("nothing first", [text(""), spoken("Done.")], "Done."),
    (
        "beside a call",
        [spoken("Let me see.", called="calculator"), spoken("It is 42.")],
        "Let me see.\n\nIt is 42.",
    ),
    (
        "cut before a call",
        [spoken("Let me", "length"), spoken("see.", called="calculator"), spoken("It is 42.")],
        "Let me\n\nsee.\n\nIt is 42.",
    ),
    (
        "broken off",
        [broken_off("Once upon"), spoken("Once upon a time.")],
        "Once upon a time.",
    ),
    ("refused", [http_error(503), spoken("Done.")], "Done."),
]


@pytest.mark.parametrize(
    ("form", "replies", "right"),
    [(form, *each[1:]) for form, each in zip(cycle(FORMS), PLANS, strict=False)],
    ids=lambda _: "",
)
async def test_a_text_comes_once(
    client: openai.AsyncOpenAI,
    bottega: Running,
    model: FakeModel,
    form: str,
    replies: Sequence[Reply],
    right: str,
) -> None:
    for answer in (streamed, whole):
        model.script(*replies)
        assert await answer(client, form) == (right, []), answer


ACCEPTED = (
    JSON,
    f"```json\n{JSON}\n```",
    f"```JSON {JSON} ```",
    f"<think>What about Oslo? {{}}</think>{JSON}",
    f"\ufeff{JSON}",
)


@pytest.mark.deep
@pytest.mark.parametrize("form", FORMS)
async def test_json_is_sent_once_it_is_accepted(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel, form: str
) -> None:
    for answer in ACCEPTED:
        plan = [spoken("Let me see.", called="calculator"), spoken('{"city": 7}'), spoken(answer)]
        model.script(*plan, *plan)
        watched = answer == JSON
        assert await streamed(client, form, watched=watched, **schema_fields(form)) == (JSON, [])
        assert await whole(client, form, **schema_fields(form)) == (JSON, [])


async def test_a_text_beside_a_call_is_no_json(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel
) -> None:
    for form in FORMS:
        for way in (partial(streamed, watched=False), whole):
            model.script(spoken("Let me look.", called="locate"))
            tools: Any = [function(form)]
            assert await way(client, form, tools=tools, **schema_fields(form)) == ("", ["locate"])
            model.script(spoken("Let me look.", called="locate"))
            assert await way(client, form, tools=tools) == ("Let me look.", ["locate"])


async def test_the_official_streams_parse(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel
) -> None:
    plan = [spoken("Let me see.", called="calculator"), spoken(f"```json\n{JSON}\n```")]
    model.script(*plan)
    asked: Any = [{"role": "user", "content": "?"}]
    async with client.chat.completions.stream(
        model="clerk", messages=asked, response_format=Place
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == Place(city="Rome")
    model.script(*plan)
    async with client.responses.stream(model="clerk", input="?", text_format=Place) as events:
        async for _ in events:
            pass
        response = await events.get_final_response()
    assert response.output_parsed == Place(city="Rome")


@pytest.mark.parametrize("form", FORMS)
async def test_an_answer_that_begins_anew_with_other_words_is_an_error(
    client: openai.AsyncOpenAI, bottega: Running, model: FakeModel, form: str
) -> None:
    shown = asyncio.Event()
    model.script(sse_until(shown, chunk("Once upon")), spoken("In Rome."))
    if form == "chat":
        asked: Any = [{"role": "user", "content": "?"}]
        chunks = await client.chat.completions.create(model="clerk", messages=asked, stream=True)

        async def read() -> None:
            async for part in chunks:
                if part.choices[0].delta.content:
                    shown.set()

        with pytest.raises(openai.APIError) as refused:
            await read()
        assert refused.value.code == "broken_off"
        return
    kinds = []
    async for event in await client.responses.create(model="clerk", input="?", stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            shown.set()
    assert kinds[-1] == "response.failed"


WORDS = st.sampled_from(
    ["Once upon a", "Bana", " na", "time.", "Rome ", " is\n", "  so", "Let me see.", "x"]
)
STEPS = st.one_of(
    st.builds(lambda words: [spoken(words, "length")], WORDS),
    st.builds(lambda words: [spoken(words, called="calculator")], WORDS),
    st.just([calls(("calculator", {"expression": "1+1"}))]),
    st.just([spoken(" \n")]),
    st.just([http_error(503)]),
    st.just([sse(chunk("Oslo is"), done=False)]),
    st.builds(lambda words: [broken_off(words), spoken(words, called="calculator")], WORDS),
)
ENDS = st.one_of(
    st.builds(spoken, WORDS),
    st.builds(lambda words: spoken(words, "length"), WORDS),
    st.builds(lambda words: spoken(words, called="locate"), WORDS),
    st.builds(lambda words: spoken(words), st.sampled_from([JSON, "{", f"```\n{JSON}\n```"])),
)


async def compared(
    client: openai.AsyncOpenAI,
    model: FakeModel,
    form: str,
    plan: Sequence[Reply],
    with_schema: bool,
) -> None:
    """Check that a plan of the model's answers gives the same, streamed and whole."""
    more = {"tools": [function(form)], **(schema_fields(form) if with_schema else {})}
    found = []
    for way in (partial(streamed, watched=not with_schema), whole):
        model.forget()
        model.script(*plan)
        model.decide = lambda request: text(JSON)
        try:
            found.append(await way(client, form, **more))
        except (openai.APIError, AssertionError) as error:
            found.append((type(error).__name__, []))
    (text_in_pieces, called), right = found
    if "Error" not in text_in_pieces:
        assert (text_in_pieces, called) == right
    if with_schema and right[0] and "Error" not in right[0]:
        assert json.loads(right[0]) == {"city": "Rome"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_schema", [False, True])
@pytest.mark.parametrize("count", [2, pytest.param(40, marks=pytest.mark.deep)])
async def test_any_plan_is_the_same_in_pieces(
    client: openai.AsyncOpenAI,
    bottega: Running,
    model: FakeModel,
    form: str,
    with_schema: bool,
    count: int,
) -> None:
    plans: list[list[Reply]] = []

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(STEPS, max_size=4), ENDS)
    def collect(steps: list[list[Reply]], end: Reply) -> None:
        plans.append([*(reply for step in steps for reply in step), end])

    collect()
    for plan in plans:
        await compared(client, model, form, plan, with_schema)
