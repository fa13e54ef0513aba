"""Owners of texts in episodes, and the texts that patterns may contain. Pure.

Runs of every user are given patterns. So a pattern contains no text that only one or two users'
runs had. Names of agents and tools come from definitions and are always allowed.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bottega.memory.patterns.pattern import Features

OWNERS = 3
"""Least number of users whose episodes have a text before a pattern may contain it."""
_NAMES = frozenset(("capabilities", "tools_required"))
"""Features that hold names of agents and tools; all other texts may be a user's."""


@dataclass(frozen=True, slots=True)
class OwnedFeatures:
    """Features of a task, and the owner of their episode.

    Attributes:
        owner: ``None`` if they are of no episode: a client sent them with the pattern.
    """

    features: Features
    owner: str | None
    agent: str | None


def owner_of(user: str | None, session_id: str | None) -> str:
    """Return an episode's owner: its user, else its session; all others share one owner."""
    if user is not None:
        return f"user:{user}"
    return "" if session_id is None else f"session:{session_id}"


def shared_texts(texts: Iterable[tuple[str, str]], owners: int = OWNERS) -> set[str]:
    """Return the texts of at least ``owners`` owners, given each text with its owner."""
    of_text: defaultdict[str, set[str]] = defaultdict(set)
    for text, owner in texts:
        of_text[text].add(owner)
    return {text for text, of in of_text.items() if len(of) >= owners}


def public_features(owned: Sequence[OwnedFeatures]) -> list[dict[str, Any]]:
    """Return the features without texts that fewer than three owners have."""
    public = {text for each in owned if each.owner is None for text in _texts(each)}
    texts = [
        (text, each.owner) for each in owned if each.owner is not None for text in _texts(each)
    ]
    public |= shared_texts(texts)

    def may_be_said(value: Any, agent: str | None) -> bool:
        return isinstance(value, str) and (value in public or value == agent)

    def of_list(values: Sequence[Any], agent: str | None) -> list[Any]:
        return [one for one in values if isinstance(one, int | float) or may_be_said(one, agent)]

    return [
        {
            name: of_list(value, each.agent)
            if name not in _NAMES and isinstance(value, list | tuple)
            else value
            for name, value in each.features.items()
            if not isinstance(value, str) or may_be_said(value, each.agent)
        }
        for each in owned
    ]


def _texts(owned: OwnedFeatures) -> list[str]:
    """Return the texts among the features that are no names of definitions."""
    values = [value for name, value in owned.features.items() if name not in _NAMES]
    texts = [
        each for value in values for each in (value if isinstance(value, list | tuple) else [value])
    ]
    return [each for each in texts if isinstance(each, str) and each != owned.agent]
