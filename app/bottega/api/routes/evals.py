"""Routes of evals, which run the same cases with several agents and compare the results."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import ConfigDict, Field

from bottega.api.auth import Principal, acts_for
from bottega.api.errors import headers, problems
from bottega.api.routes.agents import refuse_unknown_plugins, schemas_of
from bottega.api.routes.batches import BatchBudget
from bottega.api.routes.providers import known_providers, possible_names
from bottega.api.schemas.agents import AnyCheck, JudgeCheck
from bottega.api.schemas.base import NAME_PATTERN, Answer, Body, Name, Page, VersionNumber
from bottega.api.shared.deps import PrincipalDep, ReviewTenant, ServiceDep, Tenant, Transaction
from bottega.api.shared.idempotency import OnceDep
from bottega.api.shared.pages import LINK, PageQuery
from bottega.api.shared.schemas import check_schemas
from bottega.container import Service
from bottega.db.pool import AsyncConnection
from bottega.definitions.agents import checked
from bottega.errors import InvalidInputError
from bottega.events.data import Cost, OutcomeValue
from bottega.json_schema.values import WHOLE
from bottega.runs import evals
from bottega.runs.pins import UsedModel
from bottega.runs.submit import RunRequest

router = APIRouter(prefix="/v1/evals", tags=["evals"])

EvalName = Annotated[str, Path(pattern=NAME_PATTERN, description="The eval's name.")]


class EvalCase(Body):
    """A question, and the checks that a good answer must pass."""

    input: Annotated[str, Field(min_length=1, max_length=100_000)]
    """The question."""
    checks: Annotated[list[AnyCheck], Field(min_length=1, max_length=10)]
    """Checks of the answer, as in an agent's `success_check`. A run passes if all checks pass."""


class EvalTarget(Body):
    """An agent, or a version of an agent, that answers all cases."""

    agent: Name
    """The agent."""
    version: VersionNumber | None = None
    """Version of the agent; null: the version that is current at the request. Sub-agents run in
    the versions that are current at the request."""


class NewEval(Body):
    """A request for an eval."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "greetings",
                    "cases": [
                        {"input": "Say hello.", "checks": [{"type": "contains", "value": "done"}]}
                    ],
                    "targets": [{"agent": "coordinator", "version": 1}, {"agent": "requirements"}],
                }
            ]
        }
    )

    name: Name
    """Name of the eval, unique in the tenant."""
    cases: Annotated[list[EvalCase], Field(min_length=1, max_length=1_000)]
    """The cases."""
    targets: Annotated[list[EvalTarget], Field(min_length=1, max_length=10)]
    """The agents that answer all cases. The report compares each pair of targets."""
    repeats: Annotated[int, Field(ge=1, le=100), WHOLE] = 1
    """Number of runs of each case with each target."""
    budget: BatchBudget | None = None
    """Limits on the total spending of all runs, without judges. When the budget is spent, runs
    that have not begun fail with `budget_exhausted`."""


class EvalFailure(Answer):
    """A run that did not pass the checks, or for which the checks gave no result."""

    case: int
    """Index of the case, from 0."""
    run_id: UUID | None
    """The run; null: it never began, or was deleted."""
    outcome: OutcomeValue
    """`UNKNOWN`: the checks could not be decided, so the run does not count."""
    reason: str | None
    """Why: a check's reason, the run's error, or a person's comment; null: no reason is known."""


class TargetReport(Answer):
    """The results of a target."""

    agent: str
    version: int
    passed: int
    """Number of runs that passed."""
    judged: int
    """Number of runs with a known outcome. Failed and cancelled runs count; they did not pass."""
    pass_rate: float | None
    """Share of the judged runs that passed; null: no run is judged yet."""
    interval: Annotated[list[float], Field(min_length=2, max_length=2)] | None
    """Ends of the 95 % interval of the pass rate; null: no run is judged yet."""
    cost: Cost
    """Cost of the ended runs, without judges."""
    latency_ms: float | None
    """Median time in milliseconds from the start to the end of a completed run; null: none."""
    runs: list[UUID]
    """The runs that have begun, in the order of the cases."""
    failures: list[EvalFailure]
    """The first 100 runs that did not pass, in the order of the cases."""


class TargetComparison(Answer):
    """Comparison of two targets, case by case."""

    a: Annotated[str, Field(examples=["clerk@2"])]
    """Agent and version of the first target."""
    b: Annotated[str, Field(examples=["clerk@1"])]
    """Agent and version of the second target."""
    wins: int
    """Number of cases of which more runs passed with `a` than with `b`."""
    losses: int
    """Number of cases of which more runs passed with `b` than with `a`."""
    ties: int
    """Number of other cases. Cases with a run that is not judged do not count."""
    p: float
    """Probability of a result at least as one-sided if `a` and `b` were equally good: the exact
    two-sided sign test of wins and losses."""


