"""Scopes in the database: no episode is read without a scope or outside of it."""

import itertools
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.clock import utcnow
from bottega.db.pool import Database, acting_as
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import NotFoundError
from bottega.memory.episodes.embedders import Embedders
from bottega.memory.episodes.episode import Episode, EpisodeFilter
from bottega.memory.episodes.scope import EVERYTHING, Reach, Scope, scope_of_run, scope_of_search
from bottega.memory.episodes.store import EpisodicMemory
from tests.examples import examples
from tests.memories import EMBEDDER, day, embed, make_episode, store_episodes

TENANT = str(DEFAULT_TENANT)
SIGNATURE = "tool_error @fetch: no answer"
USERS = (None, "alice", "bob")
SESSIONS = (None, "s1", "s2")
AGENTS = ("clerk", "other")
SCOPES = (
    *(Scope(Reach.USER, user, agent=agent) for user in USERS[1:] for agent in (None, "clerk")),
    *(
        Scope(Reach.SESSION, user, session)
        for user, session in itertools.product(USERS, SESSIONS[1:])
    ),
    Scope(Reach.SESSION, session_id="s1", any_user=True),
    Scope(Reach.UNNAMED),
    Scope(Reach.UNNAMED, "alice"),
    Scope(Reach.RUN),
    EVERYTHING,
)


def holds(scope: Scope, episode: Episode) -> bool:
    """Return true if an episode is within a scope, computed independently of the database."""
    same_user = scope.any_user or episode.user_id == scope.user
    inside = {
        Reach.RUN: False,
        Reach.SESSION: same_user and episode.session_id == scope.session_id,
        Reach.USER: episode.user_id is not None and same_user,
        Reach.UNNAMED: episode.user_id in (None, scope.user),
        Reach.EVERYTHING: True,
    }[scope.reach]
    return inside and scope.agent in (None, episode.agent)


@pytest.fixture
async def kept(database: Database) -> dict[UUID, Episode]:
    """An episode of each user, session and agent, all about the same."""
    episodes = [
        make_episode(
            "Pay the invoice with the card",
            day(number),
            user_id=user,
            session_id=session,
            agent=agent,
            failure_signature=SIGNATURE,
            reflection={"insights": [f"{user} {session} {agent}"]},
        )
        for number, (user, session, agent) in enumerate(itertools.product(USERS, SESSIONS, AGENTS))
    ]
    ids = await store_episodes(database.pool, *episodes)
    return dict(zip(ids, episodes, strict=True))


@pytest.fixture
def memory(database: Database) -> EpisodicMemory:
    embedders = Embedders(database.pool, lambda: EMBEDDER, lambda name: EMBEDDER)
    return EpisodicMemory(database.pool, embedders=embedders, clock=lambda: day(20))


async def test_each_way_of_reading_stays_within_the_scope_and_misses_nothing(
    database: Database, memory: EpisodicMemory, kept: dict[UUID, Episode]
) -> None:
    for scope in SCOPES:
        expected = {key for key, episode in kept.items() if holds(scope, episode)}
        where = EpisodeFilter(domain="office")
        found: dict[str, list[Any]] = {
            "meaning and words": (
                await memory.semantic_search(DEFAULT_TENANT, scope, "pay the invoice", k=99)
            ).hits,
            "with filters": (
                await memory.semantic_search(
                    DEFAULT_TENANT, scope, "invoice", k=99, where=where, by="whole"
                )
            ).hits,
            "list": await memory.structured_search(DEFAULT_TENANT, scope, where, limit=99),
            "recent": await memory.recent(DEFAULT_TENANT, scope, 99),
            "failures": await memory.similar_failures(DEFAULT_TENANT, scope, SIGNATURE, 99),
        }
        for way, hits in found.items():
            ids = {getattr(hit, "episode", hit).id for hit in hits}
            assert ids == expected, (scope, way)


async def test_an_episode_is_read_only_within_the_scope(
    memory: EpisodicMemory, kept: dict[UUID, Episode]
) -> None:
    alice = Scope(Reach.USER, "alice")
    for key, episode in kept.items():
        if holds(alice, episode):
            assert (await memory.get(DEFAULT_TENANT, alice, key)).trace
        else:
            with pytest.raises(NotFoundError):
                await memory.get(DEFAULT_TENANT, alice, key)


async def test_search_by_words_stays_within_the_scope(
    database: Database, kept: dict[UUID, Episode]
) -> None:
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        for scope in SCOPES[:-2]:
            rows = await connection.fetch(
                "SELECT episode_id FROM search_episodes($1::jsonb, '{invoice,card}', NULL,"
                " NULL, 'task', '{}', $2, 0.8, 99)",
                scope.document,
                day(-1),
            )
            expected = {key for key, episode in kept.items() if holds(scope, episode)}
            assert {row["episode_id"] for row in rows} == expected, scope


# Functions that return texts, places or ids of episodes to a reader.
READERS = """
SELECT p.proname AS name, p.proargnames AS names, p.pronargs AS count,
       pg_get_function_identity_arguments(p.oid) AS arguments
FROM pg_proc p
WHERE p.pronamespace = 'public'::regnamespace
  AND p.prosrc ~ '\\m(episodes|episode_search|episode_bodies|episode_reflections|read_\\w+)\\M'
  AND (p.proretset OR p.prorettype IN ('jsonb'::regtype, 'text'::regtype, 'uuid[]'::regtype))
"""
NOT_READERS = {
    # Definitions of scopes, and background work, which shows nothing to a run or a client.
    *("episode_scope", "erase_episodes", "episode_nearest"),
    *("due_retention", "expire_episodes"),
    # The number of episodes that have each word of the query; the numbers for metrics.
    *("episode_word_shares", "memory_gauges"),
}


