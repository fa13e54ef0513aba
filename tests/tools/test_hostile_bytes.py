"""Bytes of hostile servers, programs and clients cost little CPU, and none of it for long."""

import asyncio
import random
import sys
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.agents.messages import ToolCall
from bottega.api.routes.files import MultipartFile
from bottega.mcp.client import list_tools
from bottega.outside import BoundedReader, OutsideError, check_json
from bottega.tools.egress import Egress
from bottega.tools.http import HttpTool, HttpToolDefinition
from bottega.tools.mcp import McpServer, StdioCommand
from bottega.tools.media import PageCount, pixels_of
from tests.hostile import (
    CHUNKS,
    HARMLESS,
    JSON,
    LONGEST_TURN_S,
    MOST_S,
    STEP,
    STREAMS,
    Body,
    Cost,
    allowed_s,
    cost_of,
    filled,
    sending,
)

MESSAGES = {
    "ids": Body(filled(b"id:1\n\n")),
    "notes": Body(filled(b'data:{"jsonrpc":"2.0","method":"notifications/x"}\n\n', 12 * STEP)),
    "replies": Body(filled(b'data:{"jsonrpc":"2.0","id":7,"result":{}}\n\n', 12 * STEP)),
    "batch": Body(b"[" + filled(b'{"jsonrpc":"2.0","method":"x"},', 8 * STEP) + b"1]", JSON),
}
"""Messages of MCP that nobody waits for."""


async def no_secret(name: str) -> str:
    raise AssertionError(name)


async def cost_of_tool(body: Body) -> Cost:
    with sending(body.answer()) as port:
        tool = HttpToolDefinition(
            name="t", description="x", url=f"http://127.0.0.1:{port}/", max_bytes=1_000_000
        )
        async with aclosing(Egress(["127.0.0.1"])) as egress:
            calling = HttpTool(tool, secrets=no_secret, egress=egress)
            return await cost_of(lambda: calling.execute(ToolCall(id="1", name="t", arguments={})))


