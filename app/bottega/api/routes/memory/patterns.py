"""Routes of patterns."""

from collections.abc import Mapping
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response

from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Page
from bottega.api.schemas.memory.patterns import (
    CategoryName,
    NewPattern,
    PatternChanges,
    PatternsWanted,
    StateName,
)
from bottega.api.schemas.memory.patterns_out import Pattern, PatternsFound, SimilarPatterns
from bottega.api.shared.definitions import IfMatch
from bottega.api.shared.deps import Actor, ReadTenant, ServiceDep, Tenant, Turn
from bottega.api.shared.etags import if_match_version
from bottega.api.shared.idempotency import OnceDep
from bottega.api.shared.pages import LINK, PageQuery
from bottega.db.driver import driver_of
from bottega.errors import InvalidInputError, VersionConflictError
from bottega.memory.patterns import pattern as memory
from bottega.memory.patterns import task_analysis
from bottega.memory.patterns.matcher import score_parts
from bottega.memory.patterns.pattern import Category, PatternState
from bottega.tenants import audit

router = APIRouter(prefix="/v1/patterns", tags=["memory"])

PatternId = Annotated[UUID, Path(description="The pattern's id.")]
GIVEN_BY_HAND = 1
"""Trust of a pattern that a client added or changed."""
ETAG = "The version, for `If-Match`."

_NAMED = ("domain", "task_type")


class PatternQuery(PageQuery):
    """Query parameters of the list of patterns."""

    state: StateName | None = None
    category: CategoryName | None = None

    def wanted(self) -> dict[str, Any]:
        given = {"states": (PatternState, self.state), "categories": (Category, self.category)}
        return {name: [of(value)] for name, (of, value) in given.items() if value is not None}


def tagged(pattern: memory.Pattern, response: Response) -> memory.Pattern:
    """Return the pattern; set its version as ETag of the response."""
    response.headers["ETag"] = f'"{pattern.version}"'
    return pattern


