"""The composition root: builds all long-lived objects, and closes them."""

import asyncio
import contextlib
import gc
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from bottega.db.engine import Database, open_database
from bottega.db.migrate import require_current
from bottega.db.sessions import Silence
from bottega.descriptors import Descriptors, raise_limit, warn_when_exhausted
from bottega.events.listener import NotifyListener
from bottega.events.run_streams import RunStreams
from bottega.events.wakeups import Notifier, WakeupFeed, background
from bottega.execution import queue
from bottega.files.store import FileQuota, FileStore
from bottega.leased_work import WorkLoop, wake_on_notify
from bottega.memory.episodes.store import EpisodicMemory
from bottega.memory.patterns.cache import PatternCache
from bottega.memory_services import MemoryServices, keeping, open_memory_services
from bottega.outgoing import Outgoing, open_outgoing
from bottega.runs.pins import PinCache
from bottega.scrape import Scraping, refresh_regularly
from bottega.secrets.lookup import SecretLookup
from bottega.settings import Settings
from bottega.tenants import erase
from bottega.tenants.key_cache import KeyCache
from bottega.tenants.storage import StorageSums
from bottega.tracing.export import exporting
from bottega.users.erasure import UserErasure

GC_THRESHOLD = (50_000, 20, 20)
"""Python's default collects after every 700 new objects. A thousand agents have millions of objects
with hardly any cycles, and collections took a third of the CPU."""
SWITCH_INTERVAL_S = 0.0005  # a computing thread delays the event loop by this; the default is 5 ms

if TYPE_CHECKING:
    from bottega.execution.async_tasks import SubagentRuntime
    from bottega.execution.build_agents import AgentDependencies
    from bottega.execution.executor import Executor
    from bottega.execution.load.heartbeat import Snapshot
    from bottega.execution.load.leases import Load
    from bottega.execution.retrieval import MemorySources
    from bottega.memory.learning.reflection import Analyst
    from bottega.memory.text.embeddings import Embedder
    from bottega.model_services import ModelServices
    from bottega.tools.egress import Egress


@dataclass(frozen=True, slots=True)
class Service:
    """Dependencies of the API.

    Attributes:
        listener: this process's listening connection.
        streams: the runs that are watched through this process.
        keys: authentication.
        memory: episodes of earlier runs.
        patterns: learned from them.
        files: of users and tools.
        descriptors: file descriptor limits of this process.
        pins: versions of agents and graphs that new runs pin.
        outgoing: what it sends requests with.
        scraping: what Prometheus gets.
        working: whether this process executes runs too.
    """

    settings: Settings
    database: Database
    listener: NotifyListener
    wakeups: WakeupFeed
    streams: RunStreams
    keys: KeyCache
    memory: EpisodicMemory
    patterns: PatternCache
    files: FileStore
    descriptors: Descriptors
    outgoing: Outgoing
    scraping: Scraping
    working: bool = False
    pins: PinCache = field(default_factory=PinCache)
    stop_working: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def open_service(
    settings: Settings, url: str, *, api: bool, worker: bool, silence: Silence = Silence()
) -> AsyncIterator[Service]:
    """Open the database and all services around it; close them at the end.

    Args:
        url: of a database that is up.
        api, worker: serve subscribers (listen for wake-ups); execute runs.
        silence: time limits for a silent server.

    Raises:
        UnavailableError: the database is out of reach, or not migrated to this version.
    """
    descriptors = raise_limit()
    descriptors.note(settings.max_connections)
    sizes = {"pool_size": 4 * api + 3 * worker, "engine_size": 4 if api else 1}  # + listener, lease
    async with open_database(
        url, pooler=settings.pooler_url, limits=settings.run_limits, silence=silence, **sizes
    ) as database:
        await require_current(database.pool)
        listener = NotifyListener(database.connect)
        wakeups = WakeupFeed(listener)
        key_cache = KeyCache(database.pool, listener, local=settings.on_loopback)
        async with (
            open_memory_services(settings, database, listener) as memory_services,
            background(
                # In every process: waiting runs must time out even if no worker is up.
                partial(queue.sweep_regularly, database.pool, settings.takeover_s),
                lambda: warn_when_exhausted(descriptors),
                _erasing(database, listener, memory_services).run,
                *(memory_services.memory.accesses.run, listener.run, StorageSums(database.pool)),
                partial(refresh_regularly, settings.operator_providers),
            ),
            open_outgoing(settings, database, listener, key_cache.is_open, descriptors) as outgoing,
            contextlib.AsyncExitStack() as stack,
        ):
            stack.enter_context(exporting())
            service = Service(
                settings,
                database,
                listener,
                wakeups,
                RunStreams(database.pool, wakeups),
                key_cache,
                memory_services.memory,
                memory_services.patterns,
                _files(settings, database, listener, memory_services),
                descriptors,
                outgoing,
                Scraping(settings, database.pool, key_cache),
                working=worker,
                pins=PinCache(settings.operator_providers, settings.default_model),
            )
            if api:
                await key_cache.is_open()
                await stack.enter_async_context(background(service.streams.run, key_cache.run))
                stack.callback(service.wakeups.close)
            if worker:
                await stack.enter_async_context(_worker(service, memory_services))
            yield service


