"""The route that stores a document of definitions in one transaction."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter
from pydantic import ConfigDict, Field
from pydantic_core import from_json, to_json
from sqlalchemy import and_, delete, func, select, tuple_
from sqlalchemy.dialects.postgresql import insert

from bottega.api.auth import acts_for
from bottega.api.errors import problems
from bottega.api.routes import agents, graphs, providers
from bottega.api.routes.graphs import NewGraph, Node
from bottega.api.routes.mcp import servers
from bottega.api.routes.mcp.servers import NewMcpServer
from bottega.api.routes.providers import (
    NewProvider,
    check_address_of,
    known_providers,
    possible_names,
)
from bottega.api.routes.schedules import NewSchedule, run_without_query
from bottega.api.schemas.agents import AnyCheck, JudgeCheck, NewAgent
from bottega.api.schemas.base import Answer, Body
from bottega.api.shared.definitions import Caller, Prepare, Sending, note, unknown_secrets
from bottega.api.shared.deps import DefineTenant, PrincipalDep, ServiceDep
from bottega.api.shared.new_runs import check_webhook
from bottega.api.shared.schemas import check_schema
from bottega.background import schedules
from bottega.container import Service
from bottega.db.tables import applied_definitions
from bottega.definitions import store
from bottega.definitions.agents import hold_sub_agents, listed, named_by
from bottega.definitions.store import (
    AGENTS,
    GRAPHS,
    MCP_SERVERS,
    PROVIDERS,
    Definition,
    DefinitionKind,
)
from bottega.errors import BottegaError, InvalidInputError, NotFoundError, UnknownReferenceError
from bottega.errors import CycleError as ContainedError
from bottega.files.inputs import parts_of
from bottega.tenants import audit
from bottega.tools.mcp import McpToolDefinition

MOST = 500
"""Maximum number of definitions of each kind in one document."""


class Resources(Body):
    """Definitions of a tenant.

    Each definition has the same form as the body of the POST request that creates it.
    """

    deep = frozenset({"providers", "mcp_servers", "agents", "graphs", "schedules"})

    providers: Annotated[list[NewProvider], Field(max_length=MOST, default_factory=list)]
    """Model servers."""
    mcp_servers: Annotated[list[NewMcpServer], Field(max_length=MOST, default_factory=list)]
    """MCP servers."""
    agents: Annotated[list[NewAgent], Field(max_length=MOST, default_factory=list)]
    """Agents; one agent may name another."""
    graphs: Annotated[list[NewGraph], Field(max_length=MOST, default_factory=list)]
    """Graphs of agents."""
    schedules: Annotated[list[NewSchedule], Field(max_length=MOST, default_factory=list)]
    """Schedules, which start runs at certain times."""


class Apply(Resources):
    """Definitions to store: the server stores all of the definitions, or none."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"agents": [{"name": "clerk", "system_message": "You answer customers."}]}]
        }
    )

    dry_run: bool = False
    """Check everything, return the changes, and store nothing."""
    source: Annotated[str | None, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._/-]{0,99}$")] = None
    """Name of the origin of these definitions, such as a repository. The server stores which
    definitions have this source."""
    prune: bool = False
    """Delete the definitions that earlier calls with the same `source` stored, if they are missing
    in this call."""

    allow_missing: bool = False
    """Store definitions with names of agents, graphs, MCP servers, providers or secrets that do not
    exist, and return warnings. Their runs are refused until all these names exist."""


class Applied(Answer):
    """Result for one definition."""

    kind: Literal["provider", "mcp_server", "agent", "graph", "schedule"]
    """Kind of the definition."""
    name: str
    """Name of the definition."""
    action: Literal["created", "replaced", "unchanged", "deleted"]
    """Effect on the definition; with `dry_run`: the effect that the request would have."""
    before: dict[str, Any] | None
    """The definition before the change; null: there was none, it did not change, or the answer
    already has 4 MiB of definitions."""
    after: dict[str, Any] | None
    """The definition after the change; null: there is none, it did not change, or the answer
    already has 4 MiB of definitions."""


class ApplyWarning(Answer):
    """A defect of a definition. The server stores the definition in spite of the defect."""

    pointer: str
    """JSON Pointer of the name in the request."""
    detail: str


