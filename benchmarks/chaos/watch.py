"""Subscribers that reconnect after their last event when the stream breaks off."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2
import websockets
from pydantic_core import from_json

from bottega.events.types import FINAL_EVENT_TYPES

_AGAIN_S = 0.1


@dataclass(slots=True)
class Watcher:
    """One subscriber of one run.

    Attributes:
        seen: ``seq`` of each event, in order of arrival.
        resumed: number of reconnects.
        ended: it got the final event.
    """

    run_id: str
    over: str
    seen: list[int] = field(default_factory=list)
    resumed: int = 0
    ended: bool = False

    @property
    def whole(self) -> bool:
        """Return true if it got every event once, in order, and the final one."""
        return self.ended and self.seen == list(range(1, len(self.seen) + 1))

    async def watch(self, port: Callable[[], int]) -> None:
        """Watch until the final event.

        Args:
            port: returns the port of an API process, for each connection.
        """
        follow = _socket if self.over == "WebSocket" else _sse
        while True:
            after = self.seen[-1] if self.seen else 0
            with contextlib.suppress(OSError, httpx2.TransportError, websockets.WebSocketException):
                async for event in follow(port(), self.run_id, after):
                    if event.get("seq") is None or "data" not in event:
                        continue  # live text, or a heartbeat
                    self.seen.append(event["seq"])
                    self.ended = self.ended or event["type"] in FINAL_EVENT_TYPES
            if self.ended:
                return
            self.resumed += 1
            await asyncio.sleep(_AGAIN_S)


async def _socket(port: int, run_id: str, after: int) -> AsyncIterator[dict[str, Any]]:
    url = f"ws://127.0.0.1:{port}/v1/runs/{run_id}/ws?after={after}"
    async with websockets.connect(url, compression=None) as socket:
        async for message in socket:
            yield from_json(message)


async def _sse(port: int, run_id: str, after: int) -> AsyncIterator[dict[str, Any]]:
    headers = {"accept": "text/event-stream"}
    if after:
        headers["last-event-id"] = str(after)
    url = f"http://127.0.0.1:{port}/v1/runs/{run_id}/events"
    async with (
        httpx2.AsyncClient(timeout=httpx2.Timeout(30, read=60)) as client,
        client.stream("GET", url, headers=headers) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data:") and (event := from_json(line[5:])):
                yield event
