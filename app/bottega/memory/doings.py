"""Behaviour of an episode as keys of findings: tools, call sequences, division of work. Pure."""

from collections.abc import Iterable
from itertools import groupby

from bottega.memory.finding import Kind
from bottega.memory.observing import Call, Observed

_LONGEST = 4  # calls of a sequence
_GAP = 2  # other calls allowed between two of a sequence
_READ = 20  # calls of an episode that are searched for sequences
_MOST_AGENTS = 8

Key = tuple[Kind, tuple[str, ...]]
"""Kind of finding, and the names called."""


def done(episode: Observed) -> set[Key]:
    """Return all keys of an episode: tools used, call sequences, division of work."""
    keys: set[Key] = {(Kind.TOOL, (call.name,)) for call in episode.calls}
    calls, agents = _called(episode), _agents(episode)
    if 2 <= len(agents) <= _MOST_AGENTS:
        keys.add((Kind.DECOMPOSITION, agents))
    some: list[tuple[tuple[str, ...], int]] = [((name,), at) for at, name in enumerate(calls)]
    for _ in range(_LONGEST - 1):
        some = [
            ((*names, calls[at]), at)
            for names, end in some
            for at in range(end + 1, min(end + _GAP + 2, len(calls)))
        ]
        keys |= {(Kind.SEQUENCE, names) for names, _ in some}
    return keys


def _called(episode: Observed) -> tuple[str, ...]:
    return _names(episode.calls)[:_READ]


def _agents(episode: Observed) -> tuple[str, ...]:
    return _names(call for call in episode.calls if call.is_agent)


def _names(calls: Iterable[Call]) -> tuple[str, ...]:
    """Return the names in order, with repetitions in a row as one."""
    return tuple(name for name, _ in groupby(call.name for call in calls))


def does(episode: Observed, key: Key) -> bool:
    """Return true if :func:`done` would contain the key, without computing all keys."""
    kind, names = key
    if kind is Kind.TOOL:
        return any(call.name == names[0] for call in episode.calls)
    if kind is Kind.DECOMPOSITION:
        return _agents(episode) == names
    calls = _called(episode)
    ends = {at for at, name in enumerate(calls) if name == names[0]}
    for wanted in names[1:]:
        ends = {
            at
            for end in ends
            for at in range(end + 1, min(end + _GAP + 2, len(calls)))
            if calls[at] == wanted
        }
    return bool(ends)
