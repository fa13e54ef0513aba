"""Maintenance of a tenant's episodes: ageing, consolidation, and removal of deleted episodes.

Concurrent calls do no harm, and a later call completes the work of an interrupted call. A step
reads a page of episodes without locks, stores objects, and then changes the page in one
transaction, after a new check of the rows. A step skips rows that a different transaction has
locked; a later call changes these rows.

Before consolidation, a mature episode waits (``episode_state.task_key`` is set) until all episodes
of the following week are mature. Then consolidation compares the waiting episode once with the
episodes of that week that have an equal ``task_key``. So a group of episodes is complete when it is
consolidated, and a second call changes nothing.
"""

import asyncio
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json

from bottega.clock import monotonic
from bottega.db.pool import acting_as
from bottega.leased_work import LeasedWork
from bottega.memory.episodes.episode import (
    LONGEST_TEXT,
    Episode,
    Outcome,
    State,
    StorageState,
    derived_id,
    ended_before,
)
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.episodes.search import CHANNEL, POLL_S, load
from bottega.objects import ALL_PARTS, Objects, copied

if TYPE_CHECKING:  # takes 11 MB
    import numpy as np
    from numpy.typing import NDArray

_PAGE = 100
"""Number of episodes per transaction."""
_FIRST = (datetime.min.replace(tzinfo=UTC), UUID(int=0))
"""Position before all episodes in the order of time."""

_DUE = """
SELECT episode_id FROM episode_state
WHERE tenant_id = $1 AND state = CASE $2 WHEN 'aged' THEN 'mature' WHEN 'archived' THEN 'aged' END
  AND at < $3
ORDER BY at, episode_id LIMIT $4
"""
# This statement reads the texts for ``task_key`` while the database still has the task's full text.
# The statement reads each row by its key, because a join may compare all of the tenant's rows with
# each other.
_MATURING = """
SELECT s.episode_id, e.kind, e.user_id, e.session_id, e.task, b.content AS input,
       b.object_key IS NOT NULL AS away
FROM (
    SELECT d.episode_id, d.at FROM episode_state d
    WHERE d.tenant_id = $1 AND d.state = 'active' AND d.at < $2
    ORDER BY d.at, d.episode_id LIMIT $3 FOR UPDATE SKIP LOCKED) AS s
CROSS JOIN LATERAL (
    SELECT * FROM episodes e WHERE e.tenant_id = $1 AND e.id = s.episode_id LIMIT 1) AS e
LEFT JOIN LATERAL (
    SELECT b.content, b.object_key FROM episode_bodies b
    WHERE b.tenant_id = $1 AND b.episode_id = s.episode_id AND b.part = 'input' LIMIT 1
) AS b ON true
ORDER BY s.at, s.episode_id
"""
_MATURE = """
UPDATE episode_state s SET state = 'mature', task_key = n.task_key
FROM unnest($2::uuid[], $3::bytea[]) AS n(episode_id, task_key)
WHERE s.tenant_id = $1 AND s.episode_id = n.episode_id
"""
_AGE = "SELECT age_episodes($1, $2, $3, $4)"
_PURGE = "SELECT purge_episodes($1, $2)"
_TRASH_DUE = "SELECT due_deleted_objects(NULL, '5 minutes', $1) AS key"
"""5 minutes, because a transaction that refers to such an object may be about to commit."""
_MOVE = "SELECT move_bodies($1, $2::jsonb)"

# --- Consolidation ------------------------------------------------------------------------------

_WINDOW = timedelta(days=7)
"""Maximum time between the first and the last episode of a consolidated group."""

