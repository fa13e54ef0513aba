"""Stores a document of definitions in one transaction."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from graphlib import CycleError, TopologicalSorter
from typing import Any
from uuid import UUID

from pydantic_core import from_json, to_json
from sqlalchemy import and_, delete, func, select, tuple_
from sqlalchemy.dialects.postgresql import insert

from bottega.api.auth import acts_for
from bottega.api.routes import agents, graphs, providers
from bottega.api.routes.deploy.bodies import Apply
from bottega.api.routes.mcp import servers
from bottega.api.schemas.agents import NewAgent
from bottega.api.schemas.base import Body
from bottega.api.schemas.schedules import NewSchedule
from bottega.api.shared.definitions import Caller, Prepare, note
from bottega.api.shared.new_runs import check_webhook
from bottega.api.shared.schemas import check_schema
from bottega.background import schedules
from bottega.container import Service
from bottega.db.tables import applied_definitions
from bottega.definitions import store
from bottega.definitions.agents import hold_sub_agents
from bottega.definitions.kinds import AGENTS, GRAPHS, MCP_SERVERS, PROVIDERS, DefinitionKind
from bottega.definitions.store import Definition
from bottega.errors import BottegaError, InvalidInputError, NotFoundError
from bottega.files.inputs import parts_of
from bottega.tenants import audit

_MOST_SHOWN = 4 * 1024 * 1024
"""Bytes of bodies in an answer; a response has no other limit."""
_KINDS: dict[str, tuple[DefinitionKind, Prepare]] = {
    "providers": (PROVIDERS, providers.prepare),
    "mcp_servers": (MCP_SERVERS, servers.prepare),
    "agents": (AGENTS, agents.prepare),
    "graphs": (GRAPHS, graphs.prepare),
}
"""Sections of a document, in the order in which they are stored."""
_BY_WORD = {kind.word: kind for kind, _ in _KINDS.values()}
_DELETED = (schedules.KIND, *reversed(_BY_WORD))
"""Kinds in the order of deletion: what refers to others goes first."""
_columns = applied_definitions.c


async def check_patterns(service: Service, tenant: UUID, asked: Apply) -> None:
    """Check the schemas of a document's agents and runs, which may take seconds.

    Raises:
        BottegaError: one was refused; ``pointer`` names it.
    """
    for number, agent in enumerate(asked.agents):
        with _at("agents", number):
            await agents.check_patterns_of(service, tenant, agent)
    for number, schedule in enumerate(asked.schedules):
        with _at("schedules", number):
            await check_schema(tenant, schedule.run.output_schema, "/run/output_schema")


async def store_all(caller: Caller, asked: Apply) -> list[dict[str, Any]]:
    """Store the definitions of a document that differ from what is stored.

    Returns:
        What became of each, as :class:`bottega.api.routes.deploy.bodies.Applied`.

    Raises:
        BottegaError: one was refused; ``pointer`` names it.
    """
    lock = func.hashtextextended(f"apply:{caller.tenant}", 0)
    await caller.tx.execute(select(func.pg_advisory_xact_lock(lock)))
    await hold_sub_agents(caller.tx, caller.tenant)
    results = []
    for section, (kind, prepare) in _KINDS.items():
        bodies = getattr(asked, section)
        names = [body.name for body in bodies]
        known = await store.named(caller.tx, kind, caller.tenant, names) if names else {}
        for number, body in _in_order(section, bodies):
            with _at(section, number):
                content = await prepare(caller, body.name, body)
                results.append(await _store(caller, kind, body, content, known.get(body.name)))
    for number, schedule in _in_order("schedules", asked.schedules):
        with _at("schedules", number):
            results.append(await _store_schedule(caller, schedule))
    if asked.source is not None:
        results += await _note_source(caller, asked.source, results, prune=asked.prune)
    return _bounded(results)


def _in_order(section: str, bodies: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Yield the definitions of a section with their numbers, sub-agents before their parents.

    Raises:
        InvalidInputError: two have the same name.
    """
    places: dict[str, int] = {}
    for number, body in enumerate(bodies):
        if places.setdefault(body.name, number) != number:
            raise InvalidInputError(
                f"'{body.name}' is there twice", pointer=f"/{section}/{number}/name"
            )
    order = list(places)
    if section == "agents":
        children = {body.name: _children(body) for body in bodies}
        # Otherwise a step between two sound states could be a circle. Each agent's check names one
        # that stays.
        with suppress(CycleError):
            order = [name for name in TopologicalSorter(children).static_order() if name in places]
    for name in order:
        yield places[name], bodies[places[name]]


def _children(body: NewAgent) -> Sequence[str]:
    return () if body.subagents is None else body.subagents.names


@contextmanager
def _at(section: str, number: int) -> Iterator[None]:
    """Let an error name its place in the document."""
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
    content = from_json(to_json(prepared))  # as it is read from the database
    before = None if current is None else current.content
    if content != before:
        stored, is_new = await store.put(caller.tx, kind, caller.tenant, body.name, content)
        await note(caller, kind, "create" if is_new else "replace", stored)
    return _result(kind.word, body.name, _shown(before, body), _shown(content, body))


def _shown(content: Mapping[str, Any] | None, body: Body) -> dict[str, Any] | None:
    """Return the part of a content that its body can set."""
    if content is None:
        return None
    known = type(body).model_fields
    return {key: value for key, value in content.items() if key in known and key != "name"}


async def _store_schedule(caller: Caller, body: NewSchedule) -> dict[str, Any]:
    asked, run = body.model_dump(), body.run
    if any(parts_of(asked["run"]["input"])):
        raise InvalidInputError(
            "here a schedule's input is text: use PUT /v1/schedules for one with files",
            pointer="/run/input",
        )
    acts_for(caller.principal, run.user, "/run/user")
    place, settings = "/run/webhook_url", caller.service.settings
    await check_webhook(caller.tx, caller.tenant, settings, run.webhook_url, pointer=place)
    before = None
    try:
        current = await schedules.get(caller.tx, caller.tenant, body.name, lock=True)
    except NotFoundError:
        pass
    else:
        before = _of_schedule(current)
        url = current["run"].get("webhook_url")
        if url is not None and run.webhook_url == url.split("?")[0]:
            asked["run"]["webhook_url"] = url  # its query is never shown, so it cannot be sent
    row, _ = await schedules.put(caller.tx, caller.tenant, asked)
    return _result(schedules.KIND, body.name, before, _of_schedule(row))


def _of_schedule(row: Mapping[str, Any]) -> dict[str, Any]:
    run = {name: value for name, value in row["run"].items() if value is not None}
    if url := run.get("webhook_url"):
        run["webhook_url"] = url.split("?")[0]
    return {"cron": row["cron"], "timezone": row["timezone"], "paused": row["paused"], "run": run}


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
    """Remember the source of definitions; delete those that it no longer has, if asked to."""
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
    """Delete a definition and return what it was; ``None``: somebody else deleted it."""
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
    """Leave bodies out once an answer has enough of them."""
    left = _MOST_SHOWN
    for each in results:
        left -= len(to_json(each["before"])) + len(to_json(each["after"]))
        if left < 0:
            each["before"] = each["after"] = None
    return results
