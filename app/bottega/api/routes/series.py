"""Routes for metrics over time: series for charts, totals of a period, and outcomes.

Series and totals come from rollups, which have sums for each minute and each hour; see
``rollups.sql``.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import AfterValidator, BaseModel, Field
from sqlalchemy import Text, Uuid, bindparam, func, select, text
from sqlalchemy.dialects.postgresql import ARRAY

from bottega.api.errors import problems
from bottega.api.schemas.base import Answer, PlaceInTime
from bottega.api.shared.deps import Tenant, Transaction
from bottega.api.shared.pages import storable
from bottega.db.pages import first_id
from bottega.db.pool import AsyncConnection
from bottega.errors import InvalidInputError
from bottega.memory.patterns.evidence import Tally, pooled_difference
from bottega.memory.patterns.pattern import APPLIED, Arm
from bottega.runs.read import JUDGEMENT, JudgeKind

router = APIRouter(prefix="/v1/metrics", tags=["operations"])

Metric = Literal[
    "runs",
    "errors",
    "tokens",
    "cost",
    "duration_p50",
    "duration_p95",
    "duration_p99",
    "first_token_p50",
    "first_token_p95",
    "queue_wait_p50",
    "queue_wait_p95",
]
Grouping = Literal["agent", "version", "model", "code"]
Step = Literal["1m", "5m", "1h", "1d"]
OutcomeGrouping = Literal["day", "agent", "version", "memory"]

_STEPS: Mapping[str, timedelta] = {
    "1m": timedelta(minutes=1),
    "5m": timedelta(minutes=5),
    "1h": timedelta(hours=1),
    "1d": timedelta(days=1),
}
_MINUTE, _HOUR = _STEPS["1m"], _STEPS["1h"]
_KEPT = {"minute": timedelta(days=30), "hour": timedelta(days=366)}
MOST_POINTS = 11_000
"""Maximum number of points in an answer, over all its series."""
MOST_TOTALS = 200
MOST_JUDGED = 20_000
"""Maximum number of judged runs, and of pattern applications, that a request reads."""
_EPOCH = datetime.fromtimestamp(0, UTC)

_READ = """
    SELECT key, at, n, {value}
    FROM read_rollups(:tenant, :span, :by, :name, :since, :until, :step, :most)
"""
_COUNTS = text(_READ.format(value="(sums ->> :name)::double precision AS value"))
_QUANTILES = text(_READ.format(value="bucket_quantile(sums, :of, :share) AS value"))
_TOTALS = text(
    _READ.format(
        value="""
    sums, bucket_quantile(sums, 'duration', 0.5) AS duration_p50,
    bucket_quantile(sums, 'duration', 0.95) AS duration_p95,
    bucket_quantile(sums, 'first_token', 0.5) AS first_token_p50,
    bucket_quantile(sums, 'first_token', 0.95) AS first_token_p95,
    bucket_quantile(sums, 'queue_wait', 0.5) AS queue_wait_p50,
    bucket_quantile(sums, 'queue_wait', 0.95) AS queue_wait_p95
"""
    )
)
_KEYS: Mapping[OutcomeGrouping, str] = {
    "day": "to_char(r.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD')",
    "agent": "coalesce(r.agent, r.graph)",
    "version": "coalesce(r.agent, r.graph) || '@' || coalesce(r.pinned #>> '{graph,version}', "
    "r.pinned -> 'agents' ->> r.agent)",
    "memory": "CASE WHEN r.memory = 'off' OR r.memory_used LIKE 'none%' "
    "THEN 'without' ELSE 'with' END",
}
# The query first reads the labels and the failures, because most runs have neither. Ids of runs
# have the same order as the runs' times.
_OUTCOMES = f"""
    WITH judged AS MATERIALIZED (
        SELECT run_id FROM (
            (SELECT run_id FROM episode_feedback
             WHERE tenant_id = :tenant AND run_id >= :first AND run_id < :last
               AND outcome IS NOT NULL
             ORDER BY run_id DESC LIMIT :most)
            UNION
            (SELECT run_id FROM run_checks
             WHERE tenant_id = :tenant AND run_id >= :first AND run_id < :last
               AND part = '' AND passed IS NOT NULL
             ORDER BY run_id DESC LIMIT :most)
            UNION
            (SELECT id FROM runs
             WHERE tenant_id = :tenant AND id >= :first AND id < :last
               AND error IS NOT NULL AND status IN ('failed', 'timeout')
             ORDER BY id DESC LIMIT :most)) AS labels
        ORDER BY run_id DESC LIMIT :most
    )
    SELECT looked.at AS judged, g.* FROM (SELECT count(*) AS at FROM judged) AS looked LEFT JOIN (
    SELECT {{key}} AS key, j.source, count(*) FILTER (WHERE j.value = 'SUCCESS') AS good,
           count(*) FILTER (WHERE j.value = 'PARTIAL') AS partly,
           count(*) FILTER (WHERE j.value = 'FAILURE') AS bad
    FROM judged
    JOIN runs r ON r.tenant_id = :tenant AND r.id = judged.run_id
    {JUDGEMENT}
    WHERE NOT r.draft AND r.mode <> 'batch' AND r.parent_task IS NULL
      AND (CAST(:agent AS text) IS NULL OR coalesce(r.agent, r.graph) = :agent)
    GROUP BY 1, 2) AS g ON true
