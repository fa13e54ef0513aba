"""Queries about runs, for the API.

The queries read runs, tasks, webhook deliveries, sums of usage, and what the service learned from a
run. This module also stores feedback and determines a run's outcome.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cache
from typing import Any, Literal
from uuid import UUID

from pydantic_core import from_json, to_json
from sqlalchemy import (
    ColumnElement,
    FromClause,
    Numeric,
    RowMapping,
    ScalarSelect,
    Select,
    Subquery,
    Table,
    Text,
    Uuid,
    and_,
    any_,
    bindparam,
    case,
    cast,
    exists,
    false,
    func,
    literal_column,
    select,
    text,
    true,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from bottega.agents.messages import CURRENCY, DEMAND_TITLES
from bottega.db.pages import (
    MOST_SKEW,
    PageItems,
    fetch_page,
    first_id,
    lateral_rows,
    measured,
    paged,
)
from bottega.db.pool import AsyncConnection
from bottega.db.tables import (
    agent_versions,
    episode_feedback,
    graph_versions,
    run_checks,
    run_events,
    run_learning,
    run_waits,
    runs,
    tasks,
    webhooks,
)
from bottega.errors import InvalidInputError, NotFoundError, no_run
from bottega.events.data import OutcomeValue
from bottega.events.types import EventType, RunStatus
from bottega.memory.episodes.scope import OFF
from bottega.memory.patterns.adherence import SOURCE
from bottega.subagents.handle import SubagentStatus

_MOST = 200  # maximum number of pattern candidates, and of pattern applications

_LEARNING = text("""
SELECT l.episode_id, l.status, coalesce(l.tries, 0) AS tries, l.error, l.updated_at, r.reflection,
    CASE l.status WHEN 'pending' THEN l.next_at END AS next_at
FROM (SELECT) AS one
LEFT JOIN run_learning l ON l.tenant_id = :tenant AND l.run_id = :run
LEFT JOIN episode_state s ON s.tenant_id = l.tenant_id AND s.episode_id = l.episode_id
LEFT JOIN episode_reflections r
    ON r.tenant_id = l.tenant_id AND r.episode_id = l.episode_id AND s.state <> 'deleted'
""")
_CANDIDATES = text("""
SELECT p.id, p.name, p.category, p.state, p.version
FROM pattern_sources s JOIN patterns p ON p.tenant_id = s.tenant_id AND p.id = s.pattern_id
WHERE s.tenant_id = :tenant AND s.episode_id = :episode ORDER BY p.id LIMIT :most
""")
_APPLICATIONS = text("""
SELECT CAST(:source AS text) || a.pattern_id AS source, a.pattern_id, p.name, a.version, a.arm,
    a.at, a.followed, a.good
FROM pattern_applications a JOIN patterns p ON p.tenant_id = a.tenant_id AND p.id = a.pattern_id
WHERE a.tenant_id = :tenant AND a.episode_id = :episode ORDER BY a.at, a.id LIMIT :most
""")
_STORE = text("""
INSERT INTO episode_feedback (tenant_id, run_id, outcome, score, comment, by, at)
VALUES (:tenant, :run, CAST(:outcome AS text), CAST(:score AS double precision),
        CAST(:comment AS text), CAST(:by AS text), now())
ON CONFLICT (tenant_id, run_id) DO UPDATE SET
    outcome = excluded.outcome, score = excluded.score, comment = excluded.comment,
    by = excluded.by, at = excluded.at
RETURNING outcome, score, comment, by, at
""")
_FEEDBACK = text("""
SELECT outcome, score, comment, by, at FROM episode_feedback
WHERE tenant_id = :tenant AND run_id = :run
""")
_HOLD = text("SELECT hold_episode_of(:tenant, :run)")
_LABEL = text("SELECT label_episode_of(:tenant, :run)")


async def learnt(connection: AsyncConnection, tenant_id: UUID, run_id: UUID) -> dict[str, Any]:
    """Return a run's learning status, reflection, pattern candidates and pattern applications."""
    values: dict[str, Any] = {"tenant": tenant_id, "run": run_id}
    row = (await connection.execute(_LEARNING, values)).mappings().one()
    values = {"tenant": tenant_id, "episode": row["episode_id"], "most": _MOST}
    candidates = await connection.execute(_CANDIDATES, values)
    applications = await connection.execute(_APPLICATIONS, {**values, "source": SOURCE})
    reflection = row["reflection"] or {}
    return {
        "run_id": run_id,
        **{name: row[name] for name in ("status", "tries", "error", "next_at", "updated_at")},
        **{name: reflection.get(name) or [] for name in ("insights", "patterns", "failures")},
        "by": reflection.get("by"),
        "performance": reflection.get("performance") or {},
        "candidates": list(candidates.mappings()),
        "applications": list(applications.mappings()),
    }


