"""The loops of a run, at work or waiting: a run none of whose loops is at work is suspended."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

from bottega.agents.query import CurrentCall, Path, Query, current_call
from bottega.agents.subagent import SubAgentWrapper
from bottega.agents.tools import ToolBase
from bottega.clock import monotonic
from bottega.engine.live_text import ModelCall, waits_of
from bottega.subagents.handle import SubagentHandle, Waiter
from bottega.subagents.states import SubagentStatus
from bottega.subagents.swarm import QueryScope


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

    Attributes:
        between: returns true if a loop is about to begin, or has just ended.
        tasks: returns the asynchronous tasks that have not ended.
    """

    def __init__(self, queries: Mapping[Query, None], calls: Mapping[Query, ModelCall]) -> None:
        self.between: Callable[[], bool] = lambda: False
        self.tasks: Callable[[], Sequence[SubagentHandle]] = lambda: ()
        self._queries = queries
        self._calls = calls
        self._admitted: Counter[Query] = Counter()
        self._busy: Counter[Query] = Counter()
        self._asking: dict[UUID, None] = {}
        self._askers: Counter[Query] = Counter()
        self._decided: set[tuple[Query, int]] = set()
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
        self._decided.discard((query, call.index))
        if isinstance(tool, SubAgentWrapper):
            place = (query.model_calls, call.index)
            key = (query.path, call.index)
            self._delegated[key] = ((*query.path, place), tool)
            try:
                yield
            finally:
                del self._delegated[key]
            return
        _count(self._busy, query, 1)
        try:
            yield
        finally:
            _count(self._busy, query, -1)

    @contextmanager
    def asking(self, query: Query, interrupt_id: UUID) -> Iterator[None]:
        """Mark that a tool call of a query waits for people; then it is at work."""
        call = current_call.get()
        assert call is not None
        self._decided.discard((query, call.index))
        self._asking[interrupt_id] = None
        _count(self._askers, query, 1)
        try:
            yield
            self._decided.add((query, call.index))
        finally:
            del self._asking[interrupt_id]
            _count(self._askers, query, -1)

    @property
    def needs_a_model(self) -> bool:
        """True if all open model calls wait, and no tool is at work: the run cannot end soon."""
        is_busy = any(self._has_tool_at_work(query) for query in self._queries)
        return not is_busy and waits_of(self._calls.values(), monotonic()) is not None

    @property
    def wait(self) -> Wait | None:
        """The wait of all loops together; ``None``: one is at work."""
        now = monotonic()
        if not self._queries or self.between():
            return None
        if not all(self._rests(query, now) for query in self._queries):
            return None
        if not all(self._task_rests(handle) for handle in self.tasks()):
            return None
        if self._calls:
            found = waits_of(self._calls.values(), now)
            return None if found is None else Wait(*found)
        if not self._asking or self._admitted:
            return None
        return Wait(0.0, interrupts=tuple(self._asking))

    @property
    def any_asks(self) -> bool:
        """True if a tool call waits for people."""
        return bool(self._asking)

    def needing_people(self) -> Iterator[tuple[Query, bool]]:
        """Yield the queries, and if they cannot go on without people; the deepest first.

        The caller may change the state of a query's task before the next one. A query that has just
        begun or ended is left out.
        """
        found: set[Query] = set()
        for query in sorted(self._queries, key=lambda query: -query.depth):
            needs = self._needs_people(query, found)
            if needs:
                found.add(query)
            if needs is not None:
                yield query, needs

    def _rests(self, query: Query, now: float) -> bool:
        if call := self._calls.get(query):
            return call.goes_on_at > now
        if query in self._admitted:
            return True
        if self._has_tool_at_work(query):
            return False
        delegated = self._delegated_by(query)
        if not all(self._is_open(*each) for each in delegated):
            return False
        return bool(delegated or _waits_of(query)) or query in self._askers

    def _task_rests(self, handle: SubagentHandle) -> bool:
        """Check if an asynchronous task neither begins nor ends now."""
        if any(query.path == handle.path for query in self._queries):
            return True
        if handle.status is not SubagentStatus.QUEUED:
            return False
        # While models are away, their calls may hold the slots that it needs.
        return bool(self._calls or handle.holds)

    def _needs_people(self, query: Query, found: Collection[Query]) -> bool | None:
        """Check a query, if those below it that need people are ``found``; ``None``: unknown."""
        if query in self._calls or query in self._admitted or self._has_tool_at_work(query):
            return False
        parts = [waiter.needs_people for waiter in _waits_of(query)]
        if query in self._askers:
            parts.append(True)
        for path, tool in self._delegated_by(query):
            below = [each for each in self._queries if each.path == path]
            if not below and not tool.stateless:  # another query of the same agent is before it
                below = [each for each in self._queries if each.agent is tool.agent]
            parts.append(bool(below) and all(each in found for each in below))
        return all(parts) if parts else None

    def _has_tool_at_work(self, query: Query) -> bool:
        if any(each is query for each, _ in self._decided):
            return True
        return self._busy[query] > len(_waits_of(query))

    def _delegated_by(self, query: Query) -> list[tuple[Path, SubAgentWrapper]]:
        return [each for (path, _), each in self._delegated.items() if path == query.path]

    def _is_open(self, path: Path, tool: SubAgentWrapper) -> bool:
        """Check if a sub-agent's query has begun, or waits for another one of the same agent."""
        if any(query.path == path for query in self._queries):
            return True
        return not tool.stateless and tool.agent.turn().locked()


def _waits_of(query: Query) -> list[Waiter]:
    """Return a query's waits for asynchronous tasks that nothing has ended yet."""
    scope = query.scope
    return [wait for wait in scope.waits if wait.is_open] if isinstance(scope, QueryScope) else []


def _count(counter: Counter[Query], query: Query, change: int) -> None:
    counter[query] += change
    if not counter[query]:
        del counter[query]