"""  # noqa: S608
_OUTCOMES_BY = {
    by: text(_OUTCOMES.format(key=key)).bindparams(
        *(bindparam(name, type_=Uuid) for name in ("tenant", "first", "last"))
    )
    for by, key in _KEYS.items()
}
# Group by pattern, version and state, because candidates and validated patterns are withheld from
# different shares of runs. If one agent is selected, also group by the agent's version.
_DRAWN = text(f"""
    WITH drawn AS MATERIALIZED (
        SELECT p.pattern_id, p.version, p.episode_id, p.good, p.arm = ANY (:applied) AS given,
               p.arm = ANY (:of_validated) AS of_validated
        FROM pattern_applications p
        WHERE p.tenant_id = :tenant AND p.id >= :first AND p.id < :last
          AND p.arm = ANY (:drawn) AND p.good IS NOT NULL
        ORDER BY p.id DESC LIMIT :most
    )
    SELECT looked.at AS drawn, g.*, p.name
    FROM (SELECT count(*) AS at FROM drawn) AS looked LEFT JOIN (
    SELECT a.pattern_id, a.version, a.of_validated,
           (r.pinned -> 'agents' ->> CAST(:agent AS text))::integer AS agent_version,
           count(*) FILTER (WHERE a.given AND a.good) AS given_good,
           count(*) FILTER (WHERE a.given) AS given,
           count(*) FILTER (WHERE NOT a.given AND a.good) AS others_good,
           count(*) FILTER (WHERE NOT a.given) AS others
    FROM drawn a
    LEFT JOIN episodes e ON e.tenant_id = :tenant AND e.id = a.episode_id
    LEFT JOIN runs r ON r.tenant_id = :tenant AND r.id = e.run_id
         AND (CAST(:agent AS text) IS NOT NULL OR CAST(:judged_by AS text) IS NOT NULL)
    {JUDGEMENT}
    WHERE (CAST(:agent AS text) IS NULL OR e.agent = :agent)
      AND (CAST(:judged_by AS text) IS NULL OR j.source = :judged_by)
    GROUP BY 1, 2, 3, 4) AS g ON true
    LEFT JOIN patterns p ON p.tenant_id = :tenant AND p.id = g.pattern_id
