"""Consolidation: find episodes that are similar enough, and build one from them. Pure.

Vectors alone do not suffice: two tasks that differ in one number have a cosine of 0.997, in a
"not" 0.996, and in two swapped names 1.0. So the tasks must also be the same text. Only spacing,
the case of the first letter and a full stop at the end may differ. In doubt two tasks are
different: keeping both costs some room, merging them wrongly loses information.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import reduce
from hashlib import blake2b
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bottega.memory.episodes.episode import Episode, Outcome, State, StorageState, derived_id

# --- Equal tasks --------------------------------------------------------------------------------

_FULL_STOP = re.compile(r"(?<=[^\W\d_])\.$")
"""A full stop after a letter, at the end; "3." and "cd .." may mean something else."""


def task_key(task: Mapping[str, Any], whole_input: Any = None) -> bytes | None:
    """Return a digest of 16 bytes that is equal for equally worded tasks only.

    Args:
        task: as stored in an episode; all members count except ``complexity``.
        whole_input: the full input, if ``task`` holds a shortened one.

    Returns:
        ``None`` if the input has no words: such a task equals no other.
    """
    asked = task.get("original_input") if whole_input is None else whole_input
    rest = {name: task[name] for name in task if name not in ("complexity", "original_input")}
    text = _plain(asked) if isinstance(asked, str) else _json(asked)
    if not asked or not any(map(str.isalnum, text)):
        return None
    return blake2b(_json([text, rest]).encode(), digest_size=16).digest()


def _plain(text: str) -> str:
    flat = _FULL_STOP.sub("", " ".join(unicodedata.normalize("NFC", text).split()))
    return flat[:1].lower() + flat[1:]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


# --- Groups to consolidate ----------------------------------------------------------------------


def groups(
    vectors: NDArray[np.float32], times: Sequence[datetime], *, cosine: float, window: timedelta
) -> list[list[int]]:
    """Return groups of two or more episodes in which each is close to each other, as places.

    Complete linkage: joins the two closest groups while their two farthest members are close
    enough.

    Args:
        vectors: of the episodes, of length 1; shape (n, d).
        times: their ends.
        cosine: lower bound (exclusive) of the cosine of each pair.
        window: longest time between the first and the last.
    """
    if len(times) < 2:
        return []
    near = vectors.astype(np.float64) @ vectors.T.astype(np.float64)
    ends = np.array([each.timestamp() for each in times])
    near[np.abs(ends[:, None] - ends) > window.total_seconds()] = -np.inf
    np.fill_diagonal(near, -np.inf)
    members = {place: [place] for place in range(len(times))}
    while True:
        one, other = sorted(divmod(int(near.argmax()), len(times)))
        if near[one, other] <= cosine:
            return [sorted(group) for group in members.values() if len(group) > 1]
        members[one] += members.pop(other)
        near[one] = near[:, one] = np.minimum(near[one], near[other])
        near[one, one] = -np.inf
        near[other] = near[:, other] = -np.inf


# --- One episode from several -------------------------------------------------------------------

_LONGEST_VALUE = 200
_SUCCESS_RATES = {Outcome.SUCCESS: 1.0, Outcome.UNKNOWN: None}
_LISTS = ("tools_used", "strategies_applied", "agents")


def as_one(
    members: Sequence[Episode], representative: Episode, outcome: Outcome = Outcome.SUCCESS
) -> Episode:
    """Build the episode that stands for ``members``.

    Its ``metadata["consolidated"]`` has ``representative_id``, ``instances``, ``structure`` (the
    values that are equal in all), ``variations`` (per original its id and ``diff``: its own values
    by JSON pointer, at most 20, long ones cut) and ``statistics``.

    Args:
        members: two or more episodes of one user, session and agent, oldest first.
        representative: the member that is most similar to all others.
        outcome: that of all members, labels included.
    """
    durations = [each.execution.get("duration_s") for each in members]
    known = [each for each in durations if each is not None]
    statistics: dict[str, Any] = {
        "mean_duration_s": fmean(known) if known else None,
        "success_rate": _SUCCESS_RATES.get(outcome, 0.0),
        "common_patterns": {name: _shared(members, name) for name in _LISTS},
    }
    consolidated = {
        "representative_id": str(representative.id),
        "instances": len(members),
        **_compared(members),
        "statistics": statistics,
    }
    principals = {each.origin.get("principal") for each in members}
    failures = dict.fromkeys(known for each in members for known in each.failure_signatures)
    return replace(
        representative,
        # Concurrent workers agree on it.
        id=derived_id(" ".join(["consolidated", *sorted(str(each.id) for each in members)])),
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
            "duration_s": statistics["mean_duration_s"],
            "resources": _means([each.execution.get("resources", {}) for each in members]),
        },
        metadata={**statistics["common_patterns"], "consolidated": consolidated},
        tags=tuple(sorted({tag for each in members for tag in each.tags})[:100]),
        failure_signatures=tuple(failures)[:10],
        reflection=None,
        trace=None,
        input=None,
        output=None,
        instances=len(members),
        state=State(state=StorageState.MATURE),
    )


def _compared(members: Sequence[Episode]) -> dict[str, Any]:
    """Return the common ``structure`` of episodes, and their ``variations``."""
    contents = [_content(each) for each in members]
    structure = reduce(_common, contents)
    variations = [
        {"episode_id": str(each.id), "at": each.at.isoformat(), "diff": _diff(own, structure)}
        for each, own in zip(members, contents, strict=True)
    ]
    return {"structure": structure, "variations": variations}


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
        if len(values) == 20:
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