class EvalSummary(Answer):
    """An eval in a list."""

    name: str
    total: int
    """Number of runs."""
    targets: Annotated[list[str], Field(examples=[["clerk@2", "clerk@1"]])]
    """Agent and version of each target, in the order of the request."""
    batch_id: UUID
    """The batch of all runs."""
    created_at: datetime
    ended_at: datetime | None
    """Time at which all runs were over; null: runs are not over."""


class Eval(Answer):
    """The report of an eval."""

    name: str
    status: Literal["running", "done"]
    """`done`: all runs and their checks are over."""
    total: int
    """Number of runs."""
    over: int
    """Number of runs that are over and whose checks are over."""
    targets: list[TargetReport]
    """The results of each target, in the order of the request."""
    comparisons: list[TargetComparison]
    """Comparison of each pair of targets."""
    batch_id: UUID
    """The batch of all runs: it can be followed, cancelled and retried as any batch."""
    created_at: datetime


@router.post(
    "",
    operation_id="create_eval",
    summary="Try cases with agents and compare the answers",
    description=(
        "Runs each case `repeats` times with each target: at most 2,000 runs of the lowest "
        "priority (10), which are the items of a batch. Each run is judged by the checks of its "
        "case, in place of the agent's `success_check`: the run's `outcome` has the source `eval`. "
        "409 `exists`: there is an eval with this name; it is deleted with its batch."
    ),
    status_code=202,
    response_model=Eval,
    responses={**problems(409), 202: headers(Location="Path of the eval.")},
)
async def create(
    service: ServiceDep,
    tenant: Tenant,
    principal: PrincipalDep,
    once: OnceDep,
    response: Response,
    body: NewEval,
) -> Any:
    acts_for(principal, None, None)
    if len(body.cases) * body.repeats * len(body.targets) > evals.MOST_RUNS:
        raise InvalidInputError(
            f"an eval has at most {evals.MOST_RUNS} runs (cases * repeats * targets)",
            pointer="/cases",
        )
    schemas: dict[str, Mapping[str, Any]] = {}
    for number, case in enumerate(body.cases):
        pointer = f"/cases/{number}/checks"
        refuse_unknown_plugins(case.checks, pointer)
        schemas |= schemas_of(case.checks, pointer)
    await check_schemas(tenant, schemas)
    key = await once.key_with_hash()
    response.headers["Location"] = f"{router.prefix}/{body.name}"
    async with service.database.begin(tenant) as tx:
        new_eval = evals.NewEval(
            name=body.name,
            cases=[
                (case.input, [check.model_dump() for check in case.checks]) for case in body.cases
            ],
            targets=[(target.agent, target.version) for target in body.targets],
            repeats=body.repeats,
            judges=await _judges(tx, service, principal, body),
        )
        new = _batch(service, principal, body)
        await evals.start_eval(tx, service.pins, tenant, new_eval, new, key, principal.limits)
    async with service.database.begin(tenant) as tx:
        return await evals.get_eval(tx, tenant, body.name)


async def _judges(
    tx: AsyncConnection, service: Service, principal: Principal, body: NewEval
) -> dict[str, int | None]:
    """Return the version of each judging model's provider; ``None``: the operator's provider."""
    models = {
        f"/cases/{number}/checks/{place}/model": check.model
        for number, case in enumerate(body.cases)
        for place, check in enumerate(case.checks)
        if isinstance(check, JudgeCheck) and check.model is not None
    }
    known = {
        **service.settings.operator_providers,
        **await known_providers(tx, principal.tenant_id, possible_names([*models.values()])),
    }
    found: dict[str, int | None] = {}
    for pointer, model in models.items():
        try:
            named = checked(model, known)
        except InvalidInputError as error:
            raise InvalidInputError(error.detail, code=error.code, pointer=pointer) from None
        provider = known[named.provider]
        principal.limits.need_names((), (UsedModel.of(provider, named.model, "").name,))
        found[named.provider] = provider.version
    return found


def _batch(service: Service, principal: Principal, body: NewEval) -> RunRequest:
    budget = body.budget or BatchBudget()
    fields = {
        "mode": "batch",
        "input": "",
        "metadata": {},
        "priority": 10,  # the lowest
        "token_budget": budget.tokens,
        "cost_budget": None if budget.cost is None else budget.cost.model_dump(),
    }
    return RunRequest.of(fields, memory=service.settings.memory, principal=principal.actor)


@router.get(
    "",
    operation_id="list_evals",
    summary="List evals by name",
    description="Without the results, which the report of each eval has.",
    response_model=Page[EvalSummary],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: ReviewTenant,
    query: Annotated[PageQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    rows = await evals.list_evals(tx, tenant, **query.window(str))
    return query.page(request, response, rows, lambda each: each["name"])


@router.get(
    "/{name}",
    operation_id="get_eval",
    summary="Read the report of an eval",
    description="While the eval is running, the report shows the runs that are over.",
    response_model=Eval,
    responses=problems(404),
)
async def get(tx: Transaction, tenant: ReviewTenant, name: EvalName) -> Any:
    return await evals.get_eval(tx, tenant, name)
