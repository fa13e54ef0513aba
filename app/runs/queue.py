"""The queue: which worker executes which run, and when again. It never holds the run's state.

The engine is pgqueuer. What it promises, it is trusted with (start by notification, one worker
per job, taking over from dead workers); what it does not (a job row that a stalled worker
deletes under its new owner), the sweep makes good.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from datetime import timedelta
from uuid import UUID

import asyncpg
import structlog
from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver
from pgqueuer.adapters.persistence.qb import QueryBuilderEnvironment, QueryQueueBuilder
from pgqueuer.adapters.persistence.queries import Queries
from pgqueuer.core.qm import QueueManager
from pgqueuer.domain.errors import RetryRequested
from pgqueuer.domain.models import Job
from pgqueuer.domain.settings import DBSettings, Durability
from pydantic_core import from_json, to_json

from app.events.log import is_transient

ENGINE = DBSettings(db_schema="pgqueuer", durability=Durability.balanced)
ENTRYPOINT = "run"
_LOWEST_PRIORITY = 10
_KEPT_LOG = "1 hour"

log = structlog.get_logger(__name__)

Execute = Callable[[UUID, UUID], Awaitable[None]]
"""Executes one run, given its tenant and its id."""

_UNQUEUED = """
SELECT r.tenant_id, r.id, r.priority FROM runs r
WHERE (r.status = 'queued' OR (r.status = 'running' AND r.leased_until < now()))
  AND NOT EXISTS (
    SELECT FROM pgqueuer.pgqueuer q
    WHERE q.dedupe_key = r.id::text AND q.status IN ('queued', 'picked'))