# The first episode of a group must have ended before this time, at least a week before the oldest
# active episode. Otherwise an active episode that matures late could belong to the group.
_READY = """
SELECT least($2, (SELECT min(at) FROM episode_state
                  WHERE tenant_id = $1 AND state = 'active')) - $3::interval
"""
# This step is the first step of consolidation, because most episodes have a unique task.
_DISMISS_LONELY = "SELECT dismiss_lonely_episodes($1, $2, $3)"
_ALIKE = """
ROW(x.outcome, x.domain, x.task_type, x.failure_signature, x.trust, x.user_id, x.session_id,
    x.agent)
"""
# The query reads the next waiting episode, and later episodes that may be similar to this episode.
# All vectors are from one embedder of the waiting episode, if possible from the embedder that
# searches use. The query reads each row by its key, because a join may compare all of the tenant's
# rows with each other.
_NEXT = f"""
WITH first AS (
    SELECT s.episode_id, s.at, s.task_key, x.outcome, {_ALIKE} AS kind, (
        SELECT v.embedder FROM episode_vectors v
        LEFT JOIN tenant_memory m ON m.tenant_id = $1 AND m.embedder = v.embedder
        WHERE v.tenant_id = $1 AND v.episode_id = s.episode_id
        ORDER BY m.embedder IS NULL, v.embedder LIMIT 1) AS embedder
    FROM (
        SELECT * FROM episode_state
        WHERE tenant_id = $1 AND task_key IS NOT NULL AND at < $2 AND (at, episode_id) > ($3, $4)
        ORDER BY at, episode_id LIMIT 1) AS s
    CROSS JOIN LATERAL (
        SELECT * FROM episode_search x
        WHERE x.tenant_id = $1 AND x.episode_id = s.episode_id LIMIT 1) AS x
)
SELECT f.episode_id AS first, f.at AS first_at, f.outcome, s.episode_id, s.at,
       unpacked_vector(v.whole)::real[] AS whole
FROM first AS f
CROSS JOIN LATERAL (
    SELECT * FROM episode_state s
    WHERE s.tenant_id = $1 AND s.task_key = f.task_key AND s.state = 'mature'
      AND s.at BETWEEN f.at AND f.at + $5::interval
    ORDER BY s.at, s.episode_id) AS s
CROSS JOIN LATERAL (
    SELECT * FROM episode_search x
    WHERE x.tenant_id = $1 AND x.episode_id = s.episode_id LIMIT 1) AS x
LEFT JOIN LATERAL (
    SELECT v.whole FROM episode_vectors v
    WHERE v.tenant_id = $1 AND v.episode_id = s.episode_id AND v.embedder = f.embedder
    LIMIT 1) AS v ON true
WHERE {_ALIKE} IS NOT DISTINCT FROM f.kind
ORDER BY s.at, s.episode_id LIMIT $6
"""  # noqa: S608 (texts of ours)
_DISMISS = """
UPDATE episode_state SET task_key = NULL
WHERE tenant_id = $1 AND episode_id = $2 AND state = 'mature'
"""
_CONSOLIDATE = "SELECT consolidate_episodes($1, $2, $3, $4)"