async def give_feedback(
    connection: AsyncConnection,
    tenant_id: UUID,
    run_id: UUID,
    by: str,
    *,
    outcome: str | None = None,
    score: float | None = None,
    comment: str | None = None,
) -> dict[str, Any]:
    """Store feedback on a finished run. The feedback replaces earlier feedback.

    The run's episode does not change. Learning then processes the run again.

    Args:
        by: the feedback's author, in the form that the audit log uses.
        outcome: outcome that replaces the run's outcome.
        score: a number from 0 (worst) to 1 (best).
    """
    where = {"tenant": tenant_id, "run": run_id}
    feedback = {"outcome": outcome, "score": score, "comment": comment, "by": by}
    await connection.execute(_HOLD, where)
    result = await connection.execute(_STORE, where | feedback)
    await connection.execute(_LABEL, where)
    return dict(result.mappings().one())


async def feedback(connection: AsyncConnection, tenant_id: UUID, run_id: UUID) -> RowMapping:
    """Return the latest feedback on a run.

    Raises:
        NotFoundError: the tenant has no such run, or the run has no feedback.
    """
    rows = await connection.execute(_FEEDBACK, {"tenant": tenant_id, "run": run_id})
    if (row := rows.mappings().one_or_none()) is None:
        await get(connection, tenant_id, run_id)
        raise NotFoundError(f"run {run_id} has no feedback")
    return row


OutcomeSource = Literal["feedback", "eval", "check"]
JudgeKind = Literal["feedback", "judge", "check", "status"]
MemoryDraw = Literal["with", "without"]

_BY_STATUS: Mapping[str, OutcomeValue] = {
    RunStatus.FAILED: "FAILURE",
    RunStatus.TIMEOUT: "FAILURE",
    RunStatus.CANCELLED: "CANCELLED",
}
JUDGEMENT = """
    -- LIMIT makes PostgreSQL read each row by its key: a join might read all rows of the tenant.
    LEFT JOIN LATERAL (
        SELECT * FROM episode_feedback o
        WHERE o.tenant_id = r.tenant_id AND o.run_id = r.id LIMIT 1) AS f ON true
    LEFT JOIN LATERAL (
        SELECT * FROM run_checks o
        WHERE o.tenant_id = r.tenant_id AND o.run_id = r.id AND o.part = '' LIMIT 1) AS c ON true
    CROSS JOIN LATERAL (SELECT
        CASE WHEN f.outcome IS NOT NULL THEN 'feedback'
             WHEN c.results @> jsonb_build_array(jsonb_build_object(
                 'type', 'judge', 'passed', c.passed)) THEN 'judge'
             WHEN c.passed IS NOT NULL THEN 'check'
             WHEN r.status IN ('failed', 'timeout') THEN 'status' END AS source,
        coalesce(f.outcome, CASE c.passed WHEN true THEN 'SUCCESS' WHEN false THEN 'FAILURE' END,
            CASE WHEN r.status IN ('failed', 'timeout') THEN 'FAILURE'
                 WHEN r.status = 'cancelled' THEN 'CANCELLED' ELSE 'UNKNOWN' END) AS value,
        CASE WHEN f.outcome IS NOT NULL THEN f.comment ELSE jsonb_path_query_first(c.results,
            '$[*] ? (@.passed == $passed && @.reason like_regex ".").reason',
            jsonb_build_object('passed', c.passed)) #>> CAST(ARRAY[] AS text[]) END AS reason
    ) AS j
"""
"""SQL that joins the judgement ``j`` of :func:`shown` to a run ``r``."""
_DRAW = """(
    SELECT CASE WHEN bool_or(a.arm IN ('used', 'trial')) THEN 'with'
                WHEN count(*) > 0 THEN 'without' END
    FROM episodes e
    JOIN pattern_applications a ON a.tenant_id = e.tenant_id AND a.episode_id = e.id
    WHERE e.tenant_id = {run}.tenant_id AND e.run_id = {run}.id
      AND a.arm IN ('used', 'trial', 'withheld', 'control'))"""


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the API's fields ``outcome``, ``judged_by`` and ``success_check`` for a run's row.

    The outcome comes from the feedback; without feedback, from the checks of the eval or of the
    agent; without checks, from the run's status. A completed run without feedback and checks is
    ``UNKNOWN``. If checks decide the outcome, the first check with this result gives the reason.

    Args:
        row: the run's row. Columns of ``run_checks`` have the prefix ``check_``; outcome, comment
            and author of the feedback have the prefix ``feedback_``. The row of a run that was just
            accepted has no columns with these prefixes.
    """
    check = None
    if row.get("check_status") is not None:
        check = {name: row[f"check_{name}"] for name in OF_CHECK}
    by_status = _BY_STATUS.get(row["status"], "UNKNOWN")
    outcome: dict[str, str | None] = {"value": by_status, "source": None, "reason": None}
    kind: JudgeKind | None = "status" if by_status == "FAILURE" else None
    if (judged := row.get("feedback_outcome")) is not None:
        reason = row["feedback_comment"] or None
        outcome = {"value": judged, "source": "feedback", "reason": reason}
        kind = "feedback"
    elif check is not None and (passed := check["passed"]) is not None:
        agreeing = [each for each in check["results"] if each["passed"] is passed]
        judged = "SUCCESS" if passed else "FAILURE"
        reason = next((each["reason"] for each in agreeing if each["reason"]), None)
        source = "eval" if row.get("is_of_eval") else "check"
        outcome = {"value": judged, "source": source, "reason": reason}
        kind = "judge" if any(each["type"] == "judge" for each in agreeing) else "check"
    author = row["feedback_by"] if kind == "feedback" else None
    by = None if kind is None else {"source": kind, "author": author}
    return {"outcome": outcome, "judged_by": by, "success_check": check}


OF_CHECK = ("status", "passed", "results", "reason", "error", "tries", "updated_at")


_OF_FEEDBACK = ("outcome", "comment", "by")
_OF_WAIT = ("reason", "since", "until")
_OF_WEBHOOK = ("status", "tries", "answer", "error", "next_at", "ended_at")
_BODIES = ("input", *DEMAND_TITLES, "output", "output_json", "output_schema", "overrides")
SHOWN_TEXT = 200
"""Maximum number of characters of a question or message in a list."""
_HIDDEN = (
    "pinned",
    "session_base",
    "spent",
    "spent_beside",
    "turn",
    "parent_task",
    "root_run_id",
    "child_limit",
    "batch",
    "given",
)
"""Columns of a run's row that lists do not read, because some of these columns are large."""
ABOVE_ROOTS = UUID(int=4 << 120)
"""Upper bound of runs' ids (UUIDv7) until 2109. Most ids of child runs (UUIDv5) are larger."""
_BLOCKED_BY = func.blocked_by(
    runs.c.tenant_id, func.unfinished_in(runs.c.tenant_id, runs.c.conversation_id), type_=JSONB
)