""").bindparams(  # noqa: S608
    *(bindparam(name, type_=Uuid) for name in ("tenant", "first", "last")),
    *(bindparam(name, type_=ARRAY(Text)) for name in ("applied", "of_validated", "drawn")),
)
_OF_VALIDATED = [Arm.USED.value, Arm.WITHHELD.value]
_DRAWN_ARMS = [*_OF_VALIDATED, Arm.TRIAL.value, Arm.CONTROL.value]
_COUNTED = ("runs", "errors", "tokens", "cost", "run_cost")
_TIMES = (
    *("duration_p50", "duration_p95", "first_token_p50", "first_token_p95"),
    *("queue_wait_p50", "queue_wait_p95"),
)
_USUAL = timedelta(days=1)
_BY = (
    "One series for each value. `version`: agents and graphs by version, such as `clerk@2`. "
    "`model`: runs by the models that they called. `code`: failed runs by error code. Without "
    "`by`: one series with the key `all`."
)
Moment = Annotated[datetime, Field(examples=["2026-11-02T08:00:00Z"])]


class Point(Answer):
    """The value of one time step."""

    at: Moment
    """Start of the step."""
    value: float | None
    """Value of the step; null: nothing was measured, or the value was deleted or comes later."""


class Series(Answer):
    """The values of one key."""

    key: Annotated[str, Field(examples=["clerk@2"])]
    """Name of the agent, version, model or code; `all`; or `other`: the sum of the keys beyond the
    first 199 of a minute."""
    points: list[Point]
    """One value for each step, the oldest first."""


class MetricSeries(Answer):
    """A metric over time."""

    metric: Metric
    """The requested metric."""
    by: Grouping | None
    """The requested grouping; null: none."""
    step: Step
    """The requested step."""
    series: list[Series]
    """A series for each key that has a value, in the order of the keys."""


class Total(Answer):
    """Figures of the runs of one group (`key`), or of all runs."""

    key: Annotated[str, Field(examples=["clerk@2"])]
    """Name of the agent, version, model or code, as in a time series."""
    runs: int
    """Number of runs that have ended, including items of batches."""
    errors: int
    """Number of runs that failed or timed out."""
    tokens: int
    """Number of input and output tokens of the key's own model calls."""
    cost: float
    """Cost of the key's own model calls, in US dollars."""
    run_cost: float
    """Cost of the key's runs with their sub-agents, in US dollars."""
    duration_p50: float | None
    """Median time from a run's start to its end, in seconds, without waits for people; null: no run
    was started."""
    duration_p95: float | None
    """95 % of the runs took less than this; see `duration_p50`."""
    first_token_p50: float | None
    """Median time from a model's request to the first piece of its answer, in seconds. For each
    agent and model of a run, the last 1,000 answers count."""
    first_token_p95: float | None
    """95 % of the answers began sooner than this; see `first_token_p50`."""
    queue_wait_p50: float | None
    """Median time from a run's acceptance to its start, in seconds."""
    queue_wait_p95: float | None
    """95 % of the runs started sooner than this; see `queue_wait_p50`."""


class Totals(Answer):
    """Figures of a period."""

    items: list[Total]
    """Totals by key; the key that has most runs is first."""


class JudgedRuns(Answer):
    """Number of runs by outcome, for one group of runs and one source of outcomes."""

    key: Annotated[str, Field(examples=["clerk@2"])]
    """A day (UTC), an agent or graph, its version, or `with` or `without` for memory."""
    source: JudgeKind
    """Source of the outcome, as in a run's `judged_by`."""
    good: int
    """Number of runs with the outcome `SUCCESS`."""
    partly: int
    """Number of runs with the outcome `PARTIAL`."""
    bad: int
    """Number of runs with the outcome `FAILURE`."""


class Outcomes(Answer):
    """Outcomes of judged runs."""

    by: OutcomeGrouping
    """The requested grouping."""
    items: list[JudgedRuns]
    """Outcomes, in the order of the keys."""
    complete: bool
    """False: the period has more judged runs or keys than a request reads."""


class Judged(Answer):
    """Number of applications of patterns, and number of successful applications."""

    good: int
    """Number of applications that went well."""
    runs: int
    """Number of applications whose outcome is known."""


class Comparison(Answer):
    """Comparison of runs that got learned patterns with runs from which patterns were withheld."""

    given: Judged
    """Runs that got patterns; the patterns were on trial or validated."""
    without: Judged
    """Runs from which a random draw withheld patterns."""
    difference: Annotated[float | None, Field(examples=[0.21])]
    """Share of good runs with patterns minus the share without, compared pattern by pattern and
    weighted as by Mantel and Haenszel; null: nothing to compare."""
    low: float | None
    """Lower end of the 95 % interval of `difference`."""
    high: float | None
    """Upper end of the 95 % interval of `difference`."""


class PatternEffect(Comparison):
    """The effect of a version of a pattern, as a candidate or as a validated pattern."""

    pattern_id: UUID
    name: str
    """Name of the pattern."""
    version: int
    """Version of the pattern."""
    on_trial: bool
    """True: while the pattern was a candidate; false: since it is validated."""


class VersionEffect(Comparison):
    """The effect of memory on the runs of a version of an agent."""

    version: int
    """Version of the agent."""


class MemoryEffect(Comparison):
    """The effect of memory on all runs, by pattern and by version."""

    patterns: int
    """Number of compared versions of patterns; a version needs runs with and without it. A version
    counts once as a candidate and once as a validated pattern."""
    by_pattern: list[PatternEffect]
    """The comparisons of these patterns, at most 200: the versions with most runs."""
    by_version: list[VersionEffect]
    """The same comparison among the runs of each version of the agent; empty without `agent`."""
    complete: bool
    """False: the period has more applications than the request has read."""


