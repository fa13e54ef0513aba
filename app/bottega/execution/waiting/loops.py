"""The loops of a run, at work or waiting: a run none of whose loops is at work is suspended."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

from bottega.agents.query import CurrentCall, Path, Query
from bottega.agents.subagent import SubAgentWrapper
from bottega.agents.tools import ToolBase
from bottega.clock import monotonic
from bottega.execution.live_text import ModelCall, waits_of


@dataclass(frozen=True, slots=True)
class Wait:
    """The wait of a run none of whose loops is at work.

    Attributes:
        left_s: seconds until the run is suspended; may be negative.
        pause_s: seconds until a model is tried again; ``None``: it waits for people alone.
        interrupts: what those must decide on.
    """

    left_s: float
    pause_s: float | None = None
    interrupts: tuple[UUID, ...] = ()


class Loops:
    """The state of a run's loops.

    Args:
        queries: those under way.
        calls: open model calls.
        has_tasks: true if the run has asynchronous tasks. While it waits for people, it stays on
            its worker: tasks may be queued, and their timeouts go on.

    Attributes:
        between: returns true if a loop is about to begin, or has just ended.
    """

    def __init__(
        self,
        queries: Mapping[Query, None],
        calls: Mapping[Query, ModelCall],
        *,
        has_tasks: bool = False,
    ) -> None:
        self._has_tasks = has_tasks
        self.between: Callable[[], bool] = lambda: False
        self._queries = queries
        self._calls = calls
        self._admitted: Counter[Query] = Counter()
        self._busy: Counter[Query] = Counter()
        self._asking: dict[UUID, Query] = {}
        self._passive: Counter[Query] = Counter()
        self._delegated: dict[tuple[Path, int], tuple[Path, SubAgentWrapper]] = {}

    @contextmanager
    def admission(self, query: Query) -> Iterator[Callable[[], None]]:
        """Mark that a query's model call waits until it may begin; yields what ends that."""
        self._admitted[query] += 1
        ended = False

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                _count(self._admitted, query, -1)

        try:
            yield end
        finally:
            end()

    @contextmanager
    def tool_call(self, query: Query, tool: ToolBase | None, call: CurrentCall) -> Iterator[None]:
        """Mark that a tool call of a query is under way."""
        if isinstance(tool, SubAgentWrapper):
            place = (query.model_calls, call.index)
            key = (query.path, call.index)
            self._delegated[key] = ((*query.path, place), tool)
            try:
                yield
            finally:
                del self._delegated[key]
            return
        # Tools of asynchronous tasks wait for those.
        passive = tool is not None and tool.local and self._has_tasks
        counter = self._passive if passive else self._busy
        _count(counter, query, 1)
        try:
            yield
        finally:
            _count(counter, query, -1)

    @contextmanager
    def asking(self, query: Query, interrupt_id: UUID) -> Iterator[None]:
        """Mark that a tool call of a query waits for people."""
        self._asking[interrupt_id] = query
        try:
            yield
        finally:
            del self._asking[interrupt_id]

    @property
    def needs_a_model(self) -> bool:
        """True if all open model calls wait, and no tool is at work: the run cannot end soon."""
        return not self._busy and waits_of(self._calls.values(), monotonic()) is not None

    @property
    def wait(self) -> Wait | None:
        """The wait of all loops together; ``None``: one is at work."""
        now = monotonic()
        if not self._queries or self.between():
            return None
        if not all(self._rests(query, now) for query in self._queries):
            return None
        if self._calls:
            found = waits_of(self._calls.values(), now)
            return None if found is None else Wait(*found)
        if not self._asking or self._has_tasks:
            return None
        return Wait(0.0, interrupts=tuple(self._asking))

    def _rests(self, query: Query, now: float) -> bool:
        if call := self._calls.get(query):
            return call.goes_on_at > now
        if query in self._admitted:
            return True
        if query in self._busy:
            return False
        delegated = [each for (path, _), each in self._delegated.items() if path == query.path]
        if not all(self._is_open(*each) for each in delegated):
            return False
        return bool(delegated) or query in self._asking.values() or query in self._passive

    def _is_open(self, path: Path, tool: SubAgentWrapper) -> bool:
        """Check if a sub-agent's query has begun, or waits for another one of the same agent."""
        if any(query.path == path for query in self._queries):
            return True
        return not tool.stateless and tool.agent.turn().locked()


def _count(counter: Counter[Query], query: Query, change: int) -> None:
    counter[query] += change
    if not counter[query]:
        del counter[query]