@dataclass(frozen=True, slots=True)
class EpisodeMaintenance:
    """Maintenance of episodes; each call handles one tenant. Any number of processes may run the
    maintenance at the same time.

    Attributes:
        most: maximum number of episodes (or groups) that a step handles in one call. Later calls
            handle the other episodes. So no tenant waits long for another tenant.
        most_compared: maximum number of episodes that are compared with each other.
    """

    pool: asyncpg.Pool
    objects: Objects
    most: int = 20_000
    most_compared: int = 200

    async def tend(self, tenant_id: UUID, now: datetime) -> Counter[str]:
        """Age, consolidate and purge a tenant's episodes.

        Returns:
            The numbers of episodes that became ``mature``, ``aged`` or ``archived``, or were
            ``consolidated`` or ``purged``; and the number of consolidated ``groups``.

        Raises:
            UnavailableError: the object store cannot be reached.
        """
        count = await self.archive_old(tenant_id, now)
        count += await self.consolidate_similar(tenant_id, now)
        count["purged"] = await self.purge_deleted(tenant_id, now)
        return +count

    async def archive_old(self, tenant_id: UUID, now: datetime) -> Counter[str]:
        """Move a tenant's episodes to the stage for their age (:class:`StorageState`).

        Returns:
            The numbers of episodes that became ``mature``, ``aged`` and ``archived``.

        Raises:
            UnavailableError: the object store cannot be reached; the current page is unchanged.
        """
        moved: Counter[str] = Counter()
        moved["mature"] = await self._mature(tenant_id, now)
        for stage, parts in ((StorageState.AGED, ("trace",)), (StorageState.ARCHIVED, ALL_PARTS)):
            moved[stage] = await self._move_on(tenant_id, stage, parts, now)
        return +moved

    async def purge_deleted(self, tenant_id: UUID, now: datetime) -> int:
        """Remove episodes that were marked as deleted at least 30 days ago; return their number."""
        before = now - timedelta(days=30)
        purged = 0
        while purged < self.most:
            async with acting_as(self.pool, tenant_id) as connection:
                page = await connection.fetchval(_PURGE, before, _PAGE)
            purged += page
            if page < _PAGE:
                break
        return purged

    async def _mature(self, tenant_id: UUID, now: datetime) -> int:
        before = ended_before(StorageState.MATURE, now)
        matured = 0
        while matured < self.most:
            async with acting_as(self.pool, tenant_id) as connection:
                rows = await connection.fetch(_MATURING, tenant_id, before, _PAGE)
                ids = [row["episode_id"] for row in rows]
                keys = []
                for row in rows:
                    keys.append(_key(row))
                    await asyncio.sleep(0)  # long texts take time, so let other asyncio tasks run
                await connection.execute(_MATURE, tenant_id, ids, keys)
            matured += len(rows)
            if len(rows) < _PAGE:
                break
        return matured

    async def _move_on(
        self, tenant_id: UUID, stage: StorageState, parts: Sequence[str], now: datetime
    ) -> int:
        before = ended_before(stage, now)
        moved_on = 0
        while moved_on < self.most:
            async with acting_as(self.pool, tenant_id) as connection:
                rows = await connection.fetch(_DUE, tenant_id, stage, before, _PAGE)
            ids = [row["episode_id"] for row in rows]
            moved = await copied(self.pool, self.objects, tenant_id, ids, parts)
            async with acting_as(self.pool, tenant_id) as connection:
                page = await connection.fetchval(_AGE, ids, stage, before, moved)
            moved_on += page
            if not page:  # all other due episodes are locked by other transactions
                break
        return moved_on

    # Consolidation

    async def consolidate_similar(self, tenant_id: UUID, now: datetime) -> Counter[str]:
        """Replace each group of a tenant's similar mature episodes with one episode.

        Each group has its own transaction.

        Returns:
            The number of ``groups`` and the number of ``consolidated`` episodes.

        Raises:
            UnavailableError: the object store cannot be reached; the current group is unchanged.
        """
        mature = ended_before(StorageState.MATURE, now)
        async with acting_as(self.pool, tenant_id) as connection:
            ready = await connection.fetchval(_READY, tenant_id, mature, _WINDOW)
            await connection.execute(_DISMISS_LONELY, ready, _WINDOW, self.most)
        counts: Counter[str] = Counter()
        last = _FIRST
        for _ in range(self.most):
            async with acting_as(self.pool, tenant_id) as connection:
                rows = await connection.fetch(
                    _NEXT, tenant_id, ready, *last, _WINDOW, self.most_compared
                )
            if not rows:
                break
            counts += await self._compare(tenant_id, rows, mature)
            last = (rows[0]["first_at"], rows[0]["first"])
        return counts

    async def _compare(
        self, tenant_id: UUID, rows: Sequence[asyncpg.Record], mature: datetime
    ) -> Counter[str]:
        import numpy as np

        counts: Counter[str] = Counter()
        whole_rows = [row for row in rows if row["whole"]]
        vectors = np.array([row["whole"] for row in whole_rows], np.float32)
        similar = groups(vectors, [row["at"] for row in whole_rows], cosine=0.95, window=_WINDOW)
        for group in similar:
            ids = [whole_rows[place]["episode_id"] for place in group]
            near = vectors[group] @ vectors[group].T
            middle = ids[int(near.sum(axis=1).argmax())]
            if await self._make_one(tenant_id, ids, middle, Outcome(rows[0]["outcome"]), mature):
                counts += Counter(groups=1, consolidated=len(group))
        first = rows[0]["first"]
        grouped = {whole_rows[place]["episode_id"] for group in similar for place in group}
        if first not in grouped and len(whole_rows) == len(rows):  # all episodes have vectors
            async with acting_as(self.pool, tenant_id) as connection:
                await connection.execute(_DISMISS, tenant_id, first)
        return counts

    async def _make_one(
        self, tenant_id: UUID, ids: Sequence[UUID], middle: UUID, outcome: Outcome, mature: datetime
    ) -> bool:
        async with acting_as(self.pool, tenant_id) as connection:
            loaded = await load(connection, EVERYTHING, ids)
        if len(loaded) < len(ids):
            return False
        one = as_one([loaded[each] for each in ids], loaded[middle], outcome)
        moved = await copied(self.pool, self.objects, tenant_id, ids, ALL_PARTS)
        async with acting_as(self.pool, tenant_id) as connection:
            is_stored: bool = await connection.fetchval(
                _CONSOLIDATE, to_json(one.to_row()).decode(), ids, mature, moved
            )
        return is_stored

    # Objects

    def offloading(self, clock: Callable[[], float] = monotonic) -> LeasedWork:
        """Return the background work that moves large bodies to the object store."""
        return LeasedWork(
            pool=self.pool,
            name="offload",
            columns="episode_id uuid",
            lease_s=300.0,
            share=8,
            places=16,
            batch=8,
            do=self._offload,
            channel=CHANNEL,
            poll_s=POLL_S,
            clock=clock,
        )

    async def _offload(self, tenant_id: UUID, due: Sequence[asyncpg.Record]) -> None:
        ids = [row["episode_id"] for row in due]
        moved = await copied(self.pool, self.objects, tenant_id, ids, ALL_PARTS)
        async with acting_as(self.pool, tenant_id) as connection:
            await connection.execute(_MOVE, ids, moved)

    async def empty_trash(self) -> float:
        """Delete objects to which no row refers; return the seconds until more work is due.

        Raises:
            UnavailableError: the object store cannot be reached.
        """
        keys = [row["key"] for row in await self.pool.fetch(_TRASH_DUE, 500)]
        if not keys:
            return float("inf")
        await self.objects.delete(keys)
        await self.pool.execute("SELECT forget_deleted_objects($1)", keys)
        return 0.0


