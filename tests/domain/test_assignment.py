"""Assignment of runs to the arms of a pattern's experiment."""

from collections import Counter
from dataclasses import replace
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.memory.episodes.scope import LearningOptions
from bottega.memory.patterns.evidence import arm_of, uniform
from bottega.memory.patterns.pattern import Arm, PatternState

OPTIONS = LearningOptions()
SALT, PATTERN = UUID(int=7), UUID(int=8)


def many(kind: str = "trial", *, pattern: UUID = PATTERN, version: int = 1, n: int = 20_000):  # type: ignore[no-untyped-def]
    return np.array([uniform(SALT, UUID(int=run), pattern, version, kind) for run in range(n)])


@given(st.uuids(), st.uuids(), st.uuids(), st.integers(1, 10**6), st.text(max_size=9))
def test_assignment_is_a_share_and_deterministic(
    salt: UUID, run: UUID, pattern: UUID, version: int, kind: str
) -> None:
    found = uniform(salt, run, pattern, version, kind)
    assert 0 <= found < 1
    assert found == uniform(salt, run, pattern, version, kind)


def test_assignment_never_changes_with_the_code() -> None:
    """Runs that were assigned before an upgrade continue after it."""
    assert uniform(SALT, UUID(int=1), PATTERN, 1, "trial") == 0.5589060095620898


def test_assignments_are_evenly_distributed() -> None:
    """Kolmogorov's distance of 20,000 uniform draws exceeds 0.0138 in one case of a thousand."""
    draws = np.sort(many())
    steps = np.arange(1, len(draws) + 1) / len(draws)
    assert np.abs(draws - steps).max() < 0.0138


def test_assignments_of_other_kinds_versions_and_patterns_are_independent() -> None:
    one = many(n=2_000)
    for other in (
        many("withheld", n=2_000),
        many(version=2, n=2_000),
        many(pattern=UUID(int=9), n=2_000),
    ):
        assert abs(float(np.corrcoef(one, other)[0, 1])) < 0.08


def arms(state: PatternState, options: LearningOptions) -> Counter[Arm]:
    return Counter(arm_of(state, SALT, UUID(int=run), PATTERN, 3, options) for run in range(4_000))


def test_candidate_is_on_trial_in_its_share_of_runs() -> None:
    found = arms(PatternState.CANDIDATE, OPTIONS)
    assert set(found) == {Arm.TRIAL, Arm.CONTROL}
    assert found[Arm.TRIAL] == pytest.approx(2000, abs=130)
    assert set(arms(PatternState.CANDIDATE, replace(OPTIONS, trial_share=0.0))) == {Arm.CONTROL}
    assert set(arms(PatternState.CANDIDATE, replace(OPTIONS, trial_share=1.0))) == {Arm.TRIAL}


def test_validated_pattern_is_withheld_from_its_share_of_runs() -> None:
    found = arms(PatternState.VALIDATED, OPTIONS)
    assert set(found) == {Arm.USED, Arm.WITHHELD}
    assert found[Arm.WITHHELD] == pytest.approx(800, abs=110)
    assert set(arms(PatternState.VALIDATED, replace(OPTIONS, withheld_share=0.0))) == {Arm.USED}
