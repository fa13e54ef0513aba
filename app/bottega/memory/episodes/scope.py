"""Scopes: the episodes that a reader may see; and options of retrieval and learning. Pure.

Every search and every read of episodes needs a scope. The SQL function ``episode_scope`` turns it
into conditions.

Options of retrieval and learning that an operator may set. Pure.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from pydantic_core import to_json

from bottega.memory.episodes.scoring import ScoringOptions

UNASKED = "resp-"
"""Prefix of the sessions that OpenAI's API makes by itself: they tell nothing of an owner."""
MemoryScope = Literal["run", "session", "agent", "user", "tenant"]
"""Values of an agent's ``memory_scope``: the owners of the episodes that its runs may see."""


class Reach(StrEnum):
    """The reach of a scope.

    RUN: no episode of another run. SESSION: those of one session. USER: those of one user. UNNAMED:
    those without user, and those of the scope's own user. EVERYTHING: all of the tenant.
    """

    RUN = "run"
    SESSION = "session"
    USER = "user"
    UNNAMED = "unnamed"
    EVERYTHING = "everything"


@dataclass(frozen=True, slots=True)
class Scope:
    """The episodes that a reader may see, by owner.

    Attributes:
        user: of USER; of SESSION and UNNAMED too, if the reader has one.
        session_id: of SESSION.
        agent: only episodes of runs with this root agent; ``None``: of any.
        any_user: of SESSION: ignore the user.
    """

    reach: Reach
    user: str | None = None
    session_id: str | None = None
    agent: str | None = None
    any_user: bool = False

    @property
    def document(self) -> str:
        """The scope as the argument of SQL functions."""
        said = {"reach": self.reach, "session_id": self.session_id, "agent": self.agent}
        if not self.any_user:
            said["user_id"] = self.user
        return to_json(said).decode()


EVERYTHING = Scope(Reach.EVERYTHING)
"""All episodes of the tenant: for an administrator, and for work that shows no text to a run."""


def identity_of(session_id: str | None) -> str | None:
    """Return a session that a client named; ``None``: it named none."""
    return None if session_id is None or session_id.startswith(UNASKED) else session_id


def scope_of_run(
    wanted: MemoryScope | None,
    *,
    user: str | None,
    session_id: str | None,
    agent: str | None,
    shared: bool,
) -> Scope:
    """Return the scope of a run; one without user and session reads no other run's episodes.

    Args:
        wanted: the root agent's ``memory_scope``; ``None``: that of the user, else of the session.
        shared: true if the operator lets agents read across sessions.
    """
    session_id = identity_of(session_id)
    if wanted == "run" or (wanted == "session" and session_id is None):
        return Scope(Reach.RUN)
    if wanted == "tenant" and shared:
        return Scope(Reach.UNNAMED, user)
    only = agent if wanted == "agent" else None
    if user is not None and wanted != "session":
        return Scope(Reach.USER, user, agent=only)
    if session_id is not None:
        return Scope(Reach.SESSION, user, session_id, only)
    return Scope(Reach.RUN)


NO_USER, OFF = "none (no user)", "none (off)"
_USED = {Reach.RUN: "none (memory_scope)", Reach.UNNAMED: "tenant"}


def memory_used(mode: str, scope: Scope, *, user: str | None, session_id: str | None) -> str:
    """Return whose earlier runs a run with this scope may read, in a word for people."""
    if scope.reach is Reach.RUN and user is None and identity_of(session_id) is None:
        return NO_USER
    if mode == "dag":  # no agent of a graph is the root, which alone recalls
        return "none (dag)"
    return _USED.get(scope.reach, scope.reach.value)


def scope_of_search(user: str | None, session_id: str | None, *, everything: bool) -> Scope:
    """Return the scope of a search by an API client: of its user or session.

    Args:
        everything: without user and session, the whole tenant; else only episodes without a user.
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
