"""The common part of the stubs of vendors' own APIs.

A stub translates a request into one of Chat Completions, so the demo model and the helpers of the
tests read it, and sends the answer in the vendor's form.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from bottega.agents.provider import DialectName
from bottega.llm.demo_model.rules import Answer, decide
from bottega.llm.dialects.schemas import ANSWER_TOOL
from tests.fake_model import FakeModel, Reply, _Stream, calls

Body = dict[str, Any]
Message = dict[str, Any]


def vendor_decide(request: Body) -> Answer:
    """Answer as the demo model, by the tool for the answer if the request has one."""
    tools = {tool["function"]["name"]: tool for tool in request.get("tools") or ()}
    tool = tools.pop(ANSWER_TOOL, None)
    if tool is None:
        return decide(request)
    form = response_format(tool["function"]["parameters"])
    answer = decide({**request, **form, "tools": list(tools.values())})
    return answer if answer.calls else calls((ANSWER_TOOL, json.loads(answer.text)))


class Vendor(FakeModel):
    """A vendor's API on an ephemeral port, while the ``async with`` block lasts.

    ``decide`` gets each accepted request in the form of Chat Completions.

    Attributes:
        dialect: of the provider that calls it.
        prefix: of the base URL.
        path: of the endpoint.
        bodies: all requests, in the vendor's form.
        refusals: the refused requests, and the reasons.
        held: numbers of requests that wait for an event before they are answered.
    """

    dialect: ClassVar[DialectName]
    prefix: ClassVar[str] = ""
    path: ClassVar[str]

    def __init__(self, decide: Callable[[Body], Reply] = vendor_decide, *, port: int = 0) -> None:
        super().__init__(decide, port=port)
        self.bodies: list[Body] = []
        self.refusals: list[tuple[str, Body]] = []
        self.held: dict[int, asyncio.Event] = {}

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.base_url = self.base_url.removesuffix("/v1") + self.prefix
        return self

    def refusal(self, body: Body, request: Request) -> str | None:
        """Return the vendor's error for a request; ``None``: it accepts it."""
        raise NotImplementedError

    def as_chat(self, body: Body, request: Request) -> Body:
        """Return an accepted request in the form of Chat Completions."""
        raise NotImplementedError

    def events(self, answer: Answer, body: Body) -> Iterator[Mapping[str, Any]]:
        """Yield the events of an answer's stream."""
        raise NotImplementedError

    def error(self, message: str) -> bytes:
        """Return the body of a refusal."""
        raise NotImplementedError

    def encoded(self, event: Mapping[str, Any]) -> bytes:
        return b"data: %b\n\n" % json.dumps(event).encode()

    async def _respond(self, request: Request) -> ASGIApp:
        body = await request.json()
        self.bodies.append(body)
        if wrong := self.refusal(body, request):
            self.refusals.append((wrong, body))
            return Response(self.error(wrong), 400, media_type="application/json")
        chat = self.as_chat(body, request)
        self._on_request(chat)
        if (gate := self.held.get(len(self.requests))) is not None:
            await gate.wait()
        reply = self._answer(chat)
        if not isinstance(reply, Answer):
            return reply
        return _Stream([self.encoded(event) for event in self.events(reply, body)])


def response_format(schema: Any) -> Body:
    """Return the field of Chat Completions for a schema; none without a schema."""
    if schema is None:
        return {}
    form = {"name": "answer", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


def digest(*parts: Any) -> str:
    """Return a text that only a client that kept it can send back."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def unknown(body: Mapping[str, Any], known: set[str]) -> str | None:
    """Return a field that is not known."""
    return next((name for name in body if name not in known), None)


def schemas_in(schema: Any) -> Iterator[Body]:
    """Yield a schema and the schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name in ("properties", "$defs"):
        for part in (schema.get(name) or {}).values():
            yield from schemas_in(part)
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for part in schema.get(name) or ():
            yield from schemas_in(part)
    yield from schemas_in(schema.get("items"))
