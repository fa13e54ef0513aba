"""Finished runs of some days with their logs, copied into the database."""

import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from uuid import UUID

import asyncpg

EVENTS, ROWS = 60, 8
"""Events of a run, and rows of its log."""
TENANTS = [UUID(int=0x019A_0000_0000_7000_8000_0000_0000_0000 + n) for n in range(10)]
NOW = datetime(2026, 11, 1, tzinfo=UTC)

_TEXTS = 200
_CHUNK = 250
"""Runs that are copied with one message."""
_TEXT = (
    "the run asks a model for an answer about orders invoices customers planes weather prices "
    "schedules and reads files tables pages before it writes down what was found in them"
)
_STEPS = ("tenant_id", "run_id", "first_seq", "last_seq", "attempt", "at", "events")
_RUNS = (
    *("tenant_id", "id", "created_at", "timeout_s", "mode", "agent", "input", "pinned", "status"),
    *("ended_at", "last_seq", "attempt", "output", "queued_at"),
)
_PARTITION = """
CREATE TABLE {table}_{name} PARTITION OF {table} FOR VALUES FROM ('{first}') TO ('{last}')
WITH (toast_tuple_target=128)
"""


@dataclass(frozen=True, slots=True)
class Load:
    """Number of runs to copy: ``runs`` runs a day, on each of ``days`` days before :data:`NOW`."""

    days: int
    runs: int

    def day(self, number: int) -> datetime:
        return NOW - timedelta(days=self.days - number)

    def ids(self, number: int) -> Iterator[tuple[UUID, UUID, datetime]]:
        """Yield tenant, id and time of each run of a day, in order."""
        random, begin = Random(number), self.day(number)
        for n in range(self.runs):
            at = begin + timedelta(days=n / self.runs)
            yield TENANTS[n % len(TENANTS)], uuid7(at, random.getrandbits(74)), at


def uuid7(at: datetime, rest: int) -> UUID:
    """Return the id that an object of this time has; ``rest`` are 74 bits."""
    high, low = rest >> 62, rest & ((1 << 62) - 1)
    number = int(at.timestamp() * 1000) << 80 | 7 << 76 | high << 64 | 2 << 62 | low
    return UUID(int=number)


def first_of(at: datetime) -> UUID:
    """Return the lower bound of the ids from this time on."""
    return UUID(int=int(at.timestamp() * 1000) << 80)


async def partition(
    connection: asyncpg.Connection, table: str, load: Load, *, days: int = 1, before: int = 0
) -> None:
    """Make a log like ``run_steps`` with a partition for every ``days`` days.

    Args:
        before: number of partitions for earlier days, which stay empty.
    """
    await connection.execute(
        f"CREATE TABLE {table} (LIKE run_steps INCLUDING ALL) PARTITION BY RANGE (run_id);"
        f"CREATE TABLE {table}_rest PARTITION OF {table} DEFAULT"
    )
    for begin in range(-before * days, load.days + 1, days):
        first, last = first_of(load.day(begin)), first_of(load.day(begin + days))
        name = f"{load.day(begin):%Y%m%d}"
        made = _PARTITION.format(table=table, name=name, first=first, last=last)
        await connection.execute(made)


async def fill_logs(connection: asyncpg.Connection, load: Load, day: int) -> float:
    """Copy the logs of a day's runs; return the seconds."""
    began = time.perf_counter()
    await connection.copy_to_table("run_steps", source=_logs(load, day), columns=_STEPS)
    return time.perf_counter() - began


async def fill_runs(connection: asyncpg.Connection, load: Load, day: int) -> None:
    """Copy the rows of a day's runs."""
    await connection.copy_to_table("runs", source=_runs(load, day), columns=_RUNS)


async def move_logs(connection: asyncpg.Connection, table: str, load: Load, day: int) -> float:
    """Insert a day's logs into another table like ``run_steps``, too; return the seconds."""
    began = time.perf_counter()
    names = ", ".join(_STEPS)
    again = names.replace("events", "events || ''")  # else they stay compressed, and a filler long
    for tenant in TENANTS:
        await connection.execute(
            f"INSERT INTO {table} ({names}) SELECT {again} FROM run_steps"
            f" WHERE tenant_id = '{tenant}' AND run_id >= '{first_of(load.day(day))}'"
            f" AND run_id < '{first_of(load.day(day + 1))}'"
        )
    return time.perf_counter() - began


async def _logs(load: Load, day: int) -> AsyncIterator[bytes]:
    texts = [_log(Random(n)) for n in range(_TEXTS)]
    at = load.day(day).isoformat()
    parts: list[str] = []
    for n, (tenant, run, _) in enumerate(load.ids(day)):
        text = texts[n % _TEXTS].replace("RUN", f"{tenant}\t{run}")
        parts.append(text.replace("AT", at))
        if len(parts) >= _CHUNK:
            yield "".join(parts).encode()
            parts = []
    yield "".join(parts).encode()


async def _runs(load: Load, day: int) -> AsyncIterator[bytes]:
    text = json.dumps(_text(Random(day), 60))
    pinned = '{"agents": {"solo": 1}, "graph": null, "providers": {}, "mcp_servers": {}}'
    parts: list[str] = []
    for tenant, run, time_ in load.ids(day):
        at = time_.isoformat()
        parts.append(
            f"{tenant}\t{run}\t{at}\t3600\tauto\tsolo\t{text}\t{pinned}\tcompleted\t{at}"
            f"\t{EVENTS}\t1\t{text}\t{at}\n"
        )
        if len(parts) >= _CHUNK:
            yield "".join(parts).encode()
            parts = []
    yield "".join(parts).encode()


def _log(random: Random) -> str:
    """Return the rows of a log as COPY reads them; RUN and AT stand for a run and its time."""
    rows, first = [], 1
    for n in range(ROWS):
        last = EVENTS * (n + 1) // ROWS
        events = "\\n".join(_event(random) for _ in range(first, last + 1))
        rows.append(f"RUN\t{first}\t{last}\t1\tAT\t{events}\n")
        first = last + 1
    return "".join(rows)


def _event(random: Random) -> str:
    data = {
        "call": random.randrange(100),
        "tool_call_id": f"call_{random.getrandbits(64):x}",
        "duration_ms": random.randrange(5000),
        "content": _text(random, random.choice((2, 3, 8, 20))),
    }
    kind = random.choice(("llm.completed", "tool.started", "tool.completed", "agent.completed"))
    return f'{{"type":"{kind}","agent":"solo","data":{json.dumps(data)}}}'


def _text(random: Random, words: int) -> str:
    return " ".join(random.choices(_TEXT.split(), k=words))
