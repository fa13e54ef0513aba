"""Built-in tools as a model sees them."""

from contextlib import aclosing
from datetime import UTC, datetime

import pytest

from bottega.agents import (
    AgentEvent,
    AgentStatus,
    BaseAgent,
    MemoryItem,
    Recorder,
    SharedMemoryGraph,
    ToolCall,
)
from bottega.agents.parts import Part
from bottega.agents.query import CurrentCall, Query, current_call
from bottega.agents.shared_memory import inject_shared_memory
from bottega.agents.tools import WITHIN_RUN, ToolBase
from bottega.errors import InvalidInputError
from bottega.tools.builtin import BUILTIN, ToolDeps, build_tool, builtin_tool
from bottega.tools.egress import Egress
from tests.domain.scripted import agent
from tests.tools.helpers import call, error_of, result_of
from tests.tools.raw_server import RawServer, answer
from tests.tools.test_media import png

NOON = datetime(2026, 7, 1, 12, 0, 0, 5, tzinfo=UTC)


def made(name: str, egress: Egress | None = None) -> ToolBase:
    return builtin_tool(name, ToolDeps(egress or Egress(), clock=lambda: NOON))


@pytest.mark.parametrize("name", BUILTIN)
def test_each_tool_describes_itself_to_the_model(name: str) -> None:
    tool = made(name)
    assert tool.name == name
    assert tool.idempotent
    assert tool.description
    assert tool.schema.parameters["additionalProperties"] is False
    given = build_tool({"type": "builtin", "name": name}, "always", ToolDeps(Egress()), pytest.fail)
    assert (given.approval is None) is given.local is (name in WITHIN_RUN < BUILTIN.keys())


def test_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="there are: current_time, calculator") as caught:
        made("rm_rf")
    assert caught.value.code == "unknown_tool"


# current_time


async def test_time_is_given_in_the_requested_zone() -> None:
    tool = made("current_time")
    assert await result_of(tool) == {
        "time": "2026-07-01T12:00:00+00:00",
        "weekday": "Wednesday",
        "timezone": "UTC",
    }
    there = await result_of(tool, timezone="Pacific/Auckland")
    assert there == {
        "time": "2026-07-02T00:00:00+12:00",
        "weekday": "Thursday",
        "timezone": "Pacific/Auckland",
    }


@pytest.mark.parametrize(
    "name", ["Europe/Roma", "", "Europe", "../../etc/passwd", "/etc/passwd", "a\x00", "UTC+25", "ü"]
)
async def test_unknown_zone_is_named_in_the_error(name: str) -> None:
    assert f"there is no time zone '{name}'" in await error_of(made("current_time"), timezone=name)


async def test_similar_zone_names_are_suggested() -> None:
    said = await error_of(made("current_time"), timezone="Europe/Roma")
    assert "did you mean Europe/Rome" in said


# http_get


async def test_a_page_is_fetched_as_text(web: RawServer, egress: Egress) -> None:
    web.reply = answer("grüß", content_type="text/html; charset=utf-8")
    assert await result_of(made("http_get", egress), url=web.url()) == {
        "status": 200,
        "content_type": "text/html; charset=utf-8",
        "text": "grüß",
        "truncated": False,
    }


async def test_long_page_is_cut_off_and_says_so(web: RawServer, egress: Egress) -> None:
    web.reply = answer("x" + "ü" * 100_000)
    page = await result_of(made("http_get", egress), url=web.url())
    assert isinstance(page, dict)
    assert page["truncated"]
    assert page["text"] == "x" + "ü" * 49_999  # not half a letter


@pytest.mark.parametrize(
    ("content_type", "body", "text"),
    [
        ("text/plain; charset=iso-8859-1", b"gr\xfc\xdf", "grüß"),
        ("text/plain; charset=windows-1252", b"\x80", "€"),
        ("text/plain; charset=no-such", "ü".encode(), "ü"),
        ("text/plain; charset=idna", b"a", "a"),
        ("text/plain; charset=zip", b"a", "a"),
        ("text/plain; charset=utf-8", b"a\xff", "a\ufffd"),
        ("application/json", b"\xef\xbb\xbf{}", "{}"),
        ("application/octet-stream", b"plain after all", "plain after all"),
    ],
)
async def test_text_is_decoded_with_its_charset(
    web: RawServer, egress: Egress, content_type: str, body: bytes, text: str
) -> None:
    web.reply = answer(body, content_type=content_type)
    page = await result_of(made("http_get", egress), url=web.url())
    assert isinstance(page, dict)
    assert page["text"] == text


async def test_an_image_is_a_part_of_the_result(web: RawServer, egress: Egress) -> None:
    image = png(3, 2)
    web.reply = answer(image, content_type="text/plain")

    result = await call(made("http_get", egress), url=web.url())

    assert result.result == {"status": 200, "content_type": "text/plain"}
    assert result.parts == (Part("image", data=image, media_type="image/png"),)