LIMIT 1000
"""


def _queries(connection: asyncpg.Connection) -> Queries:
    return Queries(
        AsyncpgDriver(connection), QueryBuilderEnvironment(ENGINE), QueryQueueBuilder(ENGINE)
    )


async def enqueue(connection: asyncpg.Connection, runs: list[tuple[UUID, UUID, int]]) -> None:
    """Put runs into the queue, on the caller's connection and so in its transaction.

    A run that stands there already stays as it is.

    Args:
        runs: (tenant, run, priority 1 to 10 with 1 first).
    """
    await _queries(connection).enqueue(
        [ENTRYPOINT] * len(runs),
        [to_json({"tenant": tenant, "run": run}) for tenant, run, _ in runs],
        [_LOWEST_PRIORITY - priority for *_, priority in runs],
        dedupe_key=[str(run) for _, run, _ in runs],
        on_conflict="skip",
    )


async def sweep(connection: asyncpg.Connection) -> int:
    """Queue every unfinished run that the engine does not know of; answers how many there were.

    One worker at a time: whoever comes second finds the lock taken and has nothing to do.
    """
    async with connection.transaction():
        if not await connection.fetchval("SELECT pg_try_advisory_xact_lock(4871019202)"):
            return 0
        rows = await connection.fetch(_UNQUEUED)
        if rows:
            await enqueue(
                connection, [(row["tenant_id"], row["id"], row["priority"]) for row in rows]
            )
            log.warning("queue.swept", runs=len(rows))
        await connection.execute(
            f"DELETE FROM pgqueuer.pgqueuer_log WHERE created < now() - interval '{_KEPT_LOG}'"  # noqa: S608
        )
        return len(rows)


async def sweep_regularly(pool: asyncpg.Pool, every_s: float) -> None:
    """Sweep at once and then every ``every_s`` seconds, until cancelled."""
    while True:
        try:
            async with pool.acquire() as connection:
                await sweep(connection)
        except Exception as error:
            if not is_transient(error):
                log.exception("queue.sweep_failed")
        await asyncio.sleep(every_s)


_RENEW = """
UPDATE runs SET leased_until = now() + make_interval(secs => $2)
WHERE id = ANY($1) AND status = 'running'
"""


async def renew_leases(
    pool: asyncpg.Pool, under_way: Callable[[], Collection[UUID]], takeover_s: float
) -> None:
    """Say of the runs executed here that they are alive, until cancelled.

    The sweep leaves such runs alone, whatever became of their row in the engine: a worker that was
    stalled, lost its run to another and comes back, deletes the other's row.
    """
    while True:
        await asyncio.sleep(takeover_s / 3)
        if runs := list(under_way()):
            try:
                await pool.execute(_RENEW, runs, takeover_s)
            except Exception as error:
                if not is_transient(error):
                    log.exception("queue.lease_failed")


async def work(
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    execute: Execute,
    *,
    concurrency: int,
    takeover_s: float,
    grace_s: float,
    stop: asyncio.Event,
) -> None:
    """Take runs from the queue and execute them until ``stop`` is set.

    Then nothing new is taken; what is being executed may go on for ``grace_s`` seconds, and what
    is not done by then is handed back to the queue. When the connection is lost, what is being
    executed goes on, and a new connection takes more meanwhile: the run's own fence decides who
    may write.

    Args:
        execute: what it raises is logged; the sweep queues the run again if it is not over.
        takeover_s: a dead worker's runs are taken up within about this time.
    """
    executing: dict[UUID, asyncio.Task[None]] = {}

    async def stop_in_time() -> None:
        await stop.wait()
        await asyncio.sleep(grace_s)
        for task in executing.values():
            task.cancel()

    stopper = asyncio.ensure_future(stop_in_time())
    try:
        while not stop.is_set():
            try:
                connection = await connect()
                try:
                    manager = _manager(connection, execute, executing, stop)
                    await _serve(manager, concurrency, takeover_s, stop)
                finally:
                    await connection.close(timeout=2)
            except (Exception, BaseExceptionGroup) as error:
                log.warning("queue.reconnect", error=str(error), kind=type(error).__name__)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await stop.wait()
        if executing:
            await asyncio.wait(executing.values())
    finally:
        stopper.cancel()


def _manager(
    connection: asyncpg.Connection,
    execute: Execute,
    executing: dict[UUID, asyncio.Task[None]],
    stop: asyncio.Event,
) -> QueueManager:
    """The engine on a connection. A run that is being executed already is not begun again."""
    manager = QueueManager(_queries(connection), channel=ENGINE.channel)
    lost = asyncio.Event()

    def on_loss(_: object) -> None:
        lost.set()
        manager.shutdown.set()

    connection.add_termination_listener(on_loss)

    @manager.entrypoint(ENTRYPOINT)
    async def run(job: Job) -> None:
        ids = from_json(job.payload or b"")
        run_id = UUID(ids["run"])
        task = executing.get(run_id)
        if task is None:
            task = asyncio.ensure_future(execute(UUID(ids["tenant"]), run_id))
            executing[run_id] = task
            task.add_done_callback(lambda done: _ended(executing, run_id, done))
        gone = asyncio.ensure_future(lost.wait())
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if task.done() and task.cancelled() and stop.is_set():
            raise RetryRequested(reason="the worker is stopping")

    return manager


def _ended(
    executing: dict[UUID, asyncio.Task[None]], run_id: UUID, task: asyncio.Task[None]
) -> None:
    executing.pop(run_id, None)
    if not task.cancelled() and (error := task.exception()):
        log.error("run.abandoned", run_id=str(run_id), exc_info=error)


async def _serve(
    manager: QueueManager, concurrency: int, takeover_s: float, stop: asyncio.Event
) -> None:
    async def stop_manager() -> None:
        await stop.wait()
        manager.shutdown.set()

    stopper = asyncio.ensure_future(stop_manager())
    try:
        # Half of the time for a heartbeat to go stale, a third for somebody to look again.
        await manager.run(
            dequeue_timeout=timedelta(seconds=takeover_s / 3),
            heartbeat_timeout=timedelta(seconds=takeover_s / 2),
            batch_size=max(1, min(10, concurrency // 2)),
            max_concurrent_tasks=concurrency,
            shutdown_on_listener_failure=True,
        )
    finally:
        stopper.cancel()
