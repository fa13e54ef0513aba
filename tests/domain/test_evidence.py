"""The evidence that a pattern's applications add up to."""

from dataclasses import replace
from datetime import UTC, datetime
from math import nextafter
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.memory.episodes.scope import LearningOptions
from bottega.memory.patterns.evidence import (
    Group,
    Tally,
    Verdict,
    WeighedEvidence,
    falling,
    judged,
    validated,
    weigh,
)
from bottega.memory.patterns.pattern import (
    APPLIED,
    Arm,
    Baseline,
    Category,
    Content,
    ContentKind,
    Evidence,
    Lifecycle,
    Pattern,
    PatternState,
)
from tests.domain.patterns import e_value

OPTIONS = LearningOptions()
NOW = datetime(2026, 3, 1, tzinfo=UTC)
HALF = Baseline("like_tasks", 0.5, 40)

groups = st.lists(
    st.builds(
        lambda arm, good, rate, n, lately: Group(
            arm, good, Baseline("like_tasks", rate, 9), n, min(n, lately)
        ),
        st.sampled_from(Arm),
        st.booleans(),
        st.floats(0.05, 0.95),
        st.integers(1, 9),
        st.integers(0, 9),
    ),
    max_size=12,
)


def pattern(state: PatternState, evidence: Evidence = Evidence()) -> Pattern:
    content = Content(ContentKind.HEURISTIC)
    life = Lifecycle(state, reason="before")
    return Pattern("p", Category.DOMAIN, content, id=UUID(int=1), evidence=evidence, lifecycle=life)


def look(state: PatternState, weighed: WeighedEvidence) -> tuple[PatternState, str | None]:
    after, found = validated(pattern(state), weighed, OPTIONS, NOW)
    moved = found.state is not state
    assert (after.state, after.lifecycle.reason) == (
        found.state,
        found.reason if moved else "before",
    )
    return found.state, found.reason


def at_least(group: Group) -> float:
    """Return the baseline of a group's applications; at least a half for reported ones."""
    return max(group.baseline.rate, 0.5 if group.arm is Arm.REPORTED else 0.0)


def test_reported_low_baseline_does_not_speed_up_promotion() -> None:
    low, half = Baseline("given", 0.01), Baseline("given", 0.5)
    found = [weigh([Group(Arm.REPORTED, True, each, 5, 5)]).e_value for each in (low, half)]
    assert found[0] == pytest.approx(found[1])
    assert found[0] < OPTIONS.promotion_e
    tried = weigh([Group(Arm.TRIAL, True, low, 5, 5)])
    assert tried.e_value > OPTIONS.promotion_e


@given(groups)
def test_groups_weigh_as_much_as_their_applications(given_: list[Group]) -> None:
    given_ = [each for each in given_ if each.arm in APPLIED]
    found = weigh(given_)
    one_by_one = [each for each in given_ for _ in range(each.n)]
    assert found.given == Tally(sum(each.good for each in one_by_one), len(one_by_one))
    alone = e_value((each.good, at_least(each)) for each in one_by_one)
    assert found.e_value == pytest.approx(alone, rel=1e-9)
    assert found.lately.n <= found.given.n
    assert 0 < found.baseline.rate < 1


@given(groups)
def test_runs_without_a_pattern_never_count_in_its_favour(given_: list[Group]) -> None:
    alone = weigh([each for each in given_ if each.arm in APPLIED])
    assert weigh(given_).e_value <= alone.e_value * (1 + 1e-9)


def test_pattern_is_not_promoted_if_controls_succeed_as_often() -> None:
    trials = [Group(Arm.TRIAL, True, Baseline("controls", 0.6, 5), 20, 20)]
    controls = [Group(Arm.CONTROL, True, Baseline(), 20, 20)]
    assert look(PatternState.CANDIDATE, weigh(trials)) == (PatternState.VALIDATED, None)
    assert look(PatternState.CANDIDATE, weigh(trials + controls)) == (PatternState.CANDIDATE, None)
    bad = [Group(Arm.CONTROL, good, Baseline(), 10, 10) for good in (True, False)]
    assert look(PatternState.CANDIDATE, weigh(trials + bad)) == (PatternState.VALIDATED, None)


def test_many_similar_tasks_replace_the_controls_as_baseline() -> None:
    trials = [Group(Arm.TRIAL, True, Baseline("like_tasks", 0.3, 20), 6, 6)]
    control = [Group(Arm.CONTROL, True, Baseline(), 2, 2)]
    assert weigh(trials + control).e_value == weigh(trials).e_value
    few = [Group(Arm.TRIAL, True, Baseline("like_tasks", 0.3, 19), 6, 6)]
    assert weigh(few + control).e_value < weigh(few).e_value


def test_withheld_runs_do_not_demote_a_validated_pattern() -> None:
    used = [Group(Arm.USED, True, HALF, 20, 20)]
    withheld = [Group(Arm.WITHHELD, True, HALF, 2, 2)]
    assert look(PatternState.VALIDATED, weigh(used + withheld)) == (PatternState.VALIDATED, None)