class SpanQuery(BaseModel):
    since: Annotated[
        PlaceInTime | None,
        Field(alias="from", description="Start of the period; by default a day before `to`."),
    ] = None
    until: Annotated[
        PlaceInTime | None,
        Field(alias="to", description="End of the period, exclusive; by default now."),
    ] = None

    def bounds(self, now: datetime) -> tuple[datetime, datetime]:
        """Return ``since`` and ``until``."""
        until = self.until or now
        return self.since or until - _USUAL, until


class TimeQuery(SpanQuery):
    by: Annotated[Grouping | None, Field(description=_BY)] = None


class SeriesQuery(TimeQuery):
    metric: Annotated[
        Metric,
        Field(
            description=(
                "Tokens: input and output. Cost: US dollars. Times are in seconds: `duration` "
                "from a run's start to its end, `first_token` from a model's request to the first "
                "piece of its answer, `queue_wait` from a run's acceptance to its start. `p95`: "
                "95 % of the times are shorter, with an error of 10 % at most."
            )
        ),
    ]
    step: Annotated[
        Step, Field(description="Time between two points; days begin at midnight UTC.")
    ] = "5m"


class TotalsQuery(TimeQuery):
    agent: Annotated[
        str | None, Field(max_length=128, description="Only this agent, or its versions.")
    ] = None


class OutcomesQuery(SpanQuery):
    by: Annotated[
        OutcomeGrouping,
        Field(
            description="`memory`: runs that could read memory of earlier runs, and runs that "
            "could not. These runs were not drawn at random: see `GET /v1/metrics/memory-effect`."
        ),
    ] = "day"
    agent: Annotated[
        str | None,
        Field(max_length=128, description="Only runs of this agent or graph."),
        AfterValidator(storable),
    ] = None


class EffectQuery(SpanQuery):
    agent: Annotated[
        str | None,
        Field(max_length=128, description="Only runs that began with this agent."),
        AfterValidator(storable),
    ] = None
    judged_by: Annotated[
        JudgeKind | None,
        Field(description="Only runs with this source of the outcome; see a run's `judged_by`."),
    ] = None


@router.get(
    "/series",
    operation_id="get_metric_series",
    summary="Read a metric over time",
    description=(
        "For charts. A run counts in the minute in which it was accepted. It is counted at most 75 "
        "seconds after its end, so a run that ends late changes an old minute. Minutes are kept "
        "for 30 days, hours (for the steps `1h` and `1d`) for a year. 422 for more than "
        f"{MOST_POINTS:,} points of all series together."
    ),
    response_model=MetricSeries,
    responses=problems(),
)
async def get_series(
    tx: Transaction, tenant: Tenant, query: Annotated[SeriesQuery, Query()]
) -> dict[str, Any]:
    rows = await _read_series(tx, tenant, query)
    return {"metric": query.metric, "by": query.by, "step": query.step, "series": rows}


@router.get(
    "/totals",
    operation_id="get_metric_totals",
    summary="Read all figures of a period",
    description=(
        "Compares agents, models, or the versions of an agent (`by=version&agent=clerk`). By "
        f"agent, version or model, the {MOST_TOTALS} groups with most runs are returned. A period "
        "of more than a day is extended to whole hours."
    ),
    response_model=Totals,
    responses=problems(),
)
async def get_totals(
    tx: Transaction, tenant: Tenant, query: Annotated[TotalsQuery, Query()]
) -> dict[str, Any]:
    return {"items": await _read_totals(tx, tenant, query)}


@router.get(
    "/outcomes",
    operation_id="get_outcomes",
    summary="Read outcomes of judged runs",
    description=(
        "By day, agent, version or use of memory, and by the source of the outcome. Completed runs "
        "that nobody judged do not count; failed runs are bad. Reads the newest "
        f"{MOST_JUDGED:,} judged runs, and returns at most {MOST_TOTALS} groups: the newest days "
        "or, for all other groups, those with most runs."
    ),
    response_model=Outcomes,
    responses=problems(),
)
async def get_outcomes(
    tx: Transaction, tenant: Tenant, query: Annotated[OutcomesQuery, Query()]
) -> Outcomes:
    found = await tx.execute(_OUTCOMES_BY[query.by], await _judged_span(tx, tenant, query))
    looked = found.mappings().all()  # if no run was judged, the query returns one row without a key
    rows = [row for row in looked if row["key"] is not None]
    runs: Counter[str] = Counter()
    for row in rows:
        runs[row["key"]] += row["good"] + row["partly"] + row["bad"]
    order = (lambda key: key) if query.by == "day" else (lambda key: (runs[key], key))
    keys_shown = {*sorted(runs, key=order)[-MOST_TOTALS:]}
    items = [JudgedRuns.model_validate(row) for row in rows if row["key"] in keys_shown]
    is_all = len(keys_shown) == len(runs) and looked[0]["judged"] < MOST_JUDGED
    return Outcomes(by=query.by, items=items, complete=is_all)