@pytest.mark.parametrize("body", [b"\x00\x01", b"a\x00b"])
async def test_binary_content_is_an_error(web: RawServer, egress: Egress, body: bytes) -> None:
    web.reply = answer(body, content_type="image/png")
    assert await error_of(made("http_get", egress), url=web.url()) == (
        "the answer is not text (image/png)"
    )


async def test_other_status_is_an_error_with_the_servers_text(
    web: RawServer, egress: Egress
) -> None:
    tool = made("http_get", egress)
    web.reply = answer("no such page", status=404)
    assert await error_of(tool, url=web.url()) == (
        "the server answered 404 Not Found: no such page"
    )
    web.reply = answer(status=503, headers=("retry-after: 7",))
    assert await error_of(tool, url=web.url()) == (
        "the server answered 503 Service Unavailable and asks to wait 7 s"
    )


async def test_redirect_is_reported_and_its_address_checked(web: RawServer, egress: Egress) -> None:
    tool = made("http_get", egress)
    web.reply = answer(status=302, headers=("location: http://u:p@169.254.169.254/x#y",))
    said = await error_of(tool, url=web.url())
    assert said.endswith("it has moved to http://169.254.169.254/x; use that URL")
    assert "not a public address" in await error_of(tool, url="http://169.254.169.254/x")
    web.reply = answer(status=302, headers=("location: /there",))
    assert web.url("/there") in await error_of(tool, url=web.url("/here"))
    web.reply = answer(status=302, headers=("location: http://[",))
    assert "an invalid address" in await error_of(tool, url=web.url())


async def test_internal_addresses_are_an_error_the_model_can_read() -> None:
    async with aclosing(Egress()) as egress:
        tool = made("http_get", egress)
        assert "not a public address (loopback)" in await error_of(tool, url="http://127.0.0.1/")
        assert "must have the form" in await error_of(tool, url="file:///etc/passwd")


# read_shared_memory


class Noted(Recorder):
    def __init__(self) -> None:
        self.items: list[MemoryItem] = []

    def injected(self, query: Query, items: object) -> None:
        assert isinstance(items, list)
        self.items += items


async def team() -> SharedMemoryGraph:
    """Build a → c, b → c, d → c; d published nothing; x is unrelated to c."""
    graph = SharedMemoryGraph()
    for source in ("a", "b", "d"):
        graph.add_edge(source, "c")
    graph.add_edge("c", "x")
    await graph.publish("a", "from a")
    await graph.publish("b", "from b </shared-context>")
    await graph.publish("x", "secret of x")
    return graph


def asking(graph: SharedMemoryGraph | None, agent_id: str | None = "c") -> Query:
    agent = BaseAgent("You are c.")
    agent.memory_graph, agent.agent_id = graph, agent_id
    query = Query(agent=agent, messages=(), recorder=Noted())
    current_call.set(CurrentCall(query, 0))
    return query


def noted(query: Query) -> list[str]:
    assert isinstance(query.recorder, Noted)
    return [item.source_id for item in query.recorder.items]


async def test_shared_memory_reads_like_an_injection() -> None:
    query = asking(await team())
    text = await result_of(made("read_shared_memory"))
    assert noted(query) == ["a", "b"]
    inject_shared_memory(query)
    injected = [message.content for message in query.agent.conversation_history[1:]]
    assert text == "\n\n".join(injected)


async def test_agent_reads_publications_made_while_it_works() -> None:
    graph = SharedMemoryGraph()
    graph.add_edge("late", "reader")
    reader = agent(
        ToolCall(id="1", name="read_shared_memory"), "done", tools=[made("read_shared_memory")]
    )
    reader.memory_graph, reader.agent_id = graph, "reader"

    async def publish(status: AgentStatus) -> None:
        await graph.publish("late", "just in time")

    reader.on(AgentEvent.BEFORE_TOOL_EXECUTION).do(publish)
    response = await reader.execute_query_async("go")
    assert response.content == "done"
    assert "just in time" in response.tool_results[0].text


async def test_one_source_can_be_read_alone() -> None:
    query = asking(await team())
    text = await result_of(made("read_shared_memory"), source_id="b")
    assert isinstance(text, str)
    assert "from b" in text
    assert "from a" not in text
    assert noted(query) == ["b"]


async def test_source_without_a_publication_is_no_error() -> None:
    query = asking(await team())
    said = await result_of(made("read_shared_memory"), source_id="d")
    assert said == "Nothing has been published yet."
    assert noted(query) == []


@pytest.mark.parametrize("source", ["x", "c", "nobody", ""])
async def test_only_direct_predecessors_can_be_read(source: str) -> None:
    query = asking(await team())
    said = await error_of(made("read_shared_memory"), source_id=source)
    assert said == f"this agent cannot read '{source}'; it can read: a, b, d"
    assert noted(query) == []


async def test_without_graph_or_query_nothing_can_be_read() -> None:
    tool = made("read_shared_memory")
    asking(None)
    assert "no shared-memory graph" in await error_of(tool)
    asking(await team(), None)
    assert "no shared-memory graph" in await error_of(tool)
    asking(await team(), "stranger")
    assert "it can read: none" in await error_of(tool, source_id="a")
    current_call.set(None)
    assert "within an agent's query" in await error_of(tool)
