"""Whose episodes a text came from, and whether patterns may say it (spec page 4, M32). Pure.

Patterns are given to runs of every user. So a pattern says no text that only one or two users' runs
had. Names of agents and tools are the definitions', and may always be said.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from app.memory.pattern import Features

OWNERS = 3
"""Users whose episodes must have a text, at least, before a pattern may say it."""
_TEXTS = ("domain", "task_type", "failure_signature")


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
    return [
        {
            name: value
            for name, value in each.features.items()
            if name not in _TEXTS or value == each.agent or value in public
        }
        for each in told
    ]


def _texts(told: Told) -> list[str]:
    values = [told.features.get(name) for name in _TEXTS]
    return [value for value in values if isinstance(value, str) and value != told.agent]