@router.get(
    "/memory-effect",
    operation_id="get_memory_effect",
    summary="Read whether memory helped",
    description=(
        "Bottega withholds a pattern from a random part of the runs to which it applies. For each "
        "version of a pattern, the runs with and without it are compared; the Mantel-Haenszel "
        "method combines the versions. The interval adds a good and a bad run to each side, so "
        f"that a few runs do not seem to prove much. Reads the newest {MOST_JUDGED:,} applications "
        "of the period."
    ),
    response_model=MemoryEffect,
    responses=problems(),
)
async def get_memory_effect(
    tx: Transaction, tenant: Tenant, query: Annotated[EffectQuery, Query()]
) -> MemoryEffect:
    params = {"applied": [*APPLIED], "of_validated": _OF_VALIDATED, "drawn": _DRAWN_ARMS}
    params["judged_by"] = query.judged_by
    rows = (await tx.execute(_DRAWN, await _judged_span(tx, tenant, query) | params)).all()
    by_pattern: dict[tuple[UUID, str, int, bool], list[_Pair]] = defaultdict(list)
    by_version: dict[int, list[_Pair]] = defaultdict(list)
    for row in rows:
        if row.pattern_id is None:
            continue
        pair = Tally(row.given_good, row.given), Tally(row.others_good, row.others)
        by_pattern[row.pattern_id, row.name, row.version, row.of_validated].append(pair)
        if row.agent_version is not None and _has_both(pair):
            by_version[row.agent_version].append(pair)
    sums = {key: _sum(pairs) for key, pairs in by_pattern.items()}
    compared = {key: pair for key, pair in sums.items() if _has_both(pair)}
    most = sorted(compared.items(), key=lambda each: -sum(tally.n for tally in each[1]))
    return MemoryEffect(
        **dict(_compared(compared.values())),
        patterns=len(compared),
        by_pattern=[
            PatternEffect(
                pattern_id=pattern,
                name=name,
                version=version,
                on_trial=not of_validated,
                **dict(_compared([pair])),
            )
            for (pattern, name, version, of_validated), pair in most[:MOST_TOTALS]
        ],
        by_version=[
            VersionEffect(version=version, **dict(_compared(pairs)))
            for version, pairs in sorted(by_version.items())
        ],
        complete=rows[0].drawn < MOST_JUDGED,
    )


_Pair = tuple[Tally, Tally]
"""Applications with a pattern, and those from which it was withheld."""


def _has_both(pair: _Pair) -> bool:
    return all(tally.n for tally in pair)


def _sum(pairs: Iterable[_Pair]) -> _Pair:
    with_pattern, without = (
        Tally(*map(sum, zip(*side, strict=True))) for side in zip(*pairs, strict=True)
    )
    return with_pattern, without


def _compared(pairs: Collection[_Pair]) -> Comparison:
    with_pattern, without = _sum(pairs) if pairs else (Tally(), Tally())
    difference, low, high = pooled_difference([*pairs]) if pairs else (None, None, None)
    return Comparison(
        given=Judged(good=with_pattern.good, runs=with_pattern.n),
        without=Judged(good=without.good, runs=without.n),
        difference=difference,
        low=low,
        high=high,
    )


async def _judged_span(
    tx: AsyncConnection, tenant_id: UUID, query: "OutcomesQuery | EffectQuery"
) -> dict[str, Any]:
    """Return the parameters of a statement about judged runs.

    Raises:
        InvalidInputError: ``until`` is before ``since``.
    """
    since, until = query.bounds(await _now(tx))
    if until < since:
        raise InvalidInputError("'to' is before 'from': send a later 'to'", pointer="/to")
    bounds = {"first": first_id(since), "last": first_id(until)}
    return {"tenant": tenant_id, "agent": query.agent, "most": MOST_JUDGED, **bounds}


async def _now(tx: AsyncConnection) -> datetime:
    """Return the current time; forbid sorting, so that PostgreSQL reads rollups by an index."""
    by_index = func.set_config("enable_sort", "off", True)
    now: datetime = (await tx.execute(select(func.now(), by_index))).one()[0]
    return now


