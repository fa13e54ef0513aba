"""The composition root, which builds all long-lived objects and closes them."""

import asyncio
import contextlib
import gc
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from bottega.db import signals
from bottega.db.migrate import require_current
from bottega.db.pool import Database, open_database
from bottega.db.sessions import SilenceTimeouts
from bottega.engine import queue
from bottega.engine.budget import DayBudgets
from bottega.events.listener import Notifier, NotifyListener, WakeupFeed
from bottega.events.nats import NatsSignals
from bottega.events.stream import RunStreams
from bottega.files.store import FileQuota, FileStore
from bottega.leased_work import LeasedWork, WorkLoop, wake_on_notify
from bottega.memory.episodes.store import EpisodicMemory
from bottega.memory.patterns.cache import PatternCache
from bottega.memory_services import MemoryServices, open_memory_services, run_memory_jobs
from bottega.outgoing import (
    Descriptors,
    Outgoing,
    open_outgoing,
    raise_limit,
    warn_when_exhausted,
)
from bottega.redaction import read_words
from bottega.runs.pins import PinCache
from bottega.scrape import Scraping, refresh_regularly
from bottega.secrets.lookup import SecretLookup
from bottega.services import Services
from bottega.settings import Settings, keyring
from bottega.tenants import erase
from bottega.tenants.keys import KeyCache
from bottega.tenants.oidc import SignIn
from bottega.tenants.retention import StorageSums
from bottega.tenants.tokens import TokenSigner
from bottega.tracing.export import exporting
from bottega.users import UserErasure

_OF_API = 40
"""Database connections of an API process: many, because requests wait for their commits."""
MAX_CRASHES = 5
"""A run fails after this number of worker crashes. A restart of all workers causes fewer."""
GC_THRESHOLD = (50_000, 20, 20)
"""Thresholds of the garbage collector. By default, Python collects after every 700 new objects. A
thousand agents have millions of objects with few cycles, and collections took a third of the CPU.
"""

if TYPE_CHECKING:
    from bottega.engine.async_tasks import SubagentRuntime
    from bottega.engine.build_agents import AgentDependencies
    from bottega.engine.executor import Executor
    from bottega.engine.retrieval import MemorySources
    from bottega.engine.workers import WorkerLease
    from bottega.memory.learning.reflection import Analyst
    from bottega.model_services import ModelServices
    from bottega.tools.egress import Egress


