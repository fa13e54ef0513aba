"""Cost of asynchronous sub-agents.

    python -m benchmarks.subagents scale

Parts:
  queue   operations of the queue of tasks, beside a heap that is rebuilt for each take, as ageing
          requires of a plain heap: microseconds of CPU per operation, and the ratio. Until a take
          the heap's entries are a set, so adding and removing is more expensive here.
  scale   10,000 tasks queued and 1,000 running in one process, by one coordinator and by 100, with
          a model that takes 1 s and no CPU: time inside a dispatch, CPU per task beside the same
          queries asked directly, memory per queued task; every answer is checked
  fanout  1,000 concurrent tasks, model latency 1 s: wall beside the ideal, with a model in this
          process and through the openai client with one in another
  saturate  tasks per second through the openai client, and the cost of each, beside the same
          queries asked directly
  service  the same through API, worker process and journal: CPU of worker and database, writing
          transactions and database log per task

Absolute figures depend on the machine; ratios are comparable.
"""

import argparse
import gc
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop

from benchmarks.journalled import measure_service
from benchmarks.swarms import measure_fan_out, measure_saturation, measure_scale
from bottega.container import GC_THRESHOLD
from bottega.subagents.queue import QueueEntry, TakeQueue, effective_priority

SIZES = (100, 1_000, 10_000, 100_000)
AGEING_INTERVAL_S = 5.0
OLDEST_S = 60.0
PARENTS, FREE = 200, 10
OPERATIONS, LEAST, BUDGET_S = 3_000, 3, 0.25


class RebuiltHeap:
    """A queue for one tenant: computes all effective priorities and a heap for each take."""

    def __init__(self) -> None:
        self.entries: set[QueueEntry] = set()
        self.taken: Counter[Hashable] = Counter()
        self.orders = itertools.count(1)

    def push(self, entry: QueueEntry) -> None:
        entry.order = entry.order or next(self.orders)
        self.entries.add(entry)

    def discard(self, entry: QueueEntry) -> bool:
        self.entries.remove(entry)
        return True

    def rank(self, entry: QueueEntry, now: float) -> tuple[int, float, int]:
        waited = now - entry.enqueued_at
        aged = effective_priority(entry.priority, waited, AGEING_INTERVAL_S)
        return aged, entry.enqueued_at, entry.order

    def has_room(self, entry: QueueEntry) -> bool:
        return self.taken[entry.parent] < entry.limit

    def take(self, now: float) -> QueueEntry | None:
        heap = [(*self.rank(one, now), one) for one in self.entries]
        heapify(heap)
        while heap:
            *_, entry = heappop(heap)
            if self.has_room(entry):
                self.entries.remove(entry)
                self.taken[entry.parent] += 1
                return entry
        return None

    def position(self, entry: QueueEntry, now: float) -> int:
        own = self.rank(entry, now)
        return sum(self.rank(one, now) < own for one in self.entries if self.has_room(one))

    def release(self, tenant: Hashable, parent: Hashable) -> None:
        self.taken[parent] -= 1


Queue = TakeQueue | RebuiltHeap


def filled(queue: Queue, size: int, parents: int, free: int) -> list[QueueEntry]:
    """Add ``size`` entries, enqueued over a minute up to second 0, evenly from all parents.

    Args:
        free: number of parents without limit; the others are at their limit of 1.
    """
    dice = random.Random(7)
    for parent in range(free, parents):
        queue.push(QueueEntry("t", "r", parent, 1, 1, -OLDEST_S, None))
        assert queue.take(0.0)
    entries = []
    for number in range(size):
        parent = number % parents
        limit = size if parent < free else 1
        enqueued_at = -OLDEST_S * (size - number) / size
        entries.append(QueueEntry("t", "r", parent, limit, dice.randint(1, 10), enqueued_at, None))
        queue.push(entries[-1])
    return entries


def us_per_operation(operation: Callable[[int], object]) -> float:
    """Return microseconds of CPU, over ``OPERATIONS`` of them or fewer in the time limit."""
    operation(0)
    began = time.process_time()
    done = 0
    while done < OPERATIONS:
        done += 1
        operation(done)
        if done >= LEAST and time.process_time() - began > BUDGET_S:
            break
    return (time.process_time() - began) / done * 1e6


def push_and_take(queue: Queue, entries: list[QueueEntry], step_s: float = 0.0) -> float:
    """Take one entry and add a similar one; the clock moves by ``step_s`` in between."""

    def operation(number: int) -> None:
        now = number * step_s
        taken = queue.take(now)
        assert taken
        queue.release("t", taken.parent)
        queue.push(replace(taken, enqueued_at=now, order=0))

    return us_per_operation(operation)


def push_and_take_ageing(queue: Queue, entries: list[QueueEntry]) -> float:
    return push_and_take(queue, entries, 0.05)


def full_parents_turn(queue: Queue, entries: list[QueueEntry]) -> float:
    """Free one parent when all are at their limit, and take its next entry."""
    parents = len({entry.parent for entry in entries})

    def operation(number: int) -> None:
        queue.release("t", number % parents)
        taken = queue.take(0.0)
        assert taken
        queue.push(replace(taken, order=0))

    return us_per_operation(operation)


def push_and_discard(queue: Queue, entries: list[QueueEntry]) -> float:
    def operation(number: int) -> None:
        entry = entries[number * 7919 % len(entries)]
        queue.discard(entry)
        queue.push(entry)

    return us_per_operation(operation)


def position_of_new(queue: Queue, entries: list[QueueEntry], priority: int) -> float:
    """Return the position of a new entry."""
    new = QueueEntry("t", "r", entries[0].parent, entries[0].limit, priority, 0.0, None)
    queue.push(new)
    took = us_per_operation(lambda _: queue.position(new, 0.0))
    queue.discard(new)
    return took


Part = Callable[[Queue, list[QueueEntry]], float]
TURN: dict[str, Part] = {"a parent's turn (release, take, push)": full_parents_turn}
PARTS: dict[str, Part] = {
    "position of a new one, priority 5": partial(position_of_new, priority=5),
    "position of a new one, priority 1": partial(position_of_new, priority=1),
    "discard + push": push_and_discard,
    "take + release + push": push_and_take,
    "the same, ageing": push_and_take_ageing,
}


def measure_queue() -> None:
    for title, parents, free, parts in (
        ("one parent", 1, 1, PARTS),
        (f"{PARENTS} parents, {FREE} of them with room", PARENTS, FREE, PARTS),
        (f"{PARENTS} parents, none with room", PARENTS, 0, TURN),
    ):
        print(f"\n{title + ', us of CPU':42} {'entries':>8} {'queue':>8} {'heap':>10}  heap/queue")
        took: dict[tuple[str, int], list[float]] = {}
        for size in SIZES:
            for queue in (TakeQueue(AGEING_INTERVAL_S), RebuiltHeap()):
                entries = filled(queue, size, parents, free)
                for what, part in parts.items():
                    took.setdefault((what, size), []).append(part(queue, entries))
        for what, size in itertools.product(parts, SIZES):
            ours, naive = took[what, size]
            print(f"{what:42} {size:8,} {ours:8.1f} {naive:10.1f} {naive / ours:9.1f} x")


def main() -> None:
    parts = {
        "queue": measure_queue,
        "scale": measure_scale,
        "fanout": measure_fan_out,
        "saturate": measure_saturation,
        "service": measure_service,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", nargs="*", choices=parts, help="parts to run; default: all")
    gc.set_threshold(*GC_THRESHOLD)  # as the service does
    for part in parser.parse_args().part or parts:
        parts[part]()


if __name__ == "__main__":
    main()