def _version(run: Any) -> ColumnElement[int]:
    of_agent = run.pinned["agents"][run.agent].as_integer()
    return func.coalesce(run.pinned["graph"]["version"].as_integer(), of_agent)


def _runs(*but: str) -> Select[Any]:
    """Select runs, joined to their rows in other tables. ``but``: columns to leave out."""
    reported = case((runs.c.mode == "batch", runs.c.last_seq), else_=0)
    ends = lateral_rows(webhooks, _of_run(webhooks) & (webhooks.c.seq == reported), *_OF_WEBHOOK)
    learning = lateral_rows(run_learning, _of_run(run_learning), "status")
    feedback = lateral_rows(episode_feedback, _of_run(episode_feedback), *_OF_FEEDBACK)
    itself = _of_run(run_checks) & (run_checks.c.part == "")
    checks = lateral_rows(run_checks, itself, *OF_CHECK)
    waits = lateral_rows(run_waits, _of_run(run_waits), *_OF_WAIT)
    return (
        select(
            *(column for column in runs.c if column.name not in but),
            *(ends.c[name].label(f"webhook_{name}") for name in _OF_WEBHOOK),
            _version(runs.c).label("version"),
            learning.c.status.label("learning"),
            *(feedback.c[name].label(f"feedback_{name}") for name in _OF_FEEDBACK),
            *(checks.c[name].label(f"check_{name}") for name in OF_CHECK),
            *(waits.c[name].label(f"wait_{name}") for name in _OF_WAIT),
            case((runs.c.queued_at.is_(None) & (runs.c.status == "queued"), _BLOCKED_BY)).label(
                "blocked_by"
            ),
            literal_column(_DRAW.format(run="runs")).label("memory_draw"),
            runs.c.batch.has_key("case").label("is_of_eval"),
        )
        .join_from(runs, ends, true(), isouter=True)
        .outerjoin(learning, true())
        .outerjoin(feedback, true())
        .outerjoin(checks, true())
        .outerjoin(waits, true())
    )


def _of_run(table: Table) -> ColumnElement[bool]:
    return and_(table.c.tenant_id == runs.c.tenant_id, table.c.run_id == runs.c.id)


def _first_subagents() -> ScalarSelect[Any]:
    """Select the ``subagents`` of a run's agent or, in a graph, of the graph's first agent."""
    graphs, agents = graph_versions.c, agent_versions.c
    of_graph = (
        select(func.jsonb_path_query_first(graphs.definition, _AGENT_OF_NODE, type_=JSONB))
        .where(
            graphs.tenant_id == runs.c.tenant_id,
            graphs.name == runs.c.graph,
            graphs.version == runs.c.pinned["graph"]["version"].as_integer(),
        )
        .correlate(runs)
        .scalar_subquery()
    )
    agent = func.coalesce(runs.c.agent, of_graph[()].astext)
    return (
        select(agents.definition["subagents"])
        .where(
            agents.tenant_id == runs.c.tenant_id,
            agents.name == agent,
            agents.version == runs.c.pinned["agents"][agent].as_integer(),
        )
        .correlate(runs)
        .scalar_subquery()
    )


_AGENT_OF_NODE = text("'$.nodes[*].agent ? (@ != null)'::jsonpath")
# Statements for frequent requests are built only once, because building a statement takes longer
# than executing the request.
_RUN = _runs("spent", "parent_task", "root_run_id", "child_limit", "batch").where(
    runs.c.tenant_id == bindparam("tenant"), runs.c.id == bindparam("run")
)
_RUN_IN_FULL = _RUN.add_columns(
    func.progress_of_tasks(runs.c.tenant_id, runs.c.id, type_=JSONB).label("tasks"),
    _first_subagents().label("subagents"),
)
_EXISTS = select(runs.c.id).where(
    runs.c.tenant_id == bindparam("tenant"), runs.c.id == bindparam("run")
)

