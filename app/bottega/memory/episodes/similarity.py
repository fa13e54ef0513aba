"""Groups of episodes that are similar enough to be consolidated. Pure.

Vectors alone do not suffice: two tasks that differ in one number have a cosine of 0.997, in a
"not" 0.996, and in two swapped names 1.0. So the tasks must also be the same text. Only spacing,
the case of the first letter and a full stop at the end may differ. In doubt two tasks are
different: keeping both costs some room, merging them wrongly loses information.
"""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

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
    rest = {name: part for name, part in task.items() if name != "complexity"}
    asked = rest.pop("original_input", None) if whole_input is None else whole_input
    rest.pop("original_input", None)
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

MOST_COMPARED = 200


@dataclass(frozen=True, slots=True)
class SimilarityCandidate:
    """Episode that may be merged with others.

    Attributes:
        alike: values that must be equal in all members of a group.
        whole: its vector, of length 1.
    """

    id: UUID
    at: datetime
    alike: tuple[object, ...]
    whole: NDArray[np.float32]


def groups(
    candidates: Sequence[SimilarityCandidate],
    *,
    cosine: float,
    window: timedelta,
    most: int = MOST_COMPARED,
) -> list[list[SimilarityCandidate]]:
    """Return groups of two or more episodes in which each is close to each other.

    Complete linkage: joins the two closest groups while their two farthest members are close
    enough. The order of ``candidates`` does not matter. A block of more than ``most`` candidates is
    split by age, and each part is compared separately.

    Args:
        cosine: lower bound (exclusive) of the cosine of each pair of their vectors.
        window: longest time between the first and the last.
        most: most episodes that are compared with each other, and so become one.
    """
    found: list[list[SimilarityCandidate]] = []
    blocks: dict[tuple[object, ...], list[SimilarityCandidate]] = {}
    for candidate in sorted(candidates, key=lambda each: (each.at, each.id)):
        blocks.setdefault(candidate.alike, []).append(candidate)
    for block in blocks.values():
        for start in range(0, len(block), most):
            found += _linked(block[start : start + most], cosine, window)
    return found


def _linked(
    block: Sequence[SimilarityCandidate], cosine: float, window: timedelta
) -> list[list[SimilarityCandidate]]:
    """Group episodes with equal ``alike``, given from old to new."""
    vectors = np.stack([each.whole for each in block]).astype(np.float64)
    near = vectors @ vectors.T
    times = np.array([each.at.timestamp() for each in block])
    near[np.abs(times[:, None] - times) > window.total_seconds()] = -np.inf
    np.fill_diagonal(near, -np.inf)
    members = {place: [place] for place in range(len(block))}
    while True:
        one, other = sorted(divmod(int(near.argmax()), len(block)))
        if near[one, other] <= cosine:
            return [[block[each] for each in sorted(of)] for of in members.values() if len(of) > 1]
        members[one] += members.pop(other)
        near[one] = near[:, one] = np.minimum(near[one], near[other])
        near[one, one] = -np.inf
        near[other] = near[:, other] = -np.inf
