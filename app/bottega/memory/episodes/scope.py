"""Scopes (the episodes that a reader may see), and options of retrieval and learning.

Every search and every read of episodes needs a scope. The SQL function ``episode_scope`` converts a
scope to conditions.

Runs of all users read patterns. So a pattern must not contain a text that occurs only in runs of
one or two owners. Names of agents and tools are always allowed, because these names come from
definitions.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from pydantic_core import to_json

from bottega.memory.episodes.scoring import ScoringOptions

UNASKED = "resp-"
"""Prefix of sessions that the OpenAI-compatible API creates itself; these sessions do not identify
an owner."""
MemoryMode = Literal["off", "read", "full"]
"""Use of memory by a run, strictest first: none, only reading, or reading and storing the run."""
MemoryScope = Literal["run", "session", "agent", "user", "tenant"]
"""Values of ``memory_scope``: the owners of the episodes that an agent's runs may see."""


class Reach(StrEnum):
    """Extent of a scope: the owners whose episodes the scope includes.

    - RUN: no episode of any other run.
    - SESSION: episodes of one session.
    - USER: episodes of one user.
    - UNNAMED: episodes without a user and, if the scope has a user, this user's episodes.
    - EVERYTHING: all episodes of the tenant.
    """

    RUN = "run"
    SESSION = "session"
    USER = "user"
    UNNAMED = "unnamed"
    EVERYTHING = "everything"


@dataclass(frozen=True, slots=True)
class Scope:
    """Selection, by owner, of the episodes that a reader may see.

    Attributes:
        user: the end user; required with USER; with SESSION and UNNAMED, set if the reader has a
            user.
        session_id: the session; required with SESSION.
        agent: if set, the scope has only episodes of runs with this root agent.
        any_user: with SESSION: true if the scope has the episodes of all users of the session.
    """

    reach: Reach
    user: str | None = None
    session_id: str | None = None
    agent: str | None = None
    any_user: bool = False

    @property
    def document(self) -> str:
        """The scope in JSON, as an argument of SQL functions."""
        fields = {"reach": self.reach, "session_id": self.session_id, "agent": self.agent}
        if not self.any_user:
            fields["user_id"] = self.user
        return to_json(fields).decode()


EVERYTHING = Scope(Reach.EVERYTHING)
"""All episodes of the tenant, for administrators, and for work that shows no episode to a run."""


def identity_of(session_id: str | None) -> str | None:
    """Return the session's id if a client chose this id, otherwise ``None``."""
    return None if session_id is None or session_id.startswith(UNASKED) else session_id


def scope_of_run(
    scope: MemoryScope | None,
    *,
    user: str | None,
    session_id: str | None,
    agent: str | None,
    shared: bool,
) -> Scope:
    """Return the scope of a run; a run without user and session reads no other run's episodes.

    Args:
        scope: ``memory_scope`` of the root agent; ``None``: the scope is the user or, without a
            user, the session.
        shared: true if the operator allows agents to read episodes of all sessions.
    """
    session_id = identity_of(session_id)
    if scope == "run" or (scope == "session" and session_id is None):
        return Scope(Reach.RUN)
    if scope == "tenant" and shared:
        return Scope(Reach.UNNAMED, user)
    only = agent if scope == "agent" else None
    if user is not None and scope != "session":
        return Scope(Reach.USER, user, agent=only)
    if session_id is not None:
        return Scope(Reach.SESSION, user, session_id, only)
    return Scope(Reach.RUN)


# Texts of a run's field ``memory_used``, for people. OFF: memory is switched off for the run.
NO_USER, OFF = "none (no user)", "none (off)"
_USED = {Reach.RUN: "none (memory_scope)", Reach.UNNAMED: "tenant"}


def memory_used(scope: Scope, *, user: str | None, session_id: str | None) -> str:
    """Return a short text for people about the earlier runs that a run may read."""
    if scope.reach is Reach.RUN and user is None and identity_of(session_id) is None:
        return NO_USER
    return _USED.get(scope.reach, scope.reach.value)


def scope_of_search(user: str | None, session_id: str | None, *, everything: bool) -> Scope:
    """Return the scope of a search by an API client: the user or session that the client sent.

    Args:
        everything: only used if the client sent neither user nor session. True: all episodes of the
            tenant; false: only episodes without a user.
    """
    if session_id is not None:
        return Scope(Reach.SESSION, user, session_id, any_user=user is None)
    if user is not None:
        return Scope(Reach.USER, user)
    return EVERYTHING if everything else Scope(Reach.UNNAMED)


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Options of retrieval; the settings ``memory_…`` describe them."""

    vector_deadline_ms: float = 300.0
    scoring: ScoringOptions = field(default_factory=ScoringOptions)


@dataclass(frozen=True, slots=True)
class LearningOptions:
    """Options of learning from runs; the settings ``learning_…`` describe them."""

    trial_share: float = 0.5
    withheld_share: float = 0.2


NAME_FEATURES = frozenset(("capabilities", "tools_required"))
"""Features that have names of agents and tools. All other texts may be a user's texts."""


def owner_of(user: str | None, session_id: str | None) -> str:
    """Return an episode's owner: the episode's user, or the session if there is no user. All
    episodes without user and session have the same owner."""
    if user is not None:
        return f"user:{user}"
    session = identity_of(session_id)
    return "" if session is None else f"session:{session}"


def is_shared(owners: Collection[str]) -> bool:
    """Return true if a text that these owners have may be in a pattern."""
    return len(owners) >= 3


def shared_texts(texts: Iterable[tuple[str, str]]) -> set[str]:
    """Return the texts that at least three owners have, from pairs of a text and its owner."""
    of_text: defaultdict[str, set[str]] = defaultdict(set)
    for text, owner in texts:
        of_text[text].add(owner)
    return {text for text, of in of_text.items() if is_shared(of)}