def _files(
    settings: Settings, database: Database, listener: NotifyListener, services: MemoryServices
) -> FileStore:
    """Return the files; this process forgets those that are erased."""
    quota = FileQuota(settings.files_bytes, settings.files_count)
    files = FileStore(database, services.objects, quota)
    listener.subscribe(erase.CHANNEL, partial(_forget, files.forget))
    return files


def _erasing(database: Database, listener: NotifyListener, services: MemoryServices) -> WorkLoop:
    """Return the loop that erases end users: in every process, as it must not wait for a worker."""
    loop = UserErasure(database, services.objects).loop()
    wake_on_notify(listener, loop)
    return loop


def _forget(forget: Callable[[UUID | None], None], payload: str | None) -> None:
    """Drop what a process has cached of a tenant whose data was removed, or of all."""
    forget(None if payload is None else UUID(payload))


def settle() -> None:
    """Tell the garbage collector that this process's objects stay; let threads give way sooner."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _agent_dependencies(
    models: "ModelServices", outgoing: Outgoing, embedder: "Callable[[], Embedder]"
) -> "AgentDependencies":
    from bottega.execution.build_agents import AgentDependencies
    from bottega.execution.plugins import configure_agent
    from bottega.tools.builtin import ToolDeps

    return AgentDependencies(
        models_for=models.for_agent,
        tool_deps=ToolDeps(outgoing.egress),
        secrets=outgoing.secrets,
        mcp=outgoing.mcp,
        embedder=embedder,
        configure=configure_agent(),
    )


async def _analyst(
    settings: Settings, database: Database, models: "ModelServices"
) -> "Analyst | None":
    """Return the model that analyses goals and reflects on runs, if one is configured."""
    if settings.memory_model is None:
        return None
    from bottega.execution.budget import count_beside
    from bottega.llm.structured_output import ANALYST_PATIENCE_S, ModelAnalyst

    patience_s = min(ANALYST_PATIENCE_S, settings.model_patience_s)
    provider = await models.of_operator(settings.memory_model, patience_s)
    count = partial(count_beside, database.pool)
    return ModelAnalyst(provider, settings.memory_model, count=count)


def _subagent_runtime(service: Service, models: "ModelServices") -> "SubagentRuntime":
    """Return this process's shared state for asynchronous sub-agents."""
    from bottega.execution.async_tasks import SubagentRuntime
    from bottega.execution.linked.runs import LinkedRuns
    from bottega.execution.plugins import subagent_plugins
    from bottega.subagents.registry import SubagentRegistry
    from bottega.subagents.scheduler import SubagentScheduler
    from bottega.subagents.telemetry import Totals

    settings = service.settings
    scheduler = SubagentScheduler(settings.subagent_options)
    totals = Totals()
    registry = SubagentRegistry(settings.subagent_limits, scheduler, totals)
    scheduler.places.source = models.task_places(registry.limits.tenant_max_concurrent)
    linked = LinkedRuns(service.database.pool, service.listener)
    return SubagentRuntime(registry, subagent_plugins(), totals, linked)