class ApplyResult(Answer):
    """The results of storing definitions, in the order of storing."""

    dry_run: bool
    """True: nothing was stored."""
    items: list[Applied]
    """One result for each definition."""
    warnings: list[ApplyWarning]
    """Names of agents, graphs, MCP servers, providers and secrets that do not exist; only with
    `allow_missing`."""


Place = tuple[str, DefinitionKind, str]
"""JSON Pointer of a reference in a document, with the kind and name of the reference's target."""


async def missing(caller: Caller, apply: Apply) -> list[tuple[str, str]]:
    """Return (JSON Pointer, error text) of the first 100 references to missing definitions.

    The server refuses runs of a definition that refers to a missing definition.
    """
    names: dict[str, set[str]] = defaultdict(set)
    places = list(_named(apply))
    for _, kind, name in places:
        names[kind.word].add(name)
    kinds = {kind.word: kind for _, kind, _ in places}
    unknown = {
        word: await store.unknown(caller.tx, kinds[word], caller.tenant, known)
        for word, known in names.items()
    }
    own: dict[str, list[str]] = {
        AGENTS.word: [each.name for each in apply.agents],
        GRAPHS.word: [each.name for each in apply.graphs],
        MCP_SERVERS.word: [each.name for each in apply.mcp_servers],
    }
    absent = [
        (pointer, f"there is no {kind.noun} '{name}'{_near(name, own[kind.word])}")
        for pointer, kind, name in places
        if name in unknown[kind.word]
    ]
    secrets = [
        (f"{each.pointer}/secret", f"there is no secret '{each.name}'")
        for each in _sent_secrets(apply)
        if each.name in caller.absent_secrets
    ]
    return [*absent, *await _without_provider(caller, apply), *secrets, *_unlisted(apply)][:100]


async def _without_provider(caller: Caller, apply: Apply) -> Iterable[tuple[str, str]]:
    """Return (JSON Pointer, error text) of each agent's model whose provider is missing."""
    references = [
        each for number, agent in enumerate(apply.agents) for each in _models(number, agent)
    ]
    for number, graph in enumerate(apply.graphs):
        references += _judges(f"/graphs/{number}", graph.success_check)
    default = await store.default_model(caller.tx, caller.tenant)
    references = [(pointer, reference or default) for pointer, reference in references]
    names = {name for _, reference in references for name in possible_names(reference)}
    providers: dict[str, Any] = dict(caller.service.settings.operator_providers)
    providers |= await known_providers(caller.tx, caller.tenant, names)
    problems = []
    for pointer, reference in references:
        try:
            named_by(reference, providers)
        except InvalidInputError as error:
            problems.append((pointer, error.detail))
    return problems


def _models(number: int, agent: NewAgent) -> Iterator[tuple[str, str | None]]:
    pointer = f"/agents/{number}"
    for index, reference in enumerate(listed(agent.model)):
        yield (
            f"{pointer}/model/{index}" if isinstance(agent.model, list) else f"{pointer}/model",
            reference,
        )
    yield from _judges(pointer, agent.success_check)


def _judges(pointer: str, checks: Sequence[AnyCheck]) -> Iterator[tuple[str, str | None]]:
    for index, check in enumerate(checks):
        if isinstance(check, JudgeCheck) and check.model is not None:
            yield f"{pointer}/success_check/{index}/model", check.model


def _sent_secrets(apply: Apply) -> Iterator[Sending]:
    for section, of in (
        ("providers", providers.sent_secrets),
        ("mcp_servers", servers.sent_secrets),
        ("agents", agents.sent_secrets),
        ("graphs", graphs.sent_secrets),
    ):
        for number, body in enumerate(getattr(apply, section)):
            for each in of(body):
                yield each._replace(pointer=f"/{section}/{number}{each.pointer}")


