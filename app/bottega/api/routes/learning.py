"""Routes of memory: for a task, from episodes, of a run, and its maintenance; and their bodies."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import ConfigDict, Field, JsonValue, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from bottega.api.auth import acts_for
from bottega.api.errors import headers, problems
from bottega.api.routes.episodes import imported, to_response, within
from bottega.api.schemas.base import Answer, Body, OwnUser, Page
from bottega.api.schemas.episodes import (
    EpisodeFailure,
    EpisodeHit,
    EpisodeReader,
    Feedback,
    Label,
    NewEpisode,
    NewFeedback,
)
from bottega.api.schemas.runs import LearningStatus
from bottega.api.shared.deps import (
    Actor,
    AdminTenant,
    PrincipalDep,
    ReadTenant,
    ServiceDep,
    Tenant,
    Transaction,
    Turn,
)
from bottega.api.shared.idempotency import OnceDep
from bottega.api.shared.pages import LINK, PageQuery
from bottega.db.sessions import driver_of
from bottega.errors import ConflictError
from bottega.events.types import UNFINISHED
from bottega.json_schema.values import WHOLE
from bottega.memory.episodes import rows
from bottega.memory.episodes.episode import Episode
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.learning import maintenance as jobs
from bottega.memory.learning.context import (
    Lesson,
    ReportedOutcome,
    context_for_task,
    learn_from_episode,
)
from bottega.memory.learning.insights import FoundInsight
from bottega.memory.patterns.matcher import Match
from bottega.memory.patterns.pattern import Category, Pattern
from bottega.memory.text.signature import failure_signature
from bottega.runs import read
from bottega.runs.sessions import hold_owner
from bottega.runs.working_memory import working_memory
from bottega.tenants import audit

_LEARNING: dict[str, JsonValue] = {
    "run_id": "01980c53-6b1e-7cc0-8f3e-6a3c1b0f4d11",
    "status": "done",
    "tries": 1,
    "error": None,
    "next_at": None,
    "updated_at": "2026-11-02T03:00:04Z",
    "by": "rules",
    "insights": ["After fetch failed (tool_error @fetch: no answer in #), fetch_slow went well."],
    "patterns": [{"uses": ["fetch_slow", "report"]}],
    "failures": [
        {
            "tool": "fetch",
            "signature": "tool_error @fetch: no answer in #",
            "then": "fetch_slow",
            "recovered": True,
        }
    ],
    "performance": {"model_calls": 4, "tool_calls": 3, "failed_calls": 1},
    "candidates": [],
    "applications": [],
}


class MinedPattern(Answer):
    """A pattern found in the run's episode; the run is no evidence for it."""

    id: UUID
    name: str
    category: str
    state: Literal["CANDIDATE", "VALIDATED", "IN_REVIEW", "DEPRECATED"]
    version: int


class RunApplication(Answer):
    """The assignment of a pattern to the run, and its result."""

    source: Annotated[str, Field(description="`pattern:` and its id.")]
    pattern_id: UUID
    name: str
    version: int
    arm: Annotated[
        Literal["used", "trial", "withheld", "control", "reported", "reported_without"],
        Field(
            description=(
                "`used`: validated, given. `trial`: candidate, given. `withheld`: validated, not "
                "given. `control`: candidate, not given. `reported`, `reported_without`: by a "
                "client, with and without the pattern."
            )
        ),
    ]
    at: datetime
    followed: Annotated[
        bool | None, Field(description="True if the run followed the pattern; null: unknown.")
    ]
    good: Annotated[
        bool | None,
        Field(description="True if it went well; null: the pattern's subject did not occur."),
    ]


