"""Summaries without a model."""

from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.agents.parts import estimated_tokens
from bottega.memory.text.summaries import GAP, MAX_READ, cut, summary_of
from tests.examples import examples

texts = st.text(alphabet=st.characters(), max_size=400) | st.lists(
    st.sampled_from(["Error: no 42", "a" * 300, "ok.", " ", "née", "x, y; z", "\n", '{"a": 1}']),
    max_size=60,
).map(" ".join)


@given(texts, st.integers(-1, 60))
def test_summary_is_deterministic_and_never_longer_than_asked(text: str, most: int) -> None:
    summary = summary_of(text, most)
    assert estimated_tokens(summary) <= max(most, 0)
    assert summary_of(text, most) == summary
    if estimated_tokens(text) <= most:
        assert summary == text


@given(texts, st.integers(0, 40))
@settings(max_examples=examples(50))
def test_summary_respects_any_token_counter(text: str, most: int) -> None:
    def words(text: str) -> int:
        return 3 * len(text.split())

    assert words(summary_of(text, most, words)) <= most


@given(texts, st.integers(0, 100))
def test_cut_text_fits_its_room(text: str, room: int) -> None:
    assert len(cut(text, room).encode("utf-8", "surrogatepass")) <= room


def test_errors_numbers_and_both_ends_are_kept() -> None:
    lines = [f"nothing happens here, {word} and again" for word in "abcdefghijklmnopqrstuvwxyz"]
    lines[9] = "the build failed in step_7"
    lines[15] = "17 rows were read"
    text = "\n".join(["The import begins.", *lines, "The import is over."])
    summary = summary_of(text, 40)
    assert summary.startswith("The import begins.")
    assert summary.endswith("The import is over.")
    assert "the build failed in step_7" in summary
    assert "17 rows were read" in summary
    assert GAP in summary


def test_repeated_line_is_kept_once() -> None:
    summary = summary_of("retry failed\n" * 1_000 + "stopped after 1000 tries", 50)
    assert summary.count("retry failed") == 1
    assert "stopped after 1000 tries" in summary


def test_only_the_ends_of_a_huge_text_are_read() -> None:
    ends = "first words" + "x" * MAX_READ, "x" * MAX_READ + "\nlast words 7"
    huge = summary_of(ends[0] + "Error 5\n" * 1_000_000 + ends[1], 100)
    assert "Error 5" not in huge
    assert huge.startswith("first")
    assert huge.endswith("last words 7")
