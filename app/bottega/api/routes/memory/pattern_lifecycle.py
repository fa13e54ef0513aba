"""Routes of a pattern's evidence and end: applications, validation, merge, deprecation, pruning."""

import asyncio
from dataclasses import asdict
from datetime import datetime
from typing import Any

from fastapi import APIRouter, Response

from bottega.api.errors import headers, problems
from bottega.api.routes.memory.imports import CLOCK_SKEW
from bottega.api.routes.memory.patterns import ETAG, PatternId, known_of, tagged
from bottega.api.schemas.memory.patterns import Deprecation, NewApplication, PatternsToMerge
from bottega.api.schemas.memory.patterns_out import (
    ApplicationRecorded,
    EvidenceHistory,
    Pattern,
    PatternsPruned,
    Validation,
)
from bottega.api.shared.deps import Actor, AdminTenant, ServiceDep, Tenant
from bottega.api.shared.idempotency import OnceDep
from bottega.db.driver import driver_of
from bottega.db.engine import acting_as
from bottega.errors import ConflictError, InvalidInputError
from bottega.memory.patterns import pattern as memory
from bottega.memory.patterns.application_rows import baselines_for, newest
from bottega.memory.patterns.evidence import history
from bottega.memory.patterns.pattern import Application, Arm, Baseline
from bottega.tenants import audit

router = APIRouter(prefix="/v1/patterns", tags=["memory"])

_COUNTED = 500
"""Applications that a history counts: its time grows with their number."""


@router.post(
    "/{pattern_id:uuid}/applications",
    operation_id="record_pattern_application",
    summary="Report an application of a pattern",
    description=(
        "For applications elsewhere; runs record theirs themselves. It counts against the "
        "success rate without the pattern (`baseline_rate`): give that before you know the "
        "outcome."
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
        raise InvalidInputError("this is in the future: say when it was", pointer="/at")
    async with service.database.begin(tenant) as tx:
        driver = await driver_of(tx)

        async def count() -> Any:
            store = service.patterns.store(driver, tenant)
            found = await store.get_many([pattern_id])
            pattern, features = found[pattern_id], known_of(body.features)
            baseline = Baseline("given", body.baseline_rate or 0.5)
            if body.baseline_rate is None:
                of = await baselines_for(driver, tenant, [pattern], features)
                baseline = of.get(pattern.key, Baseline())
            applied = _applied(pattern, body, baseline, body.at or now)
            recorded = await store.record_application([applied])
            if recorded:
                details = {"good": body.good}
                await audit.note(tx, tenant, actor, "pattern.apply", str(pattern_id), details)
            return {"recorded": bool(recorded)}

        answer = await once(tx, response, ApplicationRecorded, count)
    service.patterns.forget(tenant)
    return answer


def _applied(
    pattern: memory.Pattern, body: NewApplication, baseline: Baseline, at: datetime
) -> Application:
    version = pattern.version if body.version is None else body.version
    if version > pattern.version:
        raise ConflictError(
            f"the latest version of pattern {pattern.key} is {pattern.version}",
            code="stale_version",
        )
    return Application(
        pattern.key,
        version,
        Arm.REPORTED,
        at,
        baseline=baseline,
        features=known_of(body.features),
        **body.model_dump(include={"episode_id", "followed", "good", "duration_s", "tokens"}),
    )


@router.get(
    "/{pattern_id:uuid}/evidence",
    operation_id="get_pattern_evidence",
    summary="Read how the evidence about a pattern grew",
    description=(
        "After judged applications of its current version, the oldest first: at most 40 points "
        "over the newest 500. The last e-value is the pattern's own, unless there are more."
    ),
    response_model=EvidenceHistory,
    responses=problems(404),
)
async def evidence(service: ServiceDep, tenant: Tenant, pattern_id: PatternId) -> Any:
    async with service.database.turn(tenant):
        await service.patterns.get(tenant, pattern_id)
        async with acting_as(service.database.pool, tenant) as connection:
            found = await newest(connection, tenant, pattern_id, _COUNTED + 1)
    points = await asyncio.to_thread(history, found[-_COUNTED:])
    return {"points": points, "more": len(found) > _COUNTED}


@router.post(
    "/{pattern_id:uuid}/validate",
    operation_id="validate_pattern",
    summary="Validate a pattern by its applications",
    description=(
        "Sets the pattern's state by its applications of the last 90 days (an operator's "
        "setting). A promotion needs the e-value, too. The nightly maintenance validates all "
        "patterns."
    ),
    response_model=Validation,
    responses=problems(404),
)
async def validate(service: ServiceDep, tenant: Tenant, actor: Actor, pattern_id: PatternId) -> Any:
    async with service.database.turn(tenant):
        (found,) = await service.patterns.validate(tenant, [pattern_id])
    service.patterns.forget(tenant)
    async with service.database.begin(tenant) as tx:
        details = {"verdict": found.verdict, "state": found.state}
        await audit.note(tx, tenant, actor, "pattern.validate", str(pattern_id), details)
    return asdict(found)


@router.post(
    "/{pattern_id:uuid}/deprecate",
    operation_id="deprecate_pattern",
    summary="Deprecate a pattern",
    description=(
        "It is kept, but never used again, unless it is changed. `origin.deprecated_by` names the "
        "key that did it."
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
        store = service.patterns.store(await driver_of(tx), tenant)
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
        "The new pattern applies wherever one of them did, and takes over their applications. "
        "They are deprecated."
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
        driver = await driver_of(tx)

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
        "Candidates that lower the success rate, that were tried often without a visible effect, "
        "or that rarely apply. The nightly maintenance does the same."
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
