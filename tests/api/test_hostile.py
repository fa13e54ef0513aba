"""Hostile values in every place of every operation of the OpenAPI document.

Each gets a 4xx, or is stored and returned unchanged. None causes a 500 or touches another row.
"""

import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
import pytest

from bottega.settings import Settings
from tests.rows import rows
from tests.service import running
from tests.tenants import holder

LONG = "x" * 1_000_000
TEXTS = [
    "a\x00b",
    "a\ud800",
    "\udfffb",
    "\u202etxt.exe\u202c\u200f\ufeff\u200b Z\u0351\u036b\u0343a\u0301 \U0001f468\u200d\U0001f469 ﷽",
    "'; DROP TABLE runs; -- ' OR '1'='1\"; SELECT pg_sleep(9); --",
    "_%\\",
    "%s%n%x{0}{x.__class__}{{7*7}}${7*7}<%= 7*7 %>#{7*7}",
    "../../../../etc/passwd",
    "x\r\nset-cookie: a=b\r\n\r\n<script>alert(1)</script>$(reboot)`reboot`\x1b[2J\x07\x7f",
    "null",
    "9" * 400,
    "",
    LONG,
]
VALUES: list[Any] = [None, True, -1.5, 10**400, [], {}, {"$ne": 1}, {"__proto__": 1}]
BOMBS = [
    b"[" * 200 + b"]" * 200,
    b'{"a":' * 200 + b"1" + b"}" * 200,
    b"1e999",
    b"NaN",
    b"-Infinity",
]
NOBODY = "01a1fdb7-6ff4-7105-ba5d-4c99da8e1434"
_CANDIDATES = ("a", "A", "a:b", "0", NOBODY, "https://example.com/", '"1"', "2026-01-01T00:00:00Z")
SEARCHES = (
    *("/v1/episodes/search", "/v1/episodes/similar-failures"),
    *("/v1/memory/context", "/v1/memory/learn"),
    *("/v1/patterns/match", "/v1/patterns/{pattern_id}/applications"),
    *("/v1/tokens", "/v1/batches", "/v1/evals", "/v1/agents/{name}/draft-runs"),
)
"""Operations whose answers differ from their requests."""
ON_ONE_LINE = ("/v1/lessons/{lesson_id}", "/v1/users/{user}/facts")
"""Operations that store each text on one line."""
USED = ("api_keys", "definition_epochs", "episode_state")
"""Tables that record when they were used, or that any definition of the tenant changed."""
PARTS = 48
"""Tests that share the values: each tries every operation with a part of them."""
SAMPLE = (0,)
"""Parts that the gate tries."""
_MARK = "\x02here\x03"

