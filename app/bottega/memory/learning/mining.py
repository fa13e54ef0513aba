"""Mining: find, without a model, the behaviour that successful runs share. Pure.

It looks for sets of agents in order, sequences of calls, choices of a tool, and calls that helped
after an error. A finding is a guess: runs that did it went well more often, but they chose it
themselves. So it becomes a candidate and must prove itself in other runs.

Texts (a domain, a task type, a failure's message) that fewer than three users' runs had are removed
first, because runs of every user are given patterns.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, TypeVar

from bottega.memory.episodes.episode import Outcome
from bottega.memory.learning.call_trace import Observed, TracedCall, without_private_texts
from bottega.memory.learning.findings import (
    Finding,
    FindingKind,
    FindingScope,
    Key,
    as_pattern,
    does,
    done,
    is_within,
)
from bottega.memory.patterns.owners import OWNERS
from bottega.memory.patterns.pattern import Category, Pattern
from bottega.memory.text.injection import suspicious

_MOST_NAMES = 8  # in a finding
_LOOKED_AT = 10  # findings of each kind that are analysed
_SHOWS = 0.2  # least difference of success rates that counts


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


@dataclass(slots=True)
class _Seen:
    """Tallies of some episodes: of all, and by behaviour."""

    all: _Tally = field(default_factory=_Tally)
    each: dict[Any, _Tally] = field(default_factory=lambda: defaultdict(_Tally))

    def add(self, keys: Iterable[Any], good: bool) -> None:
        self.all.add(good)
        for key in keys:
            self.each[key].add(good)

    def better(self, options: "MiningOptions") -> Iterator[tuple[Any, float, _Tally, _Tally]]:
        """Yield behaviours that went better with than without, the gain, and both tallies."""
        for key, with_it in self.each.items():
            without = self.all.less(with_it)
            if with_it.good < options.support or not without.n:
                continue
            gain = round(with_it.rate - without.rate, 9)
            doubt = sqrt(with_it.variance + without.variance)
            if with_it.good * without.n > without.good * with_it.n and (
                gain >= max(options.gain, options.sure * doubt)
            ):
                yield key, gain, with_it, without


# --- Findings in one domain and in all -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Item:
    """An episode, or a failure in one and the call after it."""

    episode: Observed
    good: bool
    failed: bool = False
    then: TracedCall | None = None

    def does(self, key: Key) -> bool:
        kind, names = key
        if kind is FindingKind.RECOVERY:
            return self.then is not None and self.then.name == names[0]
        return does(self.episode, key)

    @property
    def keys(self) -> set[Key]:
        if self.failed:
            return set() if self.then is None else {(FindingKind.RECOVERY, (self.then.name,))}
        return done(self.episode)


def _found(scope: FindingScope, items: Sequence[_Item], options: MiningOptions) -> list[Finding]:
    """Mine cross-domain findings, then per-domain ones not covered by them; return the latter
    first."""
    seen = _Seen()
    of_domain: dict[str | None, _Seen] = defaultdict(_Seen)
    for item in items:
        keys = item.keys
        seen.add(keys, item.good)
        of_domain[item.episode.domain].add(keys, item.good)
    everywhere = [each for each in seen.better(options) if _holds(each[0], of_domain)]
    wide = _best(_findings(scope, items, everywhere), options)
    taken: list[Finding] = []
    for domain, some in _grouped(items, lambda each: each.episode.domain):
        if domain is not None:
            here = replace(scope, domain=domain)
            found = _findings(here, some, of_domain[domain].better(options))
            taken += _best([each for each in found if not _said(each, wide)], options)
    return [*sorted(taken, key=_order), *wide][: options.most]


def _holds(key: Key, of_domain: Mapping[str | None, _Seen]) -> bool:
    """Return true if a behaviour went well in several domains and notably worse in none. Success in
    episodes without a domain counts as several."""
    domains = 0
    for domain, seen in of_domain.items():
        with_it = seen.each.get(key)
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
    scope: FindingScope, items: Sequence[_Item], better: Iterable[tuple[Key, float, _Tally, _Tally]]
) -> list[Finding]:
    """Build findings from the behaviours with the highest gains."""
    ordered = sorted(better, key=lambda found: (-found[1], -len(found[0][1]), found[0]))
    looked_at: Counter[FindingKind] = Counter()
    findings: list[Finding] = []
    for key, gain, with_it, without in ordered:
        kind, names = key
        looked_at[kind] += 1
        if looked_at[kind] > _LOOKED_AT:
            continue
        having = [each for each in items if each.does(key)]
        if kind is not FindingKind.RECOVERY and not _is_choice(names, having):
            continue
        lacking = [each for each in items if not each.does(key)]
        instead = _instead(key, having, lacking)
        category, affects = _judged(key, instead, having, lacking)
        findings.append(
            Finding(
                kind,
                scope,
                names,
                category,
                affects,
                gain,
                (with_it.good, with_it.n),
                (without.good, without.n),
                tuple(each.episode.episode_id for each in having if each.good),
                instead,
            )
        )
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
    chosen = finding.kind is FindingKind.TOOL and bool(finding.instead)
    rank = 0 if finding.kind is FindingKind.DECOMPOSITION else 1 if chosen else 2
    return (-finding.gain, rank, -len(finding.uses), finding.scope.domain or "", finding.uses)


# --- Category: the evidence that judges a finding ------------------------------------------------


def _judged(
    key: Key, instead: tuple[str, ...], having: Sequence[_Item], lacking: Sequence[_Item]
) -> tuple[Category, tuple[str, ...]]:
    """Return a finding's category, and the names whose next call judges it. If the next call does
    not show the difference, the whole run's outcome judges it, and there are no names."""
    kind, names = key
    if kind is FindingKind.RECOVERY:  # calls of the control arm count too
        return Category.RECOVERY, tuple(sorted({*names, *instead}))
    if kind is FindingKind.DECOMPOSITION:
        return Category.DECOMPOSITION, ()
    last = names[-1]
    others = instead if kind is FindingKind.TOOL else (last,)
    with_it, without = _ended_well({last}, having), _ended_well(set(others), lacking)
    if not without.n or with_it.rate - without.rate < _SHOWS:
        return Category.STRATEGIC, ()
    if kind is FindingKind.SEQUENCE:
        return Category.SEQUENCE, (last,)
    return Category.TOOL_SELECTION, tuple(sorted({last, *others}))


