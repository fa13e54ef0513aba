"""Bodies with fields that depend on each other: the server and the OpenAPI document agree."""

import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from jsonschema import Draft202012Validator

from bottega.api.documents import VARIANTS
from bottega.settings import Settings, StdioServer
from tests.service import running

ABSENT = object()
EPISODE = {"outcome": "SUCCESS", "task": {"original_input": "x"}}
FAILURE = {"type": "TimeoutError"}
USER, SYSTEM = ({"role": role, "content": "x"} for role in ("user", "system"))
SIGNATURES: list[Any] = [ABSENT, {}, {"failure_signature": None}, {"failure_signature": "x"}]
MODES = ("semantic", "hybrid", "structured", "temporal", "failures")


def maybe(*values: Any) -> list[Any]:
    """List the values of a field that may be absent or null."""
    return [ABSENT, None, *values]


CASES: dict[str, tuple[str, dict[str, list[Any]]]] = {
    "NewRun": (
        "/v1/runs",
        {
            "input": ["x", [], [USER], [SYSTEM], [SYSTEM, USER], [USER, USER]],
            "mode": [ABSENT, "orchestrated", "dag"],
            "agent": maybe("a"),
            "graph": maybe("g"),
        },
    ),
    "EpisodeSearch": (
        "/v1/episodes/search",
        {
            "mode": [ABSENT, *MODES],
            "query": maybe("x"),
            "failure": maybe(FAILURE),
            "filters": SIGNATURES,
        },
    ),
    "SimilarFailures": (
        "/v1/episodes/similar-failures",
        {"error": maybe(FAILURE), "failure_signature": maybe("x")},
    ),
    "NewLearning": (
        "/v1/memory/learn",
        {"episode_id": maybe(str(uuid4())), "episode": maybe(EPISODE)},
    ),
    "NewMcpServer": (
        "/v1/mcp-servers",
        {
            "url": maybe("https://mcp.example.com/mcp"),
            "command": maybe("time"),
            "headers": [ABSENT, {}, {"accept-language": "en"}],
        },
    ),
    "McpServerBody": (
        "/v1/mcp-servers/server",
        {
            "url": maybe("https://mcp.example.com/mcp"),
            "command": maybe("time"),
            "headers": [ABSENT, {}, {"accept-language": "en"}],
        },
    ),
    "NewKey": (
        "/v1/keys",
        {
            "name": ["x"],
            "scopes": maybe(["run"]),
            "role": maybe("viewer"),
        },
    ),
    "PatternsWanted": ("/v1/patterns/match", {"features": maybe({}), "task": maybe("x")}),
    "NewFeedback": (
        f"/v1/runs/{uuid4()}/feedback",
        {"outcome": maybe("SUCCESS"), "score": maybe(1), "comment": maybe("x")},
    ),
    "SubAgents": (
        "/v1/agents",
        {
            "mode": [ABSENT, "sync", "async"],
            "names": [ABSENT, ["a"], ["a", "a"]],
            "limits": maybe({}),
        },
    ),
}
"""By schema: its operation, and the values to combine."""


def bodies(fields: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*fields.values()):
        yield {
            name: value for name, value in zip(fields, values, strict=True) if value is not ABSENT
        }


@pytest.fixture(scope="module")
async def client(
    module_settings: Settings, module_database_url: str
) -> AsyncIterator[httpx2.AsyncClient]:
    """Of a server with the agents and graphs that the bodies and the document's examples name."""
    programs = {"mcp_stdio": {"time": StdioServer(command="true")}}
    settings = module_settings.model_copy(update=programs)
    async with running(settings, module_database_url) as server:
        client = server.client
        server_at = {"name": "server", "url": "https://mcp.example.com/mcp"}
        assert (await client.post("/v1/mcp-servers", json=server_at)).status_code == 201
        for name in ("a", "b", "coordinator"):
            agent = {"name": name, "description": "x", "system_message": "x"}
            assert (await client.post("/v1/agents", json=agent)).status_code == 201
        for graph in ("g", "software"):
            body = {"name": graph, "edges": [{"source": "a", "target": "b"}]}
            assert (await client.post("/v1/graphs", json=body)).status_code == 201
        yield client


def test_every_body_with_variants_is_tried() -> None:
    assert VARIANTS.keys() <= CASES.keys()


def sampled() -> Iterator[Any]:
    """Yield the names of bodies; the gate tries one in three."""
    for number, name in enumerate(name for name in CASES if name != "NewKey"):
        yield pytest.param(name, marks=() if number % 3 == 0 else pytest.mark.deep)


@pytest.mark.parametrize("name", [*sampled()])
async def test_the_server_refuses_what_the_schema_refuses(
    client: httpx2.AsyncClient, name: str
) -> None:
    await compare(client, name)


async def test_the_server_refuses_what_the_schema_of_a_key_refuses(
    settings: Settings, database_url: str
) -> None:
    # The first key makes a server refuse requests without one, so no other case shares this server.
    async with running(settings, database_url) as server:
        made = await server.client.post("/v1/keys", json={"name": "test", "scopes": ["admin"]})
        server.client.headers["authorization"] = f"Bearer {made.json()['key']}"
        await compare(server.client, "NewKey")


async def compare(client: httpx2.AsyncClient, name: str) -> None:
    """Send each body of a case, and compare the answer with the verdict of the schema."""
    path, fields = CASES[name]
    document = (await client.get("/openapi.json")).json()
    examples = document["components"]["schemas"][name]["examples"]
    schema = Draft202012Validator({**document, "$ref": f"#/components/schemas/{name}"})
    refused = 0
    for number, body in enumerate([*examples, *bodies(fields)]):
        sent = body
        if name == "NewMcpServer":
            body = sent = {"name": f"m{number}", **body}
        if name == "SubAgents":
            sent = {"name": f"n{number}", "system_message": "x", "subagents": body}
        method = "PUT" if name == "McpServerBody" else "POST"
        answer = await client.request(method, path, json=sent)
        assert (answer.status_code != 422) == schema.is_valid(body), (body, answer.text)
        refused += answer.status_code == 422
        assert number >= len(examples) or answer.status_code != 422, (body, answer.text)
    assert 0 < refused < number
