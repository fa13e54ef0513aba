"""Cost of the engine's statements for runs of many tenants, beside as many runs of one.

python -m benchmarks.engine_statements [--runs 1000] [--rounds 7]

A worker or an API process sends each of these statements for all of its runs at once. Row-level
security lets a transaction see one tenant at a time, so that the functions go from tenant to
tenant. Each line has the least milliseconds of several rounds, in transactions that are rolled
back.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import asyncpg

from benchmarks.harness import temporary_database
from bottega.db.connect import connect

_EVENT = '{"type":"warning","data":{"message":"' + "some words " * 100 + '"}}'
_TASK = '[{"id":"01900000-0000-7000-8000-000000000000","agent":"a","depth":0,"status":"running"}]'
_ENDED = '{"status":"completed","usage":null,"spent":[]}'
_APPEND = "SELECT append_steps($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"

STORED = (
    "INSERT INTO tenants (name) SELECT 'tenant-' || n FROM generate_series(1, $1::integer) AS n",
    """
    INSERT INTO runs (tenant_id, timeout_s, mode, input, pinned, status, attempt, attempts,
                      messages, started_at)
    SELECT t.id, 60, 'orchestrated', '"x"', '{}', 'running', 1, '[{}]', 1, now()
    FROM tenants t CROSS JOIN LATERAL generate_series(
        1, CASE t.name WHEN 'default' THEN $1::integer ELSE 1 END)
    """,
    """
    INSERT INTO run_heads
        (tenant_id, run_id, attempt, last_seq, worker_id, claimed_at, deadline, is_child)
    SELECT tenant_id, id, 1, 2, id, now(), 'infinity', false FROM runs
    """,
    """
    INSERT INTO run_steps (tenant_id, run_id, first_seq, last_seq, attempt, at, events)
    SELECT tenant_id, id, 1, 2, 1, now(), repeat('x', 500) FROM runs
    """,
    """
    INSERT INTO live_text (tenant_id, run_id, call, attempt, at, text)
    SELECT tenant_id, id, 1, 1, 0, 'x' FROM runs
    """,
    """
    INSERT INTO run_messages (tenant_id, run_id, number, content)
    SELECT tenant_id, id, 1, '"x"' FROM runs
    """,
    """
    INSERT INTO interrupts (tenant_id, id, run_id, kind, call, tool, tool_call_id, arguments,
                            status, created_at, expires_at)
    SELECT tenant_id, uuidv7(), id, 'approval', 1, 'x', 'x', '{}', 'resolved', now(), now()
    FROM runs
    """,
    """
    INSERT INTO agents (tenant_id, name, version) SELECT id, 'a', 1 FROM tenants
    """,
    """
    INSERT INTO agent_versions (tenant_id, name, version, definition) SELECT id, 'a', 1, '{}'
    FROM tenants
    """,
)


def statements(tenants: Sequence[UUID], runs: Sequence[UUID]) -> dict[str, tuple[Any, ...]]:
    """Return each statement with its arguments, for some runs and the tenant of each."""

    def each(*values: Any) -> tuple[Any, ...]:
        return (tenants, runs, *([value] * len(runs) for value in values))

    step = 1, 2, 1, _EVENT
    text = None, None, "a", 1, 1, 0, "x", None
    return {
        "append_steps": (_APPEND, *each(*step, None, None, None, None, None)),
        "append_steps, tasks": (_APPEND, *each(*step, _TASK, None, None, None, None)),
        "append_steps, ends": (_APPEND, *each(*step, None, None, None, None, _ENDED)),
        "write_live_text": (
            "SELECT write_live_text($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
            *each(*text),
        ),
        "clear_live_text": (
            "SELECT clear_live_text($1, $2, $3, $4, $5, $6)",
            *each(None, 1, 1, None),
        ),
        "read_live_text": ("SELECT * FROM read_live_text($1, $2, $3, 100)", *each(0)),
        "read_logs": (
            "SELECT * FROM read_logs($1, $2, $3, 500, 100000, 100000000)",
            *each(0),
        ),
        "pinned_definitions": (
            "SELECT * FROM pinned_definitions($1, $2, $3, $4)",
            tenants,
            *each("agent", "a", 1)[2:],
        ),
        "ended_children": ("SELECT * FROM ended_children($1, $2)", *each()),
        "sent_to_runs": ("SELECT * FROM sent_to_runs($1, $2, $3)", *each(0)),
    }


async def fill(url: str, count: int) -> None:
    """Store so many runs of the default tenant, and one of each of as many other tenants."""
    owner = await asyncpg.connect(url)
    for statement in STORED:
        await owner.execute(statement, *([count] if "$1" in statement else []))
    await owner.execute("VACUUM ANALYZE")
    await owner.close()


async def measure(url: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the least milliseconds of each statement: for runs of one tenant, and of many."""
    owner = await asyncpg.connect(url)
    query = "SELECT tenant_id, r.id FROM runs r JOIN tenants t ON t.id = tenant_id WHERE name "
    one, many = [
        statements(*zip(*await owner.fetch(query + which), strict=True))
        for which in ("= 'default'", "<> 'default' ORDER BY r.id")
    ]
    await owner.close()
    return {
        name: (await _least(url, rounds, *one[name]), await _least(url, rounds, *many[name]))
        for name in one
    }


async def _least(url: str, rounds: int, query: str, *arguments: Any) -> float:
    """Return the least milliseconds of a statement in a session of its own.

    A session's plans depend on the arguments of its first statements.
    """
    session = await connect(url)
    took = []
    for _ in range(rounds):
        transaction = session.transaction()
        await transaction.start()
        began = time.perf_counter()
        await session.fetch(query, *arguments)
        took.append((time.perf_counter() - began) * 1000)
        await transaction.rollback()
    await session.close()
    return min(took)


async def _main(url: str, runs: int, rounds: int) -> None:
    await fill(url, runs)
    took = await measure(url, rounds)
    print(f"ms for {runs} runs: of one tenant, of {runs} tenants, and the ratio")
    for name, (one, many) in took.items():
        print(f"  {name:20} {one:8.1f} {many:8.1f} {many / one:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with temporary_database() as (url, _):
        asyncio.run(_main(url, options.runs, options.rounds))


if __name__ == "__main__":
    main()
