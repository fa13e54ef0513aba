"""Lessons of episodes, which later runs get, and which people edit, pin or remove.

A lesson is an insight of a reflection, or the reason of a verdict other than success. A lesson
belongs to the user, session and agent of the episode's run. Only runs that may read the episode get
the lesson, as an insight.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID, uuid5

import asyncpg

from bottega.db.pages import PageItems, fetch_rows
from bottega.errors import ConflictError, InvalidInputError, NotFoundError
from bottega.memory.episodes.episode import READ_OUTSIDE, Episode
from bottega.memory.episodes.scope import Reach, Scope
from bottega.memory.text.identities import without_identities
from bottega.memory.text.injection import suspicious
from bottega.memory.text.summaries import cut

LessonState = Literal["active", "removed"]
MOST_PINNED = 10
"""Maximum number of pinned lessons of a user, or of a session without a user."""

_SHOWN = """
id, text, "by", state, pinned, for_all, user_id AS "user", session_id, agent, run_id, episode_id,
created_at
"""
_PAGE = f"""
SELECT {_SHOWN} FROM lessons
WHERE tenant_id = $1 AND ($2::uuid IS NULL OR id {{than}} $2)
"""  # noqa: S608 (constant texts)
_GET = f"SELECT {_SHOWN} FROM lessons WHERE tenant_id = $1 AND id = $2"  # noqa: S608
_CHANGE = f"""
UPDATE lessons SET text = coalesce($3, text), "by" = CASE WHEN $3 IS NULL THEN "by" ELSE $5 END,
    pinned = coalesce($4, pinned), for_all = coalesce($6, for_all)
WHERE tenant_id = $1 AND id = $2 RETURNING {_SHOWN}
"""  # noqa: S608
_ONE_BY_ONE = "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))"
_PINNED = """
SELECT count(*) FROM lessons
WHERE tenant_id = $1 AND pinned AND id <> $2 AND user_id IS NOT DISTINCT FROM $3
  AND ($3 IS NOT NULL OR session_id IS NOT DISTINCT FROM $4)
"""
_REMOVE = """
UPDATE lessons SET state = 'removed', pinned = false, for_all = false
WHERE tenant_id = $1 AND id = $2 AND state = 'active'
"""
_PINNED_OF = """
SELECT * FROM pinned_lessons(set_config('bottega.tenant', $1, true)::uuid, $2::jsonb, $3)
"""

Lesson = Mapping[str, Any]


async def page(
    connection: asyncpg.Connection,
    tenant_id: UUID,
    filters: Mapping[str, str | None],
    *,
    after: UUID | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List a page of lessons by age.

    Args:
        filters: required values by column. Without a user and a session, the page has lessons
            without user and session, and lessons for all runs of an agent.
    """
    wanted = {name: value for name, value in filters.items() if value is not None}
    query = _PAGE + "".join(f" AND {name} = ${n}" for n, name in enumerate(wanted, 3))
    if wanted.keys().isdisjoint(("user_id", "session_id")):
        query += " AND (for_all OR user_id IS NULL AND session_id IS NULL)"
    query += f" ORDER BY id {{order}} LIMIT ${len(wanted) + 3}"
    values = tenant_id, after, *wanted.values()
    return await fetch_rows(connection, query, *values, limit=limit, descending=descending)


async def change(
    connection: asyncpg.Connection,
    tenant_id: UUID,
    lesson_id: UUID,
    actor: str,
    *,
    text: str | None,
    pinned: bool | None,
    for_all: bool | None,
) -> Lesson:
    """Change or pin a lesson, or release the lesson for all runs of the lesson's agent.

    Args:
        actor: author of the text.

    Raises:
        NotFoundError: the lesson does not exist.
        ConflictError: the lesson was removed (``removed``), or the user has too many pinned lessons
            (``too_many_pinned``).
        InvalidInputError: the new text looks like an order to a model, or the lesson cannot be
            released because it has no agent.
    """
    now = await get(connection, tenant_id, lesson_id, lock=True)
    if now["state"] == "removed":
        raise ConflictError(f"lesson {lesson_id} is removed", code="removed")
    text = None if text is None else " ".join(text.split())
    new_text = now["text"] if text is None and (pinned or for_all) else text
    if new_text is not None and (why := suspicious(new_text)):
        raise InvalidInputError(
            f"no run would get this text, because {why}: send another text", pointer="/text"
        )
    if for_all and now["agent"] is None:
        raise InvalidInputError(
            "the lesson has no agent whose runs could get it", pointer="/for_all"
        )
    if pinned:
        owner = now["user"], now["session_id"]
        await connection.execute(_ONE_BY_ONE, f"pinned lessons {tenant_id} {owner}")
        if await connection.fetchval(_PINNED, tenant_id, lesson_id, *owner) >= MOST_PINNED:
            raise ConflictError(
                f"{MOST_PINNED} lessons are pinned already: unpin one first", code="too_many_pinned"
            )
    changed: Lesson = await connection.fetchrow(
        _CHANGE, tenant_id, lesson_id, text, pinned, actor, for_all
    )
    return changed


