"""Evals: several agents or versions execute the same cases, and each case's checks judge them.

An eval is a batch with a name. Each item of the batch runs a case with a target (a version of an
agent), and the case's checks decide the outcome of the item's run. The report is not stored: each
request for the report computes it from the items and their outcomes.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations
from statistics import median
from typing import Any
from uuid import UUID

import asyncpg
from sqlalchemy import Text, Uuid, bindparam, text

from bottega.agents.messages import AgentUsage
from bottega.db.pages import PageItems, fetch_rows
from bottega.db.pool import AsyncConnection
from bottega.errors import BottegaError, ConflictError, InvalidInputError, NotFoundError
from bottega.events.data import OutcomeValue
from bottega.memory.patterns.evidence import Tally, binomial_p
from bottega.runs.pins import PinCache
from bottega.runs.read import JUDGEMENT
from bottega.runs.submit import OnceKey, RunRequest, checked_values, store_items, submit
from bottega.tenants.limits import StoredLimits

MOST_RUNS = 2_000
"""Maximum number of an eval's runs."""
MOST_FAILURES = 100
"""Maximum number of failures that a report shows of each target."""
_NAME_INDEX = "uq_runs_eval"

_EVAL = text("""
SELECT id, created_at, ended_at IS NOT NULL AS is_ended,
       CAST(batch ->> 'repeats' AS integer) AS repeats,
       jsonb_path_query_array(batch, '$.targets[*].agent') AS agents,
       jsonb_path_query_array(batch, '$.targets[*].version') AS versions
FROM runs WHERE tenant_id = :tenant AND eval = :name
""").bindparams(bindparam("tenant", type_=Uuid), bindparam("name", type_=Text))
_PAGE = """
SELECT eval AS name, id AS batch_id, created_at, ended_at,
       CAST(batch ->> 'total' AS integer) AS total,
       ARRAY(SELECT (t ->> 'agent') || '@' || (t ->> 'version')
             FROM jsonb_array_elements(batch -> 'targets') AS t) AS targets
FROM runs WHERE tenant_id = $1 AND eval IS NOT NULL AND ($2::text IS NULL OR eval {than} $2)
ORDER BY eval {order} LIMIT $3
"""
# LEFT JOIN, because items of a cancelled batch may have no run.
RUNS = text(f"""
SELECT i.number, r.id AS run_id, o.is_over, o.outcome, r.usage,
       coalesce(j.reason, c.error, r.error ->> 'message', i.error ->> 'message',
                CASE o.outcome WHEN 'CANCELLED' THEN 'the run was cancelled or deleted' END
       ) AS reason,
       CASE r.status WHEN 'completed' THEN CAST(
           extract(epoch FROM r.ended_at - r.started_at) * 1000 AS double precision)
       END AS duration_ms
FROM run_children i LEFT JOIN LATERAL (
    SELECT * FROM runs o WHERE o.tenant_id = i.tenant_id AND o.id = i.child_id LIMIT 1
) AS r ON true
{JUDGEMENT}
CROSS JOIN LATERAL (SELECT
    CASE WHEN r.id IS NOT NULL THEN j.value WHEN i.status = 'failed' THEN 'FAILURE'
         WHEN i.is_held THEN 'UNKNOWN' ELSE 'CANCELLED' END AS outcome,
    NOT i.is_held AND (r.id IS NULL OR r.ended_at IS NOT NULL)
        AND c.status IS DISTINCT FROM 'pending' AS is_over) AS o
WHERE i.tenant_id = :tenant AND i.run_id = :batch ORDER BY i.number
""").bindparams(*(bindparam(name, type_=Uuid) for name in ("tenant", "batch")))  # noqa: S608
"""The items of an eval's batch, sorted by number, each with the outcome of its run."""


# --- Report -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvalRun:
    """An item of an eval: a target executes a case. ``run_id`` is ``None`` if there is no run.

    Attributes:
        case, target: indexes of the item's case and target.
        is_over: true if the run and its checks are over.
        duration_ms: duration of a completed run; ``None`` for other runs.
    """

    case: int
    target: int
    run_id: UUID | None
    is_over: bool
    outcome: OutcomeValue
    reason: str | None = None
    usage: AgentUsage = AgentUsage()
    duration_ms: float | None = None

    @property
    def passed(self) -> bool | None:
        """True if the outcome is SUCCESS; ``None`` if the outcome is not known (yet)."""
        known = self.is_over and self.outcome != "UNKNOWN"
        return self.outcome == "SUCCESS" if known else None


