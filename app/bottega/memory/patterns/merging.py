"""Merging of patterns: groups of equal advice, and the pattern that replaces several. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from hashlib import sha256
from itertools import chain
from re import findall
from typing import Any
from uuid import UUID

from bottega.memory.patterns.pattern import (
    Applicability,
    Evidence,
    Guide,
    Pattern,
    PatternState,
    Relations,
)
from bottega.memory.patterns.refinement import as_text, tally_of
from bottega.memory.patterns.validation import Tally, fisher_p
from bottega.memory.text.summaries import cut

MOST_MERGED = 20
"""Patterns in one merge."""
_TASKS = ("domains", "problem_types", "complexity", "capabilities")
_DIFFERS_P = 0.05
_LONGEST_TEXT = 1_000  # bytes of the summary of a merged pattern


@dataclass(frozen=True, slots=True)
class Mergeable:
    """A pattern that may be merged automatically.

    Attributes:
        keys: one per field in which the tasks may differ; equal for patterns that are equal in all
            else.
    """

    key: UUID
    version: int
    tally: Tally
    keys: tuple[str, ...]


def mergeable(pattern: Pattern) -> Mergeable | None:
    """Return what decides about the automatic merge of a pattern; ``None`` if it may not be merged.

    It is validated; or no run was given it yet: then the choice cannot depend on results.
    """
    untried = pattern.state is PatternState.CANDIDATE and not pattern.lifecycle.uses
    if pattern.state is not PatternState.VALIDATED and not untried:
        return None
    when = pattern.applicability
    same = _hash([pattern.state, _said(pattern), when.conditions, when.anti_conditions])
    tasks = {each: getattr(when, each) for each in _TASKS}
    keys = tuple(_hash([same, each, tasks | {each: None}]) for each in _TASKS)
    return Mergeable(pattern.key, pattern.version, tally_of(pattern.evidence), keys)


def groups(patterns: Iterable[Mergeable]) -> list[list[Mergeable]]:
    """Group patterns to merge, 2 to :data:`MOST_MERGED` each.

    Those of a group give the same advice, their tasks differ in at most one field, and their
    success rates do not differ significantly. The time is linear in their number, after sorting.
    """
    found: list[list[Mergeable]] = []
    left = sorted(patterns, key=lambda each: (each.tally.rate, each.key))
    for field in range(len(_TASKS)):
        made: list[list[Mergeable]] = []
        last: dict[str, list[Mergeable]] = {}
        for each in left:
            group = last.get(each.keys[field], [])
            if not group or len(group) == MOST_MERGED or _is_better(each, group):
                group = last[each.keys[field]] = []
                made.append(group)
            group.append(each)
        found += [group for group in made if len(group) > 1]
        left = [group[0] for group in made if len(group) == 1]
    return found


def _is_better(one: Mergeable, group: Iterable[Mergeable]) -> bool:
    """Return true if its success rate is significantly higher than one of the others."""
    return any(fisher_p(one.tally, each.tally) < _DIFFERS_P for each in group)


def _said(pattern: Pattern) -> Any:
    """Return a pattern's advice; its texts may differ in case, spacing and punctuation."""
    content = pattern.content
    advice = [content.kind, _plain(content.fields), content.uses, content.affects]
    return [pattern.category, pattern.trust, advice]


def _plain(value: Any) -> Any:
    """Return a value with the words of its texts in lower case; empty parts are left out."""
    if isinstance(value, str):
        return findall(r"[^\s.,;:!?]+(?:[.,:][^\s.,;:!?]+)*", value.casefold())
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items() if each}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def merged(patterns: Sequence[Pattern]) -> Pattern:
    """Merge patterns of one category: the advice of the best-known one, for the tasks of all. The
    evidence is left empty, except for ``mined_from``."""
    best = max(
        patterns,
        key=lambda each: (each.evidence.confidence, each.evidence.applications, each.key.int),
    )
    ids = {each.key for each in patterns}
    relations = [each.relations for each in patterns]
    return Pattern(
        name=best.name,
        category=best.category,
        content=best.content,
        applicability=reduce(generalised, (each.applicability for each in patterns)),
        description=best.description,
        summary=_summaries([best, *patterns]),
        detail=best.detail,
        evidence=Evidence(mined_from=_ids(each.evidence.mined_from for each in patterns)),
        guide=_guide(best, patterns),
        relations=Relations(
            contradicts=_ids((each.contradicts for each in relations), ids),
            complements=_ids((each.complements for each in relations), ids),
        ),
        origin={"merged_from": sorted(map(str, ids)), "by": "merge"},
        trust=min(each.trust for each in patterns),
    )


def _ids(several: Iterable[Iterable[UUID]], but: Iterable[UUID] = ()) -> tuple[UUID, ...]:
    return tuple(sorted(set(chain.from_iterable(several)) - set(but)))


def _guide(best: Pattern, patterns: Sequence[Pattern]) -> Guide:
    """Return the best pattern's guide, with the risks of all, and when all of them apply."""
    guides = [each.guide for each in (best, *patterns)]
    risks = dict.fromkeys(chain.from_iterable(each.risks for each in guides))
    when = dict.fromkeys(each.when for each in guides if each.when)
    return replace(best.guide, risks=tuple(risks), when=cut("; ".join(when), _LONGEST_TEXT))


def _summaries(patterns: Sequence[Pattern]) -> str:
    """Return the different summaries as one text: each may name the tasks of its own pattern."""
    found = dict.fromkeys(each.summary for each in patterns if each.summary)
    return cut(" ".join(found), _LONGEST_TEXT)


def generalised(one: Applicability, other: Applicability) -> Applicability:
    """Return an applicability that holds wherever one of the two does."""
    return Applicability(
        problem_types=_either(one.problem_types, other.problem_types),
        domains=_either(one.domains, other.domains),
        complexity=_hull(one.complexity, other.complexity),
        capabilities=tuple(each for each in one.capabilities if each in other.capabilities),
        conditions=tuple(each for each in one.conditions if each in other.conditions),
        anti_conditions=tuple(
            each for each in one.anti_conditions if each in other.anti_conditions
        ),
    )


def _either(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*one, *other))) if one and other else ()


def _hull(
    one: tuple[float, float] | None, other: tuple[float, float] | None
) -> tuple[float, float] | None:
    if one is None or other is None:
        return None
    return min(one[0], other[0]), max(one[1], other[1])


def _hash(value: Any) -> str:
    return sha256(as_text(value).encode()).hexdigest()
