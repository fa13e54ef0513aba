"""Routes of memory: search for a task, learning, a run's memory and feedback, and maintenance."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from bottega import metrics
from bottega.api.auth import acts_for
from bottega.api.errors import headers, problems
from bottega.api.routes.episodes import imported, to_response, within
from bottega.api.schemas.base import Answer, Body, OwnUser, Page, taken_from
from bottega.api.schemas.episodes import (
    EpisodeFailure,
    EpisodeHit,
    EpisodeReader,
    Feedback,
    Label,
    NewEpisode,
    NewFeedback,
)
from bottega.api.schemas.patterns import StateName
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
from bottega.errors import ConflictError
from bottega.events.data import ShortenedPrompt
from bottega.events.types import UNFINISHED
from bottega.json_schema.values import WHOLE
from bottega.memory.episodes.episode import Episode
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.episodes.search import load
from bottega.memory.learning import maintenance as jobs
from bottega.memory.learning.context import (
    Learned,
    Lesson,
    ReportedOutcome,
    context_for_task,
    learn_from_episode,
)
from bottega.memory.learning.lessons import FoundInsight
from bottega.memory.patterns.pattern import Category
from bottega.memory.text.signature import failure_signature
from bottega.runs import read
from bottega.runs.sessions import hold_owner
from bottega.runs.working_memory import working_memory
from bottega.tenants import audit


class MinedPattern(Answer):
    """A pattern found in the run's episode. The episode does not count as its evidence."""

    id: UUID
    name: str
    category: str
    state: StateName
    """`CANDIDATE`: on trial; `VALIDATED`: in use; `IN_REVIEW`: some evidence is against it;
    `DEPRECATED`: not in use."""
    version: int
    """Version of the pattern."""


class RunApplication(Answer):
    """The assignment of a pattern to the run (given or withheld), and the run's result."""

    source: str
    """`pattern:` and its id."""
    pattern_id: UUID
    name: str
    version: int
    """Version of the pattern that was assigned."""
    arm: Literal["used", "trial", "withheld", "control", "reported", "reported_without"]
    """`used`: the run got this validated pattern; `withheld`: the run did not get it. `trial`: the
    run got this candidate; `control`: the run did not get this candidate. `reported`,
    `reported_without`: a client reported the result, with and without the pattern."""
    at: datetime
    followed: bool | None
    """True if the run followed the pattern; null: unknown."""
    good: bool | None
    """True if the run went well; null: the run had no chance to use the pattern."""


class RunLearning(Answer):
    """The status and results of learning from a finished run."""

    run_id: UUID
    status: LearningStatus | None
    """Status of learning; null: the run has not ended, or it has no episode."""
    tries: int
    """Number of tries since learning was last requested."""
    error: str | None
    """Error of the last try."""
    next_at: datetime | None
    """Time of the next try; null: there is no next try."""
    updated_at: datetime | None
    by: str | None
    """Author of the reflection: `rules`, or a model; null: there is no reflection yet."""
    insights: list[Any]
    patterns: list[Any]
    """Successful behaviour of the run."""
    failures: list[Any]
    performance: dict[str, Any]
    candidates: list[MinedPattern]
    """Patterns that were found in the run."""
    applications: list[RunApplication]
    """Patterns and insights that were assigned to the run."""


Term = Annotated[str, StringConstraints(min_length=1, max_length=100)]
Id = Annotated[UUID, Field(strict=False)]


class ContextQuery(EpisodeReader):
    """A task for which to find memory."""

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

    task: Annotated[str, StringConstraints(min_length=1, max_length=100_000)]
    """The task in a user's words."""
    domain: Label | None = None
    task_type: Label | None = None
    complexity: Annotated[float | None, Field(ge=0, le=1)] = None
    """Complexity from 0 to 1; null: the server estimates it from the task's words."""
    tools_required: Annotated[list[Term], Field(max_length=100)] | None = None
    """Required tools. Null: the tools that the task names."""
    capabilities: Annotated[list[Term], Field(max_length=200)] = Field(default_factory=list)
    """Available tools and agents."""
    error: EpisodeFailure | None = None
    """An error; if you send one, the search finds only patterns about failures."""
    k: Annotated[int, Field(ge=1, le=50), WHOLE] = 5
    """Maximum number of patterns, of episodes and of insights."""


