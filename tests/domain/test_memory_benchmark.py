"""The memory benchmark's corpus and measures."""

import pytest

from benchmarks.memory.corpus import LATEST_DAYS, OLD_DAYS, corpus
from benchmarks.memory.intents import failures, intents
from benchmarks.memory.measures import interval, measured
from bottega.llm.builtin_embedder import features, stem, words

SMALL = {"size": 400, "per_class": 4}


def content(text: str) -> set[str]:
    """Return the stems of all words except stop words (a stop word has a single feature)."""
    bag = words(text.replace("{e}", ""))
    return {stem(word) for word in bag if len(features(word)) > 4}


def test_questions_in_other_words_share_no_stem_with_the_stored_text() -> None:
    for intent in intents():
        stored, asked = (
            {word for phrase in phrases for word in content(phrase)}
            for phrases in (intent.stored, intent.asked)
        )
        assert not stored & asked, intent.key


def test_every_domain_has_failures() -> None:
    assert {each.domain for each in failures()} == {each.domain for each in intents()}


def test_seed_determines_the_corpus() -> None:
    assert corpus(3, **SMALL) == corpus(3, **SMALL)
    assert corpus(3, **SMALL).episodes != corpus(4, **SMALL).episodes


def test_each_question_has_answers_of_its_class() -> None:
    made = corpus(5, **SMALL)
    assert len(made.episodes) == SMALL["size"]
    for query in made.queries:
        relevant = [made.episodes[number] for number in query.relevant]
        assert relevant
        if query.name == "latest":
            assert max(told.age_days for told in relevant) <= LATEST_DAYS
        if query.name == "old":
            assert min(told.age_days for told in relevant) >= OLD_DAYS[0]
        if query.name == "identifier":
            assert {told.ticket in query.text for told in relevant} == {True}
        if query.failures_only:
            assert {told.outcome for told in relevant} == {"FAILURE"}


def test_measures_of_a_ranking() -> None:
    perfect = measured([1, 2, 3], {1, 2, 3})
    assert (perfect.recall5, perfect.recall10, perfect.ndcg10, perfect.any10) == (1, 1, 1, 1)
    half = measured([9, 1, 8, 7, 6, 2], {1, 2})
    assert (half.recall5, half.recall10, half.any10) == (0.5, 1, 1)
    assert half.ndcg10 == pytest.approx((1 / 1.58496 + 1 / 2.80735) / (1 + 1 / 1.58496), abs=1e-4)
    assert measured([9], {1}).any10 == 0


def test_confidence_interval_holds_the_mean_and_narrows_with_more_values() -> None:
    low, high = interval([0, 1] * 20)
    assert low < 0.5 < high
    narrow_low, narrow_high = interval([0, 1] * 200)
    assert narrow_high - narrow_low < high - low