class RunLearning(Answer):
    """The status and results of learning from a finished run."""

    model_config = ConfigDict(json_schema_extra={"examples": [_LEARNING]})

    run_id: UUID
    status: Annotated[
        LearningStatus | None,
        Field(description="Null: the run is not over, or left no episode."),
    ]
    tries: Annotated[int, Field(description="Tries since learning was last requested.")]
    error: Annotated[str | None, Field(description="Error of the last try.")]
    next_at: Annotated[datetime | None, Field(description="Time of the next try, if any.")]
    updated_at: datetime | None
    by: Annotated[
        str | None,
        Field(description="Author of the reflection: `rules`, or a model; null: none yet."),
    ]
    insights: list[Any]
    patterns: Annotated[list[Any], Field(description="Successful behaviour of the run.")]
    failures: list[Any]
    performance: dict[str, Any]
    candidates: list[MinedPattern]
    applications: list[RunApplication]


Term = Annotated[str, StringConstraints(min_length=1, max_length=100)]
Id = Annotated[UUID, Field(strict=False)]


class ContextQuery(EpisodeReader):
    """A task to find memory for."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "task": "Export the invoices of March as CSV.",
                    "domain": "billing",
                    "task_type": "export",
                    "capabilities": ["fetch_invoices"],
                }
            ]
        }
    )

    task: Annotated[
        Annotated[str, StringConstraints(min_length=1, max_length=100_000)],
        Field(description="The task, as a user would ask for it."),
    ]
    domain: Label | None = None
    task_type: Label | None = None
    complexity: Annotated[
        float | None, Field(ge=0, le=1, description="Null: estimated from the task's words.")
    ] = None
    tools_required: Annotated[
        Annotated[list[Term], Field(max_length=100)] | None,
        Field(description="Required tools. Null: those that the task names."),
    ] = None
    capabilities: Annotated[
        list[Term],
        Field(max_length=200, description="Available tools and agents."),
    ] = Field(default_factory=list)
    error: Annotated[
        EpisodeFailure | None,
        Field(description="An error; only patterns about failures are found then."),
    ] = None
    k: Annotated[int, Field(ge=1, le=50, description="Maximum number of each kind."), WHOLE] = 5


_BY_RULES = "Found in the task by rules, for searches."


class KnownPattern(Answer):
    """The parts of a pattern that are needed to apply it."""

    id: UUID
    version: int
    name: str
    category: str
    state: str
    trust: Annotated[int, Field(description="3: own runs; 2: read outside content; 1: a client.")]
    summary: str
    uses: Annotated[list[str], Field(description="Tools and agents that the pattern names.")]
    confidence: float
    success_rate: float | None
    applications: int


class MatchedPattern(Answer):
    """A pattern that applies, and its score."""

    pattern: KnownPattern
    score: float
    quality: Annotated[float, Field(description="Share of the task's features that it tests.")]


class Insight(Answer):
    """An insight of relevant episodes of the domain."""

    text: str
    times: Annotated[int, Field(description="Count among the episodes found.")]
    trust: Annotated[int, Field(description="Highest trust of these episodes.")]
    episodes: Annotated[list[UUID], Field(description="Those that have it.")]
    at: Annotated[datetime, Field(description="End of the latest of these episodes.")]


class Knowledge(Answer):
    """Patterns and insights of a domain."""

    patterns: list[MatchedPattern]
    insights: list[Insight]


class ContextFound(Answer):
    """Memory found for a task."""

    goals: Annotated[list[str], Field(description=_BY_RULES)]
    constraints: Annotated[list[str], Field(description=_BY_RULES)]
    criteria: Annotated[list[str], Field(description=_BY_RULES)]
    features: Annotated[
        dict[str, Any], Field(description="Features for matching patterns; absent: unknown.")
    ]
    patterns: Annotated[list[MatchedPattern], Field(description="Validated ones, best first.")]
    episodes: Annotated[
        list[EpisodeHit],
        Field(
            description=(
                "Similar episodes, best first. None if none is better than chance. `why` has the "
                "words they share with the task, the cosine, and the least cosine that counts."
            )
        ),
    ]
    by_meaning: Annotated[bool, Field(description="True if vectors of meaning were compared.")]
    by_spelling: Annotated[
        bool,
        Field(
            description=(
                "True if the built-in embedder was used, which compares spelling. If both are "
                "false, only words counted."
            )
        ),
    ]
    knowledge: Annotated[Knowledge, Field(description="About its domain; empty without one.")]


class NewLesson(Body):
    """A lesson of an episode."""

    text: Annotated[str, StringConstraints(min_length=1, max_length=2000)]
    name: Annotated[str, StringConstraints(min_length=1, max_length=120)] | None = None
    category: Annotated[
        Literal["domain", "strategic", "decomposition"],
        Field(description="Only categories that are validated by a whole run's outcome."),
    ] = "domain"
    uses: Annotated[
        list[Term], Field(max_length=20, description="Tools and agents that the lesson names.")
    ] = Field(default_factory=list)


class NewOutcome(Body):
    """The result of a pattern in the episode."""

    pattern_id: Id
    good: Annotated[bool, Field(description="True if it went well.")]
    followed: Annotated[
        bool | None, Field(description="True if the pattern was followed; null: unknown.")
    ] = None


class NewLearning(Body):
    """An episode and its lessons."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "episode": {
                        "outcome": "SUCCESS",
                        "domain": "billing",
                        "task_type": "export",
                        "task": {"original_input": "Export the invoices of March as CSV."},
                    },
                    "insights": [{"text": "Ask for one month at a time: longer ones time out."}],
                }
            ]
        }
    )

    episode_id: Annotated[Id | None, Field(description="A stored episode.")] = None
    episode: Annotated[NewEpisode | None, Field(description="Or an episode to store.")] = None
    user: OwnUser = None
    insights: Annotated[list[NewLesson], Field(max_length=20)] = Field(default_factory=list)
    outcomes: Annotated[
        list[NewOutcome],
        Field(
            max_length=20,
            description=(
                "Results of applied patterns. They are evidence only if a run left the episode, "
                "and the pattern was not found in it."
            ),
        ),
    ] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_episode(self) -> Self:
        if (self.episode_id is None) == (self.episode is None):
            raise PydanticCustomError("episode", "give either an episode_id or an episode")
        if self.episode is not None and self.user is not None:
            raise PydanticCustomError("episode", "an episode names its user itself")
        return self


