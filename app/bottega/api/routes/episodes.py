"""Routes of episodes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import AfterValidator

from bottega.api.auth import Principal, acts_for
from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Page, PlaceInTime, UserName
from bottega.api.schemas.episodes import (
    WITHIN,
    Episode,
    EpisodeFailure,
    EpisodeSearch,
    EpisodesFound,
    Label,
    NewEpisode,
    SimilarFailures,
    Within,
)
from bottega.api.schemas.runs import SessionName
from bottega.api.shared.deps import Actor, PrincipalDep, ReadTenant, ServiceDep, Tenant, Turn
from bottega.api.shared.idempotency import OnceDep
from bottega.api.shared.pages import LINK, PageQuery, storable
from bottega.container import Service
from bottega.db.pages import PageItems
from bottega.db.quota import require_room
from bottega.errors import InvalidInputError
from bottega.events.data import OutcomeValue
from bottega.graph.publication import as_text
from bottega.memory.episodes import episode as memory
from bottega.memory.episodes.episode import EpisodeFilter, Outcome
from bottega.memory.episodes.scope import EVERYTHING, Scope, scope_of_search
from bottega.memory.episodes.search import load
from bottega.memory.text.signature import failure_signature
from bottega.memory.text.summaries import summary_of
from bottega.objects import ALL_PARTS
from bottega.runs.sessions import hold_owner
from bottega.tenants import audit, erase

router = APIRouter(prefix="/v1/episodes", tags=["memory"])

EpisodeId = Annotated[UUID, Path(description="The episode's id.")]
CLOCK_SKEW = timedelta(minutes=5)
"""Tolerance for a client's clock that runs ahead."""


Known = Annotated[Label, AfterValidator(storable)]
_OF_USER = (
    "Only this user's episodes; without `user` and `session_id`: episodes that belong to no user."
)


def within(
    principal: Principal, user: str | None, session_id: str | None, scope: Within | None
) -> Scope:
    """Return the scope of the episodes that a request may read.

    Raises:
        ForbiddenError: the request is for the whole tenant, but the caller lacks the scope
            ``admin``.
        UserRequiredError: the key requires an end user, but the request names no user.
    """
    if scope == "tenant":
        principal.need("admin")
    user = acts_for(principal, user).user
    return scope_of_search(user, session_id, everything=scope == "tenant")


class EpisodeQuery(PageQuery):
    domain: Known | None = None
    task_type: Known | None = None
    outcome: Annotated[
        OutcomeValue | None,
        Query(description="The outcome by feedback; without feedback, the run's own outcome."),
    ] = None
    user: Annotated[UserName | None, AfterValidator(storable), Query(description=_OF_USER)] = None
    session_id: SessionName | None = None
    scope: Annotated[Within | None, Query(description=WITHIN)] = None
    tag: Known | None = None
    after: Annotated[
        PlaceInTime | None, Query(description="Only episodes that ended after this time.")
    ] = None
    before: Annotated[
        PlaceInTime | None, Query(description="Only episodes that ended before this time.")
    ] = None

    def filters(self) -> EpisodeFilter:
        return EpisodeFilter(
            domain=self.domain,
            task_type=self.task_type,
            outcomes=[each for each in (self.outcome,) if each],
            tags=[each for each in (self.tag,) if each],
            after=self.after,
            before=self.before,
        )


def to_response(episode: memory.Episode) -> dict[str, Any]:
    """Return an episode as the body of a response."""
    state = episode.state
    task, result = dict(episode.task), dict(episode.result)
    metadata = dict(episode.metadata)
    one_of_many = metadata.pop("consolidated", None) if episode.kind == "consolidated" else None
    if episode.input is not None:
        task["original_input"] = episode.input
    if episode.output is not None:
        result["output"] = episode.output
    return {
        **{name: getattr(episode, name) for name in _FIELDS},
        "user": episode.user_id,
        "outcome": episode.judged,
        "outcome_source": state.label_source,
        "verdict": episode.verdict,
        "task": task,
        "execution": {**episode.execution, "trace": episode.trace},
        "result": result,
        "metadata": metadata,
        "consolidated": one_of_many,
        "feedback": state.feedback,
        "bodies": state.bodies,
    }


_FIELDS = tuple(each.name for each in fields(memory.Episode))