def _key(row: Any) -> bytes | None:
    """Return the key of an episode's task and owner, equal for tasks with the same words.

    Return ``None`` if the task's full text is unknown, or if the episode replaces other episodes.
    """
    task = from_json(row["task"])
    question = task.get("original_input")
    cut = isinstance(question, str) and len(question) >= LONGEST_TEXT and row["input"] is None
    if row["kind"] != "episode" or row["away"] or cut:
        return None
    owner = [row["user_id"], row["session_id"]]
    if any(owner):
        task["owner"] = owner
    return task_key(task, row["input"] and from_json(row["input"]))


# --- Equal tasks --------------------------------------------------------------------------------
# A comparison of vectors alone is not enough. Two tasks that differ only in one number have a
# cosine of 0.997; tasks that differ only in a "not", 0.996; tasks that differ only in two swapped
# names, 1.0. So the texts of the tasks must be equal, too. Only spacing, the case of the first
# letter, an end mark, articles, and polite words around the task may differ. In doubt, two tasks
# count as different: separate episodes cost some space, but a wrong merge loses information.

_END_MARK = re.compile(r"""(?<=[\w"'”»)])\.$|(?<=[^\W\d_])!$""")
"""A full stop at the end, or an exclamation mark after a letter at the end; "5!" is a factorial."""
_COURTESY = (
    "please|kindly|thanks|thank you|hello|hi|hey|dear|per favore|per piacere|grazie|ciao|salve|"
    "bitte|danke|hallo|por favor|gracias|hola|s'il vous plaît|merci|bonjour|obrigad[oa]"
)
_COURTEOUS = re.compile(rf"^(?:{_COURTESY})\b[\s,.!]*(?=\w)|[\s,.!]+(?:{_COURTESY})[.!]?$", re.I)
_ARTICLE = re.compile(r"(?<!\S)(?:an|the|il|une?|una|uno|el|ein|eine[nmrs]?|uma?) (?=\w)")
_ENGLISH_ARTICLE = re.compile(r"(?<!\S)a (?=\w)(?!(?:and|at|by|for|from|in|of|on|or|to|with)\b)")
"""The article "a" before a word, removed only from texts that have words of English alone."""
_ENGLISH = re.compile(r"(?<!\S)(?:the|of|and|to|for|with|from|is)(?!\S)")
_QUOTE = re.compile('["`“”«»]')


