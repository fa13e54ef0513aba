"""The differences between two runs, for each agent, derived from the logs of both runs."""

import asyncio
from collections.abc import Mapping, Sequence
from difflib import unified_diff
from typing import Any
from uuid import UUID

from sqlalchemy import Boolean, Text, Uuid, bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY

from bottega.agents.messages import CURRENCY
from bottega.db.pages import PageItems
from bottega.db.pool import AsyncConnection
from bottega.errors import NotFoundError, no_run
from bottega.runs import graphs

MOST_CHARACTERS = 10_000
"""Maximum number of characters of an output that are compared and shown."""
MOST_LINES = 400
"""Maximum number of compared lines of an output. The time is quadratic in this number."""
MOST_RECEIVED = 100
"""Maximum number of sources of received context that the difference lists for an agent."""

_RUNS = text("""
SELECT id, status, agent, graph, mode, created_at, started_at, ended_at, usage,
       pinned -> 'agents' AS versions,
       CAST(round(extract(epoch FROM ended_at - started_at) * 1000) AS bigint) AS duration_ms
FROM runs WHERE tenant_id = :tenant AND id = ANY(:runs)
""").bindparams(bindparam("runs", type_=ARRAY(Uuid)))

# With MATERIALIZED, PostgreSQL parses the data of each event only once.
_AGENTS = text("""
WITH events AS MATERIALIZED (
    SELECT run_id, step, seq, type, agent, task_id, at, data FROM run_events
    WHERE tenant_id = :tenant AND run_id = ANY(:runs) AND agent IS NOT NULL
      AND type IN ('agent.started', 'agent.completed', 'agent.failed', 'llm.completed',
        'llm.failed', 'llm.cancelled', 'tool.started', 'memory.injected', 'context.recalled',
        'memory.published')
), answers AS MATERIALIZED (
    SELECT e.run_id, e.seq, coalesce(e.data ->> 'output', e.data ->> 'content',
        m.data #>> '{message,content}') AS text
    FROM events e LEFT JOIN events m ON m.run_id = e.run_id
        AND m.seq = CAST(e.data ->> 'answer_seq' AS bigint)
    WHERE e.type IN ('agent.completed', 'memory.published')
), page AS (
    SELECT DISTINCT agent FROM events
    WHERE CAST(:after AS text) IS NULL
       OR CASE WHEN :descending THEN agent < :after ELSE agent > :after END
), chosen AS (
    SELECT agent FROM page
    ORDER BY CASE WHEN :descending THEN agent END DESC, agent LIMIT :most
), queries AS (
    SELECT run_id, agent, max(at) FILTER (WHERE type <> 'agent.started')
        - min(at) FILTER (WHERE type = 'agent.started') AS took
    FROM events WHERE type IN ('agent.started', 'agent.completed', 'agent.failed')
    GROUP BY run_id, agent, task_id
), times AS (
    SELECT run_id, agent, count(*) AS queries, extract(epoch FROM sum(took)) * 1000 AS duration_ms
    FROM queries GROUP BY run_id, agent
), sources AS (
    SELECT r.run_id, r.agent, r.data ->> 'source' AS source, count(*) AS times,
           max(CAST(r.data ->> 'version' AS integer)) AS version,
           md5(string_agg(coalesce(r.data ->> 'content', a.text, ''), E'\\x01'
               ORDER BY r.seq)) AS digest
    FROM events r LEFT JOIN answers a ON a.run_id = r.run_id
        AND a.seq = CAST(r.data ->> 'answer_seq' AS bigint)
    WHERE r.type IN ('memory.injected', 'context.recalled')
      AND (r.data ? 'answer_seq' OR r.data ->> 'content' <> '')
    GROUP BY r.run_id, r.agent, 3
), received AS (
    SELECT run_id, agent, jsonb_agg(to_jsonb(s) - 'run_id' - 'agent' ORDER BY source) AS received
    FROM sources s GROUP BY run_id, agent
), sums AS (
    SELECT run_id, agent,
           max(seq) FILTER (WHERE type = 'agent.completed') AS answer,
           sum_usage(array_agg(data -> 'usage') FILTER (
               WHERE starts_with(type, 'llm.') AND data ? 'usage')) AS usage,
           count(*) FILTER (WHERE type = 'llm.completed') AS model_calls,
           count(DISTINCT (task_id, data ->> 'call', data ->> 'tool_call_id'))
               FILTER (WHERE type = 'tool.started') AS tool_calls
    FROM events GROUP BY run_id, agent
)
SELECT s.run_id, s.agent, s.usage, s.model_calls, s.tool_calls, t.queries,
       CAST(round(t.duration_ms) AS bigint) AS duration_ms, r.received,
       left(a.text, :characters) AS output, length(a.text) AS length
FROM chosen c JOIN sums s USING (agent)
LEFT JOIN times t ON t.run_id = s.run_id AND t.agent = s.agent
LEFT JOIN received r ON r.run_id = s.run_id AND r.agent = s.agent
LEFT JOIN answers a ON a.run_id = s.run_id AND a.seq = s.answer
ORDER BY CASE WHEN :descending THEN s.agent END DESC, s.agent
""").bindparams(
    bindparam("runs", type_=ARRAY(Uuid)),
    bindparam("after", type_=Text),
    bindparam("descending", type_=Boolean),
)