def imported(
    body: NewEpisode, *, principal: str, now: datetime, pointer: str = "/at"
) -> memory.Episode:
    """Build an episode from a client's body. The episode gets the lowest trust.

    Args:
        principal: name of the caller that imports the episode.
        now: the episode's end time if ``body`` has no time.
        pointer: JSON Pointer of the end time in the request.

    Raises:
        InvalidInputError: the end time is in the future.
    """
    if body.at is not None and body.at > now + CLOCK_SKEW:
        raise InvalidInputError("this time is in the future: send a past time", pointer=pointer)
    fields = body.model_dump()
    question, output, error = body.task.original_input, body.result.output, body.result.error
    trace = fields["execution"].pop("trace")
    text = "" if output is None else as_text(output)
    is_long = len(text) > memory.LONGEST_TEXT
    return memory.Episode(
        at=body.at or now,
        outcome=Outcome(body.outcome),
        session_id=body.session_id,
        user_id=body.user,
        domain=body.domain,
        task_type=body.task_type,
        failure_signature=failure_signature(error.type, error.message, error.tool)
        if error
        else None,
        trust=memory.IMPORTED,
        origin={"principal": principal, "run": None, "tool": None},
        task=fields["task"] | {"original_input": question[: memory.LONGEST_TEXT]},
        execution=fields["execution"],
        result=fields["result"] | ({"output": text[: memory.LONGEST_TEXT]} if is_long else {}),
        metadata=fields["metadata"],
        tags=tuple(dict.fromkeys(body.tags)),
        reflection=fields["reflection"],
        trace=trace or None,
        input=question if len(question) > memory.LONGEST_TEXT else None,
        output=output if is_long else None,
        summary=_summary(question, [*body.task.goals, text], error, trace),
    )