async def remove(connection: asyncpg.Connection, tenant_id: UUID, lesson_id: UUID) -> bool:
    """Remove a lesson; return false if the lesson was removed already.

    Raises:
        NotFoundError: the lesson does not exist.
    """
    await get(connection, tenant_id, lesson_id, lock=True)
    result: str = await connection.execute(_REMOVE, tenant_id, lesson_id)
    return result == "UPDATE 1"


async def get(
    connection: asyncpg.Connection, tenant_id: UUID, lesson_id: UUID, *, lock: bool = False
) -> Lesson:
    """Return a lesson.

    Args:
        lock: true: lock the lesson's row until the end of the transaction.

    Raises:
        NotFoundError: the lesson does not exist.
    """
    query = f"{_GET} FOR UPDATE" if lock else _GET
    lesson: Lesson | None = await connection.fetchrow(query, tenant_id, lesson_id)
    if lesson is None:
        raise NotFoundError(f"there is no lesson {lesson_id}")
    return lesson


async def pinned_for(
    pool: asyncpg.Pool, tenant_id: UUID, scope: Scope, agent: str | None
) -> list[Lesson]:
    """Return the lessons that a run gets for any task.

    The result has the pinned lessons within the run's scope, and the lessons for all runs of the
    run's agent. Each lesson has ``id``, ``text``, ``episode_id`` and ``pinned``.
    """
    within = None if scope.reach is Reach.RUN else scope.document
    return list(await pool.fetch(_PINNED_OF, str(tenant_id), within, agent))


# --- In prompts ---------------------------------------------------------------------------------

INSIGHT = "insight:"
"""Prefix of an insight's source in events; the insight's id follows."""
MOST_INSIGHTS = 3
"""Maximum number of insights in the prompts of a run."""
LONGEST = 2000
"""Maximum number of characters of an insight, which is also the limit for a text of a person."""


_NEGATIONS = frozenset(
    (
        *("always", "do", "does", "don't", "doesn't", "never", "no", "non", "not"),
        *("immer", "kein", "keine", "nicht", "nie", "ne", "jamais", "pas", "toujours"),
        *("jamás", "nunca", "siempre", "mai", "sempre", "não", "nao"),
    )
)
"""Words that reverse the meaning of a sentence, in six languages."""


@dataclass(frozen=True, slots=True)
class FoundInsight:
    """An insight, and the relevant episodes whose reflections contain the insight, best first."""

    id: UUID
    text: str
    episodes: tuple[Episode, ...]
    score: float


def insights_in(episodes: Sequence[tuple[Episode, float]], salt: UUID) -> list[FoundInsight]:
    """Return the insights of relevant episodes, sorted by frequency, then by score.

    The result omits texts that look like instructions to a model. If insights differ only in a
    negation, the result has only the insight of the newest episode.

    Args:
        episodes: relevant episodes and their scores, best first.
        salt: the tenant's salt for ids; equal sentences of a tenant have the same id.
    """
    having: dict[str, list[tuple[Episode, float]]] = defaultdict(list)
    for episode, score in episodes:
        for text in dict.fromkeys(_sentences(episode)):
            having[text].append((episode, score))
    insights = [
        FoundInsight(uuid5(salt, text), text, tuple(each for each, _ in some), some[0][1])
        for text, some in having.items()
        if suspicious(text) is None
    ]
    by_age = sorted(insights, key=lambda each: max(one.at for one in each.episodes))
    latest = {_without_negations(each.text): each for each in by_age}
    return sorted(latest.values(), key=lambda each: (-len(each.episodes), -each.score, each.text))


def _without_negations(text: str) -> tuple[str, ...]:
    words = text.casefold().replace("\u2019", "'").split()
    return tuple(word for word in words if word not in _NEGATIONS) or (text,)


def _sentences(episode: Episode) -> Iterable[str]:
    insights = (episode.reflection or {}).get("insights") or ()
    texts = (" ".join(each.split()) for each in insights[:20])
    return [cut(text, LONGEST) for text in texts if text]


def rendered(insight: FoundInsight) -> str:
    """Render an insight for a prompt: a line about the source, then the insight's sentence.

    Models may trust the first line. The sentence is indented, so it cannot imitate the first line.
    """
    newest = max(each.at for each in insight.episodes)
    imported = all(each.trust < READ_OUTSIDE for each in insight.episodes)
    authors = {str((each.reflection or {}).get("by")) for each in insight.episodes}
    by = "rules" if authors == {"rules"} else "a model or a person"
    source = "imported" if imported else "from own runs"
    head = f"insight by {by}, {source}, {len(insight.episodes)} of them, newest {newest:%Y-%m-%d}"
    return f"[{head}]\n  {without_identities(insight.text)}"
