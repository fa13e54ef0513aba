"""Sections of the working memory: entries with a budget of tokens, and their archive. Pure."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, NamedTuple

from bottega.memory.text.summaries import TokenCounter, cut, summary_of

GIST_TOKENS = 48
"""Most tokens of an archived entry, reference included, or of a shortened tool result."""
LABEL_BYTES = 48

RECENT = 5
"""Number of subtasks for which a result stays warm; older results are archived first."""
GISTS = 12
"""Number of archived results, the newest, that show a summary; others show only a reference."""
MEMORY_LIMIT = "memory_limit"

NotifyListener = Callable[[str, str], None]
"""Receiver of warnings: a code and a text."""


class Area(StrEnum):
    """The sections, in their order in prompts."""

    SYSTEM = "system"
    TASK = "task"
    STATE = "state"
    INTERMEDIATE = "intermediate"
    RETRIEVED = "retrieved"


_TITLES = {
    Area.SYSTEM: "System",
    Area.TASK: "Task",
    Area.STATE: "State of the work",
    Area.INTERMEDIATE: "Intermediate results",
    Area.RETRIEVED: "From earlier runs",
}


class Budgets(NamedTuple):
    """Most tokens of each section."""

    system: int = 2_000
    task: int = 5_000
    state: int = 3_000
    intermediate: int = 8_000
    retrieved: int = 2_000

    @property
    def total(self) -> int:
        return sum(self)

    def of(self, part: Area) -> int:
        tokens: int = getattr(self, part.value)
        return tokens


Key = tuple[str, ...]
"""The kind of an entry, and its name within the kind. The kind decides how entries are removed."""
RESULT, TRACE, EPISODE = "result", "trace", "episode"
NOTE, VARIABLE = "note", "variable"


@dataclass(slots=True)
class Entry:
    """An entry of a section.

    Attributes:
        text: text for prompts; ``None``: a summary, which is built at its first use.
        tokens: tokens of the entry in its section.
        turn: number of the subtask that added the entry.
        hot: true if the entry is removed only after all others.
        reference: reference to recall the full text, once the entry is archived.
        accessed: true once the entry was read.
    """

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
        filled: sum of the entries' tokens.
        gone: number of entries that show not even a reference, and the first and last reference.
    """

    def __init__(self, part: Area, budget: int, count: TokenCounter) -> None:
        self.title = _TITLES[part]
        self.budget = budget
        self.entries: dict[Key, Entry] = {}
        self.gone: tuple[int, str, str] | None = None
        self.warned = False
        self.filled = 0
        # tokens of the title, empty lines, and the line about entries that left
        self._frame = count(self.title) + 2 + count(_gone((10**9, "m" * 12, "m" * 12))) + 2

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
        """Append an entry; remove an older entry with this key."""
        self.remove(key)
        self.entries[key] = entry
        self.filled += entry.tokens

    def remove(self, key: Key) -> None:
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
        """Yield the section's lines for prompts, without the entry ``without``.

        All entries must have texts already."""
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
        self.entries = {tuple(key): Entry(*entry) for key, *entry in snapshot["entries"]}
        self.filled = sum(entry.tokens for entry in self.entries.values())


