"""The sections of the working memory: what stands in each, and how many tokens it takes (spec
page 4, M1). Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from bottega.memory.summaries import TokenCounter, cut

GIST_TOKENS = 48
"""At most what stays of an entry whose text was archived: its reference and a summary."""
LABEL_BYTES = 48  # room for "episode:" and an id


class Part(StrEnum):
    """The sections, in the order in which a model reads them."""

    SYSTEM = "system"
    TASK = "task"
    STATE = "state"
    INTERMEDIATE = "intermediate"
    RETRIEVED = "retrieved"


@dataclass(frozen=True, slots=True)
class Budgets:
    """The most tokens of each section."""

    system: int = 2_000
    task: int = 5_000
    state: int = 3_000
    intermediate: int = 8_000
    retrieved: int = 2_000

    @property
    def total(self) -> int:
        """The limit of all sections together."""
        return sum(getattr(self, field.name) for field in fields(self))

    def of(self, part: Part) -> int:
        """The budget of one section."""
        tokens: int = getattr(self, part.value)
        return tokens


class Kind(StrEnum):
    """What an entry of a section is; it decides how it gets out of the way."""

    NOTE = "note"
    VARIABLE = "variable"
    RESULT = "result"
    TRACE = "trace"
    EPISODE = "episode"


Key = tuple[str, ...]


@dataclass(slots=True)
class Entry:
    """Something that stands in a section.

    Attributes:
        label: what it is called.
        text: as a model reads it; ``None``: a summary that is made when it is first asked for.
        tokens: that it takes in its section.
        turn: the number of the subtask in which it came.
        hot: it stays for as long as there is any room for it.
        reference: by which the whole of it can be recalled, once it was archived.
        accessed: somebody has read it.
    """

    kind: Kind
    label: str
    text: str | None
    tokens: int
    turn: int
    hot: bool = False
    reference: str | None = None
    accessed: bool = False


class Section:
    """Entries in the order in which they came, and the sum of their tokens.

    Attributes:
        entries: by key.
        gone: how many left without a trace; the references of the first and the last of them.
    """

    def __init__(self, title: str, budget: int, count: TokenCounter) -> None:
        self.title = title
        self.budget = budget
        self.entries: dict[Key, Entry] = {}
        self.gone: tuple[int, str, str] | None = None
        self.warned = False
        self._sum = 0
        # Title, empty lines, and the line about what is gone.
        self._frame = count(title) + 2 + count(_gone((10**9, "m" * 12, "m" * 12))) + 2

    @property
    def tokens(self) -> int:
        """What the section takes, its title included; 0 if there is nothing to read in it."""
        return self._sum + self._frame if self._shown else 0

    @property
    def _shown(self) -> bool:
        return bool(self.entries) or (self.gone is not None and self._frame <= self.budget)

    @property
    def room(self) -> int:
        """What entries may take in all."""
        return self.budget - self._frame

    @property
    def filled(self) -> int:
        """What the entries take."""
        return self._sum

    def fits(self) -> bool:
        """Whether the section keeps to its budget."""
        return not self.entries or self._sum <= self.room

    def put(self, key: Key, entry: Entry) -> None:
        """Add an entry at the end, in place of the one with that key."""
        self.remove(key)
        self.entries[key] = entry
        self._sum += entry.tokens

    def remove(self, key: Key) -> Entry | None:
        """Take an entry out, if it is there."""
        if (entry := self.entries.pop(key, None)) is not None:
            self._sum -= entry.tokens
        return entry

    def change(self, entry: Entry, text: str | None, tokens: int) -> None:
        """Let an entry of the section say something else."""
        self._sum += tokens - entry.tokens
        entry.text, entry.tokens = text, tokens

    def leave(self, key: Key) -> None:
        """Take out an entry that was archived, and note that there is more to recall."""
        entry = self.remove(key)
        assert entry is not None
        reference = entry.reference or ""
        number, first, _ = self.gone or (0, reference, reference)
        self.gone = (number + 1, first, reference)

    def lines(self, without: Key = ()) -> Iterator[str]:
        """The section as a model reads it, without one entry; all must have their texts."""
        texts = [each.text for key, each in self.entries.items() if each.text and key != without]
        if not self._shown or not (texts or self.gone):
            return
        yield f"## {self.title}"
        if self.gone is not None:
            yield _gone(self.gone)
        yield from texts

    def snapshot(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        return {
            "gone": self.gone and list(self.gone),
            "warned": self.warned,
            "entries": [
                [
                    list(key),
                    e.kind.value,
                    e.label,
                    e.text,
                    e.tokens,
                    e.turn,
                    e.hot,
                    e.reference,
                    e.accessed,
                ]
                for key, e in self.entries.items()
            ],
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Be what the snapshot was made of."""
        self.gone = tuple(snapshot["gone"]) if snapshot["gone"] else None
        self.warned = snapshot["warned"]
        self.entries = {
            tuple(key): Entry(Kind(kind), *rest) for key, kind, *rest in snapshot["entries"]
        }
        self._sum = sum(entry.tokens for entry in self.entries.values())


def label_of(text: str) -> str:
    """A name on one line, and short enough to stand beside something else."""
    return cut(" ".join(text[:LABEL_BYTES].split()), LABEL_BYTES)


def _gone(gone: tuple[int, str, str]) -> str:
    number, first, last = gone
    return f"({number} more can be recalled: {first} to {last})"
