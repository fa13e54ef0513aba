"""Validation of patterns: statistical tests, verdicts and state changes."""

from dataclasses import replace
from fractions import Fraction
from math import comb, exp, log

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks import validation as simulated
from bottega.memory.episodes.scope import LearningOptions
from bottega.memory.patterns.evidence import (
    BettingEvidence,
    Tally,
    Verdict,
    binomial_p,
    fisher_p,
    judged,
    worse,
)
from tests.domain.patterns import e_value

OPTIONS = LearningOptions()

tallies = st.integers(0, 400).flatmap(lambda n: st.integers(0, n).map(lambda good: Tally(good, n)))
rates = st.floats(0.001, 0.999)


def exact_binomial(good: int, n: int, baseline: float) -> Fraction:
    rate = Fraction(baseline)
    return sum(
        (comb(n, k) * rate**k * (1 - rate) ** (n - k) for k in range(good, n + 1)), Fraction()
    )


def exact_fisher(better: Tally, other: Tally) -> Fraction:
    good, n = better.good + other.good, better.n + other.n
    ways = sum(
        comb(better.n, k) * comb(other.n, good - k)
        for k in range(better.good, min(good, better.n) + 1)
    )
    return Fraction(ways, comb(n, good))


class TestBinomialAndFisher:
    @given(st.integers(0, 60), st.data(), rates)
    def test_the_binomial_is_exact(self, n: int, data: st.DataObject, baseline: float) -> None:
        good = data.draw(st.integers(0, n))
        assert abs(binomial_p(Tally(good, n), baseline) - exact_binomial(good, n, baseline)) < 1e-12

    @pytest.mark.parametrize(
        ("n", "numerator"), [(1_000, 1), (1_000, 128), (1_000, 255), (3_000, 77)]
    )
    def test_binomial_is_exact_for_thousands(self, n: int, numerator: int) -> None:
        """Compare with integer arithmetic, possible because the rate is a multiple of 1/256."""
        weights = [comb(n, k) * numerator**k * (256 - numerator) ** (n - k) for k in range(n + 1)]
        middle = n * numerator // 256
        for good in {0, 1, middle // 2, middle - 20, middle, middle + 1, middle + 50, n - 1, n}:
            if 0 <= good <= n:
                reference = Fraction(sum(weights[good:]), 256**n)
                assert abs(binomial_p(Tally(good, n), numerator / 256) - reference) < 1e-11

    @pytest.mark.parametrize("baseline", [1e-9, 1e-4, 0.3, 0.9999, 1 - 1e-9])
    def test_thin_tails_are_exact_to_twelve_figures(self, baseline: float) -> None:
        for good in (1, 20, 40):
            found = binomial_p(Tally(good, 40), baseline)
            assert found == pytest.approx(float(exact_binomial(good, 40, baseline)), rel=1e-12)

    def test_no_applications_are_no_evidence(self) -> None:
        assert binomial_p(Tally(), 0.5) == binomial_p(Tally(0, 9), 0.0) == 1.0
        assert binomial_p(Tally(1, 9), 0.0) == 0.0
        assert binomial_p(Tally(9, 9), 1.0) == 1.0

    @given(tallies, tallies)
    @example(Tally(0, 1), Tally(1, 1))
    @example(Tally(400, 400), Tally(0, 400))
    def test_fishers_test_is_exact(self, better: Tally, other: Tally) -> None:
        if better.n and other.n:
            assert abs(fisher_p(better, other) - exact_fisher(better, other)) < 1e-12
        else:
            assert fisher_p(better, other) == 1.0

    def test_fishers_tea_tasting_example(self) -> None:
        """Check Fisher, The Design of Experiments: all eight cups, and six of them."""
        assert fisher_p(Tally(4, 4), Tally(0, 4)) == pytest.approx(1 / 70)
        assert fisher_p(Tally(3, 4), Tally(1, 4)) == pytest.approx(17 / 70)


class TestVerdict:
    def test_five_of_five_successes_validate(self) -> None:
        found = judged(Tally(5, 5), 0.5, OPTIONS)
        assert found.verdict is Verdict.VALIDATED
        assert found.p_value == pytest.approx(0.03125)
        assert found.confidence == pytest.approx(0.760, abs=5e-4)
        assert found.confidence == pytest.approx(0.5 + 0.3 * (1 - exp(-0.25)) + 0.2 * 0.96875)

    def test_four_applications_are_too_few(self) -> None:
        assert judged(Tally(4, 4), 0.1, OPTIONS).verdict is Verdict.INSUFFICIENT_EVIDENCE
        assert judged(Tally(5, 5), 0.1, OPTIONS).verdict is Verdict.VALIDATED

    def test_success_rate_has_a_minimum(self) -> None:
        assert judged(Tally(60, 100), 0.5, OPTIONS).verdict is Verdict.VALIDATED
        assert judged(Tally(59, 100), 0.4, OPTIONS).verdict is Verdict.IN_REVIEW
        assert judged(Tally(6, 10), 0.2, replace(OPTIONS, min_confidence=0)).verdict is (
            Verdict.VALIDATED
        )

    def test_p_value_must_be_below_the_limit_not_at_it(self) -> None:
        p_value = judged(Tally(8, 10), 0.5, OPTIONS).p_value
        assert p_value == pytest.approx(56 / 1024)
        at = replace(OPTIONS, significance=p_value)
        above = replace(OPTIONS, significance=np.nextafter(p_value, 1))
        assert judged(Tally(8, 10), 0.5, OPTIONS).verdict is Verdict.IN_REVIEW
        assert judged(Tally(8, 10), 0.5, at).verdict is Verdict.IN_REVIEW
        assert judged(Tally(8, 10), 0.5, above).verdict is Verdict.VALIDATED
        assert judged(Tally(9, 10), 0.5, OPTIONS).verdict is Verdict.VALIDATED

    def test_significant_result_with_low_confidence_stays_in_review(self) -> None:
        found = judged(Tally(6, 10), 0.3, OPTIONS)
        assert found.p_value == pytest.approx(0.0473489874)
        assert found.confidence == pytest.approx(0.6086, abs=5e-5)
        assert found.verdict is Verdict.CANDIDATE

    def test_confidence_at_the_limit_is_enough(self) -> None:
        sure = judged(Tally(6, 10), 0.3, OPTIONS).confidence
        just = replace(OPTIONS, min_confidence=sure)
        not_quite = replace(OPTIONS, min_confidence=np.nextafter(sure, 1))
        assert judged(Tally(6, 10), 0.3, just).verdict is Verdict.VALIDATED
        assert judged(Tally(6, 10), 0.3, not_quite).verdict is Verdict.CANDIDATE

    @given(tallies, rates)
    def test_confidence_stays_within_its_bounds(self, tally: Tally, baseline: float) -> None:
        assert 0 <= judged(tally, baseline, OPTIONS).confidence <= 1

    @given(tallies, rates)
    def test_another_success_never_raises_the_p_value(self, tally: Tally, baseline: float) -> None:
        more = Tally(tally.good + 1, tally.n + 1)
        assert binomial_p(more, baseline) <= binomial_p(tally, baseline) + 1e-12


class TestEValues:
    @given(st.lists(st.tuples(st.booleans(), rates), max_size=60), st.randoms())
    def test_order_and_grouping_make_no_difference(self, applied, random) -> None:  # type: ignore[no-untyped-def]
        value = e_value(applied)
        random.shuffle(applied)
        assert e_value(applied) == pytest.approx(value, rel=1e-9)
        grouped = BettingEvidence()
        for each in set(applied):
            grouped = grouped.after(each[0], each[1], applied.count(each))
        assert grouped.e_value == pytest.approx(value, rel=1e-9)

    @given(st.lists(st.tuples(st.booleans(), rates), max_size=20), rates, st.floats(0, 1))
    def test_e_value_has_no_expected_gain_under_the_baseline(self, applied, baseline, less) -> None:  # type: ignore[no-untyped-def]
        """Check the expected value after one more application.

        At the baseline's rate it is unchanged, at a lower rate not higher: so it is a test
        martingale, and Ville's inequality holds.
        """
        evidence = BettingEvidence()
        for each in applied:
            evidence = evidence.after(*each)
        good, bad = evidence.after(True, baseline).e_value, evidence.after(False, baseline).e_value
        now = evidence.e_value
        assert baseline * good + (1 - baseline) * bad == pytest.approx(now, rel=1e-9)
        rate = baseline * less
        assert rate * good + (1 - rate) * bad <= now * (1 + 1e-9)

    def test_chance_reaches_twenty_in_at_most_one_case_of_twenty(self) -> None:
        """Draw a baseline for each application, and check the value after every application."""
        random = np.random.default_rng(7)
        reached = 0
        for _ in range(400):
            evidence = BettingEvidence()
            for baseline in random.uniform(0.1, 0.9, 150):
                evidence = evidence.after(bool(random.random() < baseline), float(baseline))
                if evidence.e_value >= 20:
                    reached += 1
                    break
        assert 0 < reached <= 400 * 0.05

    def test_e_value_stays_finite(self) -> None:
        assert e_value([(True, 0.5)] * 5_000) == pytest.approx(1e300)
        assert 0 <= e_value([(False, 0.5)] * 50_000) < 1e-300
        assert e_value([(True, 0.0), (False, 1.0)]) > 0
        assert e_value([]) == 1.0


class TestDecline:
    def test_few_applications_prove_no_decline(self) -> None:
        assert not worse(Tally(0, 9), Tally(900, 900), OPTIONS)
        assert not worse(Tally(0, 900), Tally(9, 9), OPTIONS)
        assert worse(Tally(0, 10), Tally(10, 10), OPTIONS)

    def test_raw_difference_is_no_decline(self) -> None:
        assert not worse(Tally(7, 10), Tally(90, 100), OPTIONS)
        assert not worse(Tally(10, 10), Tally(0, 10), OPTIONS)

    def test_decline_needs_p_below_the_limit_not_at_it(self) -> None:
        p_value = fisher_p(Tally(90, 100), Tally(5, 10))
        assert worse(Tally(5, 10), Tally(90, 100), replace(OPTIONS, decline_p=p_value * 1.01))
        assert not worse(Tally(5, 10), Tally(90, 100), replace(OPTIONS, decline_p=p_value))


class TestSimulated:
    """The benchmark at a small size, with fixed seeds."""

    @pytest.mark.parametrize("rate", [0.5, 0.3])
    def test_few_useless_patterns_are_promoted(self, rate: float) -> None:
        found = simulated.promoted(simulated.outcomes(rate, 400, 200, seed=1), rate)
        assert found.by_both.mean() <= 0.05
        assert not (found.by_both & ~found.by_verdict).any()

    def test_plain_p_value_would_promote_many(self) -> None:
        found = simulated.promoted(simulated.outcomes(0.5, 300, 200, seed=1), 0.5)
        assert found.by_verdict.mean() > 0.2

    def test_helpful_pattern_is_promoted_soon(self) -> None:
        found = simulated.promoted(simulated.outcomes(0.8, 300, 60, seed=1), 0.5)
        assert found.by_both.mean() >= 0.9

    def test_pattern_that_starts_to_fail_leaves_within_ten(self) -> None:
        before = simulated.ninety_of_hundred(100, seed=1)
        left = simulated.left_after(before, np.zeros((100, 10), bool))
        assert left.max() <= 10

    def test_mixture_bets_on_likely_rates(self) -> None:
        """Compare with the best single bet in hindsight.

        60 applications at 0.8 earn more than half of its logarithm.
        """
        hindsight = 48 * log(0.8 / 0.5) + 12 * log(0.2 / 0.5)
        assert log(e_value([(True, 0.5)] * 48 + [(False, 0.5)] * 12)) > hindsight / 2