async def _read_series(
    tx: AsyncConnection, tenant_id: UUID, query: SeriesQuery
) -> list[dict[str, Any]]:
    """Return the series of a metric: ``key``, and ``points`` with ``at`` and ``value``.

    The first point is for the step that contains ``since``. A value is ``None`` if a quantile has
    no data, or if the rollups of its time were deleted or do not exist yet.

    Raises:
        InvalidInputError: ``until`` is before ``since``, or there are too many points.
    """
    width, metric, by = _STEPS[query.step], query.metric, query.by
    since, until = query.bounds(now := await _now(tx))
    since -= (since - _EPOCH) % width
    times = _times(since, until, width)
    of, _, percent = metric.partition("_p")
    span = "minute" if width < _HOUR else "hour"
    about = {
        **_place(tenant_id, span, by, since, until),
        "name": f"{of}:%" if percent else of,
        "step": width,
        "most": MOST_POINTS * (width // (_MINUTE if span == "minute" else _HOUR)),
    }
    statement = _QUANTILES if percent else _COUNTS
    quantile = {"of": of, "share": int(percent) / 100} if percent else {}
    rows = (await tx.execute(statement, about | quantile)).all()
    values: dict[str, dict[datetime, float]] = defaultdict(dict)
    for row in rows:
        values[row.key][row.at] = row.value
    _check_bound(max((row.n for row in rows), default=0), about["most"])
    _check_bound(len(values) * len(times), MOST_POINTS)
    nothing = None if percent else 0.0
    is_kept = [at > now - _KEPT[span] and at < now for at in times]
    keys = sorted(values) if by else ["all"]
    return [
        {"key": key, "points": _points(values[key], zip(times, is_kept, strict=True), nothing)}
        for key in keys
    ]


def _points(
    values: Mapping[datetime, float], times: Iterable[tuple[datetime, bool]], nothing: float | None
) -> list[dict[str, Any]]:
    return [
        {"at": at, "value": _rounded(values.get(at, nothing if is_kept else None))}
        for at, is_kept in times
    ]


def _times(since: datetime, until: datetime, width: timedelta) -> list[datetime]:
    if until < since:
        raise InvalidInputError("'to' is before 'from': send a later 'to'", pointer="/to")
    number = -((since - until) // width)
    _check_bound(number, MOST_POINTS)
    return [since + n * width for n in range(number)]


def _check_bound(number: int, most: int) -> None:
    if number > most:
        raise InvalidInputError(
            f"more than {MOST_POINTS} points in all: ask for a longer step, or a shorter period",
            pointer="/step",
        )


def _place(
    tenant_id: UUID, span: str, by: Grouping | None, since: datetime, until: datetime
) -> dict[str, Any]:
    return {
        "tenant": tenant_id,
        "span": span,
        "by": by or "all",
        "since": since,
        "until": until,
    }


def _rounded(value: float | None) -> float | None:
    """Round a value to 12 digits, which removes errors of floating-point sums."""
    return None if value is None else float(f"{value:.12g}")


async def _read_totals(
    tx: AsyncConnection, tenant_id: UUID, query: TotalsQuery
) -> list[dict[str, Any]]:
    """Return a period's figures by key, sorted by runs, then by tokens, the highest first.

    Raises:
        InvalidInputError: ``until`` is before ``since``, or the period has too many rollups.
    """
    since, until = query.bounds(await _now(tx))
    span = "minute" if until - since <= timedelta(days=1) else "hour"
    since = since - (since - _EPOCH) % (_MINUTE if span == "minute" else _HOUR)
    if until < since:
        raise InvalidInputError("'to' is before 'from': send a later 'to'", pointer="/to")
    about = _place(tenant_id, span, query.by, since, until)
    most = 24 * MOST_POINTS
    step = max(until - since, _MINUTE)
    result = await tx.execute(_TOTALS, {**about, "name": "%", "step": step, "most": most})
    rows = result.mappings().all()
    _check_bound(max((row["n"] for row in rows), default=0), most)
    totals = [
        {
            "key": row["key"],
            **{name: _rounded(float(row["sums"].get(name, 0))) for name in _COUNTED},
            **{name: _rounded(row[name]) for name in _TIMES},
        }
        for row in rows
        if query.agent is None or row["key"].partition("@")[0] == query.agent
    ]
    totals.sort(key=lambda each: (-each["runs"], -each["tokens"], each["key"]))
    return totals[:MOST_TOTALS]
