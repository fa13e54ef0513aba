"""Routes of patterns: add, find, change, validate, merge and deprecate patterns."""

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response

from bottega.api.errors import headers, problems
from bottega.api.routes.episodes import CLOCK_SKEW
from bottega.api.schemas.base import Page
from bottega.api.schemas.patterns import (
    ApplicationRecorded,
    CategoryName,
    Deprecation,
    EvidenceHistory,
    NewApplication,
    NewPattern,
    Pattern,
    PatternChanges,
    PatternsFound,
    PatternsPruned,
    PatternsToMerge,
    PatternsWanted,
    SimilarPatterns,
    StateName,
    Validation,
)
from bottega.api.shared.definitions import ETAG, IfMatch, if_match_version
from bottega.api.shared.deps import Actor, AdminTenant, ReadTenant, ServiceDep, Tenant, Turn
from bottega.api.shared.idempotency import OnceDep
from bottega.api.shared.pages import LINK, PageQuery
from bottega.db.pool import acting_as
from bottega.errors import ConflictError, InvalidInputError, VersionConflictError
from bottega.memory.patterns import pattern as memory
from bottega.memory.patterns import task_analysis
from bottega.memory.patterns.evidence import history
from bottega.memory.patterns.matcher import score_parts
from bottega.memory.patterns.pattern import Application, Arm, Category, PatternState
from bottega.tenants import audit

router = APIRouter(prefix="/v1/patterns", tags=["memory"])

PatternId = Annotated[UUID, Path(description="The pattern's id.")]
GIVEN_BY_HAND = 1
"""Trust of a pattern that a client added or changed."""

_NAMED = ("domain", "task_type")


class PatternQuery(PageQuery):
    state: StateName | None = None
    category: CategoryName | None = None

    def filters(self) -> dict[str, Any]:
        selections = {"states": (PatternState, self.state), "categories": (Category, self.category)}
        return {name: [of(value)] for name, (of, value) in selections.items() if value is not None}


def tagged(pattern: memory.Pattern, response: Response) -> memory.Pattern:
    """Return the pattern, and set the response's ETag to the pattern's version."""
    response.headers["ETag"] = f'"{pattern.version}"'
    return pattern


