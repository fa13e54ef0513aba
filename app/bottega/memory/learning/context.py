"""Memory for a client's task: retrieval of episodes and patterns; learning from a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import to_json

from bottega.db.sessions import decoded
from bottega.errors import NotFoundError
from bottega.memory.episodes import search
from bottega.memory.episodes.episode import IMPORTED, Episode
from bottega.memory.episodes.scope import EVERYTHING, Scope, owner_of
from bottega.memory.episodes.store import EpisodicMemory, Found
from bottega.memory.learning.lessons import FoundInsight, insights_in
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.matcher import Match
from bottega.memory.patterns.pattern import (
    EMPTY,
    LONGEST_NAME,
    Applicability,
    Application,
    Arm,
    Category,
    Content,
    ContentKind,
    Evidence,
    Features,
    Pattern,
)
from bottega.memory.patterns.store import PatternStore
from bottega.memory.patterns.task_analysis import Goals, analyse

_LONGEST_INSIGHT = 500
_REFLECT = """
INSERT INTO episode_reflections (tenant_id, episode_id, reflection) VALUES ($1, $2, $3::jsonb)
ON CONFLICT DO NOTHING
"""
_REFLECTION = """
SELECT reflection FROM episode_reflections WHERE tenant_id = $1 AND episode_id = $2
"""


@dataclass(frozen=True, slots=True)
class TaskContext:
    goals: Goals
    features: Features
    patterns: Sequence[Match]  # validated patterns that apply to the task, best first
    episodes: Found
    knowledge: Sequence[Match]  # validated patterns of the category ``domain``
    insights: Sequence[FoundInsight]  # of relevant episodes of the domain, most frequent first


@dataclass(frozen=True, slots=True)
class Lesson:
    text: str
    name: str | None = None
    category: Category = Category.DOMAIN  # if in ``OF_RUN``, the whole run's success decides
    uses: tuple[str, ...] = ()  # tools and agents that the lesson recommends


@dataclass(frozen=True, slots=True)
class ReportedOutcome:
    pattern_id: UUID
    good: bool
    followed: bool | None = None


@dataclass(frozen=True, slots=True)
class Learned:
    episode_id: UUID
    reflection: Mapping[str, Any]
    candidates: Sequence[Pattern]  # new patterns, or existing patterns with equal content
    applications: int  # number of reported outcomes that are new evidence


async def context_for_task(
    memory: EpisodicMemory,
    cache: PatternCache,
    tenant_id: UUID,
    scope: Scope,
    task: str,
    *,
    domain: str | None = None,
    task_type: str | None = None,
    capabilities: Sequence[str] = (),
    known: Features = EMPTY,
    k: int = 5,
) -> TaskContext:
    """Retrieve memory for a task that takes no part in the experiment with patterns.

    The result has all validated patterns that apply (the experiment withholds none) and no
    candidates.

    Args:
        scope: scope of the episodes; patterns need no scope, because they contain no texts of
            single users.
        known: features that override the features found in the task's text.
        k: the result has at most ``k`` patterns, ``k`` episodes and ``k`` insights.
    """
    goals = analyse(task, domain=domain, task_type=task_type, capabilities=capabilities)
    features = {**goals.features, **known}
    patterns = await cache.find_applicable(tenant_id, features, k=k)
    of_domain = await cache.find_applicable(tenant_id, features, category=Category.DOMAIN, k=k)
    hits = await memory.semantic_search(tenant_id, scope, task, k=k, domain=domain)
    near = [
        (hit.episode, hit.score)
        for hit in hits.hits
        if hit.relevant and hit.episode.domain == domain is not None
    ]
    insights = insights_in(near, tenant_id)[:k]
    return TaskContext(goals, features, patterns, hits, of_domain, insights)


async def learn_from_episode(
    memory: EpisodicMemory,
    cache: PatternCache,
    connection: asyncpg.Connection,
    tenant_id: UUID,
    episode: Episode | UUID,
    lessons: Sequence[Lesson] = (),
    outcomes: Sequence[ReportedOutcome] = (),
    *,
    principal: str,
) -> Learned:
    """Learn from a client's report about an episode, in a transaction of the tenant. Idempotent.

    Lessons become candidate patterns of the lowest trust, which the experiment validates in other
    runs. If the episode has a user or session, only the episode's reflection gets the lessons,
    because runs of all users read patterns. An existing reflection is not replaced.

    A reported outcome is evidence unless the episode was imported, cancelled or quarantined, or the
    pattern was found in the episode. If the experiment assigned the run to an arm of the pattern,
    the evidence is the result and feedback of the run, not the report.

    Args:
        episode: an episode to store, or the id of a stored episode.

    Raises:
        NotFoundError: the episode or a pattern is unknown.
    """
    if isinstance(episode, Episode):
        episode = await memory.store(tenant_id, episode, on=connection)
    loaded = (await search.load(connection, EVERYTHING, [episode])).get(episode)
    if loaded is None:
        raise NotFoundError(f"there is no episode {episode}")
    private = owner_of(loaded.user_id, loaded.session_id) != ""
    store = cache.store(connection, tenant_id)
    lesson_rows = () if private else lessons
    ids = [await store.add(_candidate(each, loaded, principal)) for each in lesson_rows]
    count = await _count(store, loaded, outcomes)
    if lessons:
        insights = [each.text[:_LONGEST_INSIGHT] for each in lessons]
        answer = {"insights": insights, "patterns": [], "failures": [], "performance": {}}
        said_by = to_json(answer | {"by": principal}).decode()
        await connection.execute(_REFLECT, tenant_id, episode, said_by)
    reflection = decoded(await connection.fetchval(_REFLECTION, tenant_id, episode))
    return Learned(episode, reflection or {}, ids, count)


async def _count(store: PatternStore, episode: Episode, outcomes: Sequence[ReportedOutcome]) -> int:
    ids = [each.pattern_id for each in outcomes]
    patterns = await store.get_many(ids)
    told = {"complexity": episode.task.get("complexity"), "task_type": episode.task_type}
    told |= {"domain": episode.domain}
    features = {name: value for name, value in told.items() if value is not None}
    applications = [
        Application(
            pattern_id=each.pattern_id,
            version=patterns[each.pattern_id].version,
            arm=Arm.REPORTED,
            at=store.now,
            episode_id=episode.id,
            followed=each.followed,
            good=each.good,
            features=features,
        )
        for each in outcomes
    ]
    return await store.record_application(applications)


def _candidate(lesson: Lesson, episode: Episode, principal: str) -> Pattern:
    kinds, domains = (
        () if each is None else (each,) for each in (episode.task_type, episode.domain)
    )
    fields = ["lesson", lesson.category, lesson.text, lesson.uses, kinds, domains]
    about = "/".join((*kinds, *domains)) or "any"
    return Pattern(
        name=(lesson.name or f"{about}: {lesson.text}")[:LONGEST_NAME],
        category=lesson.category,
        content=Content(
            ContentKind.HEURISTIC,
            {"condition": f"tasks like {about}", "action": lesson.text},
            uses=lesson.uses,
        ),
        applicability=Applicability(problem_types=kinds, domains=domains),
        summary=lesson.text[:_LONGEST_INSIGHT],
        evidence=Evidence(mined_from=() if episode.id is None else (episode.id,)),
        origin={"principal": principal},
        trust=IMPORTED,
        fingerprint=sha256(to_json(fields)).hexdigest(),
    )
