"""Merging of patterns: groups of equal advice, and the pattern that replaces several. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import chain
from re import findall
from typing import Any, TypeVar
from uuid import UUID

from bottega.memory.patterns.pattern import (
    Applicability,
    Evidence,
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

T = TypeVar("T")


def groups(patterns: Iterable[Pattern]) -> list[list[UUID]]:
    """Group patterns to merge, 2 to :data:`MOST_MERGED` each.

    They are validated; or no run was given them yet: then the choice cannot depend on results.
    Those of a group give the same advice, their tasks differ in at most one field, and their
    success rates do not differ significantly. The time is linear in their number, after sorting.
    """
    found: list[list[UUID]] = []
    able = [(tally_of(each.evidence), each) for each in patterns if _may_be_merged(each)]
    left = sorted(able, key=lambda each: (each[0].rate, each[1].key))
    for field in _TASKS:
        made: list[list[tuple[Tally, Pattern]]] = []
        last: dict[str, list[tuple[Tally, Pattern]]] = {}
        for tally, each in left:
            alike = _same_but_for(field, each)
            group = last.get(alike, [])
            better = any(fisher_p(tally, other) < _DIFFERS_P for other, _ in group)
            if not group or len(group) == MOST_MERGED or better:
                group = last[alike] = []
                made.append(group)
            group.append((tally, each))
        found += [[each.key for _, each in group] for group in made if len(group) > 1]
        left = [group[0] for group in made if len(group) == 1]
    return found


def _may_be_merged(pattern: Pattern) -> bool:
    untried = pattern.state is PatternState.CANDIDATE and not pattern.lifecycle.uses
    return untried or pattern.state is PatternState.VALIDATED


def _same_but_for(field: str, pattern: Pattern) -> str:
    """Return a hash that is equal for patterns that differ in one field of their tasks."""
    when = pattern.applicability
    tasks = {each: getattr(when, each) for each in _TASKS if each != field}
    same = [pattern.state, _said(pattern), when.conditions, when.anti_conditions, tasks]
    return sha256(as_text(same).encode()).hexdigest()


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
    all_of = [best, *patterns]

    def others(name: str) -> tuple[UUID, ...]:
        related = chain.from_iterable(getattr(each.relations, name) for each in patterns)
        return tuple(sorted(set(related) - ids))

    sources = set(chain.from_iterable(each.evidence.mined_from for each in patterns))
    risks = dict.fromkeys(chain.from_iterable(each.guide.risks for each in all_of))
    when = _texts("; ", (each.guide.when for each in all_of))
    return Pattern(
        name=best.name,
        category=best.category,
        content=best.content,
        applicability=generalised([each.applicability for each in patterns]),
        description=best.description,
        summary=_texts(" ", (each.summary for each in all_of)),
        detail=best.detail,
        evidence=Evidence(mined_from=tuple(sorted(sources))),
        guide=replace(best.guide, risks=tuple(risks), when=when),
        relations=Relations(contradicts=others("contradicts"), complements=others("complements")),
        origin={"merged_from": sorted(map(str, ids)), "by": "merge"},
        trust=min(each.trust for each in patterns),
    )


def _texts(joint: str, texts: Iterable[str]) -> str:
    """Join the different texts: each may name the tasks of its own pattern."""
    return cut(joint.join(dict.fromkeys(filter(None, texts))), _LONGEST_TEXT)


def generalised(several: Sequence[Applicability]) -> Applicability:
    """Return an applicability that holds wherever one of several does."""

    def either(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(chain.from_iterable(names))) if all(names) else ()

    def shared(several: Sequence[tuple[T, ...]]) -> tuple[T, ...]:
        return tuple(one for one in several[0] if all(one in each for each in several))

    ranges = [each.complexity for each in several if each.complexity is not None]
    lows, highs = [low for low, _ in ranges], [high for _, high in ranges]
    return Applicability(
        problem_types=either([each.problem_types for each in several]),
        domains=either([each.domains for each in several]),
        complexity=(min(lows), max(highs)) if len(ranges) == len(several) else None,
        capabilities=shared([each.capabilities for each in several]),
        conditions=shared([each.conditions for each in several]),
        anti_conditions=shared([each.anti_conditions for each in several]),
    )
