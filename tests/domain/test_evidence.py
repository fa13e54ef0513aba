"""The evidence that a pattern's applications add up to, and the looks at it."""

from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

import pytest

from bottega.memory.patterns.evidence import (
    LOOKS,
    Comparison,
    Side,
    Sides,
    Tally,
    Verdict,
    looked_at,
    pooled_difference,
    validated,
)
from bottega.memory.patterns.pattern import (
    Baseline,
    Category,
    Content,
    ContentKind,
    Evidence,
    Lifecycle,
    Pattern,
    PatternState,
)

NOW = datetime(2026, 3, 1, tzinfo=UTC)
CANDIDATE, VALIDATED = PatternState.CANDIDATE, PatternState.VALIDATED
IN_REVIEW, DEPRECATED = PatternState.IN_REVIEW, PatternState.DEPRECATED


def pattern(state: PatternState, evidence: Evidence = Evidence(), looks: int = 0) -> Pattern:
    content = Content(ContentKind.HEURISTIC)
    life = Lifecycle(state, reason="before", looks=looks)
    return Pattern("p", Category.DOMAIN, content, id=UUID(int=1), evidence=evidence, lifecycle=life)


def side(good: int, n: int, **more: float) -> Side:
    return Side(Tally(good, n), Tally(good, n), **more)


def look(of: Pattern, given_: tuple[int, int], without: tuple[int, int]) -> Pattern:
    return looked_at(of, Comparison(Tally(*given_), Tally(*without)), NOW)


class TestComparison:
    def test_runs_without_it_are_the_baseline(self) -> None:
        tried = Tally(5, 5)
        assert Comparison(tried, known_rate=0.3).baseline == Baseline("given", 0.3, 0)
        assert Comparison(tried, Tally(1, 4), 0.3).baseline == Baseline("without", 0.25, 4)
        assert Comparison().baseline == Comparison(tried).baseline == Baseline()

    def test_sentence_has_the_counts(self) -> None:
        assert str(Comparison(Tally(8, 8), Tally(2, 8))) == "8 of 8 with it, 2 of 8 without"
        assert str(Comparison(Tally(8, 8), known_rate=0.3)).endswith("a rate of 0.3 without")
        assert str(Comparison(Tally(8, 8))) == "8 of 8 with it, none without"


class TestLooks:
    def test_candidate_without_enough_evidence_stays_on_trial(self) -> None:
        now = look(pattern(CANDIDATE), (8, 8), (2, 8))
        assert (now.state, now.lifecycle.looks) == (CANDIDATE, 8)
        assert now.lifecycle.decision == (
            "8 of 8 with it, 2 of 8 without: p = 0.003, level 0.001: stays on trial"
        )
        assert now.lifecycle.reason == "before"

    def test_candidate_that_helps_is_validated(self) -> None:
        now = look(pattern(CANDIDATE), (8, 8), (1, 8))
        assert (now.state, now.lifecycle.looks, now.lifecycle.looks_since) == (VALIDATED, 0, NOW)
        assert now.lifecycle.decision == (
            "8 of 8 with it, 1 of 8 without: p = 0.0007, level 0.001: is validated"
        )

    @pytest.mark.parametrize(("n", "level"), LOOKS.items())
    def test_each_look_has_its_level(self, n: int, level: float) -> None:
        for good in range(n + 1):
            found = Comparison(Tally(n, n), Tally(good, n))
            now = looked_at(pattern(CANDIDATE), found, NOW)
            assert (now.state is VALIDATED) == (found.p_better < level)

    def test_nothing_happens_between_the_looks(self) -> None:
        for n in range(70):
            due = max((each for each in LOOKS if each <= n), default=0)
            was = pattern(CANDIDATE, looks=due)
            assert look(was, (n, n), (0, 64)) is was
        assert look(pattern(CANDIDATE), (7, 7), (0, 64)).state is CANDIDATE

    def test_look_that_was_missed_is_made_up(self) -> None:
        assert look(pattern(CANDIDATE), (9, 9), (0, 9)).state is VALIDATED

    def test_assumed_rate_promotes_nothing(self) -> None:
        now = looked_at(pattern(CANDIDATE), Comparison(Tally(64, 64)), NOW)
        assert (now.state, now.lifecycle.looks) == (CANDIDATE, 64)
        known = Comparison(Tally(8, 8), known_rate=0.3)
        assert looked_at(pattern(CANDIDATE), known, NOW).state is VALIDATED

    def test_confidence_is_needed_too(self) -> None:
        now = looked_at(pattern(CANDIDATE), Comparison(Tally(20, 32), known_rate=0.05), NOW)
        assert now.state is VALIDATED
        low = looked_at(pattern(CANDIDATE), Comparison(Tally(10, 32), known_rate=0.05), NOW)
        assert low.state is CANDIDATE
        assert "with a confidence of 0.60 of 0.7" in str(low.lifecycle.decision)

    def test_harmful_pattern_falls(self) -> None:
        now = look(pattern(VALIDATED), (1, 8), (8, 8))
        assert now.state is IN_REVIEW
        assert now.lifecycle.reason == now.lifecycle.decision
        assert str(now.lifecycle.reason).endswith("p = 0.0007, level 0.001: goes into review")
        assert look(pattern(VALIDATED), (4, 8), (6, 8)).state is VALIDATED

    def test_validated_pattern_begins_the_next_series_after_the_last_look(self) -> None:
        now = look(pattern(VALIDATED, looks=32), (60, 64), (8, 16))
        assert (now.state, now.lifecycle.looks, now.lifecycle.looks_since) == (VALIDATED, 0, NOW)

    @pytest.mark.parametrize("state", [IN_REVIEW, DEPRECATED])
    def test_only_live_patterns_are_looked_at(self, state: PatternState) -> None:
        was = pattern(state)
        assert look(was, (64, 64), (0, 64)) is was