def _instead(key: Key, having: Sequence[_Item], lacking: Sequence[_Item]) -> tuple[str, ...]:
    """Return the calls made in place of a finding's, the most frequent first. For a tool, only
    calls more than twice as frequent in episodes without it."""
    kind, names = key
    if kind is FindingKind.RECOVERY:
        there = Counter(each.then.name for each in lacking if each.then is not None)
        alone = [(count, name) for name, count in there.items()]
    elif kind is FindingKind.TOOL:
        beside, there = (
            Counter(name for each in some for name in {call.name for call in each.episode.calls})
            for some in (having, lacking)
        )
        alone = [
            (count, name)
            for name, count in there.items()
            if count * len(having) > 2 * beside[name] * len(lacking)
        ]
    else:
        return ()
    ordered = sorted(alone, key=lambda each: (-each[0], each[1]))
    return tuple(name for _, name in ordered if name not in names)[: _MOST_NAMES - 1]


def _ended_well(names: set[str], items: Sequence[_Item]) -> _Tally:
    """Return how often the first call of one of these names ends well."""
    tally = _Tally()
    for each in items:
        first = next((call for call in each.episode.calls if call.name in names), None)
        if first is not None:
            tally.add(first.ok)
    return tally


# --- Selection of episodes -----------------------------------------------------------------------


def _of_tasks(episodes: Sequence[Observed], options: MiningOptions) -> Iterator[Finding]:
    for task_type, some in _grouped(episodes, lambda each: each.task_type):
        if task_type is not None:
            items = [_Item(each, each.good) for each in some if each.outcome != Outcome.UNKNOWN]
            yield from _found(FindingScope(task_type), _newest(items, options), options)


def _of_failures(episodes: Sequence[Observed], options: MiningOptions) -> Iterator[Finding]:
    """Yield, for each kind of failure, the next calls that ended well."""
    failed = [(each, call, then) for each in episodes for call, then in _failures(each)]
    for signature, some in _grouped(failed, lambda each: each[1].signature):
        items = [
            _Item(
                episode,
                then is not None and then.ok and episode.outcome is not Outcome.FAILURE,
                failed=True,
                then=then,
            )
            for episode, _, then in some
        ]
        scope = FindingScope(signature=signature, tool=some[0][1].name)
        yield from _found(scope, _newest(items, options), options)


def _newest(items: Sequence[_Item], options: MiningOptions) -> list[_Item]:
    left: defaultdict[str | None, int] = defaultdict(lambda: options.newest)
    kept = []
    for item in reversed(items):
        if left[item.episode.domain]:
            left[item.episode.domain] -= 1
            kept.append(item)
    return kept[::-1]


def _failures(episode: Observed) -> Iterator[tuple[TracedCall, TracedCall | None]]:
    """Yield the first failure of each kind, and the call after it."""
    met: set[str] = set()
    for call, then in zip(episode.calls, [*episode.calls[1:], None], strict=False):
        if call.signature is not None and call.signature not in met:
            met.add(call.signature)
            if suspicious(call.signature) is None:
                yield call, then


T = TypeVar("T")


def _grouped(
    items: Iterable[T], key: Callable[[T], str | None]
) -> list[tuple[str | None, list[T]]]:
    """Group items by key, sorted; each group keeps the order of the items."""
    groups: dict[str | None, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return sorted(groups.items(), key=lambda group: group[0] or "")
