"""What several runs did alike when they went well, found without a model (spec page 4, M30). Pure.

Four things are looked for: which agents were asked in which order, sequences of calls, which tool
was chosen, and what helped after an error. What is found is a guess: it went well more often with
it than without, in episodes that chose it themselves. So it becomes a candidate, and has to prove
itself in other runs.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import sqrt
from typing import Any, TypeVar
from uuid import UUID

from app.memory.episode import Outcome
from app.memory.finding import Finding, Kind, Scope, as_pattern, is_within
from app.memory.observing import Call, Observed
from app.memory.pattern import Category, Pattern
from app.memory.quarantine import suspicious

_LONGEST = 4  # calls of a sequence
_GAP = 2  # calls that may be between two of it
_READ = 20  # calls of an episode in which sequences are looked for
_MOST_AGENTS = 8
_MOST_NAMES = 8  # that a finding may be about
_LOOKED_AT = 10  # findings of each kind that are looked at closely
_SHOWS = 0.2  # by how much calls end well more often that show a difference


@dataclass(frozen=True, slots=True)
class MiningOptions:
    """What counts as found.

    Attributes:
        support: episodes that went well with it, at least.
        each: findings for one kind of task in one domain, at most, the best first; and for one
            kind of failure.
        most: findings for one kind of task, or of failure, at most.
        gain: how much more often it must go well with it, seen from no knowledge at all.
        sure: so many standard deviations must that be.
        share: and so much of what the best one of the same tasks gains.
        sources: ids of episodes that a candidate names as what it was found in, the newest.
    """

    support: int = 3
    each: int = 3
    most: int = 12
    gain: float = 0.1
    sure: float = 1.5
    share: float = 0.5
    sources: int = 200


def mine(episodes: Iterable[Observed], options: MiningOptions | None = None) -> list[Pattern]:
    """Candidates, each with the episodes that it was found in and a fingerprint.

    The same episodes have the same candidates, in any order. Episodes of lower trust are mined by
    themselves; what the others say already is left out. Takes time linear in the number of
    episodes, but for sorting them.
    """
    options = options or MiningOptions()
    ordered = sorted(set(episodes), key=lambda each: (each.at, each.episode_id))
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


# --- What went better with than without ----------------------------------------------------------


@dataclass(slots=True)
class _Tally:
    """Of how many episodes, and how many of these went well."""

    n: int = 0
    good: int = 0

    def add(self, good: bool) -> None:
        self.n += 1
        self.good += good

    def less(self, other: "_Tally") -> "_Tally":
        return _Tally(self.n - other.n, self.good - other.good)

    @property
    def rate(self) -> float:
        """The mean of what it may be, seen from no knowledge at all."""
        return (self.good + 1) / (self.n + 2)

    @property
    def variance(self) -> float:
        """Of what it may be."""
        return self.rate * (1 - self.rate) / (self.n + 3)


@dataclass(slots=True)
class _Seen:
    """What was done in each of some episodes, and how these went."""

    all: _Tally = field(default_factory=_Tally)
    each: dict[Any, _Tally] = field(default_factory=lambda: defaultdict(_Tally))

    def add(self, keys: Iterable[Any], good: bool) -> None:
        self.all.add(good)
        for key in keys:
            self.each[key].add(good)

    def better(self, options: "MiningOptions") -> Iterator[tuple[Any, float, _Tally, _Tally]]:
        """What went well more often with it than without, by how much, and both tallies."""
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


# --- Kinds of tasks ------------------------------------------------------------------------------


def _of_tasks(episodes: Sequence[Observed], options: MiningOptions) -> Iterator[Finding]:
    """For each kind of task: what holds in one domain of it, then what the others say together."""
    for task_type, of_type in _grouped(episodes, lambda each: each.task_type):
        if task_type is None:
            continue
        taken: list[Finding] = []
        for domain, of_domain in _grouped(of_type, lambda each: each.domain):
            if domain is not None:
                taken += _best(_candidates(Scope(task_type, domain), of_domain, options), options)
        known = {each.scope.domain for each in taken}
        others = [each for each in of_type if each.domain is None or each.domain not in known]
        wide = _best(_candidates(Scope(task_type), others, options), options)
        yield from [*sorted(taken, key=_order), *wide][: options.most]


def _candidates(
    scope: Scope, episodes: Sequence[Observed], options: MiningOptions
) -> list[Finding]:
    seen = _Seen()
    for each in episodes:
        seen.add(_done(each), each.good)
    better = sorted(
        seen.better(options), key=lambda found: (-found[1], -len(found[0][1]), found[0])
    )
    looked_at: Counter[Kind] = Counter()
    found: list[Finding] = []
    for (kind, names), gain, with_it, without in better:
        looked_at[kind] += 1
        if looked_at[kind] <= _LOOKED_AT:
            having = [each for each in episodes if _does(each, kind, names)]
            lacking = [each for each in episodes if not _does(each, kind, names)]
            category, affects = _judged(kind, names, having, lacking)
            supporters = tuple(each.episode_id for each in having if each.good)
            tallies = ((with_it.good, with_it.n), (without.good, without.n))
            found.append(Finding(kind, scope, names, category, affects, gain, *tallies, supporters))
    return found


def _best(found: Iterable[Finding], options: MiningOptions) -> list[Finding]:
    """The best few, none of which says what a better one says already."""
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
        or finding.supporters == other.supporters  # nothing tells which of them it was
    )


def _order(finding: Finding) -> tuple[Any, ...]:
    """The best first; of those that are as good, the one that says most."""
    chosen = finding.kind is Kind.TOOL and len(finding.affects) > 1
    rank = 0 if finding.kind is Kind.DECOMPOSITION else 1 if chosen else 2
    return (-finding.gain, rank, -len(finding.uses), finding.scope.domain or "", finding.uses)


def _does(episode: Observed, kind: Kind, names: tuple[str, ...]) -> bool:
    """Whether it is among what :func:`_done` says."""
    if kind is Kind.TOOL:
        return any(call.name == names[0] for call in episode.calls)
    if kind is Kind.DECOMPOSITION:
        return _agents(episode) == names
    calls = _went_well(episode)
    ends = {at for at, name in enumerate(calls) if name == names[0]}
    for wanted in names[1:]:
        ends = {
            at
            for end in ends
            for at in range(end + 1, min(end + _GAP + 2, len(calls)))
            if calls[at] == wanted
        }
    return bool(ends)


def _done(episode: Observed) -> set[tuple[Kind, tuple[str, ...]]]:
    """What an episode did, as findings name it."""
    keys: set[tuple[Kind, tuple[str, ...]]] = {(Kind.TOOL, (call.name,)) for call in episode.calls}
    calls, agents = _went_well(episode), _agents(episode)
    if 2 <= len(agents) <= _MOST_AGENTS:
        keys.add((Kind.DECOMPOSITION, agents))
    some: list[tuple[tuple[str, ...], int]] = [((name,), at) for at, name in enumerate(calls)]
    for _ in range(_LONGEST - 1):
        some = [
            ((*names, calls[at]), at)
            for names, end in some
            for at in range(end + 1, min(end + _GAP + 2, len(calls)))
        ]
        keys |= {(Kind.SEQUENCE, names) for names, _ in some}
    return keys


def _went_well(episode: Observed) -> tuple[str, ...]:
    return _names(call for call in episode.calls if call.ok)[:_READ]


def _agents(episode: Observed) -> tuple[str, ...]:
    return _names(call for call in episode.calls if call.is_agent)


def _names(calls: Iterable[Call]) -> tuple[str, ...]:
    """Their names, in order; one that is called again and again counts once."""
    return tuple(name for name, _ in groupby(call.name for call in calls))


def _judged(
    kind: Kind, names: tuple[str, ...], having: Sequence[Observed], lacking: Sequence[Observed]
) -> tuple[Category, tuple[str, ...]]:
    """By what it can be seen whether it is good: by the next call of what it is about, if that
    shows the difference; else by the run."""
    if kind is Kind.DECOMPOSITION:
        return Category.DECOMPOSITION, ()
    last = names[-1]
    others = _instead(last, having, lacking) if kind is Kind.TOOL else (last,)
    with_it, without = _ended_well({last}, having), _ended_well(set(others), lacking)
    if not without.n or with_it.rate - without.rate < _SHOWS:
        return Category.STRATEGIC, ()
    if kind is Kind.SEQUENCE:
        return Category.SEQUENCE, (last,)
    return Category.TOOL_SELECTION, tuple(sorted({last, *others}))


def _instead(name: str, having: Sequence[Observed], lacking: Sequence[Observed]) -> tuple[str, ...]:
    """What was called where it was not: more often there than beside it."""
    beside = Counter(other for each in having for other in {call.name for call in each.calls})
    there = Counter(other for each in lacking for other in {call.name for call in each.calls})
    alone = [
        (count / len(lacking), other)
        for other, count in there.items()
        if count / len(lacking) > beside[other] / len(having) and other != name
    ]
    return tuple(other for _, other in sorted(alone, key=lambda each: (-each[0], each[1])))[
        : _MOST_NAMES - 1
    ]


def _ended_well(names: set[str], episodes: Sequence[Observed]) -> _Tally:
    """How often the first call of one of these does."""
    tally = _Tally()
    for each in episodes:
        first = next((call for call in each.calls if call.name in names), None)
        if first is not None:
            tally.add(first.ok)
    return tally


# --- Failures -----------------------------------------------------------------------------------


def _of_failures(episodes: Sequence[Observed], options: MiningOptions) -> Iterator[Finding]:
    """For each kind of failure, what was called next and ended well."""
    failed = [(each, call, then) for each in episodes for call, then in _failures(each)]
    for signature, those in _grouped(failed, lambda each: each[1].signature):
        taken: list[Finding] = []
        tool = those[0][1].name
        for domain, of_domain in _grouped(those, lambda each: each[0].domain):
            if domain is not None:
                scope = Scope(None, domain, signature, tool)
                taken += _recoveries(scope, of_domain, options)
        known = {each.scope.domain for each in taken}
        others = [each for each in those if each[0].domain is None or each[0].domain not in known]
        wide = _recoveries(Scope(None, None, signature, tool), others, options)
        yield from [*sorted(taken, key=_order), *wide][: options.most]


def _failures(episode: Observed) -> Iterator[tuple[Call, Call | None]]:
    """The first failure of each kind, and the call after it."""
    met: set[str] = set()
    for call, then in zip(episode.calls, [*episode.calls[1:], None], strict=False):
        if call.signature is not None and call.signature not in met:
            met.add(call.signature)
            if suspicious(call.signature) is None:
                yield call, then


def _recoveries(
    scope: Scope,
    those: Sequence[tuple[Observed, Call, Call | None]],
    options: MiningOptions,
) -> list[Finding]:
    seen = _Seen()
    supporters: dict[str, list[UUID]] = defaultdict(list)
    for episode, _, then in those:
        good = then is not None and then.ok and episode.outcome is not Outcome.FAILURE
        seen.add([] if then is None else [then.name], good)
        if then is not None and good:
            supporters[then.name].append(episode.episode_id)
    # Whoever was not told what to call is judged by what it calls instead.
    usual = sorted(seen.each, key=lambda name: (-seen.each[name].n, name))[:_MOST_NAMES]
    found = [
        Finding(
            Kind.RECOVERY,
            scope,
            (name,),
            Category.RECOVERY,
            tuple(sorted({name, *usual})),
            gain,
            (with_it.good, with_it.n),
            (without.good, without.n),
            tuple(supporters[name]),
        )
        for name, gain, with_it, without in seen.better(options)
    ]
    return sorted(found, key=_order)[: options.each]


T = TypeVar("T")


def _grouped(
    items: Iterable[T], key: Callable[[T], str | None]
) -> list[tuple[str | None, list[T]]]:
    """By key, sorted; each group in the order of the items."""
    groups: dict[str | None, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return sorted(groups.items(), key=lambda group: group[0] or "")
