"""The route that stores a document of definitions."""

from typing import Any

from fastapi import APIRouter

from bottega.api.errors import problems
from bottega.api.routes.deploy.bodies import Apply, ApplyResult
from bottega.api.routes.deploy.references import missing
from bottega.api.routes.deploy.storing import check_patterns, store_all
from bottega.api.routes.providers import check_address_of
from bottega.api.shared.definitions import Caller
from bottega.api.shared.deps import DefineTenant, PrincipalDep, ServiceDep
from bottega.errors import InvalidInputError, UnknownReferenceError

router = APIRouter(prefix="/v1/apply", tags=["deployment"])


@router.post(
    "",
    operation_id="apply",
    summary="Store many definitions, all or none",
    description=(
        "Stores a new version of each definition that differs from what is stored, and says what "
        "changed. Sub-agents may come after their parents. If one is refused, or names another "
        "that does not exist, nothing is stored."
    ),
    response_model=ApplyResult,
    responses=problems(400, 404, 409, 413, 415),
)
async def apply(
    service: ServiceDep, principal: PrincipalDep, tenant: DefineTenant, body: Apply
) -> Any:
    if body.prune and body.source is None:
        raise InvalidInputError("'prune' needs 'source': the name it compares", pointer="/source")
    for number, provider in enumerate(body.providers):
        try:
            await check_address_of(service, tenant, provider)
        except InvalidInputError as error:
            error.pointer = f"/providers/{number}{error.pointer or ''}"
            raise
    await check_patterns(service, tenant, body)
    async with service.database.begin(tenant) as tx:
        undo = await tx.begin_nested()
        caller = Caller(service, tx, tenant, principal)
        items = await store_all(caller, body)
        absent = await missing(caller, body)
        if absent and not body.allow_missing:
            raise UnknownReferenceError(absent)
        if body.dry_run:
            await undo.rollback()
        else:
            await undo.commit()
    warnings = [{"pointer": pointer, "detail": detail} for pointer, detail in absent]
    return {"dry_run": body.dry_run, "items": items, "warnings": warnings}
