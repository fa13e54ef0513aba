"""Routes for figures over time: series for charts, and totals of a time.

They read the rollups of a minute and of an hour, see ``rollups.sql``.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.api.errors import problems
from bottega.api.schemas.base import Answer, PlaceInTime
from bottega.api.shared.deps import Tenant, Transaction
from bottega.errors import InvalidInputError

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

_STEPS: Mapping[str, timedelta] = {
    "1m": timedelta(minutes=1),
    "5m": timedelta(minutes=5),
    "1h": timedelta(hours=1),
    "1d": timedelta(days=1),
}
_MINUTE, _HOUR = _STEPS["1m"], _STEPS["1h"]
_KEPT = {"minute": timedelta(days=30), "hour": timedelta(days=366)}
MOST_POINTS = 11_000
"""Points of all series of an answer."""
MOST_TOTALS = 200
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
_COUNTED = ("runs", "errors", "tokens", "cost", "run_cost")
_TIMES = (
    *("duration_p50", "duration_p95", "first_token_p50", "first_token_p95"),
    *("queue_wait_p50", "queue_wait_p95"),
)
_USUAL = timedelta(days=1)
_BY = (
    "`version`: of agents, and of graphs, as `clerk@2`. `model`: of runs that called it. `code`: "
    "of runs that failed. Left out: one sum, with the key `all`."
)
Moment = Annotated[datetime, Field(examples=["2026-11-02T08:00:00Z"])]


class Point(Answer):
    """The value of a step of time."""

    at: Moment
    """Start of the step."""
    value: float | None
    """Null: there was nothing to measure, or it is not kept any more, or not known yet."""


class Series(Answer):
    """The values of one key."""

    key: Annotated[str, Field(examples=["clerk@2"])]
    """Name of what is measured; `all`; or `other`: all beyond the first 199 keys of a minute."""
    points: list[Point]
    """A value for each step, the oldest first."""


class MetricSeries(Answer):
    """A metric over time."""

    metric: Metric
    """As asked for."""
    by: Grouping | None
    """As asked for; null: nothing."""
    step: Step
    """As asked for."""
    series: list[Series]
    """One for each key that has any value, by key."""


class Total(Answer):
    """Figures of the runs of a key, or of all."""

    key: Annotated[str, Field(examples=["clerk@2"])]
    """As of a series."""
    runs: int
    """Runs that are over, items of batches among them."""
    errors: int
    """Those of them that failed or ran out of time."""
    tokens: int
    """Input and output of the key's own model calls."""
    cost: float
    """US dollars of the key's own model calls."""
    run_cost: float
    """US dollars of its runs, with what their sub-agents cost."""
    duration_p50: float | None
    """Seconds from a run's start to its end; null: none was started."""
    duration_p95: float | None
    """See `duration_p50`."""
    first_token_p50: float | None
    """Seconds from a model's request to the first piece of its answer."""
    first_token_p95: float | None
    """See `first_token_p50`."""
    queue_wait_p50: float | None
    """Seconds from a run's acceptance to its start."""
    queue_wait_p95: float | None
    """See `queue_wait_p50`."""


class Totals(Answer):
    """Figures of a time."""

    items: list[Total]
    """The key with most runs first."""


class TimeQuery(BaseModel):
    """Query parameters of both."""

    by: Annotated[Grouping | None, Field(description=_BY)] = None
    since: Annotated[
        PlaceInTime | None, Field(alias="from", description="By default a day before `to`.")
    ] = None
    until: Annotated[
        PlaceInTime | None, Field(alias="to", description="By default now; not itself in it.")
    ] = None

    def bounds(self, now: datetime) -> tuple[datetime, datetime]:
        """Return ``since`` and ``until``."""
        until = self.until or now
        return self.since or until - _USUAL, until


class SeriesQuery(TimeQuery):
    """Query parameters of a series."""

    metric: Annotated[
        Metric,
        Field(
            description="Tokens: input and output. Cost: US dollars. Times in seconds: of a run "
            "from its start to its end; from a model's request to its answer's first piece; from "
            "a run's acceptance to its start. `p95`: 95 % of them are shorter, give or take 10 %."
        ),
    ]
    step: Annotated[
        Step, Field(description="Time between two points; days begin at midnight UTC.")
    ] = "5m"


