"""How a section of the working memory gets smaller, and where what was in it goes (spec page 4, M5
and M6). Pure."""

from collections.abc import Callable, Iterable

from bottega.memory.sections import GIST_TOKENS, Entry, Key, Kind, Section
from bottega.memory.summaries import TokenCounter, summary_of

RECENT = 5
"""Results of so many subtasks back are warm; older ones are the first to be archived."""
GISTS = 12
"""So many archived results are shown by a summary, the newest; older ones only by reference."""
MEMORY_LIMIT = "memory_limit"

Listener = Callable[[str, str], None]
"""Told a warning: its code, and a text."""


class Archive:
    """Texts by reference, in the order in which they came; none of them ever changes.

    Attributes:
        texts: results from the moment they came, as ``m1``, ``m2`` …; whatever else had to make
            room as ``v1``, ``v2`` …
        referred: references that later results build on.
        turn: the number of the subtask that is worked on.
        others: how many of the second sort there are.
    """

    def __init__(self, count: TokenCounter, listener: Listener | None) -> None:
        self.texts: dict[str, str] = {}
        self.referred: set[str] = set()
        self.turn = 0
        self.others = 0
        self._count = count
        self._listener = listener

    def make_room(self, section: Section) -> None:
        """Make a section fit its budget, and leave some room for what comes next."""
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
                    f"'{section.title}' has no room within its {section.budget} tokens for all "
                    "that is needed; older parts of it are shortened",
                )
        self._squeeze(section, mark)

    def archive_old(self, section: Section, mark: int) -> None:
        """Results of more than 5 subtasks ago that nothing refers to: a reference stays."""
        old = (
            (key, entry)
            for key, entry in section.entries.items()
            if entry.kind is Kind.RESULT
            and self.turn - entry.turn > RECENT
            and key[-1] not in self.referred
        )
        self._archive(section, old, mark)
        shortened = [
            key
            for key, entry in section.entries.items()
            if entry.kind is Kind.RESULT and entry.reference is not None
        ]
        for key in shortened[:-GISTS]:
            section.leave(key)

    def shorten_traces(self, section: Section, mark: int) -> None:
        """All traces become one summary."""
        if section.filled <= mark:
            return
        traces = {
            key: entry
            for key, entry in section.entries.items()
            if entry.kind is Kind.TRACE and entry.reference is None
        }
        if sum(entry.tokens for entry in traces.values()) <= GIST_TOKENS:
            return
        whole = "\n".join(entry.text or "" for entry in traces.values())
        for key in traces:
            section.remove(key)
        reference = self._keep(whole)
        summary = Entry(Kind.TRACE, "earlier steps", None, GIST_TOKENS, self.turn)
        summary.reference = reference
        section.put(("state", reference), summary)

    def drop_unread(self, section: Section, mark: int) -> None:
        """What was retrieved and never read goes; it can be retrieved again."""
        if section.filled <= mark:
            return
        for key in [
            key
            for key, entry in section.entries.items()
            if entry.kind is Kind.EPISODE and not entry.accessed
        ]:
            section.remove(key)

    def gist(self, section: Section, entry: Entry) -> None:
        """Give an archived entry the text that stands for it."""
        head = f"{entry.reference} {entry.label} (shortened): "
        most = entry.tokens - self._count(head) - 1
        body = self.texts[entry.reference or ""]
        text = head + summary_of(body, most, self._count) if most > 0 else entry.reference or ""
        size = self._count(text) + 1
        if size > entry.tokens:
            text, size = "", entry.tokens
        section.change(entry, text, size)

    def _archive(self, section: Section, entries: Iterable[tuple[Key, Entry]], mark: int) -> None:
        """Leave a reference and a summary of each, until ``mark`` is reached."""
        for key, entry in entries:
            if section.filled <= mark:
                return
            if entry.reference is None and entry.tokens > GIST_TOKENS:
                self._refer(key, entry)
                section.change(entry, None, GIST_TOKENS)

    def _refer(self, key: Key, entry: Entry) -> None:
        """Give an entry that has none its reference."""
        if entry.reference is None:
            entry.reference = key[-1] if entry.kind is Kind.RESULT else self._keep(entry.text or "")

    def _keep(self, text: str) -> str:
        self.others += 1
        reference = f"v{self.others}"
        self.texts[reference] = text
        return reference

    def _squeeze(self, section: Section, mark: int) -> None:
        """Make it fit whatever it takes: the oldest first, and what is hot last."""
        cold = [(key, entry) for key, entry in section.entries.items() if not self._is_hot(entry)]
        self._archive(section, cold, mark)
        for key, entry in cold:
            if section.filled <= mark:
                break
            self._refer(key, entry)
            section.leave(key)
        if section.fits():
            return
        hot = [(key, entry) for key, entry in section.entries.items() if self._is_hot(entry)]
        share = section.room // max(len(hot), 1)
        for key, entry in hot:
            if entry.tokens > share:
                self._refer(key, entry)
                if share > 1:
                    section.change(entry, None, share)
                else:
                    section.leave(key)
        for key in list(section.entries):
            if section.fits():
                break
            self._refer(key, section.entries[key])
            section.leave(key)

    def _is_hot(self, entry: Entry) -> bool:
        recent = entry.kind is Kind.RESULT and self.turn - entry.turn <= 1
        return entry.hot or recent