class Archive:
    """Immutable texts by reference, in the order of their arrival.

    Attributes:
        texts: all results, as ``m1``, ``m2`` …; other removed texts as ``v1``, ``v2`` …
        referred: references of results that later results use.
        turn: the number of the current subtask.
        others: number of ``v`` references.
    """

    def __init__(self, count: TokenCounter, listener: NotifyListener | None) -> None:
        self.texts: dict[str, str] = {}
        self.referred: set[str] = set()
        self.turn = 0
        self.others = 0
        self._count = count
        self._listener = listener

    def make_room(self, section: Section) -> None:
        """Shrink a section that exceeds its budget to three quarters of it, if possible."""
        if section.fits():
            return
        mark = section.room * 3 // 4
        for stage in (self.archive_old, self.shorten_traces, self.drop_unread):
            stage(section, mark)
            if section.fits():
                return
        if not section.warned:
            section.warned = True
            if self._listener is not None:
                self._listener(
                    MEMORY_LIMIT,
                    f"'{section.title}' needs more than its {section.budget} tokens; its older "
                    "parts are shortened",
                )
        self._squeeze(section, mark)

    def archive_old(self, section: Section, mark: int) -> None:
        """Archive unreferenced results older than ``RECENT`` subtasks; keep their references."""
        results = [(key, each) for key, each in section.entries.items() if key[0] == RESULT]
        old = (key for key, each in results if self.turn - each.turn > RECENT)
        self._shorten(section, (key for key in old if key[-1] not in self.referred), mark)
        archived = [key for key, each in results if each.reference is not None]
        self._leave(section, archived[:-GISTS])

    def shorten_traces(self, section: Section, mark: int) -> None:
        if section.filled <= mark:
            return
        traces = {
            key: entry
            for key, entry in section.entries.items()
            if key[0] == TRACE and entry.reference is None
        }
        if sum(entry.tokens for entry in traces.values()) <= GIST_TOKENS:
            return
        for key in traces:
            section.remove(key)
        reference = self._keep("\n".join(entry.text or "" for entry in traces.values()))
        summary = Entry("earlier steps", None, GIST_TOKENS, self.turn)
        summary.reference = reference
        section.put((TRACE, reference), summary)

    def drop_unread(self, section: Section, mark: int) -> None:
        """Remove retrieved entries that were never read; they can be retrieved again."""
        if section.filled > mark:
            for key, entry in list(section.entries.items()):
                if key[0] == EPISODE and not entry.accessed:
                    section.remove(key)

    def gist(self, section: Section, entry: Entry) -> None:
        """Set the text of an archived entry: its reference and summary."""
        reference = entry.reference or ""
        head = f"{reference} {entry.label} (shortened): "
        most = entry.tokens - self._count(head) - 1
        text = (
            head + summary_of(self.texts[reference], most, self._count) if most > 0 else reference
        )
        size = self._count(text) + 1
        if size > entry.tokens:
            text, size = "", entry.tokens
        section.change(entry, text, size)

    def _shorten(
        self, section: Section, keys: Iterable[Key], mark: int, size: int = GIST_TOKENS
    ) -> None:
        """Replace entries by a reference and a summary, until ``mark`` is reached."""
        for key in keys:
            if section.filled <= mark:
                return
            entry = section.entries[key]
            if entry.tokens > size:
                self._refer(key, entry)
                section.change(entry, None, size)

    def _leave(self, section: Section, keys: Iterable[Key], mark: int = -1) -> None:
        """Replace entries by their reference, until ``mark`` is reached."""
        for key in keys:
            if section.filled <= mark:
                return
            self._refer(key, section.entries[key])
            section.leave(key)

    def _refer(self, key: Key, entry: Entry) -> None:
        if entry.reference is None:
            entry.reference = key[-1] if key[0] == RESULT else self._keep(entry.text or "")

    def _keep(self, text: str) -> str:
        self.others += 1
        reference = f"v{self.others}"
        self.texts[reference] = text
        return reference

    def _squeeze(self, section: Section, mark: int) -> None:
        """Shrink a section until it fits: oldest entries first, hot entries last."""
        cold = [key for key, entry in section.entries.items() if not self._is_hot(key, entry)]
        self._shorten(section, cold, mark)
        self._leave(section, cold, mark)
        hot = list(section.entries)
        share = section.room // max(len(hot), 1)
        if share > 1:
            self._shorten(section, hot, section.room, share)
        self._leave(section, hot, section.room)

    def _is_hot(self, key: Key, entry: Entry) -> bool:
        return entry.hot or (key[0] == RESULT and self.turn - entry.turn <= 1)


def label_of(text: str) -> str:
    """Return a text as a short label on one line."""
    return cut(" ".join(text[:LABEL_BYTES].split()), LABEL_BYTES)


def _gone(gone: tuple[int, str, str]) -> str:
    number, first, last = gone
    return f"({number} more can be recalled: {first} to {last})"
