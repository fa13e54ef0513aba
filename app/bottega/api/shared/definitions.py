"""Routes of all kinds of definitions; a version's number is its entity tag (RFC 9110, 13.1)."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar
from uuid import UUID

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import BaseModel
from sqlalchemy import select

from bottega.api.auth import Principal
from bottega.api.errors import headers, problems
from bottega.api.schemas.base import NAME_PATTERN, Page
from bottega.api.shared.deps import Actor, DefineTenant, PrincipalDep, ServiceDep, Transaction
from bottega.api.shared.idempotency import OnceDep
from bottega.api.shared.pages import LINK, ViewQuery, encoded_page, merged
from bottega.container import Service
from bottega.db.pages import PageItems
from bottega.db.pool import AsyncConnection
from bottega.db.tables import tenants
from bottega.definitions import store
from bottega.definitions.store import Definition, DefinitionKind
from bottega.errors import InvalidInputError, VersionConflictError
from bottega.secrets import rows
from bottega.secrets.rows import refuse_environment, refuse_stored
from bottega.tenants import audit

_TAG = re.compile(r'"(\d{1,9})"')


def if_match_version(header: str | None) -> int | None:
    """Return the version in ``If-Match``; ``None`` means any version.

    Raises:
        VersionConflictError: the header is not an ETag that this API makes, so no version has it.
    """
    if header is None or header.strip() == "*":
        return None
    match = _TAG.fullmatch(header.strip())
    if match is None:
        raise VersionConflictError('If-Match must be one ETag of this API, such as "3", or *')
    return int(match.group(1))


def is_only_new(if_none_match: str | None) -> bool:
    """Return true if the header ``If-None-Match`` requires that the resource is new.

    Raises:
        VersionConflictError: the header is not ``*``.
    """
    if if_none_match is None:
        return False
    if if_none_match.strip() != "*":
        raise VersionConflictError(
            "If-None-Match must be *, which stores the body only if the name is new"
        )
    return True


DefinitionName = Annotated[str, Path(pattern=NAME_PATTERN)]
Version = Annotated[int, Path(ge=1, le=2**31 - 1)]
PartOf = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=1000,
        description="Name of a node of a run, such as `improve/2`, to read its parts.",
    ),
]
Paging = Annotated[ViewQuery, Query()]
IfMatch = Annotated[
    str | None, Header(description='Version that must be the current version, such as `"3"`.')
]
IfNoneMatch = Annotated[str | None, Header(description="`*`: store only if the name is new.")]

ETAG = "The version, for `If-Match`."

ContentT = TypeVar("ContentT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a route and the caller's transaction."""

    service: Service
    tx: AsyncConnection
    tenant: UUID
    principal: Principal
    absent_secrets: Set[str] = frozenset()
    """Names of secrets that need no check, because the caller reports that they are missing."""


async def _caller(
    service: ServiceDep, tx: Transaction, tenant: DefineTenant, principal: PrincipalDep
) -> Caller:
    return Caller(service, tx, tenant, principal)


CallerDep = Annotated[Caller, Depends(_caller, scope="function")]

Prepare = Callable[[Caller, str, Any], Awaitable[dict[str, Any]]]
"""Function (caller, name, body) that returns the content to store; raises for an invalid body."""
Check = Callable[[Service, UUID, Any], Awaitable[None]]
"""Function (service, tenant, body) that raises if the body is invalid."""
Show = Callable[[Caller, str, Response], Awaitable[dict[str, Any]]]
"""Function (caller, name, response) that returns the body of GET."""
Others = Callable[[Service], Sequence[dict[str, Any]]]
"""Function (service) that returns the operator's items for the list of every tenant."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Bodies of GET for a kind whose definitions may also belong to the operator.

    Attributes:
        output: schema of the body of a single definition.
        show: a function that returns the body of a single definition.
        others: a function that returns list items of the definitions that the operator made.
    """

    output: type[BaseModel]
    show: Show
    others: Others


Extra = Callable[[Service, Mapping[str, Any]], dict[str, Any]]
"""Function (service, content) that returns further fields of a definition's body."""