async def test_no_function_returns_episodes_without_a_scope(
    database: Database, owner: asyncpg.Pool
) -> None:
    found = [row for row in await owner.fetch(READERS) if row["name"] not in NOT_READERS]
    assert {row["name"] for row in found} == {
        *("search_episodes", "episode_list", "episodes_within"),
        *("read_episodes", "read_episode_bodies"),
    }
    for row in found:
        assert row["names"][0] == "p_scope", row["name"]
        nulls = ", ".join(["$1::jsonb", *["NULL"] * (row["count"] - 1)])
        for scope in (None, "null", "{}", '{"reach": "all"}', '{"reach": "user"}', "[]", '"x"'):
            async with acting_as(database.pool, DEFAULT_TENANT) as connection:
                with pytest.raises(asyncpg.NullValueNotAllowedError):
                    await connection.fetch(f"SELECT * FROM {row['name']}({nulls})", scope)


async def test_a_user_s_name_is_only_a_value(
    database: Database, memory: EpisodicMemory, kept: dict[UUID, Episode]
) -> None:
    for name in ("' OR true --", "\\' OR true --", "$1", "%s", "a' || 'lice"):
        for scope in (
            Scope(Reach.USER, name),
            Scope(Reach.SESSION, None, name),
            Scope(Reach.UNNAMED, agent=name),
        ):
            assert await memory.recent(DEFAULT_TENANT, scope, 9) == []
            assert not (await memory.semantic_search(DEFAULT_TENANT, scope, "invoice")).hits


async def test_a_user_s_few_episodes_are_found_among_many_nearer_ones(
    database: Database, owner: asyncpg.Pool, memory: EpisodicMemory
) -> None:
    near = [make_episode(f"Pay the invoice number {n}", day(1), user_id="bob") for n in range(300)]
    far = [make_episode(f"Water the plants {n}", day(1), user_id="alice") for n in range(7)]
    await store_episodes(database.pool, *near, embedded=False)
    ids = await store_episodes(database.pool, *far, embedded=False)
    await embed(database.pool, [*(each.id for each in near if each.id), *ids])
    await owner.execute("ANALYZE")
    alice = Scope(Reach.USER, "alice")
    found = await memory.semantic_search(DEFAULT_TENANT, alice, "Pay the invoice", k=7)
    assert {hit.episode.id for hit in found.hits} == set(ids)


async def test_a_user_s_episodes_are_looked_up_by_an_index(
    database: Database, owner: asyncpg.Pool
) -> None:
    many = [make_episode(f"task {n}", day(n / 100), user_id=f"u{n % 100}") for n in range(1500)]
    few = [make_episode(f"task {n}", day(n / 4), session_id="s") for n in range(60)]
    await store_episodes(database.pool, *many, *few, embedded=False)
    await owner.execute("ANALYZE")
    for scope, index in (
        (Scope(Reach.USER, "u7"), "ix_episode_search_user"),
        (Scope(Reach.UNNAMED), "ix_episode_search_unnamed"),
    ):
        async with acting_as(database.pool, DEFAULT_TENANT) as connection:
            condition = await connection.fetchval("SELECT episode_scope($1)", scope.document)
            plan = await connection.fetch(
                f"EXPLAIN SELECT episode_id FROM episode_search s WHERE s.tenant_id = $1{condition}"
                " ORDER BY s.at DESC, s.episode_id DESC LIMIT 20",
                DEFAULT_TENANT,
            )
        assert index in str(plan), plan


name = st.none() | st.sampled_from(["a", "b"])


@given(
    wanted=st.sampled_from([None, "run", "session", "agent", "user", "tenant"]),
    user=name,
    session=name,
    shared=st.booleans(),
)
@settings(max_examples=examples(200))
def test_only_an_operator_can_widen_a_run_s_scope_beyond_its_user(
    wanted: Any, user: str | None, session: str | None, shared: bool
) -> None:
    scope = scope_of_run(wanted, user=user, session_id=session, agent="clerk", shared=shared)
    assert scope.reach is not Reach.EVERYTHING
    assert scope.any_user is False
    for other in ("a", "b"):
        episode = make_episode("x", utcnow(), user_id=other, session_id=session, agent="clerk")
        assert not holds(scope, episode) or other == user
    elsewhere = make_episode("x", utcnow(), user_id=user, session_id="elsewhere", agent="clerk")
    if user is None and holds(scope, elsewhere):
        assert (wanted, shared) == ("tenant", True)
    if user is None and session is None and (wanted, shared) != ("tenant", True):
        assert scope.reach is Reach.RUN, "nobody's run reads nothing"
    elif wanted == "agent":
        assert scope.agent == "clerk"


def test_the_scope_of_a_search_follows_its_parameters() -> None:
    assert scope_of_search(None, None, everything=False) == Scope(Reach.UNNAMED)
    assert scope_of_search("a", None, everything=False) == Scope(Reach.USER, "a")
    assert scope_of_search("a", "s", everything=True) == Scope(Reach.SESSION, "a", "s")
    of_session = scope_of_search(None, "s", everything=False)
    assert of_session == Scope(Reach.SESSION, session_id="s", any_user=True)
    assert scope_of_search(None, None, everything=True) == EVERYTHING
