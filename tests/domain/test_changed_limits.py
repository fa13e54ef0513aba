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
    share.settle({"granted": [limit or 0 for limit in before], "others": False, "again_s": None})
    admission = share.admit(5)
    assert admission is not None
    share.limits = ServerLimits(*after)
    share.release(admission, 5)
    assert share.report()["busy"] == [0, 0, 0]