def _named(apply: Apply) -> Iterator[Place]:
    for number, agent in enumerate(apply.agents):
        pointer = f"/agents/{number}"
        children = () if agent.subagents is None else agent.subagents.names
        for index, name in enumerate(children):
            yield f"{pointer}/subagents/names/{index}", AGENTS, name
        for index, tool in enumerate(agent.tools):
            if isinstance(tool, McpToolDefinition):
                yield f"{pointer}/tools/{index}/server", MCP_SERVERS, tool.server
    for number, graph in enumerate(apply.graphs):
        yield from _named_by_graph(number, graph)
    for number, schedule in enumerate(apply.schedules):
        pointer = f"/schedules/{number}/run"
        if schedule.run.agent is not None:
            yield f"{pointer}/agent", AGENTS, schedule.run.agent
        if schedule.run.graph is not None:
            yield f"{pointer}/graph", GRAPHS, schedule.run.graph


def _named_by_graph(number: int, graph: NewGraph) -> Iterator[Place]:
    for index, node in enumerate(graph.nodes):
        at = f"/graphs/{number}/nodes/{index}"
        if isinstance(node, str):
            yield at, AGENTS, node
        elif node.agent is not None:
            yield f"{at}/agent", AGENTS, node.agent
        elif isinstance(node.tool, McpToolDefinition):
            yield f"{at}/tool/server", MCP_SERVERS, node.tool.server
        elif node.graph is not None:
            yield f"{at}/graph", GRAPHS, node.graph
    for pointer, name in _ends(number, graph):
        if not graph.nodes:
            yield pointer, AGENTS, name


def _ends(number: int, graph: NewGraph) -> Iterator[tuple[str, str]]:
    for index, edge in enumerate(graph.edges):
        place = f"/graphs/{number}/edges/{index}"
        yield from ((f"{place}/source", edge.source), (f"{place}/target", edge.target))


def _unlisted(apply: Apply) -> Iterator[tuple[str, str]]:
    """Yield each name in an edge that is not in the graph's list of nodes."""
    for number, graph in enumerate(apply.graphs):
        nodes = [node if isinstance(node, str) else node.name or "" for node in graph.nodes]
        for pointer, name in _ends(number, graph):
            if nodes and name not in nodes:
                yield pointer, f"'{name}' is none of the graph's nodes{_near(name, nodes)}"


def _near(name: str, names: Sequence[str]) -> str:
    near = get_close_matches(name, names, n=1)
    return f": did you mean '{near[0]}'?" if near else ""


_KINDS: dict[str, tuple[DefinitionKind, Prepare]] = {
    "providers": (PROVIDERS, providers.prepare),
    "mcp_servers": (MCP_SERVERS, servers.prepare),
    "agents": (AGENTS, agents.prepare),
    "graphs": (GRAPHS, graphs.prepare),
}
"""Sections of a document, in the order in which they are stored."""
_BY_WORD = {kind.word: kind for kind, _ in _KINDS.values()}
_DELETED = (schedules.KIND, *reversed(_BY_WORD))
"""Kinds in the order of deletion: a kind comes before the kinds to which it refers."""
_columns = applied_definitions.c


async def check_patterns(service: Service, tenant: UUID, apply: Apply) -> None:
    """Check the schemas in a document's agents, graphs and schedules; the check may take seconds.

    Raises:
        BottegaError: a schema was refused; the error's ``pointer`` locates the schema.
    """
    for number, agent in enumerate(apply.agents):
        with _at("agents", number):
            await agents.check_patterns_of(service, tenant, agent)
    for number, graph in enumerate(apply.graphs):
        with _at("graphs", number):
            await graphs.check_schemas_of(service, tenant, graph)
    for number, schedule in enumerate(apply.schedules):
        with _at("schedules", number):
            await check_schema(tenant, schedule.run.output_schema, "/run/output_schema")


async def store_all(caller: Caller, apply: Apply) -> list[dict[str, Any]]:
    """Store each definition of a document, unless the same definition is already stored.

    Returns:
        One result for each definition, in the form of :class:`Applied`.

    Raises:
        BottegaError: a definition was refused; the error's ``pointer`` locates the definition.
    """
    lock = func.hashtextextended(f"apply:{caller.tenant}", 0)
    await caller.tx.execute(select(func.pg_advisory_xact_lock(lock)))
    await hold_sub_agents(caller.tx, caller.tenant)
    results = []
    for section, (kind, prepare) in _KINDS.items():
        bodies = getattr(apply, section)
        names = [body.name for body in bodies]
        known = await store.named(caller.tx, kind, caller.tenant, names) if names else {}
        for number, body in _in_order(section, bodies):
            with _at(section, number):
                content = await prepare(caller, body.name, body)
                results.append(await _store(caller, kind, body, content, known.get(body.name)))
    for number, schedule in _in_order("schedules", apply.schedules):
        with _at("schedules", number):
            results.append(await _store_schedule(caller, schedule))
    if apply.source is not None:
        results += await _note_source(caller, apply.source, results, prune=apply.prune)
    return _bounded(results)