class Learnt(Answer):
    """The result of learning from an episode."""

    episode_id: UUID
    reflection: Annotated[
        dict[str, Any],
        Field(description="The stored reflection; the first one stays."),
    ]
    candidates: Annotated[
        list[KnownPattern],
        Field(
            description=(
                "Patterns made from the insights, or equivalent existing ones. Other runs must "
                "validate candidates."
            )
        ),
    ]
    applications: Annotated[int, Field(description="Number of outcomes that count and are new.")]


_JOB: dict[str, JsonValue] = {
    "id": "01980c53-6b1e-7cc0-8f3e-6a3c1b0f4d11",
    "cause": "nightly",
    "tick": "2026-11-02T03:00:00Z",
    "status": "done",
    "stage": 6,
    "error": None,
    "created_at": "2026-11-02T03:00:00Z",
    "started_at": "2026-11-02T03:00:00Z",
    "ended_at": "2026-11-02T03:00:04Z",
}


class MaintenanceJob(Answer):
    """A maintenance job of the tenant's memory."""

    model_config = ConfigDict(json_schema_extra={"examples": [_JOB]})

    id: UUID
    cause: Annotated[
        Literal["nightly", "demand"],
        Field(description="`nightly`: by schedule; `demand`: on request."),
    ]
    tick: Annotated[datetime | None, Field(description="Scheduled time; null: on request.")]
    status: Annotated[
        Literal["pending", "running", "done", "failed"],
        Field(description="The next job continues a failed one."),
    ]
    stage: Annotated[int, Field(description="Number of finished stages, of six.")]
    error: Annotated[str | None, Field(description="Last error, until the job succeeds.")]
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class MemoryReport(MaintenanceJob):
    """A maintenance job with its progress and report."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                _JOB
                | {
                    "progress": {"episodes": {"mature": 3, "ms": 41}},
                    "report": {
                        "episodes": {"stored": 120, "by_state": {"active": 117, "mature": 3}},
                        "patterns": {"by_state": {"CANDIDATE": 2, "VALIDATED": 1}},
                    },
                }
            ]
        }
    )

    progress: Annotated[
        dict[str, Any],
        Field(
            description=(
                "Counts and duration (`ms`) of each finished stage: `episodes`, `mining`, "
                "`validation`, `refinement`, `indices`, `report`."
            )
        ),
    ]
    report: Annotated[
        dict[str, Any] | None,
        Field(
            description=(
                "Contents of the memory after the job: episodes, storage, patterns, "
                "applications, learning from runs. Null until it is done."
            )
        ),
    ]


SectionName = Literal["system", "task", "state", "intermediate", "retrieved"]
ScopeName = Literal["global", "task", "execution", "intermediate", "metadata"]


class MemorySection(Answer):
    """A section of the working memory, within its token budget."""

    name: SectionName
    budget: Annotated[int, Field(description="Tokens, at 4 bytes each.")]
    tokens: Annotated[int, Field(description="Tokens in use.")]
    content: str


class MemoryReference(Answer):
    """An answer of a tool, of a sub-agent or, in a DAG, of an agent."""

    reference: Annotated[str, Field(description="Argument of the tool `recall_memory`.")]
    name: Annotated[str, Field(description="Name of the tool or agent.")]
    seq: Annotated[int, Field(description="Number of the event with the whole answer.")]
    tokens: int
    failed: bool
    excerpt: Annotated[str, Field(description="At most 60 tokens of it.")]


class MemoryPrompt(Answer):
    """The last prompt of the run's own agent, if it got less than its whole history."""

    tokens: Annotated[int, Field(description="Approximate total.")]
    shrunk: Annotated[int, Field(description="Answers shortened to a summary and a reference.")]
    left: Annotated[int, Field(description="Messages left out, which can be recalled.")]