@dataclass(frozen=True, slots=True)
class Service:
    """Dependencies of the API.

    Attributes:
        listener: the connection on which the database sends notifications to this process.
        streams: the event streams of runs that clients of this process read.
        keys: the API keys, for authentication.
        memory: episodes of earlier runs.
        patterns: the patterns that were learned from the episodes.
        files: the files of users and tools.
        descriptors: limits on the number of file descriptors that this process may open.
        pins: the versions of agents and graphs that new runs use.
        outgoing: the clients for outgoing requests.
        scraping: the metrics for Prometheus.
        services: the background services.
        serving: true if this process serves the API.
        working: true if this process executes runs.
        nats: connection for wake-ups and live text; ``None``: they go through the database.
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
    services: Services
    serving: bool
    working: bool
    pins: PinCache = field(default_factory=PinCache)
    sign_in: SignIn | None = None
    stop_working: asyncio.Event = field(default_factory=asyncio.Event)
    nats: NatsSignals | None = None


@asynccontextmanager
async def open_service(
    settings: Settings, url: str, *, api: bool, worker: bool, silence: SilenceTimeouts | None = None
) -> AsyncIterator[Service]:
    """Open the database and all services; close them at the end of the block.

    Args:
        api: true if the process serves the API.
        worker: true if the process executes runs.
        silence: how long a connection waits for a silent server before it is closed.

    Raises:
        UnavailableError: there is no database, the database's version differs from the service's
            version, or the service's source code is missing.
    """
    await asyncio.to_thread(read_words)
    descriptors, silence = raise_limit(), silence or SilenceTimeouts()
    sizes = {"pool_size": _OF_API * api + 4 * worker, "transactions": 4 if api else 1}
    async with open_database(
        url, pooler=settings.pooler_url, limits=settings.run_limits, silence=silence, **sizes
    ) as database:
        await require_current(database.pool)
        listener, nats = NotifyListener(database.connect), _nats(settings, database)
        services, keys = Services(), _keys(settings, database, listener)
        async with (
            open_memory_services(settings, database, listener, services) as memory_services,
            services.running(
                descriptors=partial(warn_when_exhausted, descriptors),
                **_of_every_process(settings, database, listener, nats, memory_services, worker),
            ),
            open_outgoing(settings, url, database, listener, keys.is_open, descriptors) as outgoing,
            contextlib.AsyncExitStack() as stack,
        ):
            stack.enter_context(exporting())
            service = Service(
                settings,
                database,
                listener,
                *_watching(database, listener, nats),
                keys,
                memory_services.memory,
                memory_services.patterns,
                _files(settings, database, listener, memory_services),
                descriptors,
                outgoing,
                Scraping(settings, database.pool, keys),
                services,
                api,
                worker,
                pins=_pins(settings),
                sign_in=_sign_in(settings, database),
                nats=nats,
            )
            if api:
                await keys.is_open()
                jobs = services.running(streams=service.streams.run, keys=keys.run)
                await stack.enter_async_context(jobs)
                stack.callback(service.wakeups.close)
            if worker:
                await stack.enter_async_context(_worker(service, memory_services))
            yield service


def _of_every_process(
    settings: Settings,
    database: Database,
    listener: NotifyListener,
    nats: NatsSignals | None,
    memory: MemoryServices,
    worker: bool,
) -> dict[str, Callable[[], Awaitable[None]]]:
    sums = StorageSums(database.pool)
    wake_on_notify(listener, sums.loop)
    sweep = partial(queue.sweep_regularly, database.pool, settings.lease_s)
    return {
        **({} if nats is None else {"nats": nats.run}),
        # Runs that wait for people must time out even while no worker exists. So each process calls
        # sweep_regularly, which ends such runs; for a process with a worker, see _worker.
        **({} if worker else {"sweep": sweep}),
        "erase": _erasing(database, listener, memory).run,
        "accesses": memory.memory.accesses.run,
        "notices": listener.run,
        "storage": sums.loop.run,
        "metrics": partial(refresh_regularly, settings.operator_providers),
    }


def _nats(settings: Settings, database: Database) -> NatsSignals | None:
    if settings.nats_url is None:
        return None
    nats = NatsSignals(settings.nats_url.get_secret_value())
    database.trust.signals.wake = nats.publish
    return nats


def _watching(
    database: Database, listener: NotifyListener, nats: NatsSignals | None
) -> tuple[WakeupFeed, RunStreams]:
    wakeups = WakeupFeed(listener, nats)
    if nats is None:
        return wakeups, RunStreams(database.pool, wakeups)
    return wakeups, RunStreams(database.pool, wakeups, poll_s=queue.POLL_S, nats=nats)


def _files(
    settings: Settings, database: Database, listener: NotifyListener, services: MemoryServices
) -> FileStore:
    """Return the file store. Its cache forgets erased files when a notification arrives."""
    files = FileStore(database, services.objects, FileQuota())
    listener.subscribe(erase.CHANNEL, partial(_forget, files.forget))
    return files


def _erasing(database: Database, listener: NotifyListener, services: MemoryServices) -> LeasedWork:
    work = UserErasure(database, services.objects).leased()
    wake_on_notify(listener, work.loop)
    return work


def _forget(forget: Callable[[UUID | None], None], payload: str | None) -> None:
    forget(None if payload is None else UUID(payload))


def tune_gc() -> None:
    """Exclude existing objects from garbage collection, and make threads switch more often."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)
    # A busy thread can delay the event loop by up to this time; Python's default is 5 ms.
    sys.setswitchinterval(0.0005)


def _agent_dependencies(
    models: "ModelServices", outgoing: Outgoing, memory_services: MemoryServices
) -> "AgentDependencies":
    from bottega.engine.build_agents import AgentDependencies
    from bottega.engine.plugins import configure_agent
    from bottega.tools.builtin import ToolDeps

    return AgentDependencies(
        models_for=models.for_agent,
        tool_deps=ToolDeps(outgoing.egress),
        secrets=outgoing.secrets,
        mcp=outgoing.mcp,
        embedder=memory_services.embedders.paid_by,
        configure=configure_agent(),
    )


async def _analyst(settings: Settings, models: "ModelServices") -> "Analyst | None":
    if settings.memory_model is None:
        return None
    from bottega.llm.structured_output import ANALYST_PATIENCE_S, ModelAnalyst

    patience_s = min(ANALYST_PATIENCE_S, settings.model_patience_s)
    provider_for = await models.of_operator(settings.memory_model, patience_s)
    return ModelAnalyst(provider_for, settings.memory_model)


