"""CPU time of finding the patterns that apply to a task, on this machine.

    python -m benchmarks.patterns [--sizes 100 1000 10000] [--shape "spread" …] [--finds 400]

Patterns of several shapes, each beside a scan of all patterns. Absolute figures depend on the
machine; ratios are comparable. "ranges", "nested" and "none applies" are the worst cases: no
condition demands one value, so no index helps, and many are tested before one applies.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from bottega import conditions
from bottega.memory.patterns.matcher import Match, Matcher, Rule
from bottega.memory.patterns.pattern import (
    Applicability,
    Category,
    Condition,
    Content,
    ContentKind,
    Evidence,
    Features,
    Lifecycle,
    Pattern,
    PatternState,
    Relations,
)

NOW = datetime(2026, 11, 21, tzinfo=UTC)
TASKS = 50
_TYPES, _DOMAINS, _TOOLS = 40, 25, 60

Made = tuple[list[Pattern], list[Features]]
Shape = Callable[[int, random.Random], Made]


def test(feature: str, op: str, value: Any) -> Condition:
    return {"feature": feature, "op": op, "value": value}


def task(chance: random.Random, **more: Any) -> Features:
    """Return the features of a task at a run's start."""
    return {
        "task_type": f"type_{chance.randrange(_TYPES)}",
        "domain": f"domain_{chance.randrange(_DOMAINS)}",
        "complexity": chance.random(),
        "tools_required": [f"tool_{chance.randrange(_TOOLS)}" for _ in range(3)],
        "capabilities": [f"tool_{chance.randrange(_TOOLS)}" for _ in range(12)],
    } | more


def spread(size: int, chance: random.Random) -> Made:
    """Make a typical tenant's patterns: many tasks, domains and tools, a few conditions."""

    def one() -> Applicability:
        least = chance.random()
        return Applicability(
            problem_types=(f"type_{chance.randrange(_TYPES)}",),
            domains=(f"domain_{chance.randrange(_DOMAINS)}",) if chance.random() < 0.3 else (),
            complexity=(least, min(1.0, least + 0.5)) if chance.random() < 0.3 else None,
            capabilities=(f"tool_{chance.randrange(_TOOLS)}",) if chance.random() < 0.2 else (),
            conditions=(test("tools_required", "contains", f"tool_{chance.randrange(_TOOLS)}"),)
            if chance.random() < 0.2
            else (),
        )

    return patterns(size, chance, one), [task(chance) for _ in range(TASKS)]


def mined(size: int, chance: random.Random) -> Made:
    """Make patterns as mining does: half of them for a type of task, half for a failure."""

    def one() -> Applicability:
        domains = (f"domain_{chance.randrange(_DOMAINS)}",) if chance.random() < 0.5 else ()
        used = (f"tool_{chance.randrange(_TOOLS)}",)
        if chance.random() < 0.5:
            kinds = (f"type_{chance.randrange(_TYPES)}",)
            return Applicability(problem_types=kinds, domains=domains, capabilities=used)
        failed = test("failure_signature", "eq", f"failure {chance.randrange(100)}")
        return Applicability(domains=domains, capabilities=used, conditions=(failed,))

    made = patterns(size, chance, one)
    return made, [
        task(chance, failure_signature=f"failure {chance.randrange(100)}") for _ in range(TASKS)
    ]


def one_type(size: int, chance: random.Random) -> Made:
    """Make patterns that are all for one kind of task, and all apply."""
    made = patterns(size, chance, lambda: Applicability(problem_types=("type_1",)))
    return made, [task(chance, task_type="type_1") for _ in range(TASKS)]


def all_equal(size: int, chance: random.Random) -> Made:
    """Make patterns that all apply, with equal scores."""
    made = [
        each.with_changes(evidence=Evidence(), lifecycle=VALID)
        for each in one_type(size, chance)[0]
    ]
    return made, [task(chance, task_type="type_1") for _ in range(TASKS)]


def ranges(size: int, chance: random.Random) -> Made:
    """Make conditions of number ranges only, all different."""

    def one() -> Applicability:
        least, size_of = chance.random(), chance.random() * 100
        return Applicability(
            complexity=(least, min(1.0, least + 0.1)),
            conditions=(test("size", "ge", size_of), test("size", "lt", size_of + 5)),
        )

    tasks = [task(chance, size=chance.random() * 100) for _ in range(TASKS)]
    return patterns(size, chance, one), tasks


def nested(size: int, chance: random.Random) -> Made:
    """Make conditions that no index helps: alternatives, negations, anti-conditions; few apply."""

    def one() -> Applicability:
        value = chance.random()
        either = {
            "any": [
                {"all": [test("complexity", "gt", value), test("complexity", "lt", value + 0.004)]},
                test("domain", "eq", f"domain_{chance.randrange(1000)}"),
                {"not": {"feature": "task_type", "op": "exists"}},
            ]
        }
        never = test("tools_required", "contains", f"tool_{chance.randrange(_TOOLS)}")
        return Applicability(conditions=(either,), anti_conditions=(never,))

    return patterns(size, chance, one), [task(chance) for _ in range(TASKS)]