async def cost_of_list(body: Body) -> Cost:
    with sending(body.answer()) as port:
        server = McpServer("s", url=f"http://127.0.0.1:{port}/mcp", timeout_s=5)
        async with aclosing(Egress(["127.0.0.1"])) as egress:
            return await cost_of(lambda: list_tools(server, egress))


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Load what a first call does."""
    asyncio.run(cost_of_tool(HARMLESS))
    asyncio.run(cost_of_list(HARMLESS))


@pytest.mark.parametrize("name", [*STREAMS, *CHUNKS])
@pytest.mark.parametrize("media", ["text/plain", JSON])
async def test_a_hostile_answer_to_a_tool_costs_little(name: str, media: str) -> None:
    body = replace({**STREAMS, **CHUNKS}[name], media=media)
    cost = await cost_of_tool(body)
    assert cost.whole_s <= allowed_s(replace(body, size=min(body.size, 1_000_000)))
    assert cost.turn_s <= LONGEST_TURN_S


@pytest.mark.parametrize("name", [*STREAMS, *CHUNKS, *MESSAGES])
async def test_a_hostile_mcp_server_costs_little(name: str) -> None:
    body = {**STREAMS, **CHUNKS, **MESSAGES}[name]
    cost = await cost_of_list(body)
    # The SDK tries both eras of the protocol, so it reads two answers; each note is a task of its.
    assert cost.whole_s <= (2 * MOST_S if name == "notes" else allowed_s(body, 2))
    assert cost.turn_s <= LONGEST_TURN_S


@pytest.mark.parametrize("channel", ["stdout", "stderr"])
@pytest.mark.parametrize("line", ["\\n", "x\\n", "[\\n", "x", '{"jsonrpc":"2.0","id":7}\\n'])
async def test_a_program_that_floods_costs_little(channel: str, line: str) -> None:
    size = len(line.replace("\\n", "n"))
    flood = f"import sys\nfor _ in range(64): sys.{channel}.write('{line}' * {STEP // size})"
    server = McpServer("s", command=StdioCommand(sys.executable, ("-IS", "-c", flood)), timeout_s=5)
    cost = await cost_of(lambda: list_tools(server, Egress()))
    assert cost.whole_s <= MOST_S
    assert cost.turn_s <= LONGEST_TURN_S


PART = b'--B\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
FORMS = {
    "bytes": PART + random.Random(7).randbytes(16 * STEP),
    "boundaries": PART + filled(b"\r\n--B\r", 16 * STEP),
    "half boundaries": PART + filled(b"\r\n--", 16 * STEP),
    "line feeds": PART + filled(b"\r\n", 16 * STEP),
    "headers": b"--B\r\n" + filled(b"a:b\r\n", 16 * STEP),
    "a long header": b"--B\r\na:" + filled(b"b", 16 * STEP),
    "parts": filled(b"--B\r\n\r\n\r\n", 16 * STEP),
    "fields": filled(b'--B\r\ncontent-disposition: form-data; name="a"\r\n\r\nx\r\n', 16 * STEP),
}


@pytest.mark.parametrize("name", FORMS)
async def test_a_hostile_form_costs_little(name: str) -> None:
    async def parse() -> None:
        reader, form = BoundedReader(10**9), MultipartFile(b"B", frozenset({"a"}))
        async for step in reader.steps(FORMS[name]):
            form.feed(step)

    cost = await cost_of(parse)
    assert cost.whole_s <= allowed_s(Body(FORMS[name]))
    assert cost.turn_s <= LONGEST_TURN_S / 4


@pytest.mark.parametrize("piece", [b"/Type/Page ", b"/Type/Pages", b"/Type", b"/Type        /Pag"])
async def test_hostile_pages_cost_little(piece: bytes) -> None:
    body = filled(piece, 16 * STEP)

    async def look() -> None:
        pages = PageCount()
        async for step in BoundedReader(10**9).steps(body):
            pages.feed(step)

    cost = await cost_of(look)
    assert cost.whole_s <= allowed_s(Body(body))
    assert cost.turn_s <= LONGEST_TURN_S / 4


@pytest.mark.parametrize("segment", [b"\xff\xe0\x00\x02", b"\xff\xe0\x00\x00", b"\xff\xff"])
async def test_hostile_pictures_cost_little(segment: bytes) -> None:
    picture = b"\xff\xd8" + filled(segment, 320 * STEP)

    async def look() -> None:
        assert pixels_of(picture) is None

    assert (await cost_of(look)).whole_s <= 0.05


@given(st.lists(st.sampled_from([b"\r\n", b"--", b"B", b"\r\n--B", b"x", b"\r", b"\n"])), st.data())
def test_a_form_says_the_same_however_it_is_cut(words: list[bytes], data: st.DataObject) -> None:
    content = b"".join(words)
    inside = b"\r\n" + content
    if b"\r\n--B\r\n" in inside + b"\r\n" or b"\r\n--B--" in inside:
        return
    field = b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\nabc\r\n'
    body = field + PART + content + b"\r\n--B--\r\nafter"
    form, found = MultipartFile(b"B", frozenset({"a"})), b""
    for piece in _cut(body, data):
        found += form.feed(piece)
    form.close()
    assert (found, form.fields, form.name) == (content, {"a": "abc"}, "a")


def _cut(body: bytes, data: st.DataObject) -> Iterator[bytes]:
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=5).map(sorted))
    yield from (body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True))


async def test_what_a_message_may_have() -> None:
    reader = BoundedReader(200_000, units=3)
    assert [len(step) async for step in reader.steps(b"x" * 140_000)] == [65_536, 65_536, 8_928]
    reader.count(3)
    with pytest.raises(OutsideError, match="more than 3 lines"):
        reader.count(1)
    with pytest.raises(OutsideError, match="more than 200000 bytes"):
        _ = [step async for step in reader.steps(b"x" * 60_001)]
    with pytest.raises(OutsideError, match="1 s of CPU"):
        reader.charge(1.5)
    check_json(b"[" + b"1," * 100 + b"1]")
    with pytest.raises(OutsideError, match="200000 values"):
        check_json("[" + "1," * 200_000 + "1]")
    with pytest.raises(OutsideError, match="content-encoding 'br'"):
        BoundedReader(1, encoding="br")
