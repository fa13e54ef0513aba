"""Archive of the working memory: shrinks full sections, keeps removed texts. Pure."""

from collections.abc import Callable, Iterable

from bottega.memory.text.summaries import TokenCounter, summary_of
from bottega.memory.working.sections import GIST_TOKENS, Entry, Key, Kind, Section

RECENT = 5
"""Subtasks for which a result stays warm; older results are archived first."""
GISTS = 12
"""Archived results that show a summary, the newest; older ones show only their reference."""
MEMORY_LIMIT = "memory_limit"

NotifyListener = Callable[[str, str], None]
"""Receiver of warnings: a code and a text."""


class Archive:
    """Immutable texts by reference, in the order of their arrival.

    Attributes:
        texts: all results, as ``m1``, ``m2`` …; other removed texts as ``v1``, ``v2`` …
        referred: references that later results build on.
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
        """Shrink a section that exceeds its budget, to leave some free room."""
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
        results = [(key, each) for key, each in section.entries.items() if each.kind is Kind.RESULT]
        old = (key for key, each in results if self.turn - each.turn > RECENT)
        self._shorten(section, (key for key in old if key[-1] not in self.referred), mark)
        archived = [key for key, each in results if each.reference is not None]
        self._leave(section, archived[:-GISTS])

    def shorten_traces(self, section: Section, mark: int) -> None:
        """Replace all traces by one summary."""
        if section.filled <= mark:
            return
        traces = {
            key: entry
            for key, entry in section.entries.items()
            if entry.kind is Kind.TRACE and entry.reference is None
        }
        if sum(entry.tokens for entry in traces.values()) <= GIST_TOKENS:
            return
        for key in traces:
            section.remove(key)
        reference = self._keep("\n".join(entry.text or "" for entry in traces.values()))
        summary = Entry(Kind.TRACE, "earlier steps", None, GIST_TOKENS, self.turn)
        summary.reference = reference
        section.put(("state", reference), summary)

    def drop_unread(self, section: Section, mark: int) -> None:
        """Remove retrieved entries that were never read; they can be retrieved again."""
        if section.filled > mark:
            for key, entry in list(section.entries.items()):
                if entry.kind is Kind.EPISODE and not entry.accessed:
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
        """Give an entry a reference unless it has one."""
        if entry.reference is None:
            entry.reference = key[-1] if entry.kind is Kind.RESULT else self._keep(entry.text or "")

    def _keep(self, text: str) -> str:
        self.others += 1
        reference = f"v{self.others}"
        self.texts[reference] = text
        return reference

    def _squeeze(self, section: Section, mark: int) -> None:
        """Shrink until the section fits: oldest entries first, hot ones last."""
        cold = [key for key, entry in section.entries.items() if not self._is_hot(entry)]
        self._shorten(section, cold, mark)
        self._leave(section, cold, mark)
        hot = list(section.entries)
        share = section.room // max(len(hot), 1)
        if share > 1:
            self._shorten(section, hot, section.room, share)
        self._leave(section, hot, section.room)

    def _is_hot(self, entry: Entry) -> bool:
        recent = entry.kind is Kind.RESULT and self.turn - entry.turn <= 1
        return entry.hot or recent