class KnownPattern(Answer):
    """The fields of a pattern that are needed to apply the pattern."""

    id: UUID
    version: int
    """Version of the pattern, from 1."""
    name: str
    category: str
    state: str
    trust: int
    """3: learned from the tenant's own runs; 2: from own runs that read outside content; 1: a
    client sent the pattern."""
    summary: str
    uses: Annotated[list[str], taken_from("content", "uses")]
    """Tools and agents that the pattern names."""
    confidence: Annotated[float, taken_from("evidence", "confidence")]
    success_rate: Annotated[float | None, taken_from("evidence", "success_rate")]
    applications: Annotated[int, taken_from("evidence", "applications")]
    """Number of applications of this version."""


class MatchedPattern(Answer):
    """A pattern that applies, and its score."""

    pattern: KnownPattern
    score: float
    """How well the pattern fits the task, from 0 to 1."""
    quality: float
    """The share of the task's features that the pattern tests."""


class Insight(Answer):
    """An insight from relevant episodes of the domain."""

    text: str
    """What was learned, in a sentence."""
    times: int
    """Number of the found episodes that have this insight."""
    trust: int
    """Highest trust of these episodes."""
    episodes: list[UUID]
    """The found episodes that have this insight."""
    at: datetime
    """Time at which the latest of these episodes ended."""


class Knowledge(Answer):
    """Patterns and insights of a domain."""

    patterns: list[MatchedPattern]
    """Patterns of the domain, best first."""
    insights: list[Insight]
    """Insights of episodes of the domain."""


class ContextFound(Answer):
    """Memory found for a task."""

    goals: list[str]
    """The text after the label `Goal:` in the task; without this label, the task's list items or
    its first sentence."""
    constraints: list[str]
    """The text after the label `Constraints:` in the task."""
    criteria: list[str]
    """The text after the label `Success criteria:` in the task."""
    features: dict[str, Any]
    """Features for matching patterns; an absent feature is unknown."""
    patterns: list[MatchedPattern]
    """Validated patterns, best first."""
    episodes: list[EpisodeHit]
    """Similar episodes, best first; empty if no episode is more similar than chance explains. `why`
    has the words that episode and task share, the cosine, and the minimum cosine that counts."""
    by_meaning: bool
    """True if the search compared vectors of meaning."""
    by_spelling: bool
    """True if the search used the built-in embedder, which compares spelling. If `by_meaning` and
    `by_spelling` are false, the search compared only whole words."""
    knowledge: Knowledge
    """Knowledge of the task's domain; empty if the task has no domain."""


class NewLesson(Body):
    """A lesson of an episode."""

    text: Annotated[str, StringConstraints(min_length=1, max_length=2000)]
    """What was learned, in a sentence."""
    name: Annotated[str, StringConstraints(min_length=1, max_length=120)] | None = None
    """Short name of the lesson; null: its first words."""
    category: Literal["domain", "strategic", "decomposition"] = "domain"
    """Category of the lesson. Only categories that a whole run's outcome can validate are
    allowed."""
    uses: Annotated[list[Term], Field(max_length=20)] = Field(default_factory=list)
    """Tools and agents that the lesson names."""


class NewOutcome(Body):
    """The result of applying a pattern in the episode."""

    pattern_id: Id
    """Id of the applied pattern."""
    good: bool
    """True if the run went well."""
    followed: bool | None = None
    """True if the pattern was followed; null: unknown."""


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

    episode_id: Id | None = None
    """Id of a stored episode; null: `episode` has a new episode."""
    episode: NewEpisode | None = None
    """An episode to store and to learn from; null: `episode_id` names a stored episode."""
    user: OwnUser = None
    insights: Annotated[list[NewLesson], Field(max_length=20)] = Field(default_factory=list)
    """Lessons; each lesson becomes a candidate."""
    outcomes: Annotated[list[NewOutcome], Field(max_length=20)] = Field(default_factory=list)
    """Results of applied patterns. A result is evidence only if a run made the episode, and the
    pattern was not found in this episode."""

    @model_validator(mode="after")
    def _one_episode(self) -> Self:
        if (self.episode_id is None) == (self.episode is None):
            raise PydanticCustomError("episode", "send either episode_id or episode")
        if self.episode is not None and self.user is not None:
            raise PydanticCustomError("episode", "send the user only in the episode")
        return self


class Learnt(Answer):
    """The result of learning from an episode."""

    episode_id: UUID
    reflection: dict[str, Any]
    """The stored reflection. The first reflection of an episode is never replaced."""
    candidates: list[KnownPattern]
    """Patterns made from the insights, or existing patterns with the same content. Candidates are
    used only after other runs have validated them."""
    applications: int
    """Number of new outcomes that count as evidence."""