def task_key(task: Mapping[str, Any], whole_input: Any = None) -> bytes | None:
    """Return a digest of 16 bytes that is equal only for tasks with the same words.

    Args:
        task: the field ``task`` of an episode; the digest depends on all members except
            ``complexity``.
        whole_input: the full input, if ``task`` has a shortened input.

    Returns:
        The digest; ``None`` if the input has no words, because it then equals no other input.
    """
    question = task.get("original_input") if whole_input is None else whole_input
    rest = {name: task[name] for name in task if name not in ("complexity", "original_input")}
    text = _plain(question) if isinstance(question, str) else _json(question)
    if not question or not any(map(str.isalnum, text)):
        return None
    return blake2b(_json([text, rest]).encode(), digest_size=16).digest()


def _plain(text: str) -> str:
    flat = " ".join(unicodedata.normalize("NFC", text).split())
    while (shorter := _COURTEOUS.sub("", flat)) != flat:
        flat = shorter
    flat = _END_MARK.sub("", flat)
    flat = flat[:1].lower() + flat[1:]
    if _QUOTE.search(flat):
        return flat
    if _ENGLISH.search(flat):
        flat = _ENGLISH_ARTICLE.sub("", flat)
    return _ARTICLE.sub("", flat)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


# --- Groups to consolidate ----------------------------------------------------------------------


def groups(
    vectors: "NDArray[np.float32]", times: Sequence[datetime], *, cosine: float, window: timedelta
) -> list[list[int]]:
    """Return groups of two or more similar episodes, as indexes of ``vectors``.

    The function uses complete linkage: it repeatedly joins the two closest groups. Two groups are
    as close as their two least similar members.

    Args:
        vectors: vectors of the episodes, each of length 1; shape (n, d).
        times: end times of the episodes.
        cosine: any two episodes of a group have a higher cosine than this value.
        window: maximum time between the first and the last episode of a group.
    """
    import numpy as np

    if len(times) < 2:
        return []
    near = vectors.astype(np.float64) @ vectors.T.astype(np.float64)
    ends = np.array([each.timestamp() for each in times])
    near[np.abs(ends[:, None] - ends) > window.total_seconds()] = -np.inf
    np.fill_diagonal(near, -np.inf)
    members = {place: [place] for place in range(len(times))}
    while True:
        one, other = sorted(divmod(int(near.argmax()), len(times)))
        if near[one, other] <= cosine:
            return [sorted(group) for group in members.values() if len(group) > 1]
        members[one] += members.pop(other)
        near[one] = near[:, one] = np.minimum(near[one], near[other])
        near[one, one] = -np.inf
        near[other] = near[:, other] = -np.inf


# --- One episode from several -------------------------------------------------------------------

_LONGEST_VALUE = 200
_SUCCESS_RATES = {Outcome.SUCCESS: 1.0, Outcome.UNKNOWN: None}
_LISTS = ("tools_used", "strategies_applied", "agents")