class WorkingMemory(Answer):
    """A run's working memory, computed from its log."""

    run_id: UUID
    limit: Annotated[int, Field(description="Tokens of all sections together.")]
    tokens: int
    sections: list[MemorySection]
    variables: Annotated[
        dict[ScopeName, dict[str, Any]], Field(description="By scope, then by name.")
    ]
    results: Annotated[int, Field(description="Number of references: m1, m2 and so on.")]
    references: Annotated[list[MemoryReference], Field(description="The newest 50, newest first.")]
    prompt: Annotated[
        MemoryPrompt | None, Field(description="Null: the prompt had the whole history.")
    ]


router = APIRouter(prefix="/v1/memory", tags=["memory"])


def _known(pattern: Pattern) -> dict[str, Any]:
    """Return the parts of a pattern that are needed to apply it."""
    evidence = pattern.evidence
    same = ("id", "version", "name", "category", "state", "trust", "summary")
    return {name: getattr(pattern, name) for name in same} | {
        "uses": pattern.content.uses,
        "confidence": evidence.confidence,
        "success_rate": evidence.success_rate,
        "applications": evidence.applications,
    }


def _matched(found: Sequence[Match]) -> list[dict[str, Any]]:
    return [
        {"pattern": _known(each.pattern), "score": each.score, "quality": each.quality}
        for each in found
    ]


@router.post(
    "/context",
    operation_id="find_context",
    summary="Find memory for a task",
    description=(
        "Patterns that apply, similar episodes, and knowledge of the task's domain. There is no "
        "experiment here: candidates are left out, and no validated pattern is withheld."
    ),
    response_model=ContextFound,
    responses=problems(400, 413, 415),
    dependencies=[Turn],
)
async def context(
    service: ServiceDep, principal: PrincipalDep, tenant: ReadTenant, body: ContextQuery
) -> Any:
    known: dict[str, Any] = {
        name: value
        for name in ("complexity", "tools_required")
        if (value := getattr(body, name)) is not None
    }
    signature = None
    if (error := body.error) is not None:
        signature = failure_signature(error.type, error.message, error.tool)
        known |= {"error_type": error.type} | ({"tool": error.tool} if error.tool else {})
    found = await context_for_task(
        service.memory,
        service.patterns,
        tenant,
        within(principal, body.user, body.session_id, body.scope),
        body.task,
        domain=body.domain,
        task_type=body.task_type,
        capabilities=body.capabilities,
        known=known,
        failure_signature=signature,
        k=body.k,
    )
    goals = found.goals
    return {
        "goals": goals.goals,
        "constraints": goals.constraints,
        "criteria": goals.criteria,
        "features": found.features,
        "patterns": _matched(found.patterns),
        "episodes": [
            {"episode": to_response(hit.episode), "score": hit.score, "why": hit.why}
            for hit in found.episodes.hits
            if hit.relevant
        ],
        "by_meaning": found.episodes.by_meaning,
        "by_spelling": found.episodes.by_spelling,
        "knowledge": {
            "patterns": _matched(found.knowledge),
            "insights": [_insight(each) for each in found.insights],
        },
    }


