"""How long to wait before a failed call is made again."""

from app.errors import ModelError

_FIRST_S = 0.5
_LONGEST_S = 20.0
_LONGEST_ASKED_S = 60.0


def delay_s(number: int, error: ModelError, unit: float) -> float:
    """Seconds before the next try: full jitter, after what the server asked for. Pure.

    Args:
        number: of the try that failed, from 1.
        unit: chance, in [0, 1).
    """
    if error.retry_after_s is not None:
        return min(error.retry_after_s, _LONGEST_ASKED_S) + unit * _FIRST_S
    return unit * min(_LONGEST_S, _FIRST_S * 2.0 ** (number - 1))
