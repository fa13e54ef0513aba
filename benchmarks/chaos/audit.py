"""Invariants after any fault: pure functions of a run's log and its model requests.

Events have times of the database and requests times of the model, both from this machine's clock.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.model import ModelRequest, Step
from bottega.events.types import FINAL_EVENT_TYPES, EventType


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored event: ``at`` in seconds since the epoch, ``attempt`` of its writer."""

    seq: int
    type: str
    at: float
    attempt: int
    agent: str | None
    call: int | None


@dataclass(slots=True)
class RunLog:
    """A run with its whole log.

    Attributes:
        marker: the marker of its requests.
        causes: causes of its attempts, in order.
    """

    id: str
    marker: str
    status: str
    error: Mapping[str, Any] | None
    causes: tuple[str, ...]
    events: list[Entry] = field(default_factory=list)

    def step(self, event: Entry) -> Step:
        assert event.agent is not None
        assert event.call is not None
        return self.marker, event.agent, event.call

    def answers(self) -> list[Entry]:
        return [event for event in self.events if event.type == EventType.LLM_COMPLETED]

    def claims(self) -> list[Entry]:
        begins = (EventType.RUN_STARTED, EventType.RUN_RESUMED)
        return [event for event in self.events if event.type in begins]


Requests = Mapping[Step, Sequence[ModelRequest]]


def by_step(requests: Iterable[ModelRequest]) -> Requests:
    found: defaultdict[Step, list[ModelRequest]] = defaultdict(list)
    for request in requests:
        found[request.step].append(request)
    return found


def violations(log: RunLog, requests: Requests) -> list[str]:
    """Return the violated invariants of an ended run; empty if there are none."""
    where = f"run {log.id} ({log.marker})"
    found = [*_broken_sequence(log), *_stale_writes(log), *_wrong_answers(log, requests)]
    return [f"{where}: {text}" for text in found]


def _broken_sequence(log: RunLog) -> Iterable[str]:
    seqs = [event.seq for event in log.events]
    if seqs != list(range(1, len(seqs) + 1)):
        yield f"its events are not 1, 2, 3 …: {seqs}"
    finals = [event.seq for event in log.events if event.type in FINAL_EVENT_TYPES]
    if finals != [len(seqs)]:
        yield f"final events at {finals}, where {[len(seqs)]} is the last"
    claimed = [event.attempt for event in log.claims()]
    if claimed != list(range(1, len(log.causes) + 1)):
        yield f"attempts {claimed} in the log, but {log.causes} on the run"


def _stale_writes(log: RunLog) -> Iterable[str]:
    """Yield events that an attempt wrote after it was replaced."""
    newest = 0
    for event in log.events:
        if event.attempt < newest:
            yield f"event {event.seq} is of attempt {event.attempt}, after {newest} had begun"
        newest = max(newest, event.attempt)


def _wrong_answers(log: RunLog, requests: Requests) -> Iterable[str]:
    completed = log.answers()
    for step, times in Counter(map(log.step, completed)).items():
        if times > 1:
            yield f"{step} was completed {times} times"
    for event in completed:
        step = log.step(event)
        asked = requests.get(step, ())
        if not asked:
            yield f"{step} was completed, but never asked for"
        late = [request.arrived_at - event.at for request in asked if request.arrived_at > event.at]
        if late:
            yield f"{step} was asked for {max(late):.3f} s after its answer was stored"


@dataclass(frozen=True, slots=True)
class Repeats:
    """Repeated model calls, by the state of the first.

    Attributes:
        cut: the worker died before the answer came.
        unstored: the answer had come, but was not stored.
    """

    cut: int = 0
    unstored: int = 0


def repeats(logs: Iterable[RunLog], requests: Requests) -> Repeats:
    """Count the requests beyond the first of each step."""
    cut = unstored = 0
    for log in logs:
        for step in {log.step(event) for event in log.answers()}:
            for request in requests.get(step, ())[:-1]:
                answered = request.answered_at is not None and request.cut_at is None
                cut, unstored = cut + (not answered), unstored + answered
    return Repeats(cut, unstored)


def takeovers(logs: Iterable[RunLog], faults: Sequence[float]) -> list[float]:
    """Return the seconds from a worker's death until each of its runs was resumed.

    A run's worker is not known: the first fault after the run's last event counts, so a time may
    be too long.
    """
    took = []
    for log in logs:
        for before, event in zip(log.events, log.events[1:], strict=False):
            if event.type == EventType.RUN_RESUMED:
                since = [fault for fault in faults if before.at <= fault <= event.at]
                took += [event.at - since[0]] if since else []
    return took