def _summary(
    question: str, results: Sequence[str], error: EpisodeFailure | None, trace: Sequence[Any]
) -> memory.Summary:
    steps = trace if len(trace) <= 1000 else [*trace[:500], *trace[-500:]]
    texts = (
        question,
        "\n".join(filter(None, results)),
        ": ".join(filter(None, (error.type, error.message))) if error else "",
        "\n".join(map(as_text, steps)),
    )
    return memory.Summary(*(summary_of(text, memory.LONGEST_SUMMARY // 4) for text in texts))


@router.post(
    "",
    operation_id="import_episode",
    summary="Store an episode of another system",
    description=(
        "Runs store their own episodes; this request stores an episode of another system. Searches "
        "find the episode by its words at once, and by its meaning soon after. It has the lowest "
        "trust (`trust` 1). It never changes; if it is wrong, delete it."
    ),
    status_code=201,
    response_model=Episode,
    responses={
        **problems(400, 409, 413, 415),
        201: headers(Location="Path of the new episode."),
    },
)
async def create(
    once: OnceDep,
    service: ServiceDep,
    tenant: Tenant,
    principal: PrincipalDep,
    body: NewEpisode,
    response: Response,
) -> Any:
    acts_for(principal, body.user)
    episode = imported(body, principal=principal.actor, now=service.memory.clock())
    async with service.database.begin(tenant) as tx:
        driver = tx.driver

        async def store() -> dict[str, Any]:
            await require_room(tx, tenant)
            await hold_owner(tx, tenant, body.session_id, body.user)
            episode_id = await service.memory.store(tenant, episode, on=driver)
            await audit.note(tx, tenant, principal.actor, "episode.import", str(episode_id))
            response.headers["Location"] = f"/v1/episodes/{episode_id}"
            kept = (await load(driver, EVERYTHING, [episode_id]))[episode_id]
            bodies = {part: getattr(episode, part) for part in ALL_PARTS}
            return to_response(replace(kept, **bodies))

        return await once(tx, response, Episode, store)


@router.get(
    "",
    operation_id="list_episodes",
    summary="List episodes by their end",
    description="Leaves out archived episodes, and episodes that a consolidated episode replaces.",
    response_model=Page[Episode],
    responses={**problems(), 200: headers(Link=LINK)},
    dependencies=[Turn],
)
async def list_(
    service: ServiceDep,
    principal: PrincipalDep,
    tenant: Tenant,
    query: Annotated[EpisodeQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    rows = await service.memory.structured_search(
        tenant,
        within(principal, query.user, query.session_id, query.scope),
        query.filters(),
        **query.window(tuple[PlaceInTime, UUID]),
    )
    items = PageItems(map(to_response, rows), more=rows.more)
    return query.page(request, response, items, lambda item: [item["at"], item["id"]])


@router.get(
    "/{episode_id:uuid}",
    operation_id="get_episode",
    summary="Read an episode",
    description=(
        "`body=false` omits the parts that are stored separately: the trace, and long inputs and "
        "outputs. These parts of old episodes come from slower storage."
    ),
    response_model=Episode,
    responses=problems(404),
    dependencies=[Turn],
)
async def get(
    service: ServiceDep,
    tenant: Tenant,
    episode_id: EpisodeId,
    body: Annotated[bool, Query(description="With separately stored parts.")] = True,
) -> Any:
    return to_response(await service.memory.get(tenant, EVERYTHING, episode_id, bodies=body))


@router.delete(
    "/{episode_id:uuid}",
    operation_id="delete_episode",
    summary="Delete an episode",
    description=(
        "From now on the episode cannot be found or read. Its rows are removed after 30 days, "
        "unless the operator set another time."
    ),
    status_code=204,
    responses=problems(404),
)
async def delete(service: ServiceDep, tenant: Tenant, actor: Actor, episode_id: EpisodeId) -> None:
    async with service.database.begin(tenant) as tx:
        driver = tx.driver
        if await service.memory.mark_deleted(tenant, episode_id, on=driver):
            await erase.forget_answers(tx, tenant, [episode_id], Counter())
            await audit.note(tx, tenant, actor, "episode.delete", str(episode_id))


@router.post(
    "/search",
    operation_id="search_episodes",
    summary="Find episodes",
    description=(
        "By query (`hybrid`, `semantic`), by attributes (`structured`), by time (`temporal`), or "
        "by failure (`failures`). All filters apply in every mode. Returns up to `k` episodes."
    ),
    response_model=EpisodesFound,
    responses=problems(400, 413, 415),
    dependencies=[Turn],
)
async def search(
    service: ServiceDep, principal: PrincipalDep, tenant: ReadTenant, body: EpisodeSearch
) -> Any:
    where = EpisodeFilter(**body.filters.model_dump())
    session_id = body.session_id or body.filters.session_id
    scope = within(principal, body.user, session_id, body.scope)
    if body.query is not None:
        found = await service.memory.semantic_search(
            tenant,
            scope,
            body.query,
            k=body.k,
            where=where,
            by=body.by,
            domain=body.domain,
            words=body.mode != "semantic",
        )
        hits = [
            {
                "episode": to_response(hit.episode),
                "score": hit.score,
                "relevance": hit.relevance,
                "relevant": hit.relevant,
                "parts": asdict(hit.parts) if body.explain else None,
                "why": hit.why if body.explain else None,
            }
            for hit in found.hits
        ]
        return {
            "items": hits,
            "by_meaning": found.by_meaning,
            "by_spelling": found.by_spelling,
        }
    if body.mode == "temporal":
        episodes = await service.memory.recent(tenant, scope, body.k, where)
    elif body.mode == "failures":
        episodes = await _alike(service, tenant, scope, body.failure, where, body.k)
    else:
        episodes = await service.memory.structured_search(tenant, scope, where, limit=body.k)
    return _unranked(episodes)


@router.post(
    "/similar-failures",
    operation_id="find_similar_failures",
    summary="Find episodes with the same failure",
    description=(
        "Episodes with the same failure signature (the error's type, the shape of its message, "
        "the tool), latest first."
    ),
    response_model=EpisodesFound,
    responses=problems(400, 413, 415),
    dependencies=[Turn],
)
async def similar_failures(
    service: ServiceDep, principal: PrincipalDep, tenant: ReadTenant, body: SimilarFailures
) -> Any:
    scope = within(principal, body.user, body.session_id, body.scope)
    where = EpisodeFilter(failure_signature=body.failure_signature)
    return _unranked(await _alike(service, tenant, scope, body.error, where, body.k))


async def _alike(
    service: Service,
    tenant: UUID,
    scope: Scope,
    error: EpisodeFailure | None,
    where: EpisodeFilter,
    k: int,
) -> list[memory.Episode]:
    signature = where.failure_signature
    if error is not None:
        signature = failure_signature(error.type, error.message, error.tool)
    return await service.memory.similar_failures(tenant, scope, signature or "", k, where)


def _unranked(episodes: Sequence[memory.Episode]) -> dict[str, Any]:
    items = [{"episode": to_response(episode)} for episode in episodes]
    return {"items": items, "by_meaning": False, "by_spelling": False}