Path = tuple[Any, ...]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Document:
    """Reader of the OpenAPI document's request schemas."""

    root: dict[str, Any]

    def resolve(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            found: Any = self.root
            for step in schema["$ref"].removeprefix("#/").split("/"):
                found = found[step]
            schema = found
        return schema

    def operations(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Return all (method, path, operation), deletions last."""
        found = [
            (method, path, operation)
            for path, operations in self.root["paths"].items()
            for method, operation in operations.items()
        ]
        yield from sorted(found, key=lambda one: (one[0] == "delete", one[1]))

    def body(self, operation: dict[str, Any]) -> dict[str, Any] | None:
        """Return the schema of a JSON body; tests/api/test_files.py has others."""
        content = operation.get("requestBody", {}).get("content", {})
        return content["application/json"]["schema"] if "application/json" in content else None

    def sample(self, schema: dict[str, Any]) -> Any:
        """Return a small valid value of a schema."""
        schema = self.resolve(schema)
        if schema.get("examples"):
            return schema["examples"][0]
        for alternatives in ("anyOf", "oneOf", "allOf"):
            if alternatives in schema:
                one = schema[alternatives][0]
                if "properties" in schema:  # each says which of them are required
                    return self.sample({"type": "object", "properties": schema["properties"]} | one)
                return self.sample(one)
        if "const" in schema or "enum" in schema:
            return schema.get("const", schema.get("enum", [None])[0])
        if schema.get("type") == "object":
            wanted = schema.get("required", [])
            return {name: self.sample(schema["properties"][name]) for name in wanted}
        if schema.get("type") == "array":
            return []
        if schema.get("type") in ("integer", "number"):
            return schema.get("minimum", 1)
        if schema.get("type") == "boolean":
            return True
        pattern = {"uuid": f"^{NOBODY}$", "date-time": "T"}.get(
            schema.get("format", ""), schema.get("pattern", "")
        )
        return next(text for text in _CANDIDATES if re.search(pattern, text))

    def places(self, schema: dict[str, Any], depth: int = 0) -> Iterator[Path]:
        """Yield the path of each value, and of each name that the client chooses, in a schema."""
        schema = self.resolve(schema)
        yield ()
        for number, one in enumerate(schema.get("anyOf", schema.get("oneOf", ()))):
            yield from ((("or", number), *rest) for rest in self.places(one, depth) if rest)
        for name, one in schema.get("properties", {}).items():
            yield from ((("field", name), *rest) for rest in self.places(one, depth))
        if isinstance(more := schema.get("additionalProperties"), dict):
            yield (("name",),)
            yield from ((("value",), *rest) for rest in self.places(more, depth))
        elif more is True:
            yield from ((("name",),), (("value",),))
        if "items" in schema:
            yield from ((("item",), *rest) for rest in self.places(schema["items"], depth))

    def filled(self, schema: dict[str, Any], path: Path, value: Any) -> Any:
        """Return a valid value of a schema, but with ``value`` at ``path``."""
        if not path:
            return value
        schema, (kind, *step), rest = self.resolve(schema), path[0], path[1:]
        match kind:
            case "or":
                return self.filled((schema.get("anyOf") or schema["oneOf"])[step[0]], rest, value)
            case "item":
                return [self.filled(schema["items"], rest, value)]
            case "name":
                return {value: "x"}
            case "value":
                more = schema["additionalProperties"]
                return {"k": self.filled({} if more is True else more, rest, value)}
        return self.sample(schema) | {
            step[0]: self.filled(schema["properties"][step[0]], rest, value)
        }


class Attacker:
    """Sender of hostile requests that checks the answers."""

    def __init__(self, client: httpx2.AsyncClient, document: Document, part: int) -> None:
        self.client = client
        self.document = document
        self.turns = itertools.count(part)
        self.numbers = itertools.count()
        self.kept: set[str] = set()
        self.sent = 0
        self.known: dict[str, str] = {}

    async def make_victims(self) -> None:
        """Create the resources that the operations work on."""
        for name in ("requirements", "designer", "implementer", "coordinator", "a"):
            body = {"name": name, "description": "x", "system_message": "x"}
            await self.client.post("/v1/agents", json=body)
        edges = [{"source": "requirements", "target": "implementer"}]
        await self.client.post("/v1/graphs", json={"name": "software", "edges": edges})
        schedule = {"name": "morning", "cron": "0 5 * * 1", "run": {"agent": "a", "input": "x"}}
        await self.client.post("/v1/schedules", json=schedule)
        done = {"outcome": "SUCCESS", "task": {"original_input": "x"}}
        done |= {"reflection": {"insights": ["x"]}}
        episode = await self.client.post("/v1/episodes", json=done)
        rule = {"kind": "HEURISTIC", "fields": {"condition": "x", "action": "x"}}
        known = {"name": "x", "category": "domain", "content": rule}
        pattern = await self.client.post("/v1/patterns", json=known)
        run = await self.client.post("/v1/runs", json={"agent": "a", "input": "x"})
        await self.client.post(f"/v1/runs/{run.json()['id']}/cancel")
        self.known = {
            "/v1/agents": "designer",
            "/v1/graphs": "software",
            "/v1/schedules": "morning",
            "/v1/sessions": "todo",
            "/v1/runs": run.json()["id"],
            "/v1/episodes": episode.json()["id"],
            "/v1/lessons": (await self.client.get("/v1/lessons")).json()["items"][0]["id"],
            "/v1/patterns": pattern.json()["id"],
        }

    def url(self, path: str, hostile: str = "", value: str = "") -> str:
        """Return the path with a valid value for each parameter except ``hostile``."""
        start = "/".join(path.split("/")[:3])
        for name in re.findall(r"{(\w+)}", path):
            good = (
                self.known.get(start, NOBODY)
                if name in ("name", "run_id", "session_id", "episode_id", "pattern_id", "lesson_id")
                else None
            )
            filling = {"version": "1", "agent": "designer"}.get(name, good or NOBODY)
            raw = value.encode("utf-8", "surrogatepass") if name == hostile else filling
            path = path.replace(f"{{{name}}}", quote(raw, safe=""))
        return path

    async def judge(
        self, where: str, method: str, url: str, value: Any = None, **sent: Any
    ) -> None:
        if method == "get" and url.endswith("/events"):
            sent["headers"] = {"accept": "application/json", **sent.get("headers", {})}
        answer = await self.client.request(method, url, **sent)
        self.sent += 1
        what = f"{method} {where}: {str(value)[:60]!r} → {answer.status_code} {answer.text[:300]}"
        assert answer.status_code < 500, what
        if answer.status_code >= 400:
            problem = answer.json()
            assert problem["code"], what
            assert problem["detail"], what
        elif where.split()[0] in SEARCHES:
            assert answer.is_success, what  # may find nothing
        elif "content" in sent and isinstance(value, str) and value not in ("", "null"):
            on_one_line = where.split()[0] in ON_ONE_LINE
            expected = " ".join(value.split()) if on_one_line else value
            assert expected in list(texts(answer.json())), what
            self.kept.add(where)

    def some(self, values: Sequence[Value]) -> Sequence[Value]:
        """Return this part's share of the values, other ones for each place."""
        return values[next(self.turns) % PARTS :: PARTS]

    async def attack_body(self, method: str, path: str, schema: dict[str, Any]) -> None:
        for place in self.document.places(schema):
            where = f"{path} {place}"
            for value in self.some([*TEXTS, *VALUES]):
                if place and place[-1][0] == "name" and not isinstance(value, str):
                    continue
                body = self.document.filled(schema, place, value)
                await self.judge(where, method, self.url(path), value, **self.as_json(body, place))
            if place and place[-1][0] != "name":
                good = self.as_json(self.document.filled(schema, place, _MARK), place)
                for bomb in self.some(BOMBS):
                    raw = good["content"].replace(json.dumps(_MARK).encode(), bomb)
                    await self.judge(
                        where, method, self.url(path), bomb, **{**good, "content": raw}
                    )

    def as_json(self, body: Any, place: Path) -> dict[str, Any]:
        if isinstance(body, dict) and "name" in body and ("field", "name") not in place:
            body = body | {"name": f"n{next(self.numbers)}"}  # a used name would be a conflict
            if "category" in body and place[:1] != (("field", "applicability"),):
                kinds = {"problem_types": [body["name"]]}  # an equal pattern would be returned
                body |= {"applicability": kinds}
        content = json.dumps(body).encode()
        return {"content": content, "headers": {"content-type": "application/json"}}

    async def attack_parameter(self, method: str, path: str, parameter: dict[str, Any]) -> None:
        name, where = parameter["name"], f"{path} {parameter['in']} {parameter['name']}"
        for text in self.some(TEXTS):
            value = text[:20_000]
            raw = value.encode("utf-8", "surrogatepass")
            if parameter["in"] == "path":
                if raw:  # an empty value makes another path
                    await self.judge(where, method, self.url(path, name, value), value)
            elif parameter["in"] == "query":
                url = f"{self.url(path)}?{name}={quote(raw, safe='')}"
                await self.judge(where, method, url, value)
            elif re.fullmatch(rb"[\x20-\x7e\x80-\xff]*", raw) and raw.strip() == raw:
                await self.judge(where, method, self.url(path), value, headers={name: raw})


def texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield name
            yield from texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts(one)


@pytest.fixture
async def client(settings: Settings, database_url: str) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of an administrator."""
    admin = await holder(database_url)
    async with running(settings, database_url) as server:
        server.client.headers.update(admin.headers)
        yield server.client


@pytest.mark.parametrize(
    "part", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.deep) for n in range(PARTS)]
)
async def test_hostile_values_are_refused_or_stored_unchanged(
    client: httpx2.AsyncClient, database_url: str, part: int
) -> None:
    document = Document((await client.get("/openapi.json")).json())
    bystander = {"name": "bystander", "description": "x", "system_message": "x"}
    assert (await client.post("/v1/agents", json=bystander)).status_code == 201
    graph = {"name": "bystanders", "nodes": ["bystander"]}
    assert (await client.post("/v1/graphs", json=graph)).status_code == 201
    asked = {"agent": "bystander", "input": "x", "session_id": "bystander", "metadata": {"a": "b"}}
    assert (await client.post("/v1/runs", json=asked)).status_code == 202
    schedule = {"name": "bystander", "cron": "0 5 * * 1", "run": asked, "paused": True}
    assert (await client.post("/v1/schedules", json=schedule)).status_code == 201
    done = {"outcome": "SUCCESS", "task": {"original_input": "bystander"}, "tags": ["a"]}
    assert (await client.post("/v1/episodes", json=done)).status_code == 201
    before = await rows(database_url, without=USED)

    attacker = Attacker(client, document, part)
    await attacker.make_victims()
    for method, path, operation in document.operations():
        if method == "delete":
            await attacker.make_victims()
        for parameter in operation.get("parameters", []):
            await attacker.attack_parameter(method, path, parameter)
        if (schema := document.body(operation)) is not None:
            await attacker.attack_body(method, path, schema)

    assert before <= await rows(database_url, without=USED)
    assert attacker.sent > 500
    assert len(attacker.kept) > 3, attacker.kept