def none_applies(size: int, chance: random.Random) -> Made:
    """Make patterns that need a check of all conditions; none applies."""

    def one() -> Applicability:
        likely = test("complexity", "ge", -chance.random())
        never = {"any": [{"not": likely}, test("complexity", "gt", 1 + chance.random())]}
        return Applicability(problem_types=("type_1",), conditions=(likely, never))

    made = patterns(size, chance, one)
    return made, [task(chance, task_type="type_1") for _ in range(TASKS)]


def contradicting(size: int, chance: random.Random) -> Made:
    """Make patterns that all apply, of which the best contradicts all others."""
    made, tasks = one_type(size, chance)
    best = Evidence(confidence=1.0, success_rate=1.0, validated_at=NOW)
    against = Relations(contradicts=(made[0].key,))
    return [
        made[0].with_changes(evidence=best),
        *(each.with_changes(relations=against) for each in made[1:]),
    ], tasks


SHAPES: Mapping[str, Shape] = {
    "spread": spread,
    "mined": mined,
    "one type": one_type,
    "all equal": all_equal,
    "ranges": ranges,
    "nested": nested,
    "none applies": none_applies,
    "contradicting": contradicting,
}
VALID = Lifecycle(PatternState.VALIDATED)


def patterns(
    size: int, chance: random.Random, applicability: Callable[[], Applicability]
) -> list[Pattern]:
    """Make validated patterns with various evidence."""
    return [
        Pattern(
            f"pattern {number}",
            chance.choice(list(Category)),
            Content(ContentKind.HEURISTIC),
            applicability(),
            id=UUID(int=chance.getrandbits(128)),
            evidence=Evidence(
                confidence=chance.uniform(0.7, 1),
                success_rate=chance.uniform(0.6, 1),
                validated_at=NOW - timedelta(days=chance.uniform(0, 300)),
            ),
            lifecycle=Lifecycle(PatternState.VALIDATED, uses=chance.randrange(500)),
        )
        for number in range(size)
    ]


def holds(condition: Condition, features: Features) -> bool:
    """Evaluate a checked condition for a task; never raises."""
    return conditions.holds(condition, features.get)


def applies(pattern: Pattern, features: Features) -> bool:
    """Return true if a pattern applies to a task. Its state does not matter."""
    return Rule(pattern).applies(features)


def match(pattern: Pattern, features: Features, now: datetime) -> Match:
    """Return the match of a pattern that applies."""
    known = {name for name, value in features.items() if value is not None}
    return Rule(pattern).match(known, now)


def brute_force(
    patterns: Iterable[Pattern],
    features: Features,
    *,
    now: datetime,
    k: int = 5,
    categories: Collection[Category] | None = None,
) -> list[Match]:
    """Return the result of :meth:`Matcher.find`, by testing every pattern."""
    found = [
        match(each, features, now)
        for each in patterns
        if each.state is PatternState.VALIDATED
        and (categories is None or each.category in categories)
        and applies(each, features)
    ]
    taken: list[Match] = []
    for one in sorted(found, key=lambda each: (-each.score, each.pattern.key)):
        if len(taken) < k and not any(contradict(one.pattern, each.pattern) for each in taken):
            taken.append(one)
    return taken


def contradict(one: Pattern, other: Pattern) -> bool:
    return other.id in one.relations.contradicts or one.id in other.relations.contradicts


def times_ms(find: Callable[[Features], object], tasks: Sequence[Features]) -> list[float]:
    took = []
    for each in tasks:
        began = time.thread_time()
        find(each)
        took.append((time.thread_time() - began) * 1000)
    return took


def percentile(took: Sequence[float], share: float) -> float:
    return sorted(took)[min(len(took) - 1, int(len(took) * share))]


def measure(shape: str, size: int, finds: int) -> None:
    made, tasks = SHAPES[shape](size, random.Random(size))
    began = time.perf_counter()
    matcher = Matcher(made)
    built_ms = (time.perf_counter() - began) * 1000
    for each in tasks[:3]:
        assert matcher.find(each, now=NOW) == brute_force(made, each, now=NOW)
    many = [tasks[number % len(tasks)] for number in range(finds)]
    took = times_ms(lambda each: matcher.find(each, now=NOW), many)
    slow = times_ms(lambda each: brute_force(made, each, now=NOW), tasks[:10])
    p50, brute = statistics.median(took), statistics.median(slow)
    p95, p99 = (percentile(took, share) for share in (0.95, 0.99))
    print(
        f"{shape:14} {size:7,} {p50:8.3f} {p95:8.3f} {p99:8.3f} {brute:9.2f} "
        f"{brute / p50:8.0f} x {built_ms:9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=[100, 1000, 10_000])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--finds", type=int, default=400)
    told = parser.parse_args()
    print(
        f"{'milliseconds':14} {'size':>7} {'p50':>8} {'p95':>8} {'p99':>8} {'each':>9} "
        f"{'each/p50':>10} build"
    )
    for shape in told.shape:
        for size in told.sizes:
            measure(shape, size, told.finds)


if __name__ == "__main__":
    main()
