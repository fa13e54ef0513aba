"""Learning changes later runs: a small setting of the learning benchmark."""

import asyncio
from collections.abc import Mapping, Sequence
from statistics import mean

import pytest

from benchmarks.learning import model, report
from benchmarks.learning.measuring import FULL, NONE, PLACEBO, Course, failing, measure
from benchmarks.learning.world import ORDERS
from bottega.memory.episodes.scope import LearningOptions

SEEDS = (1, 2)
TASKS, CHANGED, STRETCH = 320, 160, 50


@pytest.fixture(scope="module")
def courses() -> Sequence[Mapping[str, Course]]:
    """Measure a model that always follows its prompt; halfway the right answer changes."""
    arms = (NONE, FULL, PLACEBO)
    return [
        asyncio.run(measure(seed, TASKS, follows=1.0, tells=0.5, drift=True, arms=arms))
        for seed in SEEDS
    ]


def success(courses: Sequence[Mapping[str, Course]], arm: str, since: int) -> float:
    return mean(mean(each[arm].good[since : since + STRETCH]) for each in courses)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("other", "until"),
    # After the change the placebo, which is about other tasks, is sometimes right by chance.
    [(NONE, CHANGED), (PLACEBO, CHANGED), (NONE, TASKS)],
)
def test_own_lessons_help_and_unrelated_ones_do_not(
    courses: Sequence[Mapping[str, Course]], other: str, until: int
) -> None:
    since = until - STRETCH
    assert success(courses, FULL, since) > success(courses, other, since) + 0.1


@pytest.mark.deep
def test_outdated_lesson_is_unlearned(courses: Sequence[Mapping[str, Course]]) -> None:
    before, after, end = (
        success(courses, FULL, since) for since in (CHANGED - STRETCH, CHANGED, TASKS - STRETCH)
    )
    assert after < before - 0.1
    assert end > after + 0.1


@pytest.mark.deep
def test_placebo_has_the_same_length(courses: Sequence[Mapping[str, Course]]) -> None:
    full, placebo = (
        mean(report.of(courses, arm, lambda each: mean(each.given))) for arm in (FULL, PLACEBO)
    )
    assert placebo == pytest.approx(full, rel=0.25)


@pytest.mark.parametrize(("good", "n"), [(90, 100), (60, 60), (20, 24)])
def test_pattern_that_starts_to_fail_is_dropped_within_ten_runs(good: int, n: int) -> None:
    left = failing(LearningOptions(), good, n)
    assert left is not None
    assert left <= 10


def test_same_seed_gives_the_same_course() -> None:
    one, other = (asyncio.run(measure(3, 60, arms=(FULL, PLACEBO))) for _ in range(2))
    assert one == other


def test_model_follows_patterns_before_episodes_and_otherwise_guesses() -> None:
    pattern = "[pattern, decomposition, validated]\n  it\n  Steps: call auditor → call writer"
    steps = "\n".join(
        f"  earlier run: {n}. lead: {name} → done" for n, name in enumerate(ORDERS[0], 1)
    )
    episode = f"[SUCCESS, 2027-01-01, own run]\n{steps}"
    failed = episode.replace("SUCCESS", "FAILURE")
    told = model.order([episode, pattern], True, 0.0)
    assert told.heeded
    assert told.choice.index("auditor") < told.choice.index("writer")
    assert model.order([episode], True, 0.99).choice == ORDERS[0]
    assert not model.order([failed], True, 0.5).heeded
    assert model.order([episode, pattern], False, 0.99).choice == ORDERS[-1]
