"""The connection that listens: a process that no signal would name does not listen."""

from collections.abc import Callable

import asyncpg
import pytest

from bottega.db.pool import Database
from bottega.events.listener import NotifyListener
from bottega.services import background
from tests.waiting import until

_CHANNEL = "bottega_test"
_LISTENING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND query LIKE 'LISTEN%bottega_test%'
"""


@pytest.fixture
def heard() -> list[str | None]:
    return []


async def test_a_process_stops_listening_and_listens_again(
    database: Database, owner: asyncpg.Pool, heard: list[str | None]
) -> None:
    listener = NotifyListener(database.connect)
    listener.subscribe(_CHANNEL, heard.append)
    connections: Callable[[], object] = lambda: owner.fetchval(_LISTENING)  # noqa: E731
    async with background(listener.run):
        await until(lambda: heard == [None])
        assert await owner.fetchval(_LISTENING) == 1
        listener.need(is_needed=False)
        assert heard == [None, None]  # caches must not believe what they know any more
        await until(connections, lambda count: count == 0)
        assert not listener.hears(_CHANNEL)
        await owner.execute("SELECT pg_notify($1, 'lost')", _CHANNEL)
        listener.need(is_needed=True)
        assert heard == [None] * 3  # work that rests begins, even if the connection takes long
        await until(lambda: heard == [None] * 4)
        await owner.execute("SELECT pg_notify($1, 'one')", _CHANNEL)
        await until(lambda: heard[-1] == "one")
    assert "lost" not in heard