def answer(definition: Definition, response: Response | None = None) -> dict[str, Any]:
    """Return a definition as the body of a response, and set the ETag of ``response``."""
    if response is not None:
        response.headers["ETag"] = f'"{definition.version}"'
    return {
        **definition.content,
        "name": definition.name,
        "version": definition.version,
        "created_at": definition.created_at,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class DefinitionRoutes:
    """The routes of one kind of definitions, such as agents under ``/v1/agents``.

    Attributes:
        new: schema for POST: ``content`` with a ``name``.
        content: schema of the body of PUT.
        output: schema of responses.
        summary: schema of list items, without bodies.
        check: a function that checks the bodies of POST and PUT before the transaction begins,
            because the check may be slow.
        shown: bodies of GET; ``None``: GET returns the stored definitions.
        more_fields: a function that returns those fields of a response that are not in the
            definition's content.
    """

    kind: DefinitionKind
    new: type[BaseModel]
    content: type[BaseModel]
    output: type[BaseModel]
    summary: type[BaseModel]
    prepare: Prepare
    check: Check | None = None
    shown: Shown | None = None
    more_fields: Extra | None = None

    def router(self) -> APIRouter:
        router = APIRouter(prefix=self.kind.path, tags=[f"{self.kind.noun}s"])
        self._add_create(router)
        self._add_replace(router)
        self._add_delete(router)
        self._add_list(router)
        self._add_get(router)
        self._add_versions(router)
        return router

    def _render(
        self, service: Service, definition: Definition, response: Response | None = None
    ) -> dict[str, Any]:
        more = {} if self.more_fields is None else self.more_fields(service, definition.content)
        return answer(definition, response) | more

    def _page_model(self) -> Any:
        return Page[self.output] | Page[self.summary]  # type: ignore[name-defined]

    def _add_create(self, router: APIRouter) -> None:
        kind, output = self.kind, self.output

        @router.post(
            "",
            operation_id=f"create_{kind.word}",
            summary=f"Create {kind.article} {kind.noun}",
            description=(
                "Refuses a name that exists. Deployments send PUT, which creates or replaces."
            ),
            status_code=201,
            response_model=output,
            responses={
                **problems(400, 409, 413, 415),
                201: headers(ETag=ETAG, Location="Path of the new resource."),
            },
        )
        async def create(
            once: OnceDep,
            service: ServiceDep,
            tenant: DefineTenant,
            principal: PrincipalDep,
            body: self.new,  # type: ignore[name-defined]
            response: Response,
        ) -> Any:
            name: str = body.name
            if self.check is not None:
                await self.check(service, tenant, body)
            async with service.database.begin(tenant) as tx:
                caller = Caller(service, tx, tenant, principal)

                async def define() -> dict[str, Any]:
                    prepared = await self.prepare(caller, name, body)
                    definition = await store.create(tx, kind, tenant, name, prepared)
                    await note(caller, kind, "create", definition)
                    response.headers["Location"] = f"{kind.path}/{name}"
                    return self._render(service, definition, response)

                return await once(tx, response, output, define)

    def _add_replace(self, router: APIRouter) -> None:
        kind, output = self.kind, self.output

        @router.put(
            "/{name}",
            operation_id=f"replace_{kind.word}",
            summary=f"Store a new version of the {kind.noun}, or a new {kind.noun}",
            description="For deployments: creates or replaces. Accepted runs keep their version.",
            response_model=output,
            responses={
                **problems(400, 404, 409, 412, 413, 415),
                200: headers(ETag=ETAG),
                201: {
                    **headers(ETag=ETAG, Location="Path of the new resource."),
                    "description": "The name is new.",
                    "model": output,
                },
            },
        )
        async def replace(
            service: ServiceDep,
            tenant: DefineTenant,
            principal: PrincipalDep,
            name: DefinitionName,
            body: self.content,  # type: ignore[name-defined]
            response: Response,
            if_match: IfMatch = None,
            if_none_match: IfNoneMatch = None,
        ) -> Any:
            expected, only_new = if_match_version(if_match), is_only_new(if_none_match)
            if self.check is not None:
                await self.check(service, tenant, body)
            async with service.database.begin(tenant) as tx:
                caller = Caller(service, tx, tenant, principal)
                prepared = await self.prepare(caller, name, body)
                if if_match is None or only_new:
                    stored = await store.put(tx, kind, tenant, name, prepared, only_new=only_new)
                else:
                    stored = await store.replace(tx, kind, tenant, name, prepared, expected), False
                definition, is_new = stored
                await note(caller, kind, "create" if is_new else "replace", definition)
            if is_new:
                response.status_code = 201
                response.headers["Location"] = f"{kind.path}/{name}"
            return self._render(service, definition, response)

    def _add_delete(self, router: APIRouter) -> None:
        kind = self.kind

        @router.delete(
            "/{name}",
            operation_id=f"delete_{kind.word}",
            summary=f"Delete the {kind.noun}",
            description="Runs that were accepted before keep their pinned version.",
            status_code=204,
            responses=problems(404, 412),
        )
        async def delete(
            tx: Transaction,
            tenant: DefineTenant,
            actor: Actor,
            name: DefinitionName,
            if_match: IfMatch = None,
        ) -> None:
            await store.delete(tx, kind, tenant, name, if_match_version(if_match))
            await audit.note(tx, tenant, actor, f"{kind.word}.delete", name)

    def _add_list(self, router: APIRouter) -> None:
        kind = self.kind

        @router.get(
            "",
            operation_id=f"list_{kind.word}s",
            summary=f"List {kind.noun}s by name",
            description=(
                f"The current version of each {kind.noun}, with its body only if `view=full`."
            ),
            response_model=self._page_model(),
            responses={**problems(), 200: headers(Link=LINK)},
        )
        async def list_(
            caller: CallerDep, query: Paging, request: Request, response: Response
        ) -> Any:
            after = query.place(str)
            rows = await store.page(
                caller.tx,
                kind,
                caller.tenant,
                after=after,
                descending=query.descending,
                limit=query.limit,
                full=query.full,
            )
            items = PageItems((self._render(caller.service, each) for each in rows), more=rows.more)
            if self.shown is not None:
                others = self.shown.others(caller.service)
                names = [each["name"] for each in (*items, *others)]
                names += [] if after is None else [after]
                order = await store.in_order(caller.tx, names, descending=query.descending)
                items = merged(items, others, after, query.limit, order)
            page = query.page(request, response, items, lambda item: item["name"])
            return await encoded_page(page, self.output if query.full else self.summary, response)

    def _add_get(self, router: APIRouter) -> None:
        kind = self.kind

        @router.get(
            "/{name}",
            operation_id=f"get_{kind.word}",
            summary=f"Read the {kind.noun}",
            description="The current version, with its number as ETag for a safe change.",
            response_model=self.output if self.shown is None else self.shown.output,
            responses={**problems(404), 200: headers(ETag=ETAG)},
        )
        async def get(caller: CallerDep, name: DefinitionName, response: Response) -> Any:
            if self.shown is not None:
                return await self.shown.show(caller, name, response)
            definition = await store.get(caller.tx, kind, caller.tenant, name)
            return self._render(caller.service, definition, response)

    def _add_versions(self, router: APIRouter) -> None:
        kind = self.kind

        @router.get(
            "/{name}/versions",
            operation_id=f"list_{kind.word}_versions",
            summary=f"List the {kind.noun}'s versions",
            description="Shows what changed and when. Runs name the versions that they pinned.",
            response_model=self._page_model(),
            responses={**problems(404), 200: headers(Link=LINK)},
        )
        async def versions(
            tx: Transaction,
            service: ServiceDep,
            tenant: DefineTenant,
            name: DefinitionName,
            query: Paging,
            request: Request,
            response: Response,
        ) -> Any:
            rows = await store.versions(
                tx,
                kind,
                tenant,
                name,
                **query.window(int),
                full=query.full,
            )
            items = PageItems((self._render(service, each) for each in rows), more=rows.more)
            page = query.page(request, response, items, lambda item: item["version"])
            return await encoded_page(page, self.output if query.full else self.summary, response)

        @router.get(
            "/{name}/versions/{version}",
            operation_id=f"get_{kind.word}_version",
            summary=f"Read one version of the {kind.noun}",
            description=(
                "Returns the version as it was stored, even a version that a run pinned long ago."
            ),
            response_model=self.output,
            responses={**problems(404), 200: headers(ETag=ETAG)},
        )
        async def version(
            tx: Transaction,
            service: ServiceDep,
            tenant: DefineTenant,
            name: DefinitionName,
            version: Version,
            response: Response,
        ) -> Any:
            return self._render(
                service, await store.version(tx, kind, tenant, name, version), response
            )


async def note(caller: Caller, kind: DefinitionKind, verb: str, definition: Definition) -> None:
    """Add a change of a definition to the audit log."""
    about = {"version": definition.version}
    actor, action = caller.principal.actor, f"{kind.word}.{verb}"
    await audit.note(caller.tx, caller.tenant, actor, action, definition.name, about)


class Sending(NamedTuple):
    """A secret that a definition sends to a URL.

    Attributes:
        pointer: JSON Pointer in the body to the secret's name.
    """

    pointer: str
    name: str
    url: str


async def refuse_foreign(caller: Caller, found: Sequence[Sending]) -> None:
    """Refuse a definition that would send a secret to a host that may not get the secret.

    Raises:
        InvalidInputError: ``secret_host_unset``, ``secret_not_for_host``, ``secret_needs_https``.
    """
    found = [each for each in found if each.name not in caller.absent_secrets]
    if not found:
        return
    settings = caller.service.settings
    stored = await rows.hosts_of(caller.tx, caller.tenant, [each.name for each in found])
    tenant = await tenant_name(caller)
    allowed = await caller.service.outgoing.model_hosts.allowed()
    is_open = caller.principal.is_local
    for each in found:
        try:
            if (hosts := stored.get(each.name)) is not None:
                refuse_stored(each.name, hosts, each.url, allowed)
            else:
                of_operator = settings.hosts_of_secret(tenant, each.name)
                refuse_environment(each.name, of_operator, each.url, may_be_unset=is_open)
        except InvalidInputError as error:
            raise InvalidInputError(error.detail, code=error.code, pointer=each.pointer) from None


async def unknown_secrets(caller: Caller, names: Set[str]) -> Set[str]:
    """Return the names for which neither the tenant nor the operator has a secret."""
    if not names:
        return names
    stored = await rows.hosts_of(caller.tx, caller.tenant, names)
    tenant, secrets = await tenant_name(caller), caller.service.outgoing.secrets
    return {name for name in names if name not in stored and not secrets.operator_has(tenant, name)}


async def tenant_name(caller: Caller) -> str:
    """Return the name of the caller's tenant."""
    query = select(tenants.c.name).where(tenants.c.id == caller.tenant)
    name: str = (await caller.tx.execute(query)).scalar_one()
    return name
