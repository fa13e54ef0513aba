"""Content words of messages, and the floor that cosines must reach."""

from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.engine.retrieval import tells_a_topic
from bottega.llm.builtin_embedder import BuiltinEmbedder
from bottega.memory.episodes.scoring import is_relevant
from bottega.memory.text import content
from bottega.memory.text.content import MOST_WORDS, content_words
from bottega.memory.text.embeddings import Background, floor_of, measured_background


def count(text: str) -> int:
    return content_words(text).count()


@pytest.mark.parametrize(
    "text",
    [
        "Another story please",
        "Hello, could you please help me?",
        "Thank you so much for your help!",
        "Grazie mille, sei stato gentilissimo!",
        "Könnten Sie mir bitte helfen? Vielen Dank!",
        "Merci beaucoup, pourriez-vous m'aider s'il vous plaît ?",
        "¿Me puedes ayudar, por favor? ¡Muchas gracias!",
        "お願いします、ありがとうございます。",
        "谢谢你的帮助",
        "OK",
        "",
        "👍",
    ],
)
def test_courtesy_is_no_topic(text: str) -> None:
    assert not tells_a_topic(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Where is the refund for my headphones?", ["refund", "headphones"]),
        ("Per favore mandami la fattura di marzo", ["fattura", "marzo"]),
        ("Bitte den Lieferschein fürs Büro drucken", ["Lieferschein", "fürs", "Büro", "drucken"]),
        ("l'imprimante de l'hôtel", ["imprimante", "hôtel"]),
        ("Refund, refund, REFUND", ["Refund"]),
    ],
)
def test_content_words_stand_in_the_texts_own_spelling(text: str, words: list[str]) -> None:
    assert content_words(text).texts == words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("KX-20931", 2),
        ("E1042", 2),
        ("4471", 2),
        ("ERR_CONNECTION_RESET", 2),
        ("ECONNREFUSED", 2),
        ("NullPointerException", 2),
        ("77", 1),
        ("refund", 1),
        ("プリンター", 2),
        ("打印机", 1),
        ("会議報告", 2),
        ("猫", 0),
        ("ありがとう", 0),
    ],
)
def test_identifiers_and_long_runs_count_more(text: str, expected: int) -> None:
    assert count(text) == expected


def test_letters_that_pairs_share_count_once() -> None:
    words = content_words("会議報告")
    assert words.texts == ["会議", "議報", "報告"]
    assert [words.count({place}) for place in range(3)] == [1, 1, 1]
    assert words.count({0, 1}) == 1
    assert words.count({0, 2}) == 2


def test_a_text_of_stop_words_may_be_searched_for_and_counts_nothing() -> None:
    words = content_words("the order of this")
    assert words.texts == ["the", "order", "of", "this"]
    assert words.count() == 0
    assert words.some(range(4)) == []


@given(st.text(max_size=300))
def test_any_text_has_few_words_that_count_at_most_once(text: str) -> None:
    words = content_words(text)
    assert len(words.texts) == len(set(words.texts)) <= MOST_WORDS
    assert 0 <= words.count(range(len(words.texts) // 2)) <= words.count()
    assert all(len(word.text) >= 1 and "\x00" not in word.text for word in words.words)


def test_the_lists_of_courtesies_are_short_and_plain() -> None:
    lines = Path(content.__file__).with_name("courtesy.txt").read_text("utf-8").splitlines()
    texts = [line for line in lines if line and not line.startswith("#")]
    sections = [
        [word for line in group for word in line.split()]
        for is_name, group in groupby(texts, lambda line: line.startswith("["))
        if not is_name
    ]
    assert len(sections) >= 6
    for words in sections:
        assert len(words) <= 150
        assert len(words) == len(set(words))
        assert words == [content._folded(word) for word in words]


# --- Floors


def test_words_alone_need_two() -> None:
    for shared, expected in ((0, False), (1, False), (2, True)):
        assert is_relevant(shared, None, None, by_meaning=False) is expected
        assert is_relevant(shared, 0.1, 0.4, by_meaning=False) is expected


def test_spelling_needs_a_word() -> None:
    assert is_relevant(1, 0.5, 0.4, by_meaning=False)
    assert not is_relevant(0, 0.5, 0.4, by_meaning=False)


def test_where_meaning_is_compared_its_floor_decides() -> None:
    assert is_relevant(0, 0.5, 0.4, by_meaning=True)
    assert not is_relevant(9, 0.3, 0.4, by_meaning=True)
    assert is_relevant(2, None, None, by_meaning=True), "the episode has no vector yet"


def test_a_text_is_no_part_of_the_mean_that_it_is_compared_with() -> None:
    """Measure texts that have nothing in common: their median is that of a query, 0."""
    texts = np.eye(20, dtype=np.float32)
    background = measured_background(texts, texts, ~np.eye(20, dtype=bool))
    assert background.median == pytest.approx(0, abs=1e-6)
    assert background.mean == pytest.approx(np.full(20, 0.05))


def test_two_shared_words_lower_the_floor() -> None:
    query = np.zeros(768, np.float32)
    query[0] = 1
    embedder = BuiltinEmbedder()
    assert floor_of(embedder, query, None) == pytest.approx((0.42, 0.14))
    found = floor_of(embedder, query, Background(query * np.float32(0.1), 0.0, 0.015))
    assert found == pytest.approx((0.2725, 0.12))