class MaintenanceJob(Answer):
    """A maintenance job of the tenant's memory."""

    id: UUID
    cause: Literal["nightly", "demand"]
    """`nightly`: the schedule started the job; `demand`: a request started the job."""
    tick: datetime | None
    """Scheduled time; null: a request started the job."""
    status: Literal["pending", "running", "done", "failed"]
    """Status of the job. After `failed`, the next job continues at the stage that failed."""
    stage: int
    """Number of finished stages; a job has six."""
    error: str | None
    """Last error of the job; null after the job succeeds."""
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class MemoryReport(MaintenanceJob):
    """A maintenance job with its progress and report."""

    progress: dict[str, Any]
    """Counts and duration (`ms`) of each finished stage: `episodes`, `mining`, `validation`,
    `refinement`, `indices`, `report`."""
    report: dict[str, Any] | None
    """Contents of the memory after the job: episodes, storage, patterns, applications, learning
    from runs. Null until the job is done."""


SectionName = Literal["system", "task", "state", "intermediate", "retrieved"]
ScopeName = Literal["global", "task", "execution", "intermediate", "metadata"]


class MemorySection(Answer):
    """A section of the working memory, within its token budget."""

    name: SectionName
    """Name of the section."""
    budget: int
    """Maximum number of tokens; one token is 4 bytes."""
    tokens: int
    """Number of used tokens."""
    content: str
    """Text of the section as the prompt has it."""


class MemoryReference(Answer):
    """A stored answer of a tool, of a sub-agent or, in a DAG, of an agent."""

    reference: str
    """Argument of the tool `recall_memory`."""
    name: str
    """Name of the tool or agent."""
    seq: int
    """Number of the event with the whole answer."""
    tokens: int
    """Size of the whole answer, in tokens."""
    failed: bool
    """True: the answer is an error."""
    excerpt: str
    """Excerpt of the answer, at most 60 tokens."""


class WorkingMemory(Answer):
    """A run's working memory, computed from its log."""

    run_id: UUID
    limit: int
    """Maximum number of tokens of all sections together."""
    tokens: int
    """Number of used tokens of all sections together."""
    sections: list[MemorySection]
    """The sections, each within its budget."""
    variables: dict[ScopeName, dict[str, Any]]
    """Variables by scope and name."""
    results: int
    """Number of references of the working memory; they are called m1, m2 and so on."""
    references: list[MemoryReference]
    """The newest 50 references, newest first."""
    prompt: ShortenedPrompt | None
    """Shortening of the prompt; null: the prompt had the whole history."""


router = APIRouter(prefix="/v1/memory", tags=["memory"])


@router.post(
    "/context",
    operation_id="find_context",
    summary="Find memory for a task",
    description=(
        "Patterns that apply, similar episodes, and knowledge of the task's domain. This search is "
        "outside of experiments: it leaves out candidates, and withholds no validated pattern."
    ),
    response_model=ContextFound,
    responses=problems(400, 413, 415),
    dependencies=[Turn],
)
async def context(
    service: ServiceDep, principal: PrincipalDep, tenant: ReadTenant, body: ContextQuery
) -> Any:
    features: dict[str, Any] = {
        name: value
        for name in ("complexity", "tools_required")
        if (value := getattr(body, name)) is not None
    }
    if (error := body.error) is not None:
        features |= {"error_type": error.type} | ({"tool": error.tool} if error.tool else {})
        features["failure_signature"] = failure_signature(error.type, error.message, error.tool)
    found = await context_for_task(
        service.memory,
        service.patterns,
        tenant,
        within(principal, body.user, body.session_id, body.scope),
        body.task,
        domain=body.domain,
        task_type=body.task_type,
        capabilities=body.capabilities,
        known=features,
        k=body.k,
    )
    return {
        "goals": found.goals.goals,
        "constraints": found.goals.constraints,
        "criteria": found.goals.criteria,
        "features": found.features,
        "patterns": found.patterns,
        "episodes": [
            {"episode": to_response(hit.episode), "score": hit.score, "why": hit.why}
            for hit in found.episodes.hits
            if hit.relevant
        ],
        "by_meaning": found.episodes.by_meaning,
        "by_spelling": found.episodes.by_spelling,
        "knowledge": {
            "patterns": found.knowledge,
            "insights": [_insight(each) for each in found.insights],
        },
    }


