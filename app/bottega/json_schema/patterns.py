r"""Users' regular expressions, with limits of their size. Matching takes linear time.

The engine is Rust's ``regex``, in pydantic-core. While the engine compiles or matches, it holds
Python's global lock (GIL), so all threads wait. The engine copies a repeated part of a pattern for
each repetition. The expanded size determines the time, so this size is limited. A Unicode class
such as ``\w`` adds about 40 KB to the automaton. An expensive pattern is first compiled in a
separate process (``python -m`` this module), as a test.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock

from cachetools import LRUCache, cached
from pydantic_core import (
    SchemaError,
    SchemaValidator,
    ValidationError,
    core_schema,
    from_json,
    to_json,
)

from bottega.errors import InvalidInputError

LONGEST = 1000
"""Maximum number of characters of a pattern."""
MOST_IN_TOOL = 50
MOST_IN_AGENT = 200
MOST_REPEATS = 1000
"""Maximum product of nested repeats."""
MOST_BYTES = 32_000_000
"""Maximum estimated size in bytes of an agent's distinct compiled patterns."""
MOST_CACHED_BYTES = 64_000_000

_CODE = "pattern_too_large"
_TOO_MUCH = (
    "the patterns of the agent's tools take too much memory: repeat less, or write [A-Za-z0-9_] "
    "for \\w"
)
_OVERHEAD = 100_000
"""Bytes of a cached pattern in addition to its compiled form, for buffers of the engine."""
_CHARACTER = 400
_DIGITS = 5_000
_UNICODE = 40_000
_OTHER_ENGINES = re.compile(r"\(\?<?[=!]|\\[1-9]")
_REPEAT = re.compile(r"\{\s*([0-9]+)\s*(?:,\s*([0-9]*)\s*)?\}")
_GROUP = re.compile(r"\(\?(P?<|([a-zA-Z-]*)[:)])")
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|b\{[a-z-]+\}|[pP].|.)", re.DOTALL)


class UnsupportedPatternError(InvalidInputError):
    """A pattern has look-around or back-references, which the engine does not support."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a pattern after the expansion of its repeats.

    Attributes:
        bytes: estimated size of the compiled pattern, in bytes.
        states: number of characters and classes. The match time per byte of text is proportional
            to this number.
        repeats: largest product of the counts of nested repeats: 6 for ``(a{2}){3}``.
    """

    bytes: int = 0
    states: int = 0
    repeats: int = 1

    def __add__(self, other: "Size") -> "Size":
        return Size(
            self.bytes + other.bytes,
            self.states + other.states,
            max(self.repeats, other.repeats),
        )

    def times(self, count: int) -> "Size":
        return Size(self.bytes * count, self.states * count, self.repeats * count)


def size_of(pattern: str) -> Size:
    """Measure a pattern. The time is linear in the pattern's length.

    Raises:
        InvalidInputError: the pattern is too long, or has the flag ``x``, which ignores spaces.
    """
    if len(pattern) > LONGEST:
        raise InvalidInputError(f"a pattern is longer than {LONGEST} characters", code=_CODE)
    return _Measure(pattern).size


def check_patterns(patterns: Mapping[str, Mapping[str, str]]) -> None:
    """Measure and compile the patterns of an agent's tools. Call this slow function in a thread.

    Raises:
        InvalidInputError: see :func:`measure_patterns` and :func:`compile_patterns`.
    """
    measure_patterns(patterns)
    compile_patterns(patterns)


def measure_patterns(patterns: Mapping[str, Mapping[str, str]]) -> int:
    """Check the number and sizes of an agent's patterns. Return their compiled size in bytes.

    Args:
        patterns: patterns by tool and JSON Pointer.

    Raises:
        InvalidInputError: ``pattern_too_large``; ``pointer`` leads to the pattern.
    """
    total, left = 0, MOST_BYTES
    distinct: set[str] = set()
    for of_tool in patterns.values():
        for number, (pointer, pattern) in enumerate(of_tool.items(), 1):
            total += 1
            with _pointing(pointer):
                _check_number(number, total)
                size = size_of(pattern)
                if pattern not in distinct:
                    _check_size(size, left)
                    left -= size.bytes
            distinct.add(pattern)
    return MOST_BYTES - left


def compile_patterns(patterns: Mapping[str, Mapping[str, str]]) -> None:
    """Compile measured patterns, except patterns that the engine does not support.

    All other threads wait: about 12 ms for each million bytes of the patterns' size.

    Raises:
        InvalidInputError: a pattern is invalid or too large (``pattern_too_large``); ``pointer``
            leads to the pattern.
    """
    for of_tool in patterns.values():
        for pointer, pattern in of_tool.items():
            with _pointing(pointer), suppress(UnsupportedPatternError):
                compiled(pattern)


def is_supported(pattern: str) -> bool:
    """Return false for a pattern with look-around or back-references."""
    if not _OTHER_ENGINES.search(pattern):
        return True
    try:
        compiled(pattern)
    except UnsupportedPatternError:
        return False
    except InvalidInputError:
        return True
    return True


