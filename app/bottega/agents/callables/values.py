"""Results of callables as JSON."""

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
    Set,
    ValuesView,
)
from contextlib import aclosing, nullcontext
from typing import Any

from pydantic_core import to_jsonable_python

from bottega.agents.callers.context import current_context

_BASIC = (str, bool, int, type(None))


def as_json(value: Any) -> Any:
    """Return a value in JSON's types.

    Dataclasses, Pydantic models and other objects with public attributes are objects; named tuples,
    sets and iterators are lists; bytes are base64; dates, decimals, paths and the like are texts.

    Raises:
        TypeError: a part of it has no such form.
        ValueError: it contains itself.
    """
    if type(value) in _BASIC:
        return value
    return to_jsonable_python(value, fallback=_plain, inf_nan_mode="null", bytes_mode="base64")


def _plain(value: Any) -> Any:
    """Return an object that Pydantic does not know, in types that it knows."""
    kind: Any = type(value)
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        return dict(value)
    if callable(to_list := getattr(value, "tolist", None)):  # of numpy and array
        return to_list()
    if isinstance(value, Iterator | Sequence | Set | ValuesView):
        return list(value)
    if kind.__str__ is not object.__str__ and not isinstance(value, type):
        return str(value)
    shown = getattr(value, "__dict__", {})
    public = {name: each for name, each in shown.items() if not name.startswith("_")}
    if callable(value) or not public:
        raise TypeError(
            f"the tool has run, but its result has a {kind.__name__}, which has no form in JSON; "
            "let it return a dict, a list, a text, a number or a dataclass"
        )
    return public


def listed(function: Callable[[], Any]) -> Any:
    """Call a function; of an iterator return the items, read as long as the call is not over."""
    value = function()
    if not isinstance(value, Iterator):
        return value
    context = current_context.get()
    found = []
    for each in value:
        if context is not None and context.cancel.is_cancelled:
            break
        found.append(each)
    return found


async def listed_async(values: AsyncIterator[Any]) -> list[Any]:
    """Return the items of an asynchronous iterator, and close it if it is a generator."""
    async with aclosing(values) if isinstance(values, AsyncGenerator) else nullcontext():
        return [each async for each in values]
