"""Owners of texts in episodes, and the texts that patterns may contain.

Runs of all users read patterns. So a pattern must not contain a text that occurs only in runs of
one or two users. Names of agents and tools are always allowed, because these names come from
definitions.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bottega.memory.episodes.scope import identity_of
from bottega.memory.patterns.pattern import Features

_NAMES = frozenset(("capabilities", "tools_required"))
"""Features that contain names of agents and tools; all other features may have texts of users."""


class OwnedFeatures(NamedTuple):
    """Features of a task, and the owner of the task's episode."""

    features: Features
    owner: str | None  # ``None``: no owner, because a client sent the features with its pattern
    agent: str | None


def owner_of(user: str | None, session_id: str | None) -> str:
    """Return an episode's owner: the episode's user, or the session if there is no user. All
    episodes without user and session have the same owner."""
    if user is not None:
        return f"user:{user}"
    session = identity_of(session_id)
    return "" if session is None else f"session:{session}"


def shared_texts(texts: Iterable[tuple[str, str]]) -> set[str]:
    """Return the texts that at least three owners have, from pairs of a text and its owner."""
    of_text: defaultdict[str, set[str]] = defaultdict(set)
    for text, owner in texts:
        of_text[text].add(owner)
    return {text for text, of in of_text.items() if len(of) >= 3}


def public_features(owned: Sequence[OwnedFeatures]) -> list[dict[str, Any]]:
    """Remove texts that fewer than three owners have from the features of tasks."""
    said = [(text, each.owner) for each in owned for text in _texts(each)]
    public = shared_texts((text, owner) for text, owner in said if owner is not None)
    public |= {text for text, owner in said if owner is None}

    def shown(value: Any, agent: str | None) -> bool:
        return not isinstance(value, str) or value in public or value == agent

    return [
        {
            name: [one for one in value if shown(one, each.agent)]
            if isinstance(value, list | tuple) and name not in _NAMES
            else value
            for name, value in each.features.items()
            if name in _NAMES or shown(value, each.agent)
        }
        for each in owned
    ]


def _texts(owned: OwnedFeatures) -> Iterator[str]:
    """Yield the texts in a task's features, except the names of defined agents and tools."""
    for name, value in owned.features.items():
        if name not in _NAMES:
            several = value if isinstance(value, list | tuple) else [value]
            yield from (one for one in several if isinstance(one, str) and one != owned.agent)
