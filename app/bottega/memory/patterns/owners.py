"""Owners of texts in episodes, and the texts that patterns may contain.

Runs of all users read patterns. So a pattern must not contain a text that occurs only in runs of
one or two users. Names of agents and tools are always allowed, because these names come from
definitions.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable

from bottega.memory.episodes.scope import identity_of

NAMES = frozenset(("capabilities", "tools_required"))
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