def _insight(found: FoundInsight) -> dict[str, Any]:
    """Return an insight, and the episodes found that have it."""
    episodes = found.episodes
    return {
        "text": found.text,
        "times": len(episodes),
        "trust": max(each.trust for each in episodes),
        "episodes": [each.id for each in episodes],
        "at": max(each.at for each in episodes),
    }


@router.post(
    "/learn",
    operation_id="learn_from_episode",
    summary="Learn from an episode",
    description=(
        "From a stored episode, or from one of another system, which is stored too. Its insights "
        "become candidates of the lowest trust, which runs get on trial. If the episode names a "
        "user or a session, its insights stay with it, since runs of all users share patterns. "
        "A repetition changes nothing, except that an `episode` in the body is stored again."
    ),
    response_model=Learnt,
    responses={
        **problems(400, 404, 409, 413, 415),
        200: headers(Location="Path of the episode."),
    },
)
async def learn(
    once: OnceDep,
    service: ServiceDep,
    tenant: Tenant,
    principal: PrincipalDep,
    body: NewLearning,
    response: Response,
) -> Any:
    actor, episode = principal.actor, None
    if (new := body.episode) is None:
        acting = acts_for(principal, body.user)
    else:
        acting = acts_for(principal, new.user, "/episode/user")
        now = service.memory.clock()
        episode = imported(new, principal=actor, now=now, pointer="/episode/at")
    lessons = [
        Lesson(each.text, each.name, Category(each.category), tuple(each.uses))
        for each in body.insights
    ]
    outcomes = [ReportedOutcome(**each.model_dump()) for each in body.outcomes]
    async with service.database.begin(tenant) as tx:
        driver = await driver_of(tx)
        if (stored := body.episode_id) is not None:
            for each in (await rows.load(driver, EVERYTHING, [stored])).values():
                acting.refuse_other(each.user_id, f"episode {stored}")

        async def create() -> dict[str, Any]:
            known: Episode | UUID | None = body.episode_id
            if episode is not None:
                await hold_owner(tx, tenant, episode.session_id, episode.user_id)
                known = episode
            assert known is not None, "the body has one of them"
            learned = await learn_from_episode(
                service.memory,
                service.patterns,
                driver,
                tenant,
                known,
                lessons,
                outcomes,
                principal=actor,
            )
            response.headers["Location"] = f"/v1/episodes/{learned.episode_id}"
            details = {
                "candidates": [str(each.key) for each in learned.candidates],
                "outcomes": {str(each.pattern_id): each.good for each in outcomes},
            }
            where = str(learned.episode_id)
            await audit.note(tx, tenant, actor, "memory.learn", where, details)
            return {
                "episode_id": learned.episode_id,
                "reflection": learned.reflection,
                "candidates": [_known(each) for each in learned.candidates],
                "applications": learned.applications,
            }

        return await once(tx, response, Learnt, create)


ReportId = Annotated[UUID, Path(description="The report's id.")]


