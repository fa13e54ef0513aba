"""Findings of mining, and their conversion to candidate patterns. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from uuid import UUID

from pydantic_core import to_json

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
        category: an order of sub-agents, or a call after a failure.
        uses: tools and agents, in order.
        affects: tools and agents whose next call shows the difference; empty: the run does.
        gain: difference of the success rates with and without it, smoothed for few episodes.
        with_it, without: successes and episodes.
        supporters: the successful episodes with it, by age.
    """

    category: Category
    scope: FindingScope
    uses: tuple[str, ...]
    affects: tuple[str, ...]
    gain: float
    with_it: tuple[int, int]
    without: tuple[int, int]
    supporters: tuple[UUID, ...]

    @property
    def fingerprint(self) -> str:
        """Hash of category, scope and names; independent of the evidence."""
        scope = self.scope
        said = [self.category, scope.task_type, scope.domain, scope.signature, self.uses]
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
    do, when = _do(finding), _when(finding.scope) + _where(finding.scope)
    good, n = finding.with_it
    others_good, others = finding.without
    chain = _ARROW.join(finding.uses)
    about = finding.scope.task_type or finding.scope.tool or "any"
    domain = f"/{finding.scope.domain}" if finding.scope.domain else ""
    return Pattern(
        name=f"{about}{domain}: {chain}"[:_LONGEST_NAME],
        category=finding.category,
        content=_content(finding),
        applicability=_applicability(finding),
        description=f"{when}: {chain}"[:_LONGEST_NAME],
        summary=f"{when}: {do}.",
        detail=(
            f"Of the episodes that it was found in, {good} of {n} went well with it, and"
            f" {others_good} of {others} without."
        ),
        evidence=Evidence(mined_from=finding.supporters[-sources:]),
        guide=Guide(when=when, how=do),
        origin={"mined": str(finding.category)},
        trust=trust,
        fingerprint=finding.fingerprint,
    )


def _when(scope: FindingScope) -> str:
    if scope.signature is not None:
        return f"When {scope.tool} fails with “{scope.signature}”"
    return f"For tasks of the kind {scope.task_type}"


def _where(scope: FindingScope) -> str:
    return f" in the domain {scope.domain}" if scope.domain else ""


def _do(finding: Finding) -> str:
    names = finding.uses
    if finding.category is Category.DECOMPOSITION:
        return f"divide the work: ask {', then '.join(names)}"
    return f"call {names[0]} {'once more' if names == (finding.scope.tool,) else 'next'}"


def _content(finding: Finding) -> Content:
    """Return the advice, without the domain: that of several domains can be merged."""
    if finding.category is Category.DECOMPOSITION:
        steps = [{"do": f"call {name}", "uses": [name]} for name in finding.uses]
        kind, fields = ContentKind.TEMPLATE, {"steps": steps, "parameters": [], "rules": []}
        return Content(kind, fields, finding.uses, finding.affects)
    rule = {"condition": _when(finding.scope), "action": _do(finding)}
    return Content(ContentKind.HEURISTIC, rule, finding.uses, finding.affects)


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
