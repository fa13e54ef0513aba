"""Events of a run, as they happen, over any number of lost connections."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pydantic_core import from_json

from bottega.cli.remote.server import RemoteError, RemoteServer
from bottega.cli.texts import safe
from bottega.clock import monotonic

Event = dict[str, Any]

ENDS = frozenset(("run.completed", "run.failed", "run.timeout", "run.cancelled"))

_PATIENCE_S = 300.0
"""Time for which a server may be away."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class RunEvents:
    """The events of a run, and its live text, until the final one.

    A second iteration goes on behind the last event of the first.

    Args:
        notice: called with a text when the connection is lost, and when it is back.
    """

    def __init__(self, server: RemoteServer, run_id: str, notice: Callable[[str], None]) -> None:
        self._server = server
        self._path = f"/v1/runs/{run_id}/events"
        self._notice = notice
        self._after = 0
        self._over = False

    def __iter__(self) -> Iterator[Event]:
        """Yield event after event.

        Raises:
            RemoteError: the run or the key is gone, or the server was away for 5 minutes.
        """
        away_since: float | None = None
        pause_s = _FIRST_PAUSE_S
        while not self._over:
            try:
                for event in self._connected():
                    if away_since is not None:
                        self._notice("The connection is back.")
                        away_since, pause_s = None, _FIRST_PAUSE_S
                    if event is not None:
                        yield event
            except RemoteError as error:
                if not error.may_pass:
                    raise
                if away_since is None:
                    away_since = monotonic()
                    self._notice(f"{error.detail}. Trying again …")
                if monotonic() - away_since > _PATIENCE_S:
                    raise
            if not self._over:  # else a server that stops has closed the stream, or it was lost
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _connected(self) -> Iterator[Event | None]:
        """Yield what one connection brings; ``None`` for a heartbeat."""
        with self._server.streaming(self._path, self._after) as content:
            if content is None:
                self._over = True
                return
            for place, text in _frames(content):
                self._after = max(self._after, place)
                event = None if text is None else safe(from_json(text))
                self._over = event is not None and event["type"] in ENDS
                yield event


def _frames(content: Iterable[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Split a stream into (id or 0, data) of its frames.

    Only a line feed ends a line here: JSON may hold the others that Python knows.
    """
    place, data = 0, None
    for line in _lines(content):
        if line.startswith(b"id: "):
            place = int(line[4:])
        elif line.startswith(b"data: "):
            data = line[6:]
        elif not line and (place or data is not None):
            yield place, data
            place, data = 0, None


def _lines(content: Iterable[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []
    for chunk in content:
        first, *more = chunk.split(b"\n")
        parts.append(first)
        for rest in more:
            yield b"".join(parts).removesuffix(b"\r")
            parts = [rest]
