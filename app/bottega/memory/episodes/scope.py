"""Scopes: the episodes that a reader may see. Pure.

Every search and every read of episodes needs a scope. The SQL function ``episode_scope`` turns it
into conditions.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic_core import to_json

MemoryScope = Literal["run", "session", "agent", "user", "tenant"]
"""Values of an agent's ``memory_scope``: the owners of the episodes that its runs may see."""


class Reach(StrEnum):
    """The reach of a scope.

    RUN: no episode of another run. SESSION: those of one session. USER: those of one user. NOBODY:
    those without user and session. UNNAMED: those without user, and those of the scope's own user.
    EVERYTHING: all of the tenant.
    """

    RUN = "run"
    SESSION = "session"
    USER = "user"
    NOBODY = "nobody"
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


def scope_of_run(
    wanted: MemoryScope | None,
    *,
    user: str | None,
    session_id: str | None,
    agent: str | None,
    shared: bool,
) -> Scope:
    """Return the scope of a run.

    Args:
        wanted: the root agent's ``memory_scope``; ``None``: that of the user, else of the session.
        shared: true if the operator lets agents read across sessions.
    """
    if wanted == "run" or (wanted == "session" and session_id is None):
        return Scope(Reach.RUN)
    if wanted == "tenant" and shared:
        return Scope(Reach.UNNAMED, user)
    only = agent if wanted == "agent" else None
    if user is not None and wanted != "session":
        return Scope(Reach.USER, user, agent=only)
    if session_id is not None:
        return Scope(Reach.SESSION, user, session_id, only)
    return Scope(Reach.NOBODY, agent=only)


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