_BY_METADATA = text("""
SELECT ids_by_metadata(:of, CAST(:metadata AS jsonb), CAST(:where AS jsonb), :descending, :most)
""")


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Conditions on listed runs. A field that is ``None`` or empty is no condition.

    Attributes:
        parent_run_id: list the child runs of this run; ``None``: list only runs without a parent.
        created_after, created_before: exclusive bounds of the time at which the run was created.
        metadata: (key, value) pairs that the run's metadata must have. The value ``1`` matches the
            string ``"1"`` and the number 1; booleans and null match in the same way.
        draft: true: list only drafts; false: list only runs of stored definitions.
        search: more conditions, which are checked only for the newest ``SEARCHED_RUNS`` runs that
            meet all other conditions.
    """

    status: str | None = None
    waiting_for: str | None = None
    agent: str | None = None
    session_id: str | None = None
    user: str | None = None
    parent_run_id: UUID | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    metadata: Sequence[tuple[str, str]] = ()
    draft: bool = False
    search: "RunSearch | None" = None


@dataclass(frozen=True, slots=True)
class RunSearch:
    """Conditions without an index in the database. A field that is ``None`` is no condition.

    Attributes:
        statuses, agents, outcomes: the run must have one of these values; empty: any value.
            :func:`shown` determines the outcome.
        judged_by: judge of the run.
        outcome_reason: text that the outcome's reason must contain. Case and accents are ignored.
        memory_draw: ``with``: a random draw gave the run a pattern; ``without``: it withheld all.
        text: text that the run's question must contain. Case and accents are ignored.
        error_code: code of the run's error.
        longer_than_s: minimum number of seconds from the run's start to its end or, before its end,
            to now.
        cost_over: minimum cost in US dollars.
        version: version of the run's graph or, without a graph, of the run's agent.
        retrying: true for runs whose last model call failed and will be tried again.
        rated: true for runs with a person's feedback.
    """

    statuses: Sequence[str] = ()
    agents: Sequence[str] = ()
    outcomes: Sequence[OutcomeValue] = ()
    judged_by: JudgeKind | None = None
    memory_draw: MemoryDraw | None = None
    outcome_reason: str | None = None
    text: str | None = None
    error_code: str | None = None
    longer_than_s: float | None = None
    cost_over: float | None = None
    version: int | None = None
    retrying: bool | None = None
    rated: bool | None = None


SEARCHED_RUNS = 20_000
"""Maximum number of runs, the newest ones, that a search or a list of sessions reads."""


async def get(connection: AsyncConnection, tenant_id: UUID, run_id: UUID) -> dict[str, Any]:
    """Return a run's row. The field ``webhook`` is the state of the webhook's delivery.

    Raises:
        NotFoundError: the tenant has no such run.
    """
    return await _fetch(connection, _RUN, tenant_id, run_id)


async def get_in_full(connection: AsyncConnection, tenant_id: UUID, run_id: UUID) -> dict[str, Any]:
    """Return a run with the ``subagents`` of its first agent, and with ``tasks``.

    ``tasks`` counts the dispatched tasks: ``waiting``, ``running``, ``done`` and ``failed``. If
    enough tasks have ended, ``estimated_ms`` is the estimated time in milliseconds until all tasks
    have ended. ``tasks`` is ``None`` if the run has dispatched no tasks.

    Raises:
        NotFoundError: the tenant has no such run.
    """
    return await _fetch(connection, _RUN_IN_FULL, tenant_id, run_id)


async def _fetch(
    connection: AsyncConnection, query: Select[Any], tenant_id: UUID, run_id: UUID
) -> dict[str, Any]:
    result = await connection.execute(query, {"tenant": tenant_id, "run": run_id})
    row = result.mappings().one_or_none()
    if row is None:
        raise no_run(run_id)
    return to_response(dict(row))


def to_response(row: Mapping[str, Any]) -> dict[str, Any]:
    webhook = None
    if (url := row["webhook_url"]) is not None:
        webhook = {name: row.get(f"webhook_{name}") for name in _OF_WEBHOOK}
        webhook["url"] = url.split("?")[0]
        if webhook["status"] is None:  # a trigger queues the delivery when the run ends
            webhook |= {"status": "pending", "tries": 0}
    fork = row.get("fork_of")
    taken_over = None
    if fork is not None:
        taken_over = {"events": max(0, row["carried_seq"] - 1), "usage": fork["usage"]}
        fork = {name: fork[name] for name in ("run_id", "node", "seq") if name in fork}
    waiting = None
    if row.get("wait_reason") is not None:
        waiting = {name: row[f"wait_{name}"] for name in _OF_WAIT}
    return {
        "learning": None,
        "version": None,
        "blocked_by": None,
        "waiting": waiting,
        **row,
        **shown(row),
        "fork_of": fork,
        "taken_over": taken_over,
        "user": row["user_id"],
        "question": row["question"][:SHOWN_TEXT],
        "memory_used": OFF if row["memory"] == "off" else row["memory_used"],
        "webhook": webhook,
    }


async def page(
    connection: AsyncConnection,
    tenant_id: UUID,
    filters: RunFilter,
    *,
    after: UUID | None,
    descending: bool,
    limit: int,
    full: bool,
) -> PageItems[dict[str, Any]]:
    """List a page of runs by age, after the run ``after``. ``full``: with input and output."""
    query = _runs(*_HIDDEN, *(() if full else _BODIES))
    if filters.search is not None:
        newest = _newest(await _all_conditions(connection, tenant_id, filters))
        ids = select(newest.c.id).where(*_search_conditions(newest.c, filters.search))
        query = query.where(runs.c.tenant_id == tenant_id, runs.c.id.in_(ids))
    elif filters.metadata:
        found_ids = await _with_metadata(connection, filters, after, descending, limit + 1)
        query = query.where(*_of_tenant(tenant_id, filters), runs.c.id.in_(found_ids))
    else:
        query = query.where(*_of_tenant(tenant_id, filters), *_conditions(filters))
    query = paged(query, runs.c.id, after=after, descending=descending)
    rows = await fetch_page(connection, query, limit)
    return PageItems((to_response(dict(row)) for row in rows), more=rows.more)


async def totals(connection: AsyncConnection, tenant_id: UUID, filters: RunFilter) -> RowMapping:
    """Sum up the runs of a list: ``runs``, ``failed``, ``usage`` and ``complete``.

    ``failed`` counts failed runs and runs whose timeout expired. ``wanted.search`` is checked only
    for the newest ``SEARCHED_RUNS`` runs that meet all other conditions. ``complete`` is false if
    at least ``SEARCHED_RUNS`` runs meet these other conditions.
    """
    newest = _newest(await _all_conditions(connection, tenant_id, filters))
    run = newest.c
    is_found = and_(true(), *_search_conditions(run, filters.search or RunSearch()))
    failed = run.status.in_((RunStatus.FAILED, RunStatus.TIMEOUT))
    query = select(
        func.count().filter(is_found).label("runs"),
        func.count().filter(is_found, failed).label("failed"),
        func.sum_usage(func.array_agg(run.usage).filter(is_found), type_=JSONB).label("usage"),
        (func.count() < SEARCHED_RUNS).label("complete"),
    )
    return (await connection.execute(query)).mappings().one()


async def _all_conditions(
    connection: AsyncConnection, tenant_id: UUID, filters: RunFilter
) -> list[ColumnElement[bool]]:
    """Return all conditions except those of ``wanted.search``."""
    own = _of_tenant(tenant_id, filters)
    if not filters.metadata:
        return [*own, *_conditions(filters)]
    ids = await _with_metadata(connection, filters, None, True, SEARCHED_RUNS)
    return [*own, runs.c.id == any_(bindparam("found", ids, type_=ARRAY(Uuid)))]


def _of_tenant(tenant_id: UUID, filters: RunFilter) -> list[ColumnElement[bool]]:
    is_draft = [] if filters.parent_run_id is not None else [runs.c.draft.is_(filters.draft)]
    return [runs.c.tenant_id == tenant_id, *is_draft]


def _conditions(filters: RunFilter) -> Iterator[ColumnElement[bool]]:
    for column, value in (
        (runs.c.status, filters.status),
        (runs.c.agent, filters.agent),
        (runs.c.session_id, filters.session_id),
        (runs.c.user_id, filters.user),
    ):
        if value is not None:
            yield column == value
    if filters.waiting_for is not None:
        yield exists().where(_of_run(run_waits), run_waits.c.reason == filters.waiting_for)
    after, before = filters.created_after, filters.created_before
    if after is not None:
        yield runs.c.created_at > after
    if before is not None:
        yield runs.c.created_at < before
    if filters.parent_run_id is not None:
        yield runs.c.parent_run_id == filters.parent_run_id
        return
    yield and_(runs.c.parent_run_id.is_(None), runs.c.mode != "batch")
    # A run's id (UUIDv7) begins with a time shortly after the run's created_at. So the index of the
    # primary key serves both bounds of created_at.
    if after is not None:
        yield runs.c.id >= first_id(after)
    yield runs.c.id < (ABOVE_ROOTS if before is None else first_id(before + MOST_SKEW))


def _newest(conditions: Iterable[ColumnElement[bool]]) -> Subquery:
    """Select the newest ``SEARCHED_RUNS`` runs that meet some conditions, as ``r``."""
    query = select(runs).where(*conditions).order_by(runs.c.id.desc()).limit(SEARCHED_RUNS)
    return query.subquery("r")


def _search_conditions(run: Any, filters: RunSearch) -> Iterator[ColumnElement[bool]]:
    """Yield the conditions of a search. ``run``: the columns of the runs that are searched."""
    for column, values in ((run.status, filters.statuses), (run.agent, filters.agents)):
        if values:
            yield column.in_(values)
    if filters.text is not None:
        yield func.strpos(func.folded(run.question), func.folded(filters.text)) > 0
    if filters.error_code is not None:
        yield run.error["code"].astext == filters.error_code
    if (judged := _judgement_condition(filters)) is not None:
        yield judged
    if filters.memory_draw is not None:
        draw = literal_column(_DRAW.format(run="r"), Text)
        yield draw == filters.memory_draw
    if filters.longer_than_s is not None:
        took = func.coalesce(run.ended_at, func.now()) - run.started_at
        yield took > timedelta(seconds=filters.longer_than_s)
    if filters.cost_over is not None:
        yield cast(run.usage["cost"]["amount"].astext, Numeric) > Decimal(str(filters.cost_over))
    if filters.version is not None:
        yield _version(run) == filters.version
    if filters.retrying is not None:
        is_open = run.status.in_((RunStatus.RUNNING, RunStatus.WAITING))
        repeats = func.coalesce(func.is_retrying(run.tenant_id, run.id), false())
        yield case((is_open, repeats), else_=false()) == filters.retrying
    if filters.rated is not None:
        yield _own(run, episode_feedback, episode_feedback.c.run_id).exists() == filters.rated


def _judgement_condition(filters: RunSearch) -> Any:
    """Return the condition on the judgement of a run ``r``; ``None``: no condition."""
    conditions, values = [], []
    if filters.outcomes:
        conditions.append("j.value = ANY (:outcomes)")
        values.append(bindparam("outcomes", [*filters.outcomes], type_=ARRAY(Text)))
    if filters.judged_by is not None:
        conditions.append("j.source = :judged_by")
        values.append(bindparam("judged_by", filters.judged_by))
    if filters.outcome_reason is not None:
        conditions.append("strpos(folded(j.reason), folded(:reason)) > 0")
        values.append(bindparam("reason", filters.outcome_reason))
    if not conditions:
        return None
    query = f"EXISTS (SELECT FROM (SELECT) AS one {JUDGEMENT} WHERE {' AND '.join(conditions)})"
    return text(query).bindparams(*values)


def _own(run: Any, table: Table, column: ColumnElement[Any]) -> Select[Any]:
    """Select a column of the run's row in ``table``."""
    return select(column).where(table.c.tenant_id == run.tenant_id, table.c.run_id == run.id)