@router.post(
    "/maintenance",
    operation_id="maintain_memory",
    summary="Start a maintenance job of the tenant's memory",
    description=(
        "Does the work of the nightly job: age and consolidate episodes; mine, validate and "
        "refine patterns; maintain indexes; write a report. A worker does it beside the runs. "
        "While a job is open, it is returned instead of a new one, so there is no "
        "`Idempotency-Key`."
    ),
    status_code=202,
    response_model=MaintenanceJob,
    responses={**problems(409), 202: headers(Location="Path of its report.")},
)
async def maintain(tx: Transaction, tenant: AdminTenant, actor: Actor, response: Response) -> Any:
    driver = await driver_of(tx)
    job_id, new = await jobs.order(driver, tenant)
    if new:
        await audit.note(tx, tenant, actor, "memory.maintain", str(job_id))
    response.headers["Location"] = f"/v1/memory/reports/{job_id}"
    return await jobs.get(driver, tenant, job_id)


@router.get(
    "/reports",
    operation_id="list_memory_reports",
    summary="List maintenance jobs by age",
    description="The last 400. Read a job's own report for its results.",
    response_model=Page[MaintenanceJob],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: Tenant,
    query: Annotated[PageQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    found = await jobs.page(await driver_of(tx), tenant, **query.window(UUID))
    return query.page(request, response, found, lambda job: job.id)


@router.get(
    "/reports/{report_id}",
    operation_id="get_memory_report",
    summary="Read a maintenance job's report",
    description="While the job is open, it shows the progress.",
    response_model=MemoryReport,
    responses=problems(404),
)
async def get(tx: Transaction, tenant: Tenant, report_id: ReportId) -> Any:
    driver = await driver_of(tx)
    return await jobs.get(driver, tenant, report_id)


run_router = APIRouter(prefix="/v1/runs", tags=["runs"])

RunId = Annotated[UUID, Path(description="The run's id.")]


@run_router.post(
    "/{run_id}/feedback",
    operation_id="give_run_feedback",
    summary="Give feedback on a run's result",
    description=(
        "Only for a run that is over. The `outcome` becomes the run's, and replaces that of its "
        "episode wherever episodes are read or searched; the episode itself stays as it is. New "
        "feedback replaces the old as a whole. 409 `not_final`."
    ),
    response_model=Feedback,
    responses=problems(400, 404, 409, 413, 415),
)
async def give_feedback(
    tx: Transaction,
    tenant: Tenant,
    principal: PrincipalDep,
    actor: Actor,
    run_id: RunId,
    body: NewFeedback,
) -> Any:
    acting = acts_for(principal, body.user)
    run = await read.get(tx, tenant, run_id)
    acting.refuse_other(run["user"], f"run {run_id}")
    if run["status"] in UNFINISHED:
        raise ConflictError(
            f"run {run_id} is not over (it is {run['status']}): wait for its end",
            code="not_final",
        )
    said = body.model_dump(exclude={"user"})
    given = await read.give_feedback(tx, tenant, run_id, actor, **said)
    details = {"outcome": body.outcome, "score": body.score}
    await audit.note(tx, tenant, actor, "run.feedback", str(run_id), details)
    return given


@run_router.get(
    "/{run_id}/working-memory",
    operation_id="get_run_working_memory",
    summary="Read a run's working memory",
    description=(
        "Computed from the run's log, during the run and after it: the definition, task and "
        "progress of its own agent, and the answers of its tools and sub-agents (in a DAG, its "
        "agents). Each section keeps within its budget of tokens; all answers have references."
    ),
    response_model=WorkingMemory,
    responses=problems(404),
)
async def get_working_memory(tx: Transaction, tenant: Tenant, run_id: RunId) -> Any:
    return await working_memory(tx, tenant, run_id)


@run_router.get(
    "/{run_id}/learning",
    operation_id="get_run_learning",
    summary="Read the learning from a run",
    description=(
        "After the run's end, rules or a model learn from it in the background: insights, "
        "patterns found in it, and results of patterns that it was given. Failures are retried. "
        "After the last try `status` is `failed`, until feedback or `POST "
        "/v1/memory/maintenance` requests learning again. The run itself never changes."
    ),
    response_model=RunLearning,
    responses=problems(404),
)
async def get_learning(tx: Transaction, tenant: Tenant, run_id: RunId) -> Any:
    await read.get(tx, tenant, run_id)
    return await read.learnt(tx, tenant, run_id)