class TestStoredEvidence:
    def test_too_few_applications_keep_the_old_confidence(self) -> None:
        before = Evidence(confidence=0.9, p_value=0.001, verdict="VALIDATED")
        few = Sides(Side(Tally(1, 1), Tally(20, 21)))
        after = validated(pattern(VALIDATED, before), few, NOW).now.evidence
        assert (after.confidence, after.p_value) == (0.9, 0.001)
        assert (after.verdict, after.applications) == (Verdict.INSUFFICIENT_EVIDENCE, 1)
        assert after.uplift == 0.5

    def test_validation_without_news_keeps_its_time(self) -> None:
        some = Sides(side(9, 9))
        once = validated(pattern(CANDIDATE), some, NOW).now
        assert once.evidence.validated_at == NOW
        assert validated(once, some, datetime(2027, 1, 1, tzinfo=UTC)).now == once

    def test_pattern_without_applications_counts_as_not_validated(self) -> None:
        new = pattern(CANDIDATE)
        assert validated(new, Sides(), NOW).now == new

    def test_savings_are_measured_against_runs_without_the_pattern(self) -> None:
        both = Sides(side(4, 4, seconds=3.0, tokens=100.0), side(2, 2, seconds=5.0))
        found = validated(pattern(VALIDATED), both, NOW).now.evidence
        assert (found.time_saved_s, found.tokens_saved) == (2.0, None)

    def test_looks_count_the_present_series_and_the_verdict_what_is_recent(self) -> None:
        old = Sides(Side(Tally(20, 20)))
        new = replace(pattern(VALIDATED), evidence=Evidence())
        found = validated(new, old, NOW)
        assert (found.now.lifecycle.looks, found.now.lifecycle.decision) == (0, None)
        assert found.lately.given.n == 20


def test_a_pooled_difference_does_not_mix_patterns() -> None:
    """Check that rare withholding of a pattern for easy tasks does not look like help."""
    easy = (Tally(72, 80), Tally(18, 20))
    hard = (Tally(10, 50), Tally(10, 50))
    difference, low, high = pooled_difference([easy, hard])
    assert difference == pytest.approx(0)
    assert low < 0 < high


def test_a_few_runs_do_not_prove_much() -> None:
    difference, low, high = pooled_difference([(Tally(2, 2), Tally(0, 2))])
    assert difference == 1
    assert low < 0 < high == 1


def test_an_interval_is_that_of_agresti_and_caffo() -> None:
    """Check the bounds that the console shows for the same counts, too."""
    found = pooled_difference([(Tally(25, 30), Tally(10, 20))])
    assert found == pytest.approx((1 / 3, 0.06362, 0.56138), abs=1e-5)
