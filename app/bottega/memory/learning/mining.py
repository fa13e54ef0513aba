"""Mining: find, without a model, the behaviour that successful runs share. Pure.

It looks for orders of sub-agents, and for calls that helped after an error. A finding is a guess:
runs that did it went well more often, but they chose it themselves. So it becomes a candidate and
must prove itself in other runs. Sequences of calls and choices of a tool are not mined: in worlds
made elsewhere they helped no run (see the benchmarks of learning).

Texts (a domain, a task type, a failure's message) that fewer than three users' runs had are removed
first, because runs of every user are given patterns.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import sqrt
from typing import Any, TypeVar

from bottega.memory.episodes.episode import Outcome
from bottega.memory.learning.call_trace import Observed, failures_in, without_private_texts
from bottega.memory.learning.findings import (
    Finding,
    FindingScope,
    as_pattern,
    is_within,
)
from bottega.memory.patterns.owners import OWNERS
from bottega.memory.patterns.pattern import Category, Pattern
from bottega.memory.text.injection import suspicious

_MOST_NAMES = 8  # in a finding
_LOOKED_AT = 10  # behaviours that are analysed
_SHOWS = 0.2  # least difference of success rates that counts


Names = tuple[str, ...]
"""Names of tools and agents, in order."""


@dataclass(frozen=True, slots=True)
class MiningOptions:
    """Limits of mining.

    Attributes:
        support: least number of successful episodes that show a finding.
        each: most findings for one task type in one domain, or for one kind of failure.
        most: most findings for one task type or one kind of failure in all domains.
        gain: least difference of success rates with and without it (Laplace estimates).
        sure: least difference in standard deviations.
        share: least share of the gain of the best finding of the same tasks.
        sources: most ids of episodes that a candidate names as its source; the newest.
        newest: most episodes per task type, or kind of failure, and domain. Older ones could hide a
            change for the worse.
        owners: number of users whose episodes must have a text before a pattern may contain it.
    """

    support: int = 3
    each: int = 3
    most: int = 12
    gain: float = 0.1
    sure: float = 1.5
    share: float = 0.5
    sources: int = 200
    newest: int = 50
    owners: int = OWNERS


def mine(episodes: Iterable[Observed], options: MiningOptions | None = None) -> list[Pattern]:
    """Return candidates, each with a fingerprint and the episodes that it was found in.

    The same episodes give the same candidates, in any order. Episodes of trust 2 are mined
    separately, and their findings that episodes of trust 3 have too are left out. Linear in the
    number of episodes, but for sorting.
    """
    options = options or MiningOptions()
    ordered = sorted(set(episodes), key=lambda each: (each.at, each.episode_id))
    ordered = without_private_texts(ordered, options.owners)
    found: dict[str, Pattern] = {}
    for trust in (3, 2):
        level = [
            each
            for each in ordered
            if each.trust == trust and each.outcome is not Outcome.CANCELLED
        ]
        for finding in [*_of_tasks(level, options), *_of_failures(level, options)]:
            pattern = as_pattern(finding, trust, options.sources)
            found.setdefault(str(pattern.fingerprint), pattern)
    return list(found.values())


# --- Comparison of success rates -----------------------------------------------------------------


@dataclass(slots=True)
class _Tally:
    """Number of episodes, and of successful ones among them."""

    n: int = 0
    good: int = 0

    def add(self, good: bool) -> None:
        self.n += 1
        self.good += good

    def less(self, other: "_Tally") -> "_Tally":
        return _Tally(self.n - other.n, self.good - other.good)

    @property
    def rate(self) -> float:
        """Mean of the Beta posterior from a uniform prior."""
        return (self.good + 1) / (self.n + 2)

    @property
    def variance(self) -> float:
        """Variance of that posterior."""
        return self.rate * (1 - self.rate) / (self.n + 3)


_Better = tuple[Names, float, _Tally, _Tally]
"""Behaviour, gain, and the tallies with and without it."""


@dataclass(slots=True)
class _Seen:
    """Tallies of some episodes: of all, and by behaviour."""

    all: _Tally = field(default_factory=_Tally)
    each: dict[Names, _Tally] = field(default_factory=lambda: defaultdict(_Tally))

    def add(self, item: "_Item") -> None:
        self.all.add(item.good)
        if item.uses:
            self.each[item.uses].add(item.good)

    def better(self, options: "MiningOptions") -> Iterator["_Better"]:
        """Yield behaviours that went better with than without."""
        for uses, with_it in self.each.items():
            without = self.all.less(with_it)
            if with_it.good < options.support or not without.n:
                continue
            gain = round(with_it.rate - without.rate, 9)
            doubt = sqrt(with_it.variance + without.variance)
            if with_it.good * without.n > without.good * with_it.n and (
                gain >= max(options.gain, options.sure * doubt)
            ):
                yield uses, gain, with_it, without


# --- Findings in one domain and in all -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Item:
    """An episode, or a failure in one.

    Attributes:
        uses: its behaviour: the sub-agents in order, or the call after the failure; may be empty.
    """

    episode: Observed
    good: bool
    uses: Names


def _found(
    category: Category, scope: FindingScope, items: Sequence[_Item], options: MiningOptions
) -> list[Finding]:
    """Mine cross-domain findings, then per-domain ones not covered by them; return the latter
    first."""
    seen = _Seen()
    of_domain: dict[str | None, _Seen] = defaultdict(_Seen)
    for item in items:
        seen.add(item)
        of_domain[item.episode.domain].add(item)
    everywhere = [each for each in seen.better(options) if _holds(each[0], of_domain)]
    wide = _best(_findings(category, scope, items, everywhere), options)
    taken: list[Finding] = []
    for domain, some in _grouped(items, lambda each: each.episode.domain):
        if domain is not None:
            here = replace(scope, domain=domain)
            found = _findings(category, here, some, of_domain[domain].better(options))
            taken += _best([each for each in found if not _said(each, wide)], options)
    return [*sorted(taken, key=_order), *wide][: options.most]


def _holds(uses: Names, of_domain: Mapping[str | None, _Seen]) -> bool:
    """Return true if a behaviour went well in several domains and notably worse in none. Success in
    episodes without a domain counts as several."""
    domains = 0
    for domain, seen in of_domain.items():
        with_it = seen.each.get(uses)
        if with_it is None:
            continue
        if with_it.rate - seen.all.less(with_it).rate < -_SHOWS:
            return False
        domains += 2 if domain is None else bool(with_it.good)
    return domains > 1


def _said(finding: Finding, wide: Iterable[Finding]) -> bool:
    """Return true if a cross-domain finding covers this one."""
    return any(
        finding.gain <= other.gain + _SHOWS
        and (is_within(finding.uses, other.uses) or is_within(other.uses, finding.uses))
        for other in wide
    )


def _findings(
    category: Category, scope: FindingScope, items: Sequence[_Item], better: Iterable[_Better]
) -> list[Finding]:
    """Build findings from the behaviours with the highest gains."""
    ordered = sorted(better, key=lambda found: (-found[1], -len(found[0]), found[0]))
    findings: list[Finding] = []
    for uses, gain, with_it, without in ordered[:_LOOKED_AT]:
        having = [each for each in items if each.uses == uses]
        affects: Names = ()
        if category is Category.RECOVERY:  # calls of the control arm count too
            affects = tuple(sorted({*uses, *_instead(uses, items)}))
        elif not _is_choice(uses, having):
            continue
        supporters = tuple(each.episode.episode_id for each in having if each.good)
        tallies = (with_it.good, with_it.n), (without.good, without.n)
        findings.append(Finding(category, scope, uses, affects, gain, *tallies, supporters))
    return findings


def _is_choice(names: Sequence[str], having: Sequence[_Item]) -> bool:
    """Return false if a call usually failed, or usually followed a failure. Such a call is a
    reaction to failures, not a choice."""
    for name in names:
        failed = after = 0
        for each in having:
            calls = each.episode.calls
            at = next(at for at, call in enumerate(calls) if call.name == name)
            failed += not calls[at].ok
            after += at > 0 and not calls[at - 1].ok
        if 2 * max(failed, after) > len(having):
            return False
    return True


def _best(found: Iterable[Finding], options: MiningOptions) -> list[Finding]:
    """Return the best few findings, without those that a better one implies."""
    taken: list[Finding] = []
    for each in sorted(found, key=_order):
        if len(taken) == options.each or (taken and each.gain < options.share * taken[0].gain):
            break
        if not any(_implied(each, other) for other in taken):
            taken.append(each)
    return taken


def _implied(finding: Finding, other: Finding) -> bool:
    return (
        is_within(finding.uses, other.uses)
        or is_within(other.uses, finding.uses)
        or finding.supporters == other.supporters  # the evidence cannot tell them apart
    )


def _order(finding: Finding) -> tuple[Any, ...]:
    """Return the sort key: highest gain first, then the most specific finding."""
    return (-finding.gain, -len(finding.uses), finding.scope.domain or "", finding.uses)


def _instead(uses: Names, items: Sequence[_Item]) -> Names:
    """Return the other calls that followed the failure, the most frequent first."""
    there = Counter(name for each in items for name in each.uses)
    ordered = sorted((-count, name) for name, count in there.items() if name not in uses)
    return tuple(name for _, name in ordered[: _MOST_NAMES - 1])


# --- Selection of episodes -----------------------------------------------------------------------


def _of_tasks(episodes: Sequence[Observed], options: MiningOptions) -> Iterator[Finding]:
    judged = [each for each in episodes if each.outcome != Outcome.UNKNOWN]
    for task_type, some in _grouped(judged, lambda each: each.task_type):
        if task_type is not None:
            items = _newest([_Item(each, each.good, _agents(each)) for each in some], options)
            yield from _found(Category.DECOMPOSITION, FindingScope(task_type), items, options)


def _agents(episode: Observed) -> Names:
    """Return the sub-agents in order, repetitions in a row as one; none if work was not divided."""
    agents = tuple(name for name, _ in groupby(c.name for c in episode.calls if c.is_agent))
    return agents if 2 <= len(agents) <= _MOST_NAMES else ()


def _of_failures(episodes: Sequence[Observed], options: MiningOptions) -> Iterator[Finding]:
    """Yield, for each kind of failure, the next calls that ended well."""
    failed = [
        (each, call, then)
        for each in episodes
        for call, then in failures_in(each.calls)
        if suspicious(call.signature or "") is None
    ]
    for signature, some in _grouped(failed, lambda each: each[1].signature):
        items = [
            _Item(
                episode,
                then is not None and then.ok and episode.outcome is not Outcome.FAILURE,
                () if then is None else (then.name,),
            )
            for episode, _, then in some
        ]
        scope = FindingScope(signature=signature, tool=some[0][1].name)
        yield from _found(Category.RECOVERY, scope, _newest(items, options), options)


def _newest(items: Sequence[_Item], options: MiningOptions) -> list[_Item]:
    left: defaultdict[str | None, int] = defaultdict(lambda: options.newest)
    kept = []
    for item in reversed(items):
        if left[item.episode.domain]:
            left[item.episode.domain] -= 1
            kept.append(item)
    return kept[::-1]


T = TypeVar("T")


def _grouped(
    items: Iterable[T], key: Callable[[T], str | None]
) -> list[tuple[str | None, list[T]]]:
    """Group items by key, sorted; each group keeps the order of the items."""
    groups: dict[str | None, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return sorted(groups.items(), key=lambda group: group[0] or "")
