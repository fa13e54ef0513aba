"""The messages that users send to a run under way, on the worker that executes the run."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json

from bottega.agents.history import user_message
from bottega.agents.messages import StandardMessage
from bottega.agents.query import Query
from bottega.db.failures import persist
from bottega.engine.task_rows import Tasks
from bottega.events.types import EventType

_AFTER = "SELECT * FROM messages_after($1, $2, $3)"
_PATIENCE_S = 3.0


class Inbox:
    """The messages for the root agent of one run: see :class:`bottega.agents.query.InboxPort`.

    A message is in its row first. The worker records that it came in, and before which model call
    the agent got it; a later attempt gives it before the same call.

    Attributes:
        read: number of messages that the agent got.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._journal = tasks.journal
        self._known: int | None = None
        self._new: deque[tuple[str, Any]] = deque()
        self.read = 0

    def open(self) -> None:
        """Begin, once the journal's replay is known."""
        self._known = self.read = self._journal.replay.messages_read

    def lacks(self, sent: int) -> int | None:
        """Return the number of messages known here, if it is less than ``sent``."""
        return self._known if self._known is not None and self._known < sent else None

    def take(self, number: int, message_id: UUID, content: Any) -> None:
        """Take the next message; ignore one that is known."""
        if self._known is None or number != self._known + 1 or self._journal.finishing:
            return
        self._known = number
        self._journal.add(EventType.MESSAGE_RECEIVED, {"message_id": str(message_id)})
        self._new.append((str(message_id), content))

    def due(self, query: Query, *, answered: bool) -> Sequence[StandardMessage]:
        """Return the messages for the root's next model call."""
        replay = self._journal.replay
        if query.path or not (self._new or replay.delivered):
            return ()
        call = query.model_calls + 1
        contents = replay.delivered.pop(call, [])
        if not replay.has_call(call):
            while self._new:
                message_id, content = self._new.popleft()
                told = {"message_id": message_id, "call": call, "content": content}
                self._tasks.add(
                    query,
                    EventType.MESSAGE_DELIVERED,
                    told | ({"answered": True} if answered else {}),
                )
                replay.reopen()
                self.read += 1
                contents.append(content)
        return list(map(user_message, contents))


async def take_messages(pool: asyncpg.Pool, sent: Mapping[UUID, tuple[UUID, Inbox, int]]) -> None:
    """Let runs have the messages that they lack. Waits while the database is away.

    Args:
        sent: tenant, inbox and number of messages, by run.
    """
    lacking = {
        run_id: (tenant_id, known)
        for run_id, (tenant_id, inbox, count) in sent.items()
        if (known := inbox.lacks(count)) is not None
    }
    if not lacking:
        return
    tenants, numbers = zip(*lacking.values(), strict=True)
    wanted = tenants, list(lacking), numbers
    rows = await persist(lambda: pool.fetch(_AFTER, *wanted, timeout=_PATIENCE_S))
    for row in rows:
        sent[row["run_id"]][1].take(row["number"], row["id"], from_json(row["content"]))