def test_baseline_is_the_mean_under_the_commonest_name() -> None:
    found = weigh(
        [
            Group(Arm.TRIAL, True, Baseline("like_tasks", 0.4, 10), 5, 3),
            Group(Arm.USED, False, Baseline("unknown", 0.8, 0), 9, 1),
            Group(Arm.CONTROL, False, Baseline("controls", 0.1, 7), 50, 50),
        ]
    )
    assert found.baseline.rate == pytest.approx(0.5)
    assert (found.baseline.name, found.baseline.n) == ("like_tasks", 8)
    assert found.lately == Tally(3, 4)
    assert weigh([]) == WeighedEvidence()


def test_savings_are_measured_against_runs_without_the_pattern() -> None:
    used = Group(Arm.USED, True, HALF, 4, 4, timed=2, seconds=6.0, counted=4, tokens=400.0)
    other = Group(Arm.WITHHELD, True, HALF, 2, 2, timed=1, seconds=5.0)
    found = weigh([used, other])
    assert (found.time_saved_s, found.tokens_saved) == (2.0, None)


class TestPromotion:
    WELL, FEW = Tally(50, 50), Tally(4, 4)
    BADLY = Tally(1, 50)

    @pytest.mark.parametrize("lately", [WELL, FEW, BADLY, Tally()])
    @pytest.mark.parametrize("state", list(PatternState))
    def test_state_follows_the_verdict(self, state: PatternState, lately: Tally) -> None:
        found = look(state, WeighedEvidence(lately=lately, given=lately, e_value=20.0))[0]
        promoted = state is PatternState.CANDIDATE and lately == self.WELL
        assert found is (PatternState.VALIDATED if promoted else state)

    def test_candidate_needs_the_e_value_too(self) -> None:
        less = WeighedEvidence(lately=self.WELL, given=self.WELL, e_value=nextafter(20.0, 0))
        assert look(PatternState.CANDIDATE, less)[0] is PatternState.CANDIDATE
        enough = replace(less, e_value=20.0)
        assert look(PatternState.CANDIDATE, enough)[0] is PatternState.VALIDATED


class TestDemotion:
    well = WeighedEvidence(lately=Tally(90, 100), given=Tally(90, 100), baseline=HALF, e_value=1e9)

    def test_successful_pattern_stays(self) -> None:
        assert look(PatternState.VALIDATED, self.well) == (PatternState.VALIDATED, None)

    def test_lack_of_significance_is_no_reason_to_fall(self) -> None:
        mixed = replace(self.well, lately=Tally(8, 10), given=Tally(8, 10), latest=Tally(8, 10))
        assert judged(mixed.lately, 0.5, OPTIONS).verdict is Verdict.IN_REVIEW
        assert look(PatternState.VALIDATED, mixed) == (PatternState.VALIDATED, None)

    def test_decline_overrides_a_good_verdict(self) -> None:
        declined = replace(self.well, latest=Tally(4, 10))
        state, reason = look(PatternState.VALIDATED, declined)
        assert state is PatternState.IN_REVIEW
        assert reason == (
            "declined: 4 of the last 10 applications went well, and 86 of the 90 before"
        )

    def test_harm_overrides_a_good_verdict(self) -> None:
        harmful = replace(self.well, used=Tally(70, 100), withheld=Tally(40, 40))
        assert look(PatternState.VALIDATED, harmful)[0] is PatternState.IN_REVIEW
        assert falling(replace(harmful, withheld=Tally(9, 9)), OPTIONS) is None

    def test_candidate_is_not_demoted(self) -> None:
        declined = replace(self.well, latest=Tally(0, 10), lately=Tally(1, 50), e_value=0.1)
        assert look(PatternState.CANDIDATE, declined) == (PatternState.CANDIDATE, None)


class TestStoredEvidence:
    def test_too_few_applications_keep_the_old_confidence(self) -> None:
        before = Evidence(confidence=0.9, p_value=0.001, verdict="VALIDATED")
        few = WeighedEvidence(lately=Tally(1, 1), given=Tally(20, 21), baseline=HALF, e_value=50.0)
        one = pattern(PatternState.VALIDATED, before)
        after = validated(one, few, OPTIONS, NOW)[0].evidence
        assert (after.confidence, after.p_value) == (0.9, 0.001)
        assert (after.verdict, after.applications) == (Verdict.INSUFFICIENT_EVIDENCE, 1)
        assert after.uplift == 0.5

    def test_validation_without_news_keeps_its_time(self) -> None:
        some = WeighedEvidence(lately=Tally(9, 9), given=Tally(9, 9), baseline=HALF, e_value=9.0)
        once, _ = validated(pattern(PatternState.CANDIDATE), some, OPTIONS, NOW)
        assert once.evidence.validated_at == NOW
        assert validated(once, some, OPTIONS, datetime(2027, 1, 1, tzinfo=UTC))[0] == once

    def test_pattern_without_applications_counts_as_not_validated(self) -> None:
        new = pattern(PatternState.CANDIDATE)
        assert validated(new, WeighedEvidence(), OPTIONS, NOW)[0] == new