def _insight(insight: FoundInsight) -> dict[str, Any]:
    episodes = insight.episodes
    return {
        "text": insight.text,
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
        "Learns from a stored episode, or from an episode of another system, which is stored too. "
        "The insights become candidates of the lowest trust, which runs get on trial. If the "
        "episode names a user or a session, its insights become no candidates, because runs of all "
        "users share patterns. Repeating the request changes nothing, except that an `episode` in "
        "the body is stored again."
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
        driver = tx.driver
        if (episode_id := body.episode_id) is not None:
            for each in (await load(driver, EVERYTHING, [episode_id])).values():
                acting.refuse_other(each.user_id, f"episode {episode_id}")

        async def create() -> Learned:
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
            return learned

        return await once(tx, response, Learnt, create)


ReportId = Annotated[UUID, Path(description="The report's id.")]


@router.post(
    "/maintenance",
    operation_id="maintain_memory",
    summary="Start a maintenance job of the tenant's memory",
    description=(
        "Does the work of the nightly job: age and consolidate episodes; mine, validate and "
        "refine patterns; maintain indexes; write a report. A worker does this while it executes "
        "runs. While a job is open, the request returns this job instead of starting another. "
        "Therefore there is no `Idempotency-Key`."
    ),
    status_code=202,
    response_model=MaintenanceJob,
    responses={**problems(409), 202: headers(Location="Path of its report.")},
)
async def maintain(tx: Transaction, tenant: AdminTenant, actor: Actor, response: Response) -> Any:
    driver = tx.driver
    job_id, new = await jobs.order(driver, tenant)
    if new:
        await audit.note(tx, tenant, actor, "memory.maintain", str(job_id))
    response.headers["Location"] = f"/v1/memory/reports/{job_id}"
    return await jobs.get(driver, tenant, job_id)


@router.get(
    "/reports",
    operation_id="list_memory_reports",
    summary="List maintenance jobs by age",
    description="Lists the last 400 jobs. Read a job's own report for its results.",
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
    rows = await jobs.page(tx.driver, tenant, **query.window(UUID))
    return query.page(request, response, rows, lambda job: job.id)


@router.get(
    "/reports/{report_id}",
    operation_id="get_memory_report",
    summary="Read a maintenance job's report",
    description="While the job is open, it shows the progress.",
    response_model=MemoryReport,
    responses=problems(404),
)
async def get(tx: Transaction, tenant: Tenant, report_id: ReportId) -> Any:
    driver = tx.driver
    return await jobs.get(driver, tenant, report_id)


run_router = APIRouter(prefix="/v1/runs", tags=["runs"])

RunId = Annotated[UUID, Path(description="The run's id.")]


@run_router.post(
    "/{run_id}/feedback",
    operation_id="give_run_feedback",
    summary="Give feedback on a run's result",
    description=(
        "Only for a run that is over (else 409 `not_final`). The `outcome` becomes the run's "
        "outcome. Wherever the run's episode is read or searched, this outcome replaces the "
        "episode's; the stored episode does not change. New feedback replaces all old feedback."
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
    fields = body.model_dump(exclude={"user"})
    feedback = await read.give_feedback(tx, tenant, run_id, actor, **fields)
    if body.outcome or body.comment:
        metrics.verdicts.labels("feedback").inc()
    details = {"outcome": body.outcome, "score": body.score}
    await audit.note(tx, tenant, actor, "run.feedback", str(run_id), details)
    return feedback


@run_router.get(
    "/{run_id}/feedback",
    operation_id="get_run_feedback",
    summary="Read the feedback on a run's result",
    description="The latest feedback, with its author. 404: there is none.",
    response_model=Feedback,
    responses=problems(404),
)
async def get_feedback(tx: Transaction, tenant: Tenant, run_id: RunId) -> Any:
    return await read.feedback(tx, tenant, run_id)


@run_router.get(
    "/{run_id}/working-memory",
    operation_id="get_run_working_memory",
    summary="Read a run's working memory",
    description=(
        "Computed from the run's log, during the run and after it: the definition, task and "
        "progress of the run's own agent, and the answers of its tools and sub-agents (in a DAG: "
        "of all agents). No section exceeds its budget of tokens; all answers have references."
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
        "patterns found in the run, and results of the patterns that the run got. Failures are "
        "retried. "
        "After the last try `status` is `failed`, until feedback or `POST "
        "/v1/memory/maintenance` requests learning again. The run itself never changes."
    ),
    response_model=RunLearning,
    responses=problems(404),
)
async def get_learning(tx: Transaction, tenant: Tenant, run_id: RunId) -> Any:
    await read.get(tx, tenant, run_id)
    return await read.learnt(tx, tenant, run_id)
