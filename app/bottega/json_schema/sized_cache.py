"""A cache of a function's results, bounded by bytes."""

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, TypeVar

T = TypeVar("T")


def sized_cache(
    most_bytes: int, *, size: Callable[[str, Any], int]
) -> Callable[[Callable[[str], T]], Callable[[str], T]]:
    """Cache the most recently used results of a function of one text, up to ``most_bytes``.

    Only one thread computes at a time.

    Args:
        size: returns the bytes that a text's result takes.
    """

    def decorate(make: Callable[[str], T]) -> Callable[[str], T]:
        kept: OrderedDict[str, tuple[T, int]] = OrderedDict()
        turn = Lock()
        held = 0

        @wraps(make)
        def cached(text: str) -> T:
            nonlocal held
            with turn:
                if text in kept:
                    kept.move_to_end(text)
                    return kept[text][0]
                made = make(text)
                took = size(text, made)
                kept[text] = made, took
                held += took
                while held > most_bytes and kept:
                    _, (_, gone) = kept.popitem(last=False)
                    held -= gone
                return made

        return cached

    return decorate