@contextmanager
def _pointing(pointer: str) -> Iterator[None]:
    """Add a JSON Pointer to errors that the ``with`` block raises."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(error.detail, code=error.code, pointer=pointer) from None


def _check_number(in_tool: int, in_agent: int) -> None:
    if in_tool > MOST_IN_TOOL or in_agent > MOST_IN_AGENT:
        raise InvalidInputError(
            f"at most {MOST_IN_TOOL} patterns per tool and {MOST_IN_AGENT} per agent: "
            "remove some patterns",
            code=_CODE,
        )


def _check_size(size: Size, left: int) -> None:
    if size.repeats > MOST_REPEATS:
        raise InvalidInputError(
            f"nested repeats multiply to more than {MOST_REPEATS}: use smaller repeats",
            code=_CODE,
        )
    if size.bytes > left:
        raise InvalidInputError(_TOO_MUCH, code=_CODE)


@dataclass(frozen=True, slots=True)
class Compiled:
    validator: SchemaValidator
    size: Size

    def found_in(self, text: str) -> bool:
        """Return true if a part of the text matches. Takes up to 25 ns x states x bytes of text."""
        try:
            self.validator.validate_python(text)
        except ValidationError:
            return False
        return True


@cached(LRUCache(MOST_CACHED_BYTES, lambda made: _OVERHEAD + made.size.bytes), lock=Lock())
def compiled(pattern: str) -> Compiled:
    """Return a compiled pattern, from the cache if possible.

    Raises:
        InvalidInputError: ``pattern_too_large``, or the pattern is not supported.
    """
    size = size_of(pattern)
    _check_size(size, MOST_BYTES)
    try:
        schema = core_schema.str_schema(pattern=pattern, regex_engine="rust-regex")
        return Compiled(SchemaValidator(schema), size)
    except SchemaError as error:
        if "size limit" in str(error):
            raise InvalidInputError(_TOO_MUCH, code=_CODE) from None
        shown = f"the pattern {pattern[:100]!r} is not supported"
        if "not supported" in str(error):  # the engine's error for look-around and back-references
            raise UnsupportedPatternError(f"{shown}: it has look-around or references") from None
        raise InvalidInputError(f"{shown}: it is not a valid regular expression") from None


class _Measure:
    """Scanner that measures a pattern. Syntax errors are found later, by the engine."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        groups: list[list[Size]] = [[]]
        while self._at < len(pattern):
            self._step(groups)
        self.size = sum((item for group in groups for item in group), Size())

    def _step(self, groups: list[list[Size]]) -> None:
        here, items = self._pattern[self._at], groups[-1]
        if here == "(":
            self._open_group(groups)
        elif here == ")":
            self._at += 1
            if len(groups) > 1:
                groups.pop()
                groups[-1].append(sum(items, Size()))
        elif (repeat := _REPEAT.match(self._pattern, self._at)) and items:
            self._at = repeat.end()
            items.append(items.pop().times(_count(repeat)))
        elif here == "[":
            items.append(self._class())
        elif here == "\\":
            items.append(self._escape())
        else:
            self._at += 1
            if here not in "*+?|":
                items.append(Size(_CHARACTER, 1))

    def _open_group(self, groups: list[list[Size]]) -> None:
        opening = _GROUP.match(self._pattern, self._at)
        if opening is None:
            self._at += 1
        elif "x" in (opening[2] or ""):
            raise InvalidInputError("the flag x is not supported: remove the flag and the spaces")
        else:
            self._at = opening.end()
            if opening[0].endswith(")"):
                return
        groups.append([])

    def _escape(self) -> Size:
        escape = _ESCAPE.match(self._pattern, self._at)
        text = "\\" if escape is None else escape[0]
        self._at += len(text)
        kind = text[1:2]
        if kind in ("w", "W", "p", "P"):
            return Size(_UNICODE, 1)
        if kind in ("d", "D"):
            return Size(_DIGITS, 1)
        return Size(_CHARACTER, 1)

    def _class(self) -> Size:
        depth, largest, members = 0, 0, 0
        while self._at < len(self._pattern):
            here = self._pattern[self._at]
            if here == "[":
                depth += 1
                self._begin_class()
            elif here == "]":
                depth -= 1
                self._at += 1
                if depth == 0:
                    break
            elif here == "\\":
                largest = max(largest, self._escape().bytes)
                members += 1
            else:
                self._at += 1
                members += 1
        return Size(max(largest, _CHARACTER) + _CHARACTER * members, 1)

    def _begin_class(self) -> None:
        """Skip ``[``, ``^`` and the literal characters that may follow them."""
        pattern, at = self._pattern, self._at + 1
        at += pattern.startswith("^", at)
        start = at
        while pattern.startswith("-", at):
            at += 1
        if at == start:
            at += pattern.startswith("]", at)
        self._at = at


def _count(repeat: re.Match[str]) -> int:
    least, most = (int((text or "").lstrip("0")[:9] or 0) for text in repeat.groups())
    return max(least, most, 1)


def command() -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment of a process that calls :func:`main`."""
    path = os.pathsep.join(filter(None, sys.path))
    arguments = [sys.executable, "-P", "-m", "bottega.json_schema.patterns"]
    return arguments, {**os.environ, "PYTHONPATH": path}


def main() -> None:
    """Read patterns as JSON from standard input, compile them, and print an error or ``null``."""
    try:
        compile_patterns(from_json(sys.stdin.buffer.read()))
    except InvalidInputError as error:
        found = {"detail": error.detail, "code": error.code, "pointer": error.pointer}
        sys.stdout.buffer.write(to_json(found))
    else:
        sys.stdout.buffer.write(b"null")


if __name__ == "__main__":
    main()
