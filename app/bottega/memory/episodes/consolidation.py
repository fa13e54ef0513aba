"""Consolidation: build one episode from several similar ones. Pure.

The new episode stores the parts that all of them share once, and the differences per original. The
originals stay readable by id.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from hashlib import md5
from statistics import fmean
from typing import Any
from uuid import UUID

from bottega.memory.episodes.episode import Episode, Outcome, State, StorageState

_LONGEST_VALUE = 200
_MOST_VALUES = 20
_MOST_TAGS = 100
_MOST_FAILURES = 10
_SUCCESS_RATES = {Outcome.SUCCESS: 1.0, Outcome.UNKNOWN: None}
_LISTS = ("tools_used", "strategies_applied", "agents")


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
    durations = [each.execution.get("duration_s") for each in members]
    known = [each for each in durations if each is not None]
    duration_s = fmean(known) if known else None
    shared = {name: _shared(members, name) for name in _LISTS}
    contents = [_content(each) for each in members]
    structure = reduce(_common, contents)
    consolidated = {
        "representative_id": str(representative.id),
        "instances": len(members),
        "structure": structure,
        "variations": [
            {"episode_id": str(each.id), "at": each.at.isoformat(), "diff": _diff(own, structure)}
            for each, own in zip(members, contents, strict=True)
        ],
        "statistics": {
            "mean_duration_s": duration_s,
            "success_rate": _SUCCESS_RATES.get(outcome, 0.0),
            "common_patterns": shared,
        },
    }
    principals = {each.origin.get("principal") for each in members}
    failures = dict.fromkeys(known for each in members for known in each.failure_signatures)
    return replace(
        representative,
        id=_id_of(members),
        kind="consolidated",
        run_id=None,
        at=members[-1].at,
        outcome=outcome,
        origin={
            "principal": principals.pop() if len(principals) == 1 else None,
            "run": None,
            "tool": None,
        },
        execution={
            **representative.execution,
            "duration_s": duration_s,
            "resources": _means([each.execution.get("resources", {}) for each in members]),
        },
        metadata={**shared, "consolidated": consolidated},
        tags=tuple(sorted({tag for each in members for tag in each.tags})[:_MOST_TAGS]),
        failure_signatures=tuple(failures)[:_MOST_FAILURES],
        reflection=None,
        trace=None,
        input=None,
        output=None,
        instances=len(members),
        state=State(state=StorageState.MATURE),
    )


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


def _common(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are equal in two objects, at any depth."""
    common = {}
    for name, value in one.items():
        if isinstance(value, Mapping) and isinstance(other.get(name), Mapping):
            common[name] = _common(value, other[name])
        elif name in other and value == other[name]:
            common[name] = value
    return common


def _diff(own: Mapping[str, Any], structure: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for path, value in _leaves(own, structure, ""):
        if len(values) == _MOST_VALUES:
            values["…"] = "and more"
            break
        text = value if isinstance(value, str) else json.dumps(value)
        values[path] = value if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
    return values


def _leaves(
    own: Mapping[str, Any], structure: Mapping[str, Any], path: str
) -> Iterator[tuple[str, Any]]:
    """Yield the values that ``structure`` lacks, each with its JSON pointer."""
    for name, value in own.items():
        here = f"{path}/{name.replace('~', '~0').replace('/', '~1')}"
        if name not in structure:
            yield here, value
        elif isinstance(value, Mapping):
            yield from _leaves(value, structure[name], here)


def _shared(members: Sequence[Episode], name: str) -> list[Any]:
    """Return the items that a list has in all members, in the order of the first one."""
    first, *others = (each.metadata.get(name, []) for each in members)
    return [item for item in first if all(item in other for other in others)]


def _means(resources: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each number that all of them have."""
    columns: dict[str, list[Any]] = {
        name: [each.get(name) for each in resources] for name in resources[0]
    }
    return {name: fmean(each) for name, each in columns.items() if all(map(_is_number, each))}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
