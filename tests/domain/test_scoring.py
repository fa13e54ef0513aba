"""The score of an episode in retrieval."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import exp, inf, isfinite, log1p, nan, pi
from typing import get_args
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.memory.episodes.scoring import Candidate, Normalisation, Parts, ScoringOptions, score

NOW = datetime(2026, 11, 21, tzinfo=UTC)
OPTIONS = ScoringOptions()
NORMALISATIONS: tuple[Normalisation, ...] = get_args(Normalisation)

measures = st.none() | st.floats(-1, 1) | st.sampled_from([nan, inf, -inf, 0.0, 1.0])
candidates = st.builds(
    Candidate,
    episode_id=st.uuids(),
    at=st.integers(-(10**6), 10**9).map(lambda s: NOW - timedelta(seconds=s)),
    outcome=st.sampled_from(["SUCCESS", "PARTIAL", "FAILURE", "CANCELLED"]),
    domain=st.none() | st.sampled_from(["code", "law"]),
    access_count=st.integers(0, 10**12),
    cosine=measures,
    lexical=measures.map(lambda value: value if value is None else abs(value)),
)
lists = st.lists(candidates, max_size=40, unique_by=lambda each: each.episode_id)
options = st.builds(ScoringOptions, normalisation=st.sampled_from(NORMALISATIONS))
domains = st.none() | st.sampled_from(["code", "law"])


def candidate(
    number: int = 1,
    cosine: float | None = None,
    lexical: float | None = None,
    *,
    days: float = 10_000,
    outcome: str = "FAILURE",
    domain: str | None = None,
    accesses: int = 0,
) -> Candidate:
    at = NOW - timedelta(days=days)
    return Candidate(UUID(int=number), at, outcome, domain, accesses, cosine, lexical)


def parts(*given: Candidate, **changed: object) -> dict[int, Parts]:
    chosen = replace(OPTIONS, **changed)  # type: ignore[arg-type]
    return {c.episode_id.int: p for c, p in score(given, chosen, NOW, "code")}


class TestInvariants:
    @given(lists, options, domains)
    def test_terms_add_up_and_stay_within_their_weights(
        self, given_: list[Candidate], chosen: ScoringOptions, domain: str | None
    ) -> None:
        for _, p in score(given_, chosen, NOW, domain):
            assert isfinite(p.score)
            terms = (p.similarity, p.recency, p.success, p.accesses, p.domain)
            assert p.score == sum(terms)
            assert (-0.5 if chosen.normalisation == "raw" else 0) <= p.similarity <= 0.5
            assert 0 <= p.recency <= 0.2
            assert 0 <= p.accesses <= 0.1
            assert p.success in (0, 0.15)
            assert p.domain in (0, 0.05)

    @given(lists, options, domains, st.randoms())
    def test_all_candidates_are_scored_in_any_input_order(
        self, given_: list[Candidate], chosen: ScoringOptions, domain: str | None, random: object
    ) -> None:
        shuffled = list(given_)
        random.shuffle(shuffled)  # type: ignore[attr-defined]
        result = score(given_, chosen, NOW, domain)
        assert repr(result) == repr(score(shuffled, chosen, NOW, domain))  # NaN != NaN
        assert sorted(c.episode_id for c, _ in result) == sorted(c.episode_id for c in given_)
        keys = [(-p.score, c.episode_id) for c, p in result]
        assert keys == sorted(keys)

    @given(lists, options, domains)
    def test_higher_inputs_never_lower_the_score(
        self, given_: list[Candidate], chosen: ScoringOptions, domain: str | None
    ) -> None:
        known = [c for c in given_ if None not in (c.cosine, c.lexical)]
        known = [c for c in known if isfinite(c.cosine or 0) and isfinite(c.lexical or 0)]
        found = {c.episode_id: p.score for c, p in score(known, chosen, NOW, domain)}
        for one in known:
            for other in known:
                better = (
                    (one.cosine or 0) >= (other.cosine or 0)
                    and (one.lexical or 0) >= (other.lexical or 0)
                    and one.at >= other.at
                    and one.access_count >= other.access_count
                    and (one.outcome, one.domain) == (other.outcome, other.domain)
                )
                if better:
                    assert found[one.episode_id] >= found[other.episode_id] - 1e-12


def test_no_candidates_have_no_scores() -> None:
    assert score([], OPTIONS, NOW, "code") == []


class TestTerms:
    def test_terms_have_the_documented_values(self) -> None:
        one = candidate(1, 0.9, days=30, outcome="SUCCESS", domain="code", accesses=5)
        [(_, found)] = score([one], OPTIONS, NOW, "code")
        assert found.similarity == 0.5
        assert found.recency == pytest.approx(0.2 * exp(-1))
        assert found.success == 0.15
        assert found.accesses == pytest.approx(0.1 * log1p(5) / 10)
        assert found.domain == 0.05
        assert found.cosine == 0.9

    def test_only_success_has_the_success_bonus(self) -> None:
        for outcome in ("PARTIAL", "FAILURE", "CANCELLED"):
            assert parts(candidate(outcome=outcome))[1].success == 0

    def test_missing_domain_has_no_bonus(self) -> None:
        [(_, found)] = score([candidate(domain=None)], OPTIONS, NOW, None)
        assert found.domain == 0

    def test_accesses_count_up_to_a_bound(self) -> None:
        assert parts(candidate(accesses=10**9))[1].accesses == 0.1

    def test_episode_from_a_clock_ahead_counts_as_new(self) -> None:
        assert parts(candidate(days=-3))[1].recency == 0.2

    def test_weights_are_as_configured(self) -> None:
        found = parts(candidate(cosine=0.4, days=0), similarity=2.0, recency=0.0)[1]
        assert (found.similarity, found.recency) == (2.0, 0.0)


class TestSimilarity:
    def test_old_relevant_episode_comes_before_a_new_irrelevant_one(self) -> None:
        """Use cosines of 0.78 and 0.7: taken raw, recency alone would decide."""
        old, new = candidate(1, 0.78, days=300), candidate(2, 0.7, days=0)
        assert [c.episode_id.int for c, _ in score([old, new], OPTIONS, NOW, None)] == [1, 2]
        raw = replace(OPTIONS, normalisation="raw")
        assert [c.episode_id.int for c, _ in score([old, new], raw, NOW, None)] == [2, 1]

    def test_weak_embedder_does_not_lower_a_lexical_match(self) -> None:
        hit, other = candidate(1, 0.11, 0.6), candidate(2, 0.13, 0.0)
        alone = parts(replace(hit, cosine=None), replace(other, cosine=None))[1]
        found = parts(hit, other)[1]
        assert found.similarity == alone.similarity == 0.5

    def test_without_words_the_vectors_decide(self) -> None:
        found = parts(candidate(1, 0.9), candidate(2, 0.5), candidate(3, 0.1))
        assert [found[n].similarity for n in (1, 2, 3)] == [0.5, 0.25, 0.0]

    @pytest.mark.parametrize("normalisation", NORMALISATIONS)
    def test_candidates_without_a_common_word_have_no_similarity(
        self, normalisation: Normalisation
    ) -> None:
        for found in parts(candidate(1, None, 0.0), candidate(2, None, 0.0)).values():
            assert found.similarity == 0

    def test_equal_candidates_are_all_best(self) -> None:
        found = parts(candidate(1, 0.3), candidate(2, 0.3))
        assert found[1].similarity == found[2].similarity == 0.5

    def test_cosine_and_lexical_parts_add_up(self) -> None:
        every_word = 6 / pi**2
        found = parts(
            candidate(1, 0.2, every_word), candidate(2, 0.6, 0.0), candidate(3, 0.6, every_word / 2)
        )
        assert [found[n].cosine_normalised for n in (1, 2, 3)] == pytest.approx([0, 0.5, 0.5])
        assert [found[n].lexical_normalised for n in (1, 2, 3)] == pytest.approx([1, 0, 0.5])
        assert [found[n].similarity for n in (1, 2, 3)] == pytest.approx([0.5, 0, 0.5])

    def test_candidates_after_the_twentieth_have_no_similarity(self) -> None:
        found = parts(*(candidate(n, 1 - n / 100) for n in range(1, 31)))
        assert [n for n in found if found[n].similarity > 0] == list(range(1, 20))

    def test_page_of_fifty_is_compared_as_a_whole(self) -> None:
        found = parts(*(candidate(n, 1 - n / 200) for n in range(1, 101)))
        assert [n for n in found if found[n].similarity > 0] == list(range(1, 50))

    def test_raw_is_the_plain_cosine(self) -> None:
        found = parts(candidate(1, 0.3, 0.9), candidate(2, None, 0.4), normalisation="raw")
        assert (found[1].similarity, found[2].similarity) == (0.15, 0.2)

    @pytest.mark.parametrize("normalisation", NORMALISATIONS)
    def test_zero_vector_has_no_cosine(self, normalisation: Normalisation) -> None:
        found = parts(candidate(1, nan), candidate(2, 0.5), normalisation=normalisation)
        assert found[1].cosine is None
        assert found[1].similarity == 0
