"""Validation of patterns: statistical tests, verdicts and state changes."""

from fractions import Fraction
from math import comb, exp

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks import validation as simulated
from bottega.memory.patterns.evidence import Comparison, Tally, Verdict, binomial_p, fisher_p
from bottega.memory.patterns.pattern import PatternState

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
            assert abs(fisher_p(better, other) - exact_fisher(better, other)) < 1e-11
        else:
            assert fisher_p(better, other) == 1.0

    def test_fishers_tea_tasting_example(self) -> None:
        """Check Fisher, The Design of Experiments: all eight cups, and six of them."""
        assert fisher_p(Tally(4, 4), Tally(0, 4)) == pytest.approx(1 / 70)
        assert fisher_p(Tally(3, 4), Tally(1, 4)) == pytest.approx(17 / 70)


def judged(good: int, n: int, rate: float = 0.5) -> Comparison:
    return Comparison(Tally(good, n), known_rate=rate)


class TestVerdict:
    def test_five_of_five_successes_validate(self) -> None:
        found = Comparison(Tally(5, 5))
        assert found.verdict is Verdict.VALIDATED
        assert found.p_better == pytest.approx(0.03125)
        assert found.confidence == pytest.approx(0.760, abs=5e-4)
        assert found.confidence == pytest.approx(0.5 + 0.3 * (1 - exp(-0.25)) + 0.2 * 0.96875)

    def test_four_applications_are_too_few(self) -> None:
        assert judged(4, 4, 0.1).verdict is Verdict.INSUFFICIENT_EVIDENCE
        assert judged(5, 5, 0.1).verdict is Verdict.VALIDATED

    def test_success_rate_has_a_minimum(self) -> None:
        assert judged(60, 100).verdict is Verdict.VALIDATED
        assert judged(59, 100, 0.4).verdict is Verdict.IN_REVIEW

    def test_result_must_be_significant(self) -> None:
        assert judged(8, 10).p_better == pytest.approx(56 / 1024)
        assert judged(8, 10).verdict is Verdict.IN_REVIEW
        assert judged(9, 10).verdict is Verdict.VALIDATED

    def test_significant_result_with_low_confidence_is_a_candidate(self) -> None:
        found = judged(6, 10, 0.3)
        assert found.p_better == pytest.approx(0.0473489874)
        assert found.confidence == pytest.approx(0.6086, abs=5e-5)
        assert found.verdict is Verdict.CANDIDATE

    @given(tallies, tallies, st.none() | rates)
    def test_confidence_and_p_values_stay_within_their_bounds(
        self, given_: Tally, without: Tally, rate: float | None
    ) -> None:
        found = Comparison(given_, without, rate)
        for value in (found.confidence, found.p_better, found.p_worse, found.baseline.rate):
            assert 0 <= value <= 1

    @given(tallies, rates)
    def test_another_success_never_raises_the_p_value(self, tally: Tally, baseline: float) -> None:
        more = Tally(tally.good + 1, tally.n + 1)
        assert binomial_p(more, baseline) <= binomial_p(tally, baseline) + 1e-12


class TestSimulated:
    """The benchmark at a small size, with fixed seeds."""

    @pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.9])
    def test_few_useless_patterns_are_promoted(self, rate: float) -> None:
        promoted = simulated.moved(PatternState.CANDIDATE, rate, rate, 1_500, seed=3)
        assert promoted.mean() <= 0.03

    def test_helpful_pattern_is_promoted(self) -> None:
        assert simulated.moved(PatternState.CANDIDATE, 0.8, 0.5, 1_000, seed=1).mean() >= 0.94

    def test_only_patterns_that_do_harm_fall(self) -> None:
        state = PatternState.VALIDATED
        assert simulated.moved(state, 0.2, 0.8, 300, seed=1).mean() >= 0.95
        assert simulated.moved(state, 0.5, 0.5, 1_500, seed=1).mean() <= 0.03
        assert not simulated.moved(state, 0.8, 0.5, 300, seed=1).any()
