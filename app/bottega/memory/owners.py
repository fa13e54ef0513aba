"""Owners of texts in episodes, and the texts that patterns may contain. Pure.

Patterns are given to runs of every user. So a pattern says no text that only one or two users' runs
had. Names of agents and tools are the definitions', and may always be said.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bottega.memory.pattern import Features

OWNERS = 3
"""Users whose episodes must have a text, at least, before a pattern may say it."""
_NAMES = frozenset(("capabilities", "tools_required"))
"""Features that are names of agents and tools; all other texts may be a user's."""


@dataclass(frozen=True, slots=True)
class Told:
    """Features of a task, and whose episode they are of.

    Attributes:
        owner: ``None`` if they are of no episode: a client told them with the pattern.
        agent: the one that the episode's run began with.
    """

    features: Features
    owner: str | None
    agent: str | None


def owner_of(user: str | None, session_id: str | None) -> str:
    """Whom an episode is of: its user, else its session; all others are of one owner."""
    if user is not None:
        return f"user:{user}"
    return "" if session_id is None else f"session:{session_id}"


def shared_texts(said: Iterable[tuple[str, str]], owners: int = OWNERS) -> set[str]:
    """The texts that so many owners have said, given each text with its owner."""
    of_text: defaultdict[str, set[str]] = defaultdict(set)
    for text, owner in said:
        of_text[text].add(owner)
    return {text for text, of in of_text.items() if len(of) >= owners}


def public_features(told: Sequence[Told]) -> list[dict[str, Any]]:
    """The features without the texts that fewer than three owners have."""
    public = {text for each in told if each.owner is None for text in _texts(each)}
    said = [(text, each.owner) for each in told if each.owner is not None for text in _texts(each)]
    public |= shared_texts(said)

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
        for each in told
    ]


def _texts(told: Told) -> list[str]:
    """The texts among the features that are not names out of definitions."""
    values = [value for name, value in told.features.items() if name not in _NAMES]
    said = [
        each for value in values for each in (value if isinstance(value, list | tuple) else [value])
    ]
    return [each for each in said if isinstance(each, str) and each != told.agent]