def target_report(runs: Sequence[EvalRun]) -> dict[str, Any]:
    """Return a target's results. The pass rate excludes runs whose outcome is not known."""
    tally = Tally.of(each.passed for each in runs if each.passed is not None)
    durations = [each.duration_ms for each in runs if each.duration_ms is not None]
    failed = [each for each in runs if each.is_over and not each.passed]
    usage = reduce(AgentUsage.__add__, (each.usage for each in runs), AgentUsage())
    return {
        "passed": tally.good,
        "judged": tally.n,
        "pass_rate": tally.rate if tally.n else None,
        "interval": [*tally.interval] if tally.n else None,
        "cost": usage.to_dict()["cost"],
        "latency_ms": median(durations) if durations else None,
        "runs": [each.run_id for each in runs if each.run_id is not None],
        "failures": failed[:MOST_FAILURES],
    }


def compare(a: Sequence[EvalRun], b: Sequence[EvalRun]) -> dict[str, Any]:
    """Compare two targets. ``wins``: number of cases that ``a`` passed more often than ``b``.

    A case is left out if the outcome of one of its runs is not known. ``p`` is the p-value of an
    exact two-sided sign test. The test counts cases, because runs of one case are not independent.
    """
    passed = [_passed_by_case(each) for each in (a, b)]
    pairs = [(passed[0][case], passed[1][case]) for case in passed[0].keys() & passed[1].keys()]
    wins, losses = sum(x > y for x, y in pairs), sum(x < y for x, y in pairs)
    one_sided = binomial_p(Tally(max(wins, losses), wins + losses), 0.5)
    ties = len(pairs) - wins - losses
    return {"wins": wins, "losses": losses, "ties": ties, "p": min(1.0, 2 * one_sided)}


def _passed_by_case(runs: Sequence[EvalRun]) -> dict[int, int]:
    cases: defaultdict[int, list[bool | None]] = defaultdict(list)
    for run in runs:
        cases[run.case].append(run.passed)
    return {case: sum(map(bool, every)) for case, every in cases.items() if None not in every}


def report(targets: Sequence[tuple[str, int]], runs: Sequence[EvalRun]) -> dict[str, Any]:
    """Return the results of an eval.

    Args:
        targets: agent and version of each target.
    """
    by_target = [[each for each in runs if each.target == n] for n in range(len(targets))]
    names = [f"{agent}@{version}" for agent, version in targets]
    named = zip(names, by_target, strict=True)
    over = sum(each.is_over for each in runs)
    return {
        "status": "done" if over == len(runs) else "running",
        "total": len(runs),
        "over": over,
        "targets": [
            {"agent": agent, "version": version, **target_report(own)}
            for (agent, version), own in zip(targets, by_target, strict=True)
        ],
        "comparisons": [
            {"a": a, "b": b, **compare(of_a, of_b)}
            for (a, of_a), (b, of_b) in combinations(named, 2)
        ],
    }


# --- Store ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewEval:
    """A request for an eval.

    Attributes:
        cases: input and checks of each case.
        targets: agent and version of each target; ``None``: the current version.
        judges: versions of the judging models' providers, by provider; ``None``: the operator's.
    """

    name: str
    cases: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]
    targets: Sequence[tuple[str, int | None]]
    repeats: int
    judges: Mapping[str, int | None]


async def start_eval(
    tx: AsyncConnection,
    pins: PinCache,
    tenant_id: UUID,
    body: NewEval,
    new: RunRequest,
    once: OnceKey | None,
    limits: StoredLimits,
) -> None:
    """Store an eval and all its items, and queue the first items.

    Args:
        new: the request for the eval's batch, without an agent.

    Raises:
        ConflictError: ``exists``; see also :func:`bottega.runs.submit.accept`.
        BottegaError: see :func:`bottega.runs.submit.submit`; ``duplicate_target``.
    """
    driver = tx.driver
    total = len(body.cases) * body.repeats * len(body.targets)
    batch = {
        "eval": body.name,
        "repeats": body.repeats,
        "checks": [checks for _, checks in body.cases],
        "on_error": "continue",
        "total": total,
    }
    versions: list[tuple[str, int]] = []

    async def check() -> tuple[Mapping[str, Any], UUID | None]:
        while True:
            rows_of_targets = [
                await _checked_target(driver, pins, tenant_id, number, new, *target, limits)
                for number, target in enumerate(body.targets)
            ]
            if len({epoch for _, epoch in rows_of_targets}) > 1:  # a definition has just changed
                continue
            targets = [_target(values, body.judges) for values, _ in rows_of_targets]
            versions[:] = [(each["agent"], each["version"]) for each in targets]
            _refuse_twice(versions)
            names = {agent for agent, _ in versions}
            operators = {name for each in targets for name in each["pinned"]["operators"]}
            values, epoch = rows_of_targets[0]
            return {
                **values,
                "agent": names.pop() if len(names) == 1 else None,
                "pinned": {**targets[0]["pinned"], "operators": sorted(operators)},
                "batch": batch | {"targets": targets},
            }, epoch

    try:
        run = await submit(driver, pins, tenant_id, new, once, limits, check)
    except asyncpg.UniqueViolationError as error:
        if error.constraint_name != _NAME_INDEX:
            raise
        raise ConflictError(
            f"there is an eval '{body.name}': choose another name", code="exists", pointer="/name"
        ) from None
    items = list(_items(body, versions))
    await store_items(driver, tenant_id, UUID(str(run["id"])), items, driver)


