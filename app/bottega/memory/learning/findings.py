"""Findings of mining, and their conversion to candidate patterns. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from itertools import groupby
from typing import Any
from uuid import UUID

from pydantic_core import to_json

from bottega.memory.learning.call_trace import Observed, TracedCall
from bottega.memory.patterns.pattern import (
    Applicability,
    Category,
    Condition,
    Content,
    ContentKind,
    Evidence,
    Guide,
    Pattern,
)

_LONGEST_NAME = 120
_ARROW = " → "


class FindingKind(StrEnum):
    """Kind of behaviour that was mined."""

    DECOMPOSITION = "decomposition"
    TOOL = "tool"
    SEQUENCE = "sequence"
    RECOVERY = "recovery"


@dataclass(frozen=True, slots=True)
class FindingScope:
    """Tasks or failures that a finding applies to.

    Attributes:
        signature: of the failure; ``tool`` is the tool that failed.
    """

    task_type: str | None = None
    domain: str | None = None
    signature: str | None = None
    tool: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Behaviour that goes with success.

    Attributes:
        uses: tools and agents, in order.
        category: the kind of evidence that shows the difference: a call, or the whole run.
        affects: tools and agents whose next call shows the difference; empty: the run does.
        gain: difference of the success rates with and without it, smoothed for few episodes.
        with_it, without: successes and episodes.
        supporters: the successful episodes with it, by age.
        instead: tools that were called in episodes without it.
    """

    kind: FindingKind
    scope: FindingScope
    uses: tuple[str, ...]
    category: Category
    affects: tuple[str, ...]
    gain: float
    with_it: tuple[int, int]
    without: tuple[int, int]
    supporters: tuple[UUID, ...]
    instead: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Hash of kind, scope and names; independent of the evidence."""
        said = [self.kind, self.scope.task_type, self.scope.domain, self.scope.signature, self.uses]
        return sha256(to_json(said)).hexdigest()


def is_within(names: Sequence[str], others: Sequence[str]) -> bool:
    """Return true if ``names`` is a subsequence of ``others``."""
    rest = iter(others)
    return all(name in rest for name in names)


def as_pattern(finding: Finding, trust: int, sources: int) -> Pattern:
    """Build the candidate pattern of a finding.

    Args:
        sources: number of episodes to name, the newest.
    """
    do, when = _do(finding), _when(finding.scope)
    good, n = finding.with_it
    others_good, others = finding.without
    chain = _ARROW.join(finding.uses)
    about = finding.scope.task_type or finding.scope.tool or "any"
    domain = f"/{finding.scope.domain}" if finding.scope.domain else ""
    return Pattern(
        name=f"{about}{domain}: {chain}"[:_LONGEST_NAME],
        category=finding.category,
        content=_content(finding, do, when),
        applicability=_applicability(finding),
        description=f"{when}: {chain}"[:_LONGEST_NAME],
        summary=f"{when}: {do}.",
        detail=(
            f"Of the episodes that it was found in, {good} of {n} went well with it, and"
            f" {others_good} of {others} without."
        ),
        evidence=Evidence(mined_from=finding.supporters[-sources:]),
        guide=Guide(when=when, how=do),
        origin={"mined": str(finding.kind)},
        trust=trust,
        fingerprint=finding.fingerprint,
    )


def _when(scope: FindingScope) -> str:
    domain = f" in the domain {scope.domain}" if scope.domain else ""
    if scope.signature is not None:
        return f"When {scope.tool} fails with “{scope.signature}”{domain}"
    return f"For tasks of the kind {scope.task_type}{domain}"


def _do(finding: Finding) -> str:
    names = finding.uses
    match finding.kind:
        case FindingKind.RECOVERY if names == (finding.scope.tool,):
            return f"call {names[0]} once more"
        case FindingKind.RECOVERY:
            return f"call {names[0]} next"
        case FindingKind.DECOMPOSITION:
            return f"divide the work: ask {', then '.join(names)}"
        case FindingKind.SEQUENCE:
            return f"call {', then '.join(names)}"
        case _:
            others = " or ".join(finding.instead)
            return f"use {names[0]}" + (f" rather than {others}" if others else "")


def _content(finding: Finding, do: str, when: str) -> Content:
    fields: dict[str, Any]
    steps = [{"do": f"call {name}", "uses": [name]} for name in finding.uses]
    match finding.kind:
        case FindingKind.DECOMPOSITION:
            kind, fields = ContentKind.TEMPLATE, {"steps": steps, "parameters": [], "rules": []}
        case FindingKind.SEQUENCE:
            kind, fields = ContentKind.PROCEDURE, {"steps": steps, "branches": []}
        case _:
            kind, fields = ContentKind.HEURISTIC, {"condition": when, "action": do}
    return Content(kind, fields, finding.uses, finding.affects)


def _applicability(finding: Finding) -> Applicability:
    scope = finding.scope
    failed: tuple[Condition, ...] = ()
    if scope.signature is not None:
        failed = ({"feature": "failure_signature", "op": "eq", "value": scope.signature},)
    return Applicability(
        problem_types=() if scope.task_type is None else (scope.task_type,),
        domains=() if scope.domain is None else (scope.domain,),
        capabilities=tuple(sorted(set(finding.uses))),
        conditions=failed,
    )


_LONGEST = 4  # calls of a sequence
_GAP = 2  # other calls allowed between two of a sequence
_READ = 20  # calls of an episode that are searched for sequences
_MOST_AGENTS = 8

Key = tuple[FindingKind, tuple[str, ...]]
"""Kind of finding, and the names called."""


def done(episode: Observed) -> set[Key]:
    """Return all keys of an episode: tools used, call sequences, division of work."""
    keys: set[Key] = {(FindingKind.TOOL, (call.name,)) for call in episode.calls}
    calls, agents = _called(episode), _agents(episode)
    if 2 <= len(agents) <= _MOST_AGENTS:
        keys.add((FindingKind.DECOMPOSITION, agents))
    some: list[tuple[tuple[str, ...], int]] = [((name,), at) for at, name in enumerate(calls)]
    for _ in range(_LONGEST - 1):
        some = [
            ((*names, calls[at]), at)
            for names, end in some
            for at in range(end + 1, min(end + _GAP + 2, len(calls)))
        ]
        keys |= {(FindingKind.SEQUENCE, names) for names, _ in some}
    return keys


def _called(episode: Observed) -> tuple[str, ...]:
    return _names(episode.calls)[:_READ]


def _agents(episode: Observed) -> tuple[str, ...]:
    return _names(call for call in episode.calls if call.is_agent)


def _names(calls: Iterable[TracedCall]) -> tuple[str, ...]:
    """Return the names in order, with repetitions in a row as one."""
    return tuple(name for name, _ in groupby(call.name for call in calls))


def does(episode: Observed, key: Key) -> bool:
    """Return true if :func:`done` would contain the key, without computing all keys."""
    kind, names = key
    if kind is FindingKind.TOOL:
        return any(call.name == names[0] for call in episode.calls)
    if kind is FindingKind.DECOMPOSITION:
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