async def _with_metadata(
    connection: AsyncConnection,
    filters: RunFilter,
    after: UUID | None,
    descending: bool,
    limit: int,
) -> Sequence[UUID]:
    first = [] if after is None or descending else [after]
    last = [after] if after is not None and descending else []
    if filters.created_after is not None:  # `>` suffices here, because no run has exactly this id
        first.append(first_id(filters.created_after))
    if filters.created_before is not None:
        last.append(first_id(filters.created_before + MOST_SKEW))
    where = [
        ("status", "=", filters.status),
        ("agent", "=", filters.agent),
        ("session_id", "=", filters.session_id),
        ("user_id", "=", filters.user),
        ("waiting_for", "=", filters.waiting_for),
        ("created_at", ">", filters.created_after),
        ("created_at", "<", filters.created_before),
        ("id", ">", max(first, default=None)),
        ("id", "<", min(last, default=None)),
    ]
    ids = await ids_by_metadata(connection, "runs", filters.metadata, where, descending, limit)
    return [UUID(each) for each in ids]


async def ids_by_metadata(
    connection: AsyncConnection,
    of: Literal["runs", "sessions"],
    metadata: Iterable[tuple[str, str]],
    where: Iterable[tuple[str, str, Any]],
    descending: bool,
    limit: int,
) -> Sequence[str]:
    """Return ids of the tenant's runs or sessions with some metadata, sorted.

    PostgreSQL cannot use the index for ``@>`` under row-level security. Therefore, an SQL function
    searches without row-level security, and reads only rows of the transaction's tenant.

    Args:
        where: further conditions: column, operator (``=``, ``<`` or ``>``) and value. A value of
            ``None`` is no condition.
    """
    spellings = [[{key: each} for each in spelled(value)] for key, value in metadata]
    values = {
        "of": of,
        "metadata": to_json(spellings).decode(),
        "where": to_json([each for each in where if each[2] is not None]).decode(),
        "descending": descending,
        "most": limit,
    }
    return (await connection.scalars(_BY_METADATA, values)).all()


