"""Repetition of requests for which the database failed for a moment."""

import asyncio
from collections.abc import Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bottega.api.errors import FAILURE
from bottega.clock import monotonic
from bottega.db.failures import PAUSES_S, REPEAT_S, is_undone

_READS = ("GET", "HEAD")
_IDEMPOTENT = ("PUT", "DELETE")


class RepeatRequests:
    """Middleware that repeats a request in place of the answer that the database is unavailable.

    One that only reads is repeated after any error that passes; one that may be made twice only if
    the transaction that failed was undone, since nobody knows what else it would find. What other
    requests store is repeated where it is stored.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _READS + _IDEMPOTENT:
            await self.app(scope, receive, send)
            return
        until = monotonic() + REPEAT_S
        received: list[Message] = []
        for pause_s in PAUSES_S:
            answer = _Answer(scope, send, until)
            await self.app(scope, _again(received, receive), answer.send)
            if not answer.is_dropped:
                return
            await asyncio.sleep(pause_s)
        await self.app(scope, _again(received, receive), send)


class _Answer:
    """An answer to the client, which is dropped if the request may be repeated."""

    def __init__(self, scope: Scope, send: Send, until: float) -> None:
        self.is_dropped = False
        self._scope = scope
        self._send = send
        self._until = until

    async def send(self, message: Message) -> None:
        failure = self._scope.get("state", {}).pop(FAILURE, None)
        if failure is not None and message["type"] == "http.response.start":
            reads = self._scope["method"] in _READS
            self.is_dropped = monotonic() < self._until and (reads or is_undone(failure))
        if not self.is_dropped:
            await self._send(message)


def _again(received: list[Message], receive: Receive) -> Receive:
    """Return what gives the messages of an earlier try, and then new ones, which it keeps."""
    earlier: Iterator[Message] = iter([*received])

    async def receive_again() -> Message:
        if (message := next(earlier, None)) is None:
            message = await receive()
            received.append(message)
        return message

    return receive_again