def _written(fields: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {"name": "", "category": Category.DOMAIN, "content": {"kind": "HEURISTIC"}}
    read = memory.pattern_of(defaults | dict(fields))
    return {name: getattr(read, name) for name in fields}


@router.post(
    "",
    operation_id="create_pattern",
    summary="Add a pattern",
    description=(
        "The pattern begins as a `CANDIDATE` of the lowest trust (`trust` 1): runs to which it "
        "applies get it on trial, and their results decide whether it is used. If a pattern in use "
        "has the same category, conditions and content, that pattern is returned, unchanged."
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
    origin_fields = {"origin": {"principal": actor}, "trust": GIVEN_BY_HAND}
    new = memory.pattern_of(body.model_dump(mode="json") | origin_fields)
    async with service.database.begin(tenant) as tx:
        driver = tx.driver

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
    description=(
        "Lists what was learned, by state and category; deprecated patterns are included."
    ),
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
    rows = await service.patterns.page(tenant, **query.filters(), **query.window(UUID))
    return query.page(request, response, rows, lambda pattern: pattern.key)


@router.post(
    "/match",
    operation_id="match_patterns",
    summary="Find the patterns that apply to a task",
    description=(
        "Returns only `VALIDATED` patterns, best first. Of patterns that contradict each other, "
        "only the best is returned. If the features describe a failure, only patterns about "
        "failures are returned, else only patterns about other subjects; `category` overrides "
        "this rule."
    ),
    response_model=PatternsFound,
    responses=problems(400, 413, 415),
    dependencies=[Turn],
)
async def match(service: ServiceDep, tenant: ReadTenant, body: PatternsWanted) -> Any:
    features = _features(body)
    matches = await service.patterns.find_applicable(
        tenant,
        features,
        category=None if body.category is None else Category(body.category),
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
        for each in matches
    ]
    return {"features": features, "items": items}


def known_of(features: Mapping[str, Any]) -> dict[str, Any]:
    """Return those features that are not null."""
    return {name: value for name, value in features.items() if value is not None}


def _features(body: PatternsWanted) -> dict[str, Any]:
    """Return the features in the body, and the features found in the text of the task."""
    context = body.context if body.features is None else body.features
    known = known_of(context)
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
    description="Returns a pattern with its evidence, its state and how to apply it.",
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
        "Makes a new version. If advice or conditions change, the pattern begins again as a "
        "`CANDIDATE` without evidence. A changed pattern has the lowest trust (`trust` 1). The "
        "version to change is required: a stale `version` is refused with 409 `stale_version`, a "
        "stale `If-Match` with 412."
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
        store = service.patterns.store(tx.driver, tenant)
        now = (await store.get_many([pattern_id]))[pattern_id]
        version = asked if asked is not None else body.version
        if version is None and if_match is None:
            raise InvalidInputError(
                f"send the version to change: the current version is {now.version}",
                pointer="/version",
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
    description="Returns patterns of the same category with similar advice and conditions, without "
    "deprecated patterns.",
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
    hits = await service.patterns.similar(tenant, pattern, k)
    return {"items": [{"pattern": each, "likeness": likeness} for each, likeness in hits]}


@router.post(
    "/{pattern_id:uuid}/applications",
    operation_id="record_pattern_application",
    summary="Report an application of a pattern",
    description=(
        "For applications in other systems; runs record their own applications. Choose at random "
        "the tasks that do not get the pattern, and report them, too (`arm`); or send the success "
        "rate without it (`baseline_rate`). The 8th, 16th, 32nd and 64th application with it start "
        "a check: a candidate may be validated, a validated pattern may lose its state."
    ),
    response_model=ApplicationRecorded,
    responses=problems(400, 404, 409, 413, 415),
)
async def record(
    once: OnceDep,
    service: ServiceDep,
    tenant: Tenant,
    actor: Actor,
    pattern_id: PatternId,
    body: NewApplication,
    response: Response,
) -> Any:
    now = service.patterns.clock()
    if body.at is not None and body.at > now + CLOCK_SKEW:
        raise InvalidInputError("this time is in the future: send a past time", pointer="/at")
    async with service.database.begin(tenant) as tx:
        driver = tx.driver

        async def count() -> Any:
            store = service.patterns.store(driver, tenant)
            patterns = await store.get_many([pattern_id])
            applied = _applied(patterns[pattern_id], body, body.at or now)
            recorded = await store.record_application([applied])
            if recorded:
                details = {"good": body.good}
                await audit.note(tx, tenant, actor, "pattern.apply", str(pattern_id), details)
            return {"recorded": bool(recorded)}

        answer = await once(tx, response, ApplicationRecorded, count)
    service.patterns.forget(tenant)
    return answer


def _applied(pattern: memory.Pattern, body: NewApplication, at: datetime) -> Application:
    version = pattern.version if body.version is None else body.version
    if version > pattern.version:
        raise ConflictError(
            f"pattern {pattern.key} has no version {version}: the latest is {pattern.version}",
            code="stale_version",
        )
    return Application(
        pattern.key,
        version,
        Arm.REPORTED if body.arm == "with" else Arm.REPORTED_WITHOUT,
        at,
        features=known_of(body.features),
        **body.model_dump(exclude={"arm", "version", "at", "features"}),
    )


@router.get(
    "/{pattern_id:uuid}/evidence",
    operation_id="get_pattern_evidence",
    summary="Read how the evidence about a pattern grew",
    description=(
        "At most 40 points over the newest 500 applications of the current version whose result is "
        "known, the oldest first."
    ),
    response_model=EvidenceHistory,
    responses=problems(404),
)
async def evidence(service: ServiceDep, tenant: Tenant, pattern_id: PatternId) -> Any:
    async with service.database.turn(tenant):
        await service.patterns.get(tenant, pattern_id)
        async with acting_as(service.database.pool, tenant) as connection:
            versions = await service.patterns.store(connection, tenant).newest(pattern_id, 501)
    points = await asyncio.to_thread(history, versions[-500:])
    return {"points": points, "more": len(versions) > 500}


@router.post(
    "/{pattern_id:uuid}/validate",
    operation_id="validate_pattern",
    summary="Validate a pattern by its applications",
    description=(
        "Returns the verdict (rate, exact p-value, confidence) on its applications of the last 90 "
        "days, and makes the check after 8, 16, 32 or 64 applications if it is still due. The "
        "nightly maintenance does the same for all patterns."
    ),
    response_model=Validation,
    responses=problems(404),
)
async def validate(service: ServiceDep, tenant: Tenant, actor: Actor, pattern_id: PatternId) -> Any:
    async with service.database.turn(tenant):
        (validation,) = await service.patterns.validate(tenant, [pattern_id])
    service.patterns.forget(tenant)
    async with service.database.begin(tenant) as tx:
        details = {"verdict": validation.lately.verdict, "state": validation.now.state}
        await audit.note(tx, tenant, actor, "pattern.validate", str(pattern_id), details)
    return validation


@router.post(
    "/{pattern_id:uuid}/deprecate",
    operation_id="deprecate_pattern",
    summary="Deprecate a pattern",
    description=(
        "The pattern is kept, but not used again unless it is changed. `origin.deprecated_by` "
        "names the key that deprecated it."
    ),
    response_model=Pattern,
    responses={**problems(400, 404, 413, 415), 200: headers(ETag=ETAG)},
)
async def deprecate(
    service: ServiceDep,
    tenant: Tenant,
    actor: Actor,
    pattern_id: PatternId,
    body: Deprecation,
    response: Response,
) -> Any:
    async with service.database.begin(tenant) as tx:
        store = service.patterns.store(tx.driver, tenant)
        given_up = await store.deprecate(pattern_id, body.reason, body.replaced_by, actor)
        details = {"replaced_by": None if body.replaced_by is None else str(body.replaced_by)}
        await audit.note(tx, tenant, actor, "pattern.deprecate", str(pattern_id), details)
    service.patterns.forget(tenant)
    return tagged(given_up, response)


@router.post(
    "/merge",
    operation_id="merge_patterns",
    summary="Merge patterns into one",
    description=(
        "The new pattern applies wherever one of the merged patterns applied, and takes over their "
        "applications. The merged patterns are deprecated."
    ),
    status_code=201,
    response_model=Pattern,
    responses={
        **problems(400, 404, 409, 413, 415),
        201: headers(ETag=ETAG, Location="Path of the new pattern."),
    },
)
async def merge(
    once: OnceDep,
    service: ServiceDep,
    tenant: Tenant,
    actor: Actor,
    body: PatternsToMerge,
    response: Response,
) -> Any:
    async with service.database.begin(tenant) as tx:
        driver = tx.driver

        async def make_one() -> Any:
            one = await service.patterns.store(driver, tenant).merge(set(body.ids))
            details = {"ids": sorted(map(str, set(body.ids)))}
            await audit.note(tx, tenant, actor, "pattern.merge", str(one.key), details)
            response.headers["Location"] = f"/v1/patterns/{one.key}"
            return tagged(one, response)

        answer = await once(tx, response, Pattern, make_one)
    service.patterns.forget(tenant)
    return answer


@router.post(
    "/prune",
    operation_id="prune_patterns",
    summary="Deprecate patterns of little value",
    description=(
        "Deprecates candidates that lower the success rate, that were tried often without a "
        "visible effect, or that rarely apply. The nightly maintenance does the same."
    ),
    response_model=PatternsPruned,
    responses=problems(),
)
async def prune(service: ServiceDep, tenant: AdminTenant, actor: Actor) -> Any:
    async with service.database.turn(tenant):
        ids = await service.patterns.prune_low_value(tenant)
    service.patterns.forget(tenant)
    async with service.database.begin(tenant) as tx:
        for each in ids:
            await audit.note(tx, tenant, actor, "pattern.prune", str(each))
    return {"ids": ids}