def _in_order(section: str, bodies: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Yield (index, definition) of a section. A definition follows those to which it refers.

    Raises:
        InvalidInputError: two definitions have the same name.
    """
    places: dict[str, int] = {}
    for number, body in enumerate(bodies):
        if places.setdefault(body.name, number) != number:
            raise InvalidInputError(
                f"'{body.name}' is defined twice", pointer=f"/{section}/{number}/name"
            )
    order = list(places)
    if section in ("agents", "graphs"):
        children = {body.name: _children(body) for body in bodies}
        # Store sub-agents before their callers: in other orders, old and new definitions together
        # could form a cycle. If agents in the document form a cycle, the later check of each agent
        # refuses the cycle.
        try:
            order = [name for name in TopologicalSorter(children).static_order() if name in places]
        except CycleError as error:
            if section == "graphs":
                raise ContainedError(error.args[1], what="node") from None
    for name in order:
        yield places[name], bodies[places[name]]


def _children(body: NewAgent | NewGraph) -> Sequence[str]:
    if isinstance(body, NewGraph):
        return [node.graph for node in body.nodes if isinstance(node, Node) and node.graph]
    return () if body.subagents is None else body.subagents.names


@contextmanager
def _at(section: str, number: int) -> Iterator[None]:
    """Put the definition's JSON Pointer in front of the pointer of each error in the block."""
    try:
        yield
    except BottegaError as error:
        error.pointer = f"/{section}/{number}{error.pointer or ''}"
        raise


async def _store(
    caller: Caller,
    kind: DefinitionKind,
    body: Any,
    prepared: Mapping[str, Any],
    current: Definition | None,
) -> dict[str, Any]:
    content = from_json(to_json(prepared))  # converted to the form that the database returns
    before = None if current is None else current.content
    if content != before:
        stored, is_new = await store.put(caller.tx, kind, caller.tenant, body.name, content)
        await note(caller, kind, "create" if is_new else "replace", stored)
    return _result(kind.word, body.name, _shown(before, body), _shown(content, body))


def _shown(content: Mapping[str, Any] | None, body: Body) -> dict[str, Any] | None:
    if content is None:
        return None
    fields = type(body).model_fields
    return {key: value for key, value in content.items() if key in fields and key != "name"}


async def _store_schedule(caller: Caller, body: NewSchedule) -> dict[str, Any]:
    schedule, run = body.model_dump(), body.run
    if any(parts_of(schedule["run"]["input"])):
        raise InvalidInputError(
            "a schedule in a document needs a text as input: send a schedule with files to PUT "
            "/v1/schedules/{name}",
            pointer="/run/input",
        )
    acts_for(caller.principal, run.user, "/run/user")
    caller.principal.limits.need_no_limit_of_runs()
    pointer, settings = "/run/webhook_url", caller.service.settings
    await check_webhook(caller.tx, caller.tenant, settings, run.webhook_url, pointer=pointer)
    before = None
    try:
        current = await schedules.get(caller.tx, caller.tenant, body.name, lock=True)
    except NotFoundError:
        pass
    else:
        before = _of_schedule(current)
        url = current["run"].get("webhook_url")
        if url is not None and run.webhook_url == url.split("?")[0]:
            # Keep the stored URL: its query is secret, so the client may not know the query.
            schedule["run"]["webhook_url"] = url
    row, _ = await schedules.put(caller.tx, caller.tenant, schedule)
    result = _result(schedules.KIND, body.name, before, _of_schedule(row))
    if result["action"] != "unchanged":
        action = "schedule.create" if before is None else "schedule.replace"
        await audit.note(caller.tx, caller.tenant, caller.principal.actor, action, body.name)
    return result


def _of_schedule(row: Mapping[str, Any]) -> dict[str, Any]:
    same = {name: row[name] for name in ("cron", "timezone", "paused")}
    return {**same, "run": run_without_query(row)}


def _result(
    kind: str, name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> dict[str, Any]:
    action = "replaced"
    if before is None:
        action = "created"
    elif before == after:
        action, before, after = "unchanged", None, None
    elif after is None:
        action = "deleted"
    return {"kind": kind, "name": name, "action": action, "before": before, "after": after}


async def _note_source(
    caller: Caller, source: str, results: Sequence[Mapping[str, Any]], *, prune: bool
) -> list[dict[str, Any]]:
    """Store the source of definitions. ``prune``: delete those that the source no longer has."""
    here = [(each["kind"], each["name"]) for each in results]
    mine = and_(_columns.tenant_id == caller.tenant, _columns.source == source)
    deleted = []
    if prune:
        gone = mine if not here else and_(mine, tuple_(_columns.kind, _columns.name).not_in(here))
        removal = delete(applied_definitions).where(gone)
        rows = (await caller.tx.execute(removal.returning(_columns.kind, _columns.name))).all()
        for kind, name in sorted(rows, key=lambda row: (_DELETED.index(row.kind), row.name)):
            if (before := await _delete(caller, kind, name)) is not None:
                deleted.append(_result(kind, name, before, None))
    if here:
        values = [
            {"tenant_id": caller.tenant, "kind": kind, "name": name, "source": source}
            for kind, name in here
        ]
        query = insert(applied_definitions).values(values)
        key = [_columns.tenant_id, _columns.kind, _columns.name]
        changes = {"source": query.excluded.source}
        await caller.tx.execute(query.on_conflict_do_update(index_elements=key, set_=changes))
    return deleted


async def _delete(caller: Caller, kind: str, name: str) -> dict[str, Any] | None:
    tx, tenant = caller.tx, caller.tenant
    try:
        if kind == schedules.KIND:
            before = _of_schedule(await schedules.get(tx, tenant, name, lock=True))
            await schedules.remove(tx, tenant, name)
        else:
            of = _BY_WORD[kind]
            before = (await store.get(tx, of, tenant, name, lock=True)).content
            await store.delete(tx, of, tenant, name)
    except NotFoundError:
        return None
    await audit.note(tx, tenant, caller.principal.actor, f"{kind}.delete", name)
    return before


def _bounded(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    left = 4 * 1024 * 1024  # remaining bytes for definitions; nothing else limits the response
    for result in results:
        left -= len(to_json(result["before"])) + len(to_json(result["after"]))
        if left < 0:
            result["before"] = result["after"] = None
    return results


class _DryRunError(Exception):
    """Ends the transaction of a dry run, so that nothing is stored."""


router = APIRouter(prefix="/v1/apply", tags=["deployment"])


@router.post(
    "",
    operation_id="apply",
    summary="Store many definitions, all or none",
    description=(
        "Stores a new version of each definition that differs from what is stored, and says what "
        "changed. Sub-agents may come after their parents. If a definition is refused, or names a "
        "definition that does not exist, nothing is stored."
    ),
    response_model=ApplyResult,
    responses=problems(400, 404, 409, 413, 415),
)
async def apply(
    service: ServiceDep, principal: PrincipalDep, tenant: DefineTenant, body: Apply
) -> Any:
    if body.prune and body.source is None:
        raise InvalidInputError("'prune' needs a 'source'", pointer="/source")
    for number, provider in enumerate(body.providers):
        try:
            await check_address_of(service, tenant, provider)
        except InvalidInputError as error:
            error.pointer = f"/providers/{number}{error.pointer or ''}"
            raise
    await check_patterns(service, tenant, body)
    with suppress(_DryRunError):
        async with service.database.begin(tenant) as tx:
            caller = Caller(service, tx, tenant, principal)
            secret_names = {each.name for each in _sent_secrets(body)}
            caller = replace(caller, absent_secrets=await unknown_secrets(caller, secret_names))
            items = await store_all(caller, body)
            absent = await missing(caller, body)
            if absent and not body.allow_missing:
                raise UnknownReferenceError(absent)
            if body.dry_run:
                raise _DryRunError
    warnings = [{"pointer": pointer, "detail": detail} for pointer, detail in absent]
    return {"dry_run": body.dry_run, "items": items, "warnings": warnings}