def _written(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert fields of a body to fields of a pattern."""
    known = {"name": "", "category": Category.DOMAIN, "content": {"kind": "HEURISTIC"}}
    read = memory.pattern_of(known | dict(fields))
    return {name: getattr(read, name) for name in fields}


@router.post(
    "",
    operation_id="create_pattern",
    summary="Add a pattern",
    description=(
        "It begins as a `CANDIDATE` of the lowest trust (`trust` 1): runs that it applies to get "
        "it on trial, and their results decide. If a pattern in use has the same category, "
        "conditions and content, that one is returned, unchanged."
    ),
    status_code=201,
    response_model=Pattern,
    responses={
        **problems(400, 409, 413, 415),
        201: headers(ETag=ETAG, Location="Path of the new pattern."),
    },
)
async def create(
    once: OnceDep,
    service: ServiceDep,
    tenant: Tenant,
    actor: Actor,
    body: NewPattern,
    response: Response,
) -> Any:
    given = {"origin": {"principal": actor}, "trust": GIVEN_BY_HAND}
    new = memory.pattern_of(body.model_dump(mode="json") | given)
    async with service.database.begin(tenant) as tx:
        driver = await driver_of(tx)

        async def add() -> Any:
            added = await service.patterns.store(driver, tenant).add(new)
            await audit.note(tx, tenant, actor, "pattern.create", str(added.key))
            response.headers["Location"] = f"/v1/patterns/{added.key}"
            return tagged(added, response)

        answer = await once(tx, response, Pattern, add)
    service.patterns.forget(tenant)
    return answer


@router.get(
    "",
    operation_id="list_patterns",
    summary="List patterns by age",
    response_model=Page[Pattern],
    responses={**problems(), 200: headers(Link=LINK)},
    dependencies=[Turn],
)
async def list_(
    service: ServiceDep,
    tenant: Tenant,
    query: Annotated[PatternQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    found = await service.patterns.page(
        tenant,
        **query.wanted(),
        after=query.place(UUID),
        descending=query.descending,
        limit=query.limit,
    )
    return query.page(request, response, found, lambda pattern: pattern.key)


@router.post(
    "/match",
    operation_id="match_patterns",
    summary="Find the patterns that apply to a task",
    description=(
        "Only `VALIDATED` patterns, best first, without those that contradict a better one. If "
        "the features describe a failure, only patterns about failures, else only the others; "
        "`category` overrides this."
    ),
    response_model=PatternsFound,
    responses=problems(400, 413, 415),
    dependencies=[Turn],
)
async def match(service: ServiceDep, tenant: ReadTenant, body: PatternsWanted) -> Any:
    features = _features(body)
    found = await service.patterns.find_applicable(
        tenant,
        features,
        category=None if body.category is None else Category(body.category),
        failure_signature=body.failure_signature,
        k=body.k,
    )
    now = service.patterns.clock()
    items = [
        {
            "pattern": each.pattern,
            "score": each.score,
            "quality": each.quality,
            "parts": score_parts(each.pattern, each.quality, now) if body.explain else None,
        }
        for each in found
    ]
    return {"features": features, "items": items}


def known_of(features: Mapping[str, Any]) -> dict[str, Any]:
    """Return the features that are not null."""
    return {name: value for name, value in features.items() if value is not None}


def _features(body: PatternsWanted) -> dict[str, Any]:
    """Return the features that the body gives, and those read from its task."""
    told = body.context if body.features is None else body.features
    known = known_of(told)
    if body.task is not None:
        named = {name: known.get(name) for name in _NAMED}
        texts = {name: value for name, value in named.items() if isinstance(value, str)}
        at_hand = known.get("capabilities")
        names = at_hand if isinstance(at_hand, list) else []
        capabilities = [name for name in names if isinstance(name, str)]
        read = task_analysis.analyse(body.task, **texts, capabilities=capabilities)
        known = {**read.features, **known}
    if body.failure_signature is not None:
        known["failure_signature"] = body.failure_signature
    return known


@router.get(
    "/{pattern_id:uuid}",
    operation_id="get_pattern",
    summary="Read a pattern",
    response_model=Pattern,
    responses={**problems(404), 200: headers(ETag=ETAG)},
    dependencies=[Turn],
)
async def get(
    service: ServiceDep, tenant: Tenant, pattern_id: PatternId, response: Response
) -> Any:
    return tagged(await service.patterns.get(tenant, pattern_id), response)


@router.patch(
    "/{pattern_id:uuid}",
    operation_id="change_pattern",
    summary="Change a pattern",
    description=(
        "Makes a new version. If its advice or its conditions change, it begins again as a "
        "`CANDIDATE` without evidence. A changed pattern has the lowest trust (`trust` 1). The "
        "version to change is required: a stale `version` is 409 `stale_version`, a stale "
        "`If-Match` 412."
    ),
    response_model=Pattern,
    responses={**problems(400, 404, 409, 412, 413, 415), 200: headers(ETag=ETAG)},
)
async def change(
    service: ServiceDep,
    tenant: Tenant,
    actor: Actor,
    pattern_id: PatternId,
    body: PatternChanges,
    response: Response,
    if_match: IfMatch = None,
) -> Any:
    given = body.model_dump(mode="json", exclude_none=True, exclude={"version"})
    asked = if_match_version(if_match)
    async with service.database.begin(tenant) as tx:
        store = service.patterns.store(await driver_of(tx), tenant)
        now = (await store.get_many([pattern_id]))[pattern_id]
        version = asked if asked is not None else body.version
        if version is None and if_match is None:
            raise InvalidInputError(
                f"give the version to change: the current one is {now.version}", pointer="/version"
            )
        if asked is not None and asked != now.version:
            raise VersionConflictError(f"pattern {pattern_id} now has version {now.version}")
        changes = _written(given)
        if any(getattr(now, name) != value for name, value in changes.items()):
            origin = {**now.origin, "changed_by": actor}
            changes |= {"trust": GIVEN_BY_HAND, "origin": origin}
            details = {"version": now.version + 1, "fields": sorted(given)}
            await audit.note(tx, tenant, actor, "pattern.change", str(pattern_id), details)
        based_on = now.version if version is None else version
        changed = await store.update(pattern_id, based_on, changes)
    service.patterns.forget(tenant)
    return tagged(changed, response)


@router.get(
    "/{pattern_id:uuid}/similar",
    operation_id="list_similar_patterns",
    summary="Find similar patterns",
    description="Patterns of its category with similar advice and conditions; none is deprecated.",
    response_model=SimilarPatterns,
    responses=problems(404),
    dependencies=[Turn],
)
async def similar(
    service: ServiceDep,
    tenant: Tenant,
    pattern_id: PatternId,
    k: Annotated[int, Query(ge=1, le=50, description="Maximum number of patterns.")] = 5,
) -> Any:
    pattern = await service.patterns.get(tenant, pattern_id)
    found = await service.patterns.similar(tenant, pattern, k)
    return {"items": [{"pattern": each, "likeness": likeness} for each, likeness in found]}