Side = Mapping[str, Any]
"""Row of an agent in one run. The row is empty if the agent did nothing in this run."""


async def compare(
    connection: AsyncConnection,
    tenant_id: UUID,
    before: UUID,
    after: UUID,
    *,
    after_key: str | None,
    descending: bool,
    limit: int,
) -> tuple[dict[str, Any], dict[str, Any], PageItems[tuple[str, Side, Side]]]:
    """Return both runs, and a page of agents: (name, the agent's row in each of the two runs).

    Args:
        after_key: name of the last agent of the previous page. Pages are sorted by name.

    Raises:
        NotFoundError: one of the two runs is unknown.
    """
    of_both = {"tenant": tenant_id, "runs": [before, after]}
    by_id = {row["id"]: dict(row) for row in (await connection.execute(_RUNS, of_both)).mappings()}
    for run_id in (before, after):
        if run_id not in by_id:
            raise no_run(run_id)
    bounds = {"after": after_key, "descending": descending, "most": limit + 1}
    rows = await connection.execute(_AGENTS, of_both | bounds | {"characters": MOST_CHARACTERS})
    sides: dict[str, dict[UUID, Side]] = {}
    for row in rows.mappings():
        sides.setdefault(row["agent"], {})[row["run_id"]] = dict(row)
    pairs = [(agent, of.get(before, {}), of.get(after, {})) for agent, of in sides.items()]
    return by_id[before], by_id[after], PageItems(pairs[:limit], more=len(pairs) > limit)


async def node_differences(
    connection: AsyncConnection, tenant_id: UUID, before: UUID, after: UUID
) -> list[dict[str, Any]]:
    """Return the nodes whose statuses differ between two existing runs, in the graph's order."""
    old, new = [await _statuses(connection, tenant_id, run_id) for run_id in (before, after)]
    return [
        {"name": name, "status": _both(old.get(name), new.get(name))}
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]


async def _statuses(connection: AsyncConnection, tenant_id: UUID, run_id: UUID) -> dict[str, str]:
    try:
        drawing = await graphs.graph(connection, tenant_id, run_id)
    except NotFoundError:  # the run has no graph
        return {}
    return {node["name"]: node["status"] for node in drawing["nodes"]}


async def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], pairs: Sequence[tuple[str, Side, Side]]
) -> list[dict[str, Any]]:
    return await asyncio.to_thread(
        lambda: [difference(agent, (before, after), sides) for agent, *sides in pairs]
    )


def difference(agent: str, runs: Sequence[Side], sides: Sequence[Side]) -> dict[str, Any]:
    old, new = sides
    received = [{each["source"]: each for each in side.get("received") or ()} for side in sides]
    sources = sorted({*received[0], *received[1]})
    return {
        "agent": agent,
        "version": _both(*((run["versions"] or {}).get(agent) for run in runs)),
        "output": output_difference(old, new),
        "tokens": _both(*(_tokens(side.get("usage")) for side in sides)),
        "cost": _both(*(_cost(side.get("usage")) for side in sides)),
        "duration_ms": _both(*(side.get("duration_ms") for side in sides)),
        **{
            name: _both(*(side.get(name) or 0 for side in sides))
            for name in ("model_calls", "tool_calls", "queries")
        },
        "received": [
            {
                "source": source,
                "version": _both(*(of.get(source, {}).get("version") for of in received)),
                "times": _both(*(of.get(source, {}).get("times", 0) for of in received)),
                "is_same": len({of.get(source, {}).get("digest") for of in received}) == 1,
            }
            for source in sources[:MOST_RECEIVED]
        ],
        "received_more": len(sources) > MOST_RECEIVED,
    }


def totals(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the differences between two runs' totals; ``None`` if one run has not ended. Pure."""
    usages = [run["usage"] for run in (before, after)]
    return {
        "tokens": _both(*(usage and _tokens(usage) for usage in usages)),
        "cost": _both(*(usage and usage["cost"] for usage in usages)),
        "duration_ms": _both(before["duration_ms"], after["duration_ms"]),
        "model_calls": _both(*(usage and usage["model_calls"] for usage in usages)),
        "tool_calls": _both(*(usage and usage["tool_calls"] for usage in usages)),
    }


def output_difference(before: Side, after: Side) -> dict[str, Any]:
    """Return two outputs with a unified diff of their lines. Pure.

    ``truncated`` is true if an output has more than ``MOST_CHARACTERS`` or ``MOST_LINES``.
    """
    outputs = [side.get("output") for side in (before, after)]
    lines = [(output or "").splitlines() for output in outputs]
    old, new = (each[:MOST_LINES] for each in lines)
    cut = any((side.get("length") or 0) > MOST_CHARACTERS for side in (before, after))
    return {
        **_both(*outputs),
        "diff": "\n".join(unified_diff(old, new, "before", "after", lineterm="")),
        "truncated": cut or any(len(each) > MOST_LINES for each in lines),
    }


def _both(before: Any, after: Any) -> dict[str, Any]:
    return {"before": before, "after": after}


def _tokens(usage: Mapping[str, Any] | None) -> int:
    return 0 if usage is None else usage["input"] + usage["output"]


def _cost(usage: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if usage is None:
        return {"amount": "0", "currency": CURRENCY, "complete": True}
    cost: Mapping[str, Any] = usage["cost"]
    return cost