def spelled(value: str) -> list[Any]:
    """Return the JSON values that a text in a request may mean: ``1`` is a string or a number."""
    try:
        parsed = from_json(value)
    except ValueError:
        return [value]
    if isinstance(parsed, float) and not math.isfinite(parsed):
        return [value]
    return [value] if isinstance(parsed, str | list | dict) else [value, parsed]


TALKING = (SubagentStatus.RUNNING, SubagentStatus.STREAMING)
"""Statuses of tasks that may have live text."""


async def children(
    connection: AsyncConnection, tenant_id: UUID, parents: Collection[UUID], since: datetime
) -> list[UUID]:
    """Return the ids of child runs that have not ended, or that were created since a time."""
    query = select(runs.c.id).where(
        runs.c.tenant_id == tenant_id,
        runs.c.parent_run_id.in_(parents),
        runs.c.ended_at.is_(None) | (runs.c.created_at >= since),
    )
    return list(await connection.scalars(query))


async def tasks_page(
    connection: AsyncConnection,
    tenant_id: UUID,
    run_id: UUID,
    *,
    status: str | None,
    after: tuple[Any, ...] | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List a run's tasks, sorted by creation, each with its accepted answer.

    Args:
        status: list only tasks with this status; ``None``: list all tasks.
    """
    await require(connection, tenant_id, run_id)
    values: dict[str, object] = {"tenant": tenant_id, "run": run_id}
    if status is not None:
        values["of_status"] = status
    if after is not None:
        values |= zip(("after_at", "after_id"), after, strict=True)
    query = _tasks(by_status=status is not None, on=after is not None, descending=descending)
    rows = await fetch_page(connection, query, limit, values=values)
    return PageItems(map(dict, rows), more=rows.more)


@cache
def _tasks(*, by_status: bool, on: bool, descending: bool) -> Select[Any]:
    """Select a run's tasks. ``on``: true: select only the tasks after a position."""
    data = event_data(tasks, tasks.c.answer_seq).label("data")
    answer = select(data).correlate(tasks).lateral().c
    is_whole = tasks.c.status == RunStatus.COMPLETED
    usage = func.coalesce(case((is_whole, answer.data["usage"])), tasks.c.usage).label("usage")
    changed_at = func.coalesce(tasks.c.ended_at, tasks.c.status_changed_at)
    columns = (column for column in tasks.c if column.name not in ("usage", "status_changed_at"))
    dispatch = event_data(tasks, tasks.c.dispatch_seq).label("data")
    request = select(dispatch).correlate(tasks).lateral().c.data
    is_open = tasks.c.status.in_(TALKING)
    child_run = cast(request["child_run_id"].astext, Uuid)
    text_so_far = func.partial_output(
        tasks.c.tenant_id,
        func.coalesce(child_run, tasks.c.run_id),
        case((child_run.is_(None), tasks.c.id)),
    )
    position = _positions().c
    query = (
        select(
            *columns,
            usage,
            changed_at.label("status_changed_at"),
            answer_in(tasks, answer.data).label("output"),
            case((is_open, text_so_far)).label("partial_output"),
            request["prompt"].astext.label("prompt"),
            request["instructions"].astext.label("instructions"),
            request["token_budget"].as_integer().label("token_budget"),
            child_run.label("child_run_id"),
            position.queue_position,
        )
        .join_from(tasks, answer.data.table, true())
        .join(request.table, true())
        .outerjoin(position.id.table, position.id == tasks.c.id)
        .where(tasks.c.tenant_id == bindparam("tenant"), tasks.c.run_id == bindparam("run"))
    )
    if by_status:
        query = query.where(tasks.c.status == bindparam("of_status"))
    place = bindparam("after_at", type_=tasks.c.created_at.type), bindparam("after_id", type_=Uuid)
    return measured(
        paged(
            query,
            *(tasks.c.created_at, tasks.c.id),
            after=place if on else None,
            descending=descending,
        )
    )


def _positions() -> Subquery:
    """Select the queued tasks of a run, each with its position in the queue."""
    order = tasks.c.priority, tasks.c.created_at, tasks.c.id
    position = func.row_number().over(order_by=order) - 1
    return (
        select(tasks.c.id, position.label("queue_position"))
        .where(tasks.c.tenant_id == bindparam("tenant"), tasks.c.run_id == bindparam("run"))
        .where(tasks.c.status == SubagentStatus.QUEUED, tasks.c.mode == "async")
        .subquery()
    )


async def require(connection: AsyncConnection, tenant_id: UUID, run_id: UUID) -> None:
    """Raise ``NotFoundError`` unless the tenant has this run."""
    if await connection.scalar(_EXISTS, {"tenant": tenant_id, "run": run_id}) is None:
        raise no_run(run_id)


def event_data(of: FromClause, seq: ColumnElement[Any]) -> ColumnElement[Any]:
    """Select the data of an event; NULL if ``seq`` is NULL. ``of``: a table with ``run_id``."""
    return func.event_data(of.c.tenant_id, of.c.run_id, seq, type_=JSONB)


def answer_in(of: FromClause, data: ColumnElement[Any]) -> ColumnElement[Any]:
    """Select an answer's text from an event's data, or from the event to which the data refer."""
    return func.answer_in(of.c.tenant_id, of.c.run_id, data, type_=Text)


def with_answers(*columns: ColumnElement[Any]) -> Select[Any]:
    """Select events. ``output`` is the text of the answer to which the event refers."""
    answer = event_data(run_events, run_events.c.data["answer_seq"].as_integer())
    return select(*columns, answer_in(run_events, answer).label("output"))


async def context(
    connection: AsyncConnection, tenant_id: UUID, run_id: UUID, agent: str
) -> list[dict[str, Any]]:
    """Return the context that an agent received from other agents of the run, in the log's order.

    Raises:
        NotFoundError: the tenant has no such run, or the run has no such agent.
    """
    run = await get(connection, tenant_id, run_id)
    if agent not in run["pinned"]["agents"]:
        raise NotFoundError(f"run {run_id} has no agent '{agent}'")
    query = (
        with_answers(run_events.c.seq, run_events.c.task_id, run_events.c.data)
        .where(
            run_events.c.tenant_id == tenant_id,
            run_events.c.run_id == run_id,
            run_events.c.type.in_((EventType.MEMORY_INJECTED, EventType.CONTEXT_RECALLED)),
            run_events.c.agent == agent,
        )
        .order_by(run_events.c.step, run_events.c.seq)
    )
    found = []
    for row in await connection.execute(query):
        content = row.data.get("content")
        content = row.output if content is None else content
        found.append({**row.data, "seq": row.seq, "task_id": row.task_id, "content": content})
    return found


Place = tuple[UUID, int]
"""Run and ``seq`` of a delivery: the position of the delivery in a list."""

_same_run = and_(runs.c.tenant_id == webhooks.c.tenant_id, runs.c.id == webhooks.c.run_id)
_run = lateral_rows(runs, _same_run, "status", "user_id")
_event_type = (  # a delivery reports the last event of a step
    select(run_events.c.type)
    .where(*(run_events.c[name] == webhooks.c[name] for name in ("tenant_id", "run_id", "seq")))
    .where(run_events.c.step == webhooks.c.seq)
    .correlate(webhooks)
    .scalar_subquery()
)
_event = case((webhooks.c.seq == 0, func.concat("run.", _run.c.status)), else_=_event_type)


async def deliveries_page(
    tx: AsyncConnection,
    tenant_id: UUID,
    filters: Mapping[str, Any],
    *,
    user: str | None = None,
    after: Place | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List a page of webhook deliveries. Omit the URL's query, which may contain a secret.

    Args:
        filters: required values of ``status`` and ``run_id``; ``None``: any value.
        user: list only deliveries of this user's runs.
    """
    own = webhooks.c
    query = (
        select(
            own.run_id,
            own.seq,
            _event.label("event"),
            func.split_part(own.url, "?", 1).label("url"),
            *(own[name] for name in ("status", "tries", "answer", "error", "next_at", "ended_at")),
        )
        .join(_run, true())
        .where(own.tenant_id == tenant_id)
        .where(*(own[name] == value for name, value in filters.items() if value is not None))
    )
    if user is not None:
        query = query.where(_run.c.user_id == user)
    query = paged(query, own.run_id, own.seq, after=after, descending=descending)
    few = filters.get("status") == "pending"  # the index has another order
    return await fetch_page(tx, query, limit, by_index=not few)


USAGE_BY = "agent", "model", "session", "day", "key", "user", "batch"
"""Groupings of usage, in addition to the grouping by the values of a metadata key."""

_USUAL = timedelta(days=30)
_LONGEST = timedelta(days=366)
_SUMS = ("input", "output", "cached", "reasoning", "estimated")
_COLUMNS = ("name", *_SUMS, "amount", "complete", "runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFilter:
    """Conditions on the summed usage. A field that is ``None`` is no condition.

    Attributes:
        agent, model: the model call's agent and model.
        user, session: the run's user and session.
        metadata: (key, value) pairs that a run's metadata must have.
        key: if the usage is grouped by metadata: the key whose values are the groups.
    """

    agent: str | None = None
    model: str | None = None
    user: str | None = None
    session: str | None = None
    metadata: Sequence[tuple[str, str]] = ()
    key: str | None = None


async def usage_page(
    connection: AsyncConnection,
    tenant_id: UUID,
    by: str,
    only: UsageFilter,
    *,
    since: datetime | None,
    until: datetime | None,
    after: str | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, object]]:
    """List the summed usage of ended runs that were created from ``since`` to ``until``.

    Each sum has its group's name in a field that is called like the value of ``by``, such as
    ``agent``. The sums are sorted by group. The group ``None`` has the runs without a value.

    Args:
        by: what the usage is grouped by: one of `USAGE_BY`, or ``metadata``.
        since: ``None``: 30 days before ``until``.
        until: ``None``: now.
        after: name of the last group of the previous page.

    Raises:
        InvalidInputError: the period from ``since`` to ``until`` is longer than a year.
    """
    until = until or await connection.scalar(select(func.now()))
    assert until is not None
    since = since or until - _USUAL
    if until - since > _LONGEST:
        raise InvalidInputError(
            f"the time from since to until is longer than {_LONGEST.days} days: shorten it",
            pointer="/since",
        )
    bounds = since, until, first_id(since), first_id(until + MOST_SKEW)
    spelled_pairs = [[{key: each} for each in spelled(value)] for key, value in only.metadata]
    filters = bindparam("only", {**asdict(only), "metadata": spelled_pairs}, JSONB)
    sums = func.usage_by(tenant_id, by, *bounds, filters).table_valued(*_COLUMNS)
    query = select(sums)
    query = paged(query, sums.c.name, after=after, descending=descending)
    rows = await fetch_page(connection, query, limit)
    return PageItems(
        (
            {
                by: row["name"] or None,
                **{name: row[name] for name in (*_SUMS, "runs")},
                "cost": {
                    "amount": row["amount"],
                    "currency": CURRENCY,
                    "complete": row["complete"],
                },
            }
            for row in rows
        ),
        more=rows.more,
    )