@asynccontextmanager
async def _worker(service: Service, memory_services: MemoryServices) -> AsyncIterator[None]:
    """Execute runs during the block; at its end, hand back unfinished ones."""
    from bottega.execution.budget import DayBudgets
    from bottega.execution.build_agents import Teams
    from bottega.execution.executor import Executor
    from bottega.execution.live_text import LiveText
    from bottega.execution.load.leases import Load, leases
    from bottega.execution.mcp.tools import McpSessions
    from bottega.execution.step_writer import StepWriter
    from bottega.runs.control import CancelWatch

    settings, database, worker_id = service.settings, service.database, uuid4()
    egress, secrets = service.outgoing.egress, service.outgoing.secrets
    notifier = Notifier(database.pool)
    live_text = LiveText(database.pool, notifier.wrote)
    async with (
        _models(service, worker_id, secrets) as models,
        _keeping_memory(service, memory_services, models) as (sources, episode_stored),
    ):
        day_budgets = DayBudgets(database.pool, settings.run_limits)
        embedder = lambda: memory_services.embedders.current  # noqa: E731
        dependencies = _agent_dependencies(models, service.outgoing, embedder)
        checks = models.success_checks(database.pool)
        runtime = _subagent_runtime(service, models)
        executor = Executor(
            pool=database.pool,
            writer=StepWriter(database.pool),
            teams=Teams(dependencies, runtime.registry),
            notifier=notifier,
            max_crashes=settings.max_crashes,
            live_text=live_text,
            known=secrets.redactor,
            runtime=runtime,
            sources=sources,
            left_work=checks.then(episode_stored),
            prompt_tokens=settings.memory_prompt_tokens,
            stopping=service.stop_working,
            day_budgets=day_budgets,
            files=service.files,
            mcp=McpSessions(egress, live_text),
        )
        watch = CancelWatch(database.pool, service.listener, executor)
        load = Load(settings.worker_concurrency, runtime.linked.resting)
        async with (
            _reporting(database, runtime, executor, models),
            leases(database.connect, worker_id, executor, settings.takeover_s, load),
            background(
                *(notifier.run, live_text.run, runtime.linked.run, executor.hand_back_waiting),
                *(watch.run, day_budgets.run, secrets.run, checks.loop.run),
            ),
            runtime.registry,
            _by_the_clock(service, egress),
        ):
            try:
                async with _taking_runs(service, worker_id, executor.execute, load):
                    yield
            finally:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await notifier.sent()


@asynccontextmanager
async def _reporting(
    database: Database, runtime: "SubagentRuntime", executor: "Executor", models: "ModelServices"
) -> AsyncIterator[None]:
    """Report this worker's load during the block, to other processes and as metrics."""
    from bottega.execution.load.heartbeat import heartbeats
    from bottega.execution.observed.gauges import measured

    def snapshot() -> "Snapshot":
        return runtime.snapshot(len(executor.under_way())).with_models(models.calls())

    async with heartbeats(database.pool, snapshot), measured(runtime, models):
        yield


@asynccontextmanager
async def _models(
    service: Service, worker_id: UUID, secrets: SecretLookup
) -> "AsyncIterator[ModelServices]":
    from bottega.llm.traffic.gates import Traffic
    from bottega.model_services import open_models

    traffic = Traffic(service.database.pool, worker_id, service.listener)
    lookups = service.outgoing.egress.lookups
    opening = open_models(service.settings, secrets, traffic, lookups)
    async with background(traffic.run), opening as models:
        yield models


@asynccontextmanager
async def _keeping_memory(
    service: Service,
    memory_services: MemoryServices,
    models: "ModelServices",
) -> "AsyncIterator[tuple[MemorySources, Callable[[], None]]]":
    """Run the background work of memory; yield the memory for runs, and what wakes that work."""
    from bottega.execution.retrieval import MemorySources

    settings = service.settings
    analyst = await _analyst(settings, service.database, models)
    sources = MemorySources(
        service.memory,
        service.patterns,
        settings.learning_options,
        analyst,
        shared=settings.shared_memory,
    )
    async with keeping(
        settings, service.database, service.listener, memory_services, analyst
    ) as episode_stored:
        yield sources, episode_stored


@asynccontextmanager
async def _taking_runs(
    service: Service, worker_id: UUID, execute: queue.Execute, load: "Load"
) -> AsyncIterator[None]:
    """Take runs from the queue during the block; at its end, hand back unfinished ones."""
    from bottega.execution.claim import Claims

    settings, database = service.settings, service.database
    working = asyncio.ensure_future(
        queue.work(
            service.listener,
            Claims(database.pool, worker_id, settings.takeover_s),
            execute,
            load,
            poll_s=settings.takeover_s / 3,
            grace_s=settings.drain_grace_s,
            stop=service.stop_working,
        )
    )
    try:
        yield
    finally:
        service.stop_working.set()
        await working


@asynccontextmanager
async def _by_the_clock(service: Service, egress: "Egress") -> AsyncIterator[None]:
    """Start scheduled runs and send webhooks during the block."""
    from bottega.background.schedules import Limits, Ticker
    from bottega.background.webhooks import Webhooks
    from bottega.files.retention import FileRetention
    from bottega.tenants.retention import Pruning

    settings, database = service.settings, service.database
    limits = Limits(settings.run_timeout_s, settings.queue_timeout_s, settings.memory)
    first = settings.webhook_secret
    secret = None if first is None else first.get_secret_value()
    workers = (Ticker(database, limits, service.pins), Webhooks(database.pool, egress, secret))
    wake_on_notify(service.listener, *(worker.loop for worker in workers))
    retention = FileRetention(database.pool, timedelta(days=settings.files_days))
    expiry = WorkLoop("files", retention.delete_unused, poll_s=3600.0)
    pruning = Pruning(database, settings.retention_days).loop()
    async with background(*(worker.run for worker in workers), expiry.run, pruning.run):
        yield