class TotalsQuery(TimeQuery):
    """Query parameters of totals."""

    agent: Annotated[
        str | None, Field(max_length=128, description="Only this agent's, or its versions'.")
    ] = None


@router.get(
    "/series",
    operation_id="get_metric_series",
    summary="Read a metric over time",
    description=(
        "For charts. A run counts once it is over, in the minute in which it was accepted, at most "
        "75 seconds later; a run that ends late changes that minute. Minutes are kept for 30 days, "
        "hours (for the steps `1h` and `1d`) for a year. 422 for more than "
        f"{MOST_POINTS:,} points of all series together."
    ),
    response_model=MetricSeries,
    responses=problems(),
)
async def get_series(
    tx: Transaction, tenant: Tenant, query: Annotated[SeriesQuery, Query()]
) -> dict[str, Any]:
    found = await _read_series(tx, tenant, query)
    return {"metric": query.metric, "by": query.by, "step": query.step, "series": found}


@router.get(
    "/totals",
    operation_id="get_metric_totals",
    summary="Read all figures of a time",
    description=(
        "To compare agents, models, or the versions of an agent (`by=version&agent=clerk`). By "
        f"agent, version and model at most {MOST_TOTALS} keys, those with most runs. Of more than "
        "a day, whole hours."
    ),
    response_model=Totals,
    responses=problems(),
)
async def get_totals(
    tx: Transaction, tenant: Tenant, query: Annotated[TotalsQuery, Query()]
) -> dict[str, Any]:
    return {"items": await _read_totals(tx, tenant, query)}


async def _now(tx: AsyncConnection) -> datetime:
    """Return the time; from now on rollups are read in the order of their index, and no further."""
    by_index = func.set_config("enable_sort", "off", True)
    now: datetime = (await tx.execute(select(func.now(), by_index))).one()[0]
    return now


async def _read_series(
    tx: AsyncConnection, tenant_id: UUID, query: SeriesQuery
) -> list[dict[str, Any]]:
    """Return the series of a metric: ``key``, and ``points`` with ``at`` and ``value``.

    The first point is the step that holds ``since``. A value is ``None`` where there is no time of
    which to tell a quantile, and where rollups are not kept any more, or not made yet.

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
    kept = [at > now - _KEPT[span] and at < now for at in times]
    keys = sorted(values) if by else ["all"]
    return [
        {"key": key, "points": _points(values[key], zip(times, kept, strict=True), nothing)}
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
        raise InvalidInputError("to is before from", pointer="/to")
    number = -((since - until) // width)
    _check_bound(number, MOST_POINTS)
    return [since + n * width for n in range(number)]


def _check_bound(number: int, most: int) -> None:
    if number > most:
        raise InvalidInputError(
            f"that is more than {MOST_POINTS} points: ask for a longer step, or a shorter time",
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
    """Return a value without digits that mean nothing."""
    return None if value is None else float(f"{value:.12g}")


async def _read_totals(
    tx: AsyncConnection, tenant_id: UUID, query: TotalsQuery
) -> list[dict[str, Any]]:
    """Return all figures of a time by key, of those with most runs, and then most tokens, first.

    Raises:
        InvalidInputError: ``until`` is before ``since``, or there are too many rollups between.
    """
    since, until = query.bounds(await _now(tx))
    span = "minute" if until - since <= timedelta(days=1) else "hour"
    since = since - (since - _EPOCH) % (_MINUTE if span == "minute" else _HOUR)
    if until < since:
        raise InvalidInputError("to is before from", pointer="/to")
    about = _place(tenant_id, span, query.by, since, until)
    most = 24 * MOST_POINTS
    step = max(until - since, _MINUTE)
    found = await tx.execute(_TOTALS, {**about, "name": "%", "step": step, "most": most})
    rows = found.mappings().all()
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