async def _checked_target(
    driver: asyncpg.Connection,
    pins: PinCache,
    tenant_id: UUID,
    number: int,
    new: RunRequest,
    agent: str,
    version: int | None,
    limits: StoredLimits,
) -> tuple[Mapping[str, Any], UUID | None]:
    pins.forget(tenant_id, agent, None, version)  # all targets need pins of the same epoch
    target = replace(new, agent=agent, version=version)
    try:
        return await checked_values(driver, pins, tenant_id, target, limits)
    except BottegaError as error:
        field = error.pointer if error.pointer in ("/agent", "/version") else ""
        error.pointer = f"/targets/{number}{field}"
        raise


def _target(values: Mapping[str, Any], judges: Mapping[str, int | None]) -> dict[str, Any]:
    """Return a target as the batch stores it; add the judges' providers to the target's pins."""
    pinned, agent = values["pinned"], values["agent"]
    own = {name: version for name, version in judges.items() if version is not None}
    operators = {*pinned["operators"], *(judges.keys() - own.keys())}
    more = {"providers": own | pinned["providers"], "operators": sorted(operators)}
    return {
        **{name: values[name] for name in ("agent", "memory", "memory_used")},
        "version": pinned["agents"][agent],
        "pinned": pinned | more,
    }


def _refuse_twice(versions: Sequence[tuple[str, int]]) -> None:
    for number, (agent, version) in enumerate(versions):
        if (agent, version) in versions[:number]:
            raise InvalidInputError(
                f"version {version} of the agent '{agent}' is a target twice: remove one of them",
                code="duplicate_target",
                pointer=f"/targets/{number}",
            )


def _items(request: NewEval, versions: Sequence[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """Yield the items of a batch, sorted by case, so that all targets progress equally fast."""
    for case, (case_input, _) in enumerate(request.cases):
        for repeat in range(request.repeats):
            for target, (agent, version) in enumerate(versions):
                yield {
                    "key": f"{case}/{repeat}/{agent}@{version}",
                    "input": case_input,
                    "agent": agent,
                    "case": case,
                    "target": target,
                }


async def list_evals(
    tx: AsyncConnection, tenant_id: UUID, *, after: str | None, descending: bool, limit: int
) -> PageItems[dict[str, Any]]:
    """List a page of evals, sorted by name, after the eval ``after``."""
    return await fetch_rows(
        tx.driver, _PAGE, tenant_id, after, limit=limit, descending=descending, by_index=True
    )


async def get_eval(tx: AsyncConnection, tenant_id: UUID, name: str) -> dict[str, Any]:
    """Return an eval's report.

    Raises:
        NotFoundError: the tenant has no such eval.
    """
    eval_row = (await tx.execute(_EVAL, {"tenant": tenant_id, "name": name})).one_or_none()
    if eval_row is None:
        raise NotFoundError(f"there is no eval '{name}'")
    targets = [*zip(eval_row.agents, eval_row.versions, strict=True)]
    rows = await tx.execute(RUNS, {"tenant": tenant_id, "batch": eval_row.id})
    runs = [
        EvalRun(
            case=(row.number - 1) // (eval_row.repeats * len(targets)),
            target=(row.number - 1) % len(targets),
            run_id=row.run_id,
            is_over=row.is_over,
            outcome=row.outcome,
            reason=row.reason,
            usage=AgentUsage() if row.usage is None else AgentUsage.from_dict(row.usage),
            duration_ms=row.duration_ms,
        )
        for row in rows
    ]
    about = {"name": name, "batch_id": eval_row.id, "created_at": eval_row.created_at}
    answer = about | report(targets, runs)
    # The batch ends a moment after its last run, and clients can retry only an ended batch.
    return answer if eval_row.is_ended else answer | {"status": "running"}
