"""Answers in a run's log: a text stands there once, and other events refer to its place.

``agent.completed`` refers by ``answer_seq`` to the ``llm.completed`` with the same text, and the
end of a sub-agent's call or task to its ``agent.completed``. Clients get the text with each of
them: it is copied as JSON, without decoding.
"""

import re
from collections.abc import Sequence
from json import JSONDecoder
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json

from bottega.events.types import EventType

_REFERRING = frozenset(
    {EventType.AGENT_COMPLETED, EventType.TOOL_COMPLETED, EventType.SUBAGENT_COMPLETED}
)
_REFERENCE = '"answer_seq"'
# Quotes within a string are escaped, so these are keys. Only usage has a number as ``output``.
_TEXT = re.compile(r'(?:"message": ?\{"content"|"output"): ?(?=")')
_END_OF = JSONDecoder().raw_decode
_READ = """
SELECT run_id, seq, output FROM (
    SELECT a.*,
           sum(octet_length(output)) OVER (PARTITION BY run_id ORDER BY n
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS of_run,
           sum(octet_length(output)) OVER (ORDER BY n
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS of_all
    FROM answers_in_logs($1, $2, $3) WITH ORDINALITY AS a(run_id, seq, output, n)) AS a
WHERE coalesce(of_run, 0) < $4 AND coalesce(of_all, 0) < $5
"""
_MOST = 500
"""Texts that one query reads."""

LogRow = dict[str, Any]
"""An event with ``seq``, ``type``, and ``data`` as JSON."""


def fill(rows: Sequence[LogRow]) -> list[tuple[LogRow, int]]:
    """Add the texts to rows of one run that refer to others of them, in order.

    Returns:
        The rows whose text is elsewhere, each with the ``seq`` of its event.
    """
    by_seq: dict[int, LogRow] = {}
    missing = []
    for row in rows:
        if row["type"] not in _REFERRING or _REFERENCE not in row["data"]:
            continue
        seq = from_json(row["data"]).get("answer_seq")
        if seq is None:
            continue
        by_seq = by_seq or {each["seq"]: each for each in rows}
        text = _text_in(by_seq.get(seq))
        if text is None:
            missing.append((row, seq))
        else:
            _add(row, text)
    return missing


def _text_in(row: LogRow | None) -> str | None:
    """Return the text of an event's answer, as JSON."""
    data = "" if row is None else row["data"]
    if (key := _TEXT.search(data)) is None:
        return None
    _, end = _END_OF(data, key.end())
    text: str = data[key.end() : end]
    return text


def _add(row: LogRow, text: str) -> None:
    row["data"] = f'{row["data"][:-1]},"output":{text}}}'


async def fill_from(
    connection: asyncpg.Connection | asyncpg.Pool,
    tenant_id: UUID,
    missing: Sequence[tuple[UUID, LogRow, int]],
    run_bytes: int,
    total_bytes: int,
) -> dict[UUID, int]:
    """Add the texts that are elsewhere in the logs of a tenant's runs, up to some size.

    Args:
        missing: run, row, and ``seq`` of the event with its text.
        run_bytes: texts of a run with so many bytes are enough, but one is read.
        total_bytes: likewise for all runs together.

    Returns:
        The runs with texts still missing; of each, the ``seq`` of the first row without its text.
    """
    asked = missing[:_MOST]
    runs, seqs = [run for run, _, _ in asked], [seq for _, _, seq in asked]
    found = await connection.fetch(_READ, tenant_id, runs, seqs, run_bytes, total_bytes)
    texts = {(each["run_id"], each["seq"]): each["output"] for each in found}
    left: dict[UUID, int] = {}
    for run_id, row, seq in missing:
        if run_id in left:
            continue
        if (run_id, seq) not in texts:
            left[run_id] = row["seq"]
        elif (text := texts[run_id, seq]) is not None:
            _add(row, to_json(text).decode())
    return left
