"""Consolidation: build one episode from several similar ones. Pure.

The new episode stores the parts that all of them share once, and the differences per original. The
originals stay readable by id.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from hashlib import md5
from typing import Any
from uuid import UUID

from bottega.memory.episodes.episode import Episode, Outcome, State, StorageState

_LONGEST_VALUE = 200
_MOST_VALUES = 20
_MOST_TAGS = 100
_MOST_FAILURES = 10


def as_one(
    members: Sequence[Episode], representative: Episode, outcome: Outcome = Outcome.SUCCESS
) -> Episode:
    """Build the episode that stands for ``members``.

    Its ``metadata["consolidated"]`` has ``representative_id``, ``instances``, ``structure`` (the
    values that are equal in all), ``variations`` (per original its id and ``diff``: its own values
    by JSON pointer, long ones cut) and ``statistics``.

    Args:
        members: two or more episodes of one user, session and agent, oldest first.
        representative: the member that is most similar to all others.
        outcome: that of all members, labels included.
    """
    consolidated = _said_of(members, representative, outcome)
    return replace(
        representative,
        id=_id_of(members),
        kind="consolidated",
        run_id=None,
        at=members[-1].at,
        outcome=outcome,
        origin={
            "principal": _same([each.origin.get("principal") for each in members]),
            "run": None,
            "tool": None,
        },
        execution={
            **representative.execution,
            "duration_s": consolidated["statistics"]["mean_duration_s"],
            "resources": _means([each.execution.get("resources") for each in members]),
        },
        metadata={
            **{name: _shared(members, name) for name in _LISTS},
            "consolidated": consolidated,
        },
        tags=tuple(sorted({tag for each in members for tag in each.tags})[:_MOST_TAGS]),
        failure_signatures=tuple(
            dict.fromkeys(known for each in members for known in each.failure_signatures)
        )[:_MOST_FAILURES],
        reflection=None,
        trace=None,
        input=None,
        output=None,
        instances=len(members),
        state=State(state=StorageState.MATURE),
    )


_SUCCESS_RATES = {Outcome.SUCCESS: 1.0, Outcome.UNKNOWN: None}
_LISTS = ("tools_used", "strategies_applied", "agents")


def _said_of(
    members: Sequence[Episode], representative: Episode, outcome: Outcome
) -> dict[str, Any]:
    contents = [_content(each) for each in members]
    structure = reduce(_common, contents)
    durations = [_number(each.execution.get("duration_s")) for each in members]
    known = [each for each in durations if each is not None]
    return {
        "representative_id": str(representative.id),
        "instances": len(members),
        "structure": structure,
        "variations": [
            {"episode_id": str(each.id), "at": each.at.isoformat(), "diff": _diff(own, structure)}
            for each, own in zip(members, contents, strict=True)
        ],
        "statistics": {
            "mean_duration_s": _mean(known),
            "success_rate": _SUCCESS_RATES.get(outcome, 0.0),
            "common_patterns": {name: _shared(members, name) for name in _LISTS},
        },
    }


def _id_of(members: Sequence[Episode]) -> UUID:
    """Return an id that depends only on the members' ids, so that concurrent workers agree."""
    ids = " ".join(sorted(str(each.id) for each in members))
    return UUID(md5(f"consolidated {ids}".encode(), usedforsecurity=False).hexdigest())


def _content(episode: Episode) -> dict[str, Any]:
    return {
        "task": episode.task,
        "execution": episode.execution,
        "result": episode.result,
        "metadata": episode.metadata,
        "session_id": episode.session_id,
        "run_id": None if episode.run_id is None else str(episode.run_id),
    }


def _common(one: Any, other: Any) -> Any:
    """Return the fields that are equal in two objects, at any depth."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {
            name: _common(one[name], other[name])
            for name in one
            if name in other
            and (
                one[name] == other[name]
                or (isinstance(one[name], Mapping) and isinstance(other[name], Mapping))
            )
        }
    return one


def _diff(own: Any, structure: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for path, value in _leaves(own, structure, ""):
        if len(values) == _MOST_VALUES:
            values["…"] = "and more"
            break
        text = value if isinstance(value, str) else json.dumps(value)
        values[path] = value if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
    return values


def _leaves(own: Any, structure: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the values that ``structure`` lacks, each with its JSON pointer."""
    for name, value in own.items():
        here = f"{path}/{name.replace('~', '~0').replace('/', '~1')}"
        if name not in structure:
            yield here, value
        elif isinstance(value, Mapping):
            yield from _leaves(value, structure[name], here)


def _shared(members: Sequence[Episode], name: str) -> list[Any]:
    """Return the items that a list has in all members, in the order of the first one."""
    lists = [each.metadata.get(name) for each in members]
    first, *others = [each if isinstance(each, list) else [] for each in lists]
    return [item for item in first if all(item in other for other in others)]


def _same(values: Sequence[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else None


def _means(resources: Sequence[Any]) -> dict[str, float]:
    """Return the mean of each number that all of them have."""
    known = [each if isinstance(each, Mapping) else {} for each in resources]
    columns = {name: [_number(each.get(name)) for each in known] for name in known[0]}
    return {
        name: mean
        for name, column in columns.items()
        if None not in column
        and (mean := _mean([value for value in column if value is not None])) is not None
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