def _subagent_runtime(service: Service, models: "ModelServices") -> "SubagentRuntime":
    from bottega.engine.async_tasks import SubagentRuntime
    from bottega.engine.child_runs import ChildRuns
    from bottega.engine.plugins import subagent_plugins
    from bottega.engine.telemetry import MeasuredTotals
    from bottega.subagents.registry import SubagentRegistry
    from bottega.subagents.scheduler import SubagentScheduler

    settings = service.settings
    scheduler = SubagentScheduler(settings.subagent_options)
    totals = MeasuredTotals()
    registry = SubagentRegistry(settings.subagent_limits, scheduler, totals)
    scheduler.places.source = models.task_places(registry.limits.tenant_max_concurrent)
    children = ChildRuns(service.database.pool, service.nats)
    return SubagentRuntime(registry, subagent_plugins(), totals, children)


def _lease(
    service: Service,
    worker_id: UUID,
    executor: "Executor",
    runtime: "SubagentRuntime",
    models: "ModelServices",
    sweep: Callable[[], object],
) -> "tuple[WorkerLease, queue.RunClaimer]":
    from bottega.engine.claim import ClaimedRun, ClaimReader
    from bottega.engine.workers import WorkerLease

    settings, pool = service.settings, service.database.pool

    def places() -> int:  # a run that waits for child runs uses no place
        return settings.worker_concurrency + runtime.children.resting()

    async def execute(run: ClaimedRun) -> bool:
        service.listener.need(is_needed=True)  # runs must hear of new secrets at once
        return await executor.execute(run)

    def listen(is_next: bool) -> None:
        needed = is_next or service.serving or bool(executor.under_way())
        service.listener.need(is_needed=needed)
        claimer.poll_s = queue.POLL_S if needed else math.inf

    claimer = queue.RunClaimer(pool, worker_id, ClaimReader(pool), execute, places)
    lease = WorkerLease(
        worker_id,
        executor,
        settings.lease_s,
        places=places,
        load=lambda: runtime.load(len(executor.under_way())).with_models(models.calls()),
        claim=lambda: claimer.notice(None),
        listen=listen,
        sweep=sweep,
    )
    return lease, claimer


@asynccontextmanager
async def _worker(service: Service, memory_services: MemoryServices) -> AsyncIterator[None]:
    from bottega.engine.build_agents import Teams
    from bottega.engine.executor import Executor
    from bottega.engine.live_text import LiveText, TextSubjects, TextTable
    from bottega.engine.mcp import McpSessions
    from bottega.engine.telemetry import measured
    from bottega.events.log import StepWriter
    from bottega.runs.control import WorkerInbox

    settings, database, worker_id = service.settings, service.database, uuid4()
    egress, secrets = service.outgoing.egress, service.outgoing.secrets
    notifier, nats = Notifier(database.trust.signals), service.nats
    live_text = LiveText(
        TextTable(database.pool, notifier.wrote) if nats is None else TextSubjects(nats)
    )
    async with (
        _models(service, worker_id, secrets, memory_services.budgets) as models,
        _keeping_memory(service, memory_services, models) as (sources, episode_stored),
    ):
        dependencies = _agent_dependencies(models, service.outgoing, memory_services)
        checks = models.success_checks(database.pool)
        runtime = _subagent_runtime(service, models)
        executor = Executor(
            pool=database.pool,
            writer=StepWriter(database.pool),
            teams=Teams(dependencies, runtime.registry),
            notifier=notifier,
            max_crashes=MAX_CRASHES,
            live_text=live_text,
            secrets=secrets,
            runtime=runtime,
            sources=sources,
            on_run_finished=checks.run_end_hook(episode_stored),
            prompt_tokens=settings.memory_prompt_tokens,
            stopping=service.stop_working,
            day_budgets=memory_services.budgets,
            files=service.files,
            mcp=McpSessions(database.pool, egress, live_text),
        )
        sweep_due = asyncio.Event()
        wake_on_notify(service.listener, *(work.loop for work in checks.stages))
        lease, claimer = _lease(service, worker_id, executor, runtime, models, sweep_due.set)
        async with (
            measured(runtime, models),
            lease.kept(database.connect, database.pool),
            service.services.running(
                **{"live text": live_text.run},
                **{"child runs": runtime.children.run, "suspending": executor.hand_back_waiting},
                inbox=WorkerInbox(database.pool, worker_id, executor).run,
                secrets=secrets.run,
                sweep=partial(queue.sweep_regularly, database.pool, settings.lease_s, sweep_due),
                **{work.name: work.run for work in checks.stages},
            ),
            runtime.registry,
            run_cron_jobs(service, egress),
            _claiming_runs(service, claimer, lease, executor.hold),
        ):
            yield


