"""Metrics of the connections to the database."""

from typing import Any

import asyncpg
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine

from bottega import metrics
from bottega.clock import monotonic
from bottega.db.driver import ShrinkingPool


def measure_statements(engine: AsyncEngine) -> None:
    """Measure the time of each statement of an engine."""

    def begin(connection: Any, *_: object) -> None:
        connection.info["began"] = monotonic()

    def end(connection: Any, *_: object) -> None:
        metrics.db_statement_duration.observe(monotonic() - connection.info["began"])

    event.listen(engine.sync_engine, "before_cursor_execute", begin)
    event.listen(engine.sync_engine, "after_cursor_execute", end)


def count_connections(engine: AsyncEngine, pool: asyncpg.Pool) -> None:
    """Set the gauges of a database's connections: those of its engine and of its pool."""
    of_engine = engine.sync_engine.pool
    assert isinstance(of_engine, ShrinkingPool)
    idle = pool.get_idle_size()
    used = pool.get_size() - idle + of_engine.checkedout()
    metrics.db_pool_connections.labels("used").set(used)
    metrics.db_pool_connections.labels("idle").set(idle + of_engine.checkedin())
