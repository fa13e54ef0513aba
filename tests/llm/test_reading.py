"""Times at which long answers are read."""

from math import floor

from hypothesis import given
from hypothesis import strategies as st

from bottega.llm.dialects.answer import pause_of

TURNS = st.integers(0, 4)
WHOLE_MS = st.integers(0, 10**9).map(lambda ms: ms / 1000)


@given(WHOLE_MS, st.floats(0.2, 1000), TURNS)
def test_long_answers_are_read_at_common_moments(now: float, took_s: float, turn: int) -> None:
    """Check with an event loop that counts whole milliseconds, as uvloop's does."""
    pause_s = pause_of(now, took_s, turn)
    assert 0.005 <= pause_s <= 0.0551
    moment = (now + pause_s - 0.01 * turn) / 0.05
    assert abs(moment - floor(moment + 0.5)) < 1e-4
    later = now + floor(pause_s * 1000) / 1000  # the loop may wake too early
    assert pause_of(later, took_s, turn) > 0.004


@given(WHOLE_MS, st.floats(0, 0.01), TURNS)
def test_short_answers_wait_half_as_long_as_they_took(now: float, took_s: float, turn: int) -> None:
    assert pause_of(now, took_s, turn) == min(took_s / 2, pause_of(now, 1000, turn))