def as_one(
    members: Sequence[Episode], representative: Episode, outcome: Outcome = Outcome.SUCCESS
) -> Episode:
    """Build the episode that replaces ``members``.

    The ``metadata["consolidated"]`` of the new episode has ``representative_id``, ``instances``,
    ``structure`` (the values that all members have in common, by JSON pointer), ``variations`` and
    ``statistics``. A variation has the id of a member, and ``diff``: at most 20 shortened values
    of the member that are not in ``structure``.

    Args:
        members: two or more episodes of one user, session and agent, oldest first.
        representative: the member that is most similar to all others.
        outcome: the outcome that all members have, after feedback and checks.
    """
    durations = [each.execution.get("duration_s") for each in members]
    values = [each for each in durations if each is not None]
    statistics: dict[str, Any] = {
        "mean_duration_s": fmean(values) if values else None,
        "success_rate": _SUCCESS_RATES.get(outcome, 0.0),
        "common_patterns": {name: _shared(members, name) for name in _LISTS},
    }
    consolidated = {
        "representative_id": str(representative.id),
        "instances": len(members),
        **_compared(members),
        "statistics": statistics,
    }
    principals = {each.origin.get("principal") for each in members}
    failures = dict.fromkeys(known for each in members for known in each.failure_signatures)
    return replace(
        representative,
        # The new id is derived from the members' ids, so concurrent workers make the same id.
        id=derived_id(" ".join(["consolidated", *sorted(str(each.id) for each in members)])),
        kind="consolidated",
        run_id=None,
        at=members[-1].at,
        outcome=outcome,
        origin={
            "principal": principals.pop() if len(principals) == 1 else None,
            "run": None,
            "tool": None,
        },
        execution={
            **representative.execution,
            "duration_s": statistics["mean_duration_s"],
            "resources": _means([each.execution.get("resources", {}) for each in members]),
        },
        metadata={**statistics["common_patterns"], "consolidated": consolidated},
        tags=tuple(sorted({tag for each in members for tag in each.tags})[:100]),
        failure_signatures=tuple(failures)[:10],
        reflection=None,
        trace=None,
        input=None,
        output=None,
        instances=len(members),
        state=State(state=StorageState.MATURE),
    )


def _compared(members: Sequence[Episode]) -> dict[str, Any]:
    contents = [dict(_leaves(_content(each))) for each in members]
    first, *rest = contents
    structure = {
        path: value
        for path, value in first.items()
        if all(path in other and other[path] == value for other in rest)
    }
    variations = [
        {"episode_id": str(each.id), "at": each.at.isoformat(), "diff": _diff(own, structure)}
        for each, own in zip(members, contents, strict=True)
    ]
    return {"structure": structure, "variations": variations}


def _content(episode: Episode) -> dict[str, Any]:
    return {
        "task": episode.task,
        "execution": episode.execution,
        "result": episode.result,
        "metadata": episode.metadata,
        "session_id": episode.session_id,
        "run_id": None if episode.run_id is None else str(episode.run_id),
    }


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for name, inner in value.items():
        yield from _leaves(inner, f"{path}/{name.replace('~', '~0').replace('/', '~1')}")


def _diff(own: Mapping[str, Any], structure: Mapping[str, Any]) -> dict[str, Any]:
    values = {path: _shown(value) for path, value in own.items() if path not in structure}
    if len(values) > 20:
        values = {**dict(islice(values.items(), 20)), "…": "and more"}
    return values


def _shown(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value)
    return value if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def _shared(members: Sequence[Episode], name: str) -> list[Any]:
    first, *rest = (each.metadata.get(name, []) for each in members)
    return [item for item in first if all(item in other for other in rest)]


def _means(resources: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    columns: dict[str, list[Any]] = {
        name: [each.get(name) for each in resources] for name in resources[0]
    }
    return {name: fmean(each) for name, each in columns.items() if all(map(_is_number, each))}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
