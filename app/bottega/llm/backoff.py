"""Delays between the tries of a failed call."""

from bottega.errors import ModelError

_FIRST_S = 0.5
_LONGEST_S = 30.0
_TAKEN_AT_ITS_WORD = 3


def delay_s(number: int, error: ModelError, unit: float) -> float:
    """Compute the seconds before the next try. Pure.

    The delay doubles from try to try up to 30 s; its second half is random. ``Retry-After``
    replaces it after the first three tries. Later it can only lengthen the delay: a server that
    always answers "0" must not be asked in a tight loop.

    Args:
    number: number of the failed try, from 1.
    unit: random number in [0, 1).
    """
    longest = min(_LONGEST_S, _FIRST_S * 2.0 ** min(number - 1, 10))
    own = longest * (1 + unit) / 2
    if error.retry_after_s is None:
        return own
    asked = error.retry_after_s + unit * _FIRST_S
    return asked if number <= _TAKEN_AT_ITS_WORD else max(asked, own)


def next_delay_s(number: int, error: ModelError, unit: float, left_s: float) -> float | None:
    """Compute the seconds before the next try, or ``None`` if no patience is left. Pure.

    The last try is made when the patience ends. A server that asks for a longer wait is not asked
    again.

    Args:
        left_s: seconds of patience that are left.
    """
    if left_s <= 0 or (error.retry_after_s or 0.0) > left_s:
        return None
    return min(left_s, delay_s(number, error, unit))


def out_of_patience(number: int, error: ModelError, patience_s: float) -> ModelError:
    """Make the error of a call without patience left, from the error of its last try. Pure."""
    asked = error.retry_after_s
    until = "" if asked is None else f"; the server asks to wait {asked:g} s"
    return ModelError(
        f"no answer after {number} tries within model_patience_s ({patience_s:g} s){until}: "
        f"{error.detail}",
        code="model_unavailable",
        retryable=True,
        retry_after_s=asked,
        last_code=error.code,
    )