def _keys(settings: Settings, database: Database, listener: NotifyListener) -> KeyCache:
    local = settings.on_loopback and settings.oidc_issuer is None
    tokens = TokenSigner(keyring(settings))
    return KeyCache(database.pool, listener, local=local, tokens=tokens)


def _sign_in(settings: Settings, database: Database) -> SignIn | None:
    issuer, audience = settings.oidc_issuer, settings.oidc_audience
    if issuer is None or audience is None:
        return None
    return SignIn(issuer, audience, settings.oidc_claims, database.pool)


def _pins(settings: Settings) -> PinCache:
    shared = settings.shared_memory
    return PinCache(settings.operator_providers, settings.default_model, shared=shared)


@asynccontextmanager
async def _models(
    service: Service, worker_id: UUID, secrets: SecretLookup, budgets: DayBudgets
) -> "AsyncIterator[ModelServices]":
    from bottega.llm.gates import Traffic
    from bottega.model_services import open_models

    traffic = Traffic(service.database.pool, worker_id)
    lookups = service.outgoing.egress.lookups
    hosts = service.outgoing.model_hosts
    opening = open_models(service.settings, budgets, secrets, hosts, traffic, lookups)
    running = service.services.running(limits=traffic.shares.run)
    async with running, opening as models:
        yield models


@asynccontextmanager
async def _keeping_memory(
    service: Service,
    memory_services: MemoryServices,
    models: "ModelServices",
) -> "AsyncIterator[tuple[MemorySources, Callable[[], None]]]":
    """Run the memory's background work during the block.

    Yields the memory for runs, and a function that wakes the background work.
    """
    from bottega.engine.retrieval import MemorySources

    settings = service.settings
    analyst = await _analyst(settings, models)
    sources = MemorySources(
        service.memory,
        service.patterns,
        settings.learning_options,
        analyst,
        shared=settings.shared_memory,
    )
    async with run_memory_jobs(
        settings, service.database, service.listener, service.services, memory_services, analyst
    ) as episode_stored:
        yield sources, episode_stored


@asynccontextmanager
async def _claiming_runs(
    service: Service, claimer: queue.RunClaimer, lease: "WorkerLease", hold: Callable[[], None]
) -> AsyncIterator[None]:
    """Claim runs during the block; at its end, put unfinished runs back into the queue."""
    service.listener.subscribe(signals.DUE, claimer.notice)
    if service.nats is not None:
        receive = lambda *_: claimer.notice(None)  # noqa: E731
        service.nats.subscribe(signals.DUE, str(claimer.worker_id), receive=receive)
    stop, database = service.stop_working, service.database
    database.trust.signals.claims = claimer.claims_own

    async def work() -> None:
        await claimer.run(stop)
        database.trust.signals.claims = lambda: False
        await lease.leave(database.pool)
        grace_s = service.settings.drain_grace_s
        asyncio.get_running_loop().call_later(max(grace_s / 2, grace_s - 5.0), hold)
        await claimer.finish(grace_s)

    working = asyncio.ensure_future(work())
    try:
        yield
    finally:
        stop.set()
        await working
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await database.trust.signals.sent()


@asynccontextmanager
async def run_cron_jobs(service: Service, egress: "Egress") -> AsyncIterator[None]:
    """Start scheduled runs and send webhooks during the block."""
    from bottega.background.schedules import Ticker
    from bottega.background.webhooks import Webhooks
    from bottega.files.store import FileRetention
    from bottega.tenants.retention import Pruning

    settings, database = service.settings, service.database
    first = settings.webhook_secret
    secret = None if first is None else first.get_secret_value()
    ticker, webhooks = (
        Ticker(database, settings.memory, service.pins),
        Webhooks(database.pool, egress, secret),
    )
    wake_on_notify(service.listener, ticker.loop, webhooks.work.loop)
    retention = FileRetention(database.pool)
    expiry = WorkLoop("files", retention.delete_unused, poll_s=3600.0)
    pruning = Pruning(database, settings.retention_days).loop()
    async with service.services.running(
        schedules=ticker.run, webhooks=webhooks.work.run, files=expiry.run, pruning=pruning.run
    ):
        yield
