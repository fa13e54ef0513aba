"""Limits of a model server that change while a call is under way."""

import pytest

from bottega.llm.limits import ServerLimits, Share


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, None, 10), (None, None, 10)),
        ((None, None, 10), (1, None, 10)),
        ((1, 5, 9), (1, 5, None)),
    ],
)
def test_a_call_returns_what_it_took(
    before: tuple[int | None, ...], after: tuple[int | None, ...]
) -> None:
    share = Share(ServerLimits(*before))
    share.apply_answer([limit or 0 for limit in before], None)
    permit = share.admit(5)
    assert permit is not None
    share.limits = ServerLimits(*after)
    share.release(permit, 0)
    calls, _, tokens = share.in_use
    assert (calls, tokens) == (0, 0)
