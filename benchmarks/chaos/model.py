"""The demo model behind a server that records each request with its step and times."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from bottega.cli.scenarios import SOFTWARE
from bottega.llm.demo_model.rules import Answer, DemoCall, decide, read
from bottega.llm.demo_model.server import response

_MARKER = re.compile(r"\bjob-\d+\b")
_AGENTS = {agent["system_message"]: agent["name"] for agent in SOFTWARE.agents}

Step = tuple[str, str, int]
"""The step of a model call: the run's marker, the agent, the number of its call (from 1)."""


@dataclass(slots=True, eq=False)
class ModelRequest:
    """A request as the model received it. Times are seconds since the epoch.

    Attributes:
        port: the client's port, which identifies its process.
        answered_at: time when the whole answer was in the socket.
        cut_at: time when the client disconnected earlier.
    """

    step: Step
    arrived_at: float
    port: int = 0
    answered_at: float | None = None
    cut_at: float | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)


class CountingModel:
    """Answers as the demo model does, each request after a random time.

    Args:
        latency_s: least and most seconds until the answer.

    Attributes:
        requests: all requests, in order of arrival.
        base_url: for the provider, while it serves.
        holds: selects requests that wait for a release before their answer.
        on_arrival: called with each request at once.
    """

    def __init__(self, random: Random, latency_s: tuple[float, float]) -> None:
        self.requests: list[ModelRequest] = []
        self.base_url = ""
        self.holds: Callable[[ModelRequest], bool] = lambda request: False
        self.on_arrival: Callable[[ModelRequest], None] = lambda request: None
        self._random = random
        self._latency_s = latency_s
        self._changed = asyncio.Event()

    def asked_by(self, marker: str) -> list[ModelRequest]:
        return [request for request in self.requests if request.step[0] == marker]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for ``condition``; it is checked when a request comes or ends."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])
        config = uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        serving = asyncio.ensure_future(server.main_loop())
        port = server.servers[0].sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}/v1"
        try:
            yield
        finally:
            server.should_exit = server.force_exit = True
            await serving
            await server.shutdown()

    async def _answer(self, chat: Request) -> ASGIApp:
        body = await chat.json()
        request = ModelRequest(step_of(body), time.time())
        self.requests.append(request)
        decided = decide(body)
        if decided.calls and " in parallel" in (query := decided.calls[0].arguments["query"]):
            decided = Answer(
                "", tuple(DemoCall(name, {"query": query}) for name in read(body).tools)
            )
        answer = response(decided, body)

        async def wait() -> None:
            await asyncio.sleep(self._random.uniform(*self._latency_s))
            if self.holds(request):
                await request.released.wait()

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            request.port = scope["client"][1]
            self.on_arrival(request)
            self._changed.set()
            waiting = asyncio.ensure_future(wait())
            gone = asyncio.ensure_future(receive())  # the body was read: only the end can come
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                request.cut_at = time.time()
            else:
                await answer(scope, receive, send)
                request.answered_at = time.time()
            waiting.cancel()
            gone.cancel()
            self._changed.set()

        return respond


def step_of(body: dict[str, Any]) -> Step:
    """Return a request's step, from the marker in its query (its context may have other ones)."""
    conversation = read(body)
    marker = _MARKER.search(conversation.asked)
    answers = sum(message["role"] == "assistant" for message in body["messages"])
    own = conversation.system.partition("\n\nYou are coordinating")[0]
    return marker[0] if marker else "", _AGENTS[own], answers + 1
