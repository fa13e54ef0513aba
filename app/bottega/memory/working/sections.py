"""Sections of the working memory: entries with a budget of tokens. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from bottega.memory.text.summaries import TokenCounter, cut

GIST_TOKENS = 48
"""Most tokens of an archived entry: its reference and a summary."""
LABEL_BYTES = 48  # room for "episode:" and an id


class Area(StrEnum):
    """The sections, in their order in prompts."""

    SYSTEM = "system"
    TASK = "task"
    STATE = "state"
    INTERMEDIATE = "intermediate"
    RETRIEVED = "retrieved"


@dataclass(frozen=True, slots=True)
class Budgets:
    """Most tokens of each section."""

    system: int = 2_000
    task: int = 5_000
    state: int = 3_000
    intermediate: int = 8_000
    retrieved: int = 2_000

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def of(self, part: Area) -> int:
        tokens: int = getattr(self, part.value)
        return tokens


class Kind(StrEnum):
    """The kind of an entry; it determines how the entry makes room."""

    NOTE = "note"
    VARIABLE = "variable"
    RESULT = "result"
    TRACE = "trace"
    EPISODE = "episode"


Key = tuple[str, ...]


@dataclass(slots=True)
class Entry:
    """An entry of a section.

    Attributes:
        text: as in prompts; ``None``: a summary, built on first use.
        tokens: in its section.
        turn: number of the subtask that added it.
        hot: stays as long as there is any room.
        reference: recalls the full text, once it is archived.
        accessed: true once it was read.
    """

    kind: Kind
    label: str
    text: str | None
    tokens: int
    turn: int
    hot: bool = False
    reference: str | None = None
    accessed: bool = False


_ENTRY = tuple(each.name for each in fields(Entry))


class Section:
    """Entries in the order of insertion, and the sum of their tokens.

    Attributes:
        filled: sum of their tokens.
        gone: number of entries that left completely, with the first and last of their references.
    """

    def __init__(self, title: str, budget: int, count: TokenCounter) -> None:
        self.title = title
        self.budget = budget
        self.entries: dict[Key, Entry] = {}
        self.gone: tuple[int, str, str] | None = None
        self.warned = False
        self.filled = 0
        # title, empty lines, and the line about entries that left
        self._frame = count(title) + 2 + count(_gone((10**9, "m" * 12, "m" * 12))) + 2

    @property
    def tokens(self) -> int:
        """Tokens of the section with its title; 0 if it is empty."""
        return self.filled + self._frame if self._is_rendered else 0

    @property
    def _is_rendered(self) -> bool:
        return bool(self.entries) or (self.gone is not None and self._frame <= self.budget)

    @property
    def room(self) -> int:
        """Most tokens of all entries together."""
        return self.budget - self._frame

    def fits(self) -> bool:
        return not self.entries or self.filled <= self.room

    def put(self, key: Key, entry: Entry) -> None:
        """Append an entry, replacing the one with that key."""
        self.remove(key)
        self.entries[key] = entry
        self.filled += entry.tokens

    def remove(self, key: Key) -> None:
        """Remove the entry with that key, if there is one."""
        if (entry := self.entries.pop(key, None)) is not None:
            self.filled -= entry.tokens

    def change(self, entry: Entry, text: str | None, tokens: int) -> None:
        self.filled += tokens - entry.tokens
        entry.text, entry.tokens = text, tokens

    def leave(self, key: Key) -> None:
        """Remove an archived entry, and count it in ``gone``."""
        reference = self.entries[key].reference or ""
        self.remove(key)
        number, first, _ = self.gone or (0, reference, reference)
        self.gone = (number + 1, first, reference)

    def lines(self, without: Key = ()) -> Iterator[str]:
        """Yield the section's lines for prompts, without one entry. All entries need texts."""
        texts = [each.text for key, each in self.entries.items() if each.text and key != without]
        if not self._is_rendered or not (texts or self.gone):
            return
        yield f"## {self.title}"
        if self.gone is not None:
            yield _gone(self.gone)
        yield from texts

    def snapshot(self) -> dict[str, Any]:
        return {
            "gone": self.gone and list(self.gone),
            "warned": self.warned,
            "entries": [
                [list(key), *(getattr(entry, name) for name in _ENTRY)]
                for key, entry in self.entries.items()
            ],
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        self.gone = tuple(snapshot["gone"]) if snapshot["gone"] else None
        self.warned = snapshot["warned"]
        self.entries = {
            tuple(key): Entry(Kind(kind), *rest) for key, kind, *rest in snapshot["entries"]
        }
        self.filled = sum(entry.tokens for entry in self.entries.values())


def label_of(text: str) -> str:
    """Return a text as a short label on one line."""
    return cut(" ".join(text[:LABEL_BYTES].split()), LABEL_BYTES)


def _gone(gone: tuple[int, str, str]) -> str:
    number, first, last = gone
    return f"({number} more can be recalled: {first} to {last})"
