"""Storage of agents, graphs, providers and MCP servers, by name, with all versions.

The functions serve all kinds of definitions; :mod:`bottega.definitions.agents` and
:mod:`bottega.definitions.graphs` check agents and graphs.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn
from uuid import UUID

import sqlalchemy
from sqlalchemy import (
    ColumnElement,
    Row,
    Select,
    Table,
    Text,
    and_,
    cast,
    func,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, insert

from bottega.db import tables
from bottega.db.pages import PageItems, fetch_page, paged
from bottega.db.pool import AsyncConnection
from bottega.db.quota import require_room
from bottega.db.tables import applied_definitions, definition_epochs
from bottega.errors import ConflictError, NotFoundError, VersionConflictError


@dataclass(frozen=True, slots=True)
class DefinitionKind:
    """A kind of definition: its noun in messages, its table, and the table of its versions.

    Attributes:
        bodies: names of large fields; a list includes these fields only if the caller wants them.
    """

    noun: str
    table: Table
    versions: Table
    bodies: tuple[str, ...]

    @property
    def word(self) -> str:
        """Noun for this kind in the names of operations and of actions in the audit log."""
        return self.noun.lower().replace(" ", "_")

    @property
    def path(self) -> str:
        """Path of this kind's definitions in the API."""
        return f"/v1/{self.word.replace('_', '-')}s"

    @property
    def article(self) -> str:
        return "an" if self.noun[0] in "aM" else "a"


AGENTS = DefinitionKind(
    "agent",
    tables.agents,
    tables.agent_versions,
    ("system_message", "tools", "success_check"),
)
GRAPHS = DefinitionKind(
    "graph", tables.graphs, tables.graph_versions, ("nodes", "edges", "success_check")
)
PROVIDERS = DefinitionKind(
    "provider",
    tables.providers,
    tables.provider_versions,
    ("headers", "models", "prices"),
)
MCP_SERVERS = DefinitionKind(
    "MCP server",
    tables.mcp_servers,
    tables.mcp_server_versions,
    ("headers", "tools", "warnings"),
)


MOST_NAMES = 100_000
MOST_VERSIONS = 10_000


@dataclass(frozen=True, slots=True)
class Definition:
    """One version of a definition; ``content`` is JSON in the form of the API's schema."""

    name: str
    version: int
    content: dict[str, Any]
    created_at: datetime


async def default_model(connection: AsyncConnection, tenant_id: UUID) -> str | None:
    """Return a tenant's default model as ``provider:MODEL``; ``None``: the tenant has none."""
    epochs = definition_epochs.c
    query = select(epochs.default_model).where(epochs.tenant_id == tenant_id)
    model: str | None = await connection.scalar(query)
    return model


async def set_default_model(connection: AsyncConnection, tenant_id: UUID, model: str) -> None:
    """Store a tenant's default model, for runs that the API accepts after this change."""
    added = insert(definition_epochs).values(
        tenant_id=tenant_id, epoch=func.gen_random_uuid(), default_model=model
    )
    new = {"default_model": added.excluded.default_model, "epoch": added.excluded.epoch}
    await connection.execute(added.on_conflict_do_update(index_elements=["tenant_id"], set_=new))


async def create(
    connection: AsyncConnection,
    kind: DefinitionKind,
    tenant_id: UUID,
    name: str,
    content: dict[str, Any],
) -> Definition:
    """Store a definition under a new name; after a deletion, a name's version numbers continue.

    Raises:
        ConflictError: the name is in use (``exists``), or there are too many names or versions
            (``too_many``).
    """
    version = await _claim(connection, kind, tenant_id, name)
    if version is None:
        raise ConflictError(
            f"{kind.noun} '{name}' already exists: use PUT to store a new version", code="exists"
        )
    return await _store_version(connection, kind, tenant_id, name, version, content)


async def put(
    connection: AsyncConnection,
    kind: DefinitionKind,
    tenant_id: UUID,
    name: str,
    content: dict[str, Any],
    *,
    only_new: bool = False,
) -> tuple[Definition, bool]:
    """Store a definition under a new name, or a new version under an existing name.

    Args:
        only_new: true: refuse a name that exists.

    Returns:
        The definition, and true for a new name.

    Raises:
        VersionConflictError: the name exists, but ``only_new`` is true.
        ConflictError: there are too many names or versions (``too_many``).
    """
    version = await _claim(connection, kind, tenant_id, name)
    if version is not None:
        return await _store_version(connection, kind, tenant_id, name, version, content), True
    if only_new:
        raise VersionConflictError(
            f"{kind.noun} '{name}' exists already, but 'If-None-Match: *' requires a new name"
        )
    return await replace(connection, kind, tenant_id, name, content), False


async def _claim(
    connection: AsyncConnection, kind: DefinitionKind, tenant_id: UUID, name: str
) -> int | None:
    """Reserve an unused name; return its next version number, or ``None`` for a used name."""
    table = kind.table
    version: int | None = await connection.scalar(
        insert(table)
        .values(tenant_id=tenant_id, name=name, version=1)
        .on_conflict_do_update(
            index_elements=[table.c.tenant_id, table.c.name],
            set_={"version": table.c.version + 1, "deleted_at": None, "updated_at": func.now()},
            where=table.c.deleted_at.is_not(None),
        )
        .returning(table.c.version)
    )
    if version == 1:
        await _refuse_excess(connection, kind, tenant_id)
    return version


async def replace(
    connection: AsyncConnection,
    kind: DefinitionKind,
    tenant_id: UUID,
    name: str,
    content: dict[str, Any],
    if_version: int | None = None,
) -> Definition:
    """Store a new version of the definition with this name.

    Args:
        if_version: number that the current version must have.

    Raises:
        NotFoundError: the name does not exist.
        VersionConflictError: ``if_version`` is not the current version.
    """
    table = kind.table
    condition = _live(kind, tenant_id, name)
    if if_version is not None:
        condition = and_(condition, table.c.version == if_version)
    version = await connection.scalar(
        update(table)
        .where(condition)
        .values(version=table.c.version + 1, updated_at=func.now())
        .returning(table.c.version)
    )
    if version is None:
        await _explain_none(connection, kind, tenant_id, name, if_version)
    return await _store_version(connection, kind, tenant_id, name, version, content)


async def get(
    connection: AsyncConnection,
    kind: DefinitionKind,
    tenant_id: UUID,
    name: str,
    *,
    lock: bool = False,
) -> Definition:
    """Return a name's current version; ``lock``: lock the name's row until the transaction ends.

    Raises:
        NotFoundError: the name does not exist.
    """
    query = _current(kind).where(_live(kind, tenant_id, name))
    if lock:
        query = query.with_for_update(of=kind.table)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no {kind.noun} '{name}'")
    return _definition(row)


async def named(
    connection: AsyncConnection,
    kind: DefinitionKind,
    tenant_id: UUID,
    names: Sequence[str],
    *,
    lock: bool = True,
) -> dict[str, Definition]:
    """Return the current version of each name that exists; ``lock``: lock the rows."""
    table = kind.table.c
    query = (
        _current(kind)
        .where(table.tenant_id == tenant_id, table.name.in_(names), table.deleted_at.is_(None))
        .order_by(table.name)
    )
    if lock:
        query = query.with_for_update(of=kind.table)
    return {row.name: _definition(row) for row in await connection.execute(query)}


async def referred(
    connection: AsyncConnection,
    kind: DefinitionKind,
    tenant_id: UUID,
    refs: Collection[tuple[str, int | None]],
) -> dict[tuple[str, int | None], dict[str, Any]]:
    """Return {(name, version): content}; a version of ``None`` means the current version."""
    table, old = kind.table.c, kind.versions.c
    query = select(old.name, old.version, table.version.label("current"), old.definition)
    query = query.join_from(
        kind.versions, kind.table, and_(old.tenant_id == table.tenant_id, old.name == table.name)
    ).where(
        table.tenant_id == tenant_id,
        table.deleted_at.is_(None),
        or_(
            tuple_(old.name, old.version).in_([ref for ref in refs if ref[1] is not None]),
            and_(old.version == table.version, old.name.in_([name for name, _ in refs])),
        ),
    )
    found: dict[tuple[str, int | None], dict[str, Any]] = {}
    for row in await connection.execute(query):
        found[row.name, row.version] = row.definition
        if row.version == row.current:
            found[row.name, None] = row.definition
    return found


async def unknown(
    connection: AsyncConnection, kind: DefinitionKind, tenant_id: UUID, names: Collection[str]
) -> set[str]:
    """Return the names that do not exist."""
    table = kind.table.c
    query = select(table.name).where(
        table.tenant_id == tenant_id, table.name.in_(names), table.deleted_at.is_(None)
    )
    return set(names) - set((await connection.scalars(query)).all())


async def page(
    connection: AsyncConnection,
    kind: DefinitionKind,
    tenant_id: UUID,
    *,
    after: str | None,
    descending: bool,
    limit: int,
    full: bool,
    exposed: str | None = None,
) -> PageItems[Definition]:
    """List a page of current versions, sorted by name. The page begins after the name ``after``.

    Args:
        full: true: include the large fields (``bodies``).
        exposed: if given, list only agents whose ``expose`` contains this façade.
    """
    column = kind.table.c.name
    query = _current(kind, full=full).where(
        kind.table.c.tenant_id == tenant_id, kind.table.c.deleted_at.is_(None)
    )
    if exposed is not None:
        query = query.where(_exposes(exposed))
    query = paged(query, column, after=after, descending=descending)
    return _definitions(await fetch_page(connection, query, limit))


def _exposes(channel: str) -> ColumnElement[bool]:
    return AGENTS.versions.c.definition["expose"].contains([channel])


async def in_order(
    connection: AsyncConnection, names: Sequence[str], *, descending: bool
) -> Sequence[str]:
    """Sort names as :func:`page` does, by the collation of the database."""
    name = func.unnest(cast(list(set(names)), ARRAY(Text))).column_valued("name")
    query = select(name).order_by(name.desc() if descending else name)
    return (await connection.execute(query)).scalars().all()


async def delete(
    connection: AsyncConnection,
    kind: DefinitionKind,
    tenant_id: UUID,
    name: str,
    if_version: int | None = None,
) -> None:
    """Delete a name; keep its versions for the runs that use these versions.

    Raises:
        NotFoundError, VersionConflictError: see :func:`replace`.
    """
    condition = _live(kind, tenant_id, name)
    if if_version is not None:
        condition = and_(condition, kind.table.c.version == if_version)
    deleted = await connection.scalar(
        update(kind.table)
        .where(condition)
        .values(deleted_at=func.now())
        .returning(kind.table.c.name)
    )
    if deleted is None:
        await _explain_none(connection, kind, tenant_id, name, if_version)
    await forget_source(connection, tenant_id, kind.word, name)


async def _explain_none(
    connection: AsyncConnection,
    kind: DefinitionKind,
    tenant_id: UUID,
    name: str,
    if_version: int | None,
) -> NoReturn:
    """Raise the error for a change that found no row, because the name or version was wrong."""
    current = await get(connection, kind, tenant_id, name)
    raise VersionConflictError(
        f"{kind.noun} '{name}' has version {current.version}, not {if_version}: "
        "read the current version and repeat the change"
    )


async def versions(
    connection: AsyncConnection,
    kind: DefinitionKind,
    tenant_id: UUID,
    name: str,
    *,
    after: int | None,
    descending: bool,
    limit: int,
    full: bool,
) -> PageItems[Definition]:
    """List a page of a name's versions. The page is sorted, and begins after the number ``after``.

    Args:
        full: true: include the large fields (``bodies``).

    Raises:
        NotFoundError: the name does not exist.
    """
    await get(connection, kind, tenant_id, name)
    table = kind.versions
    query = select(*_columns(kind, full=full)).where(
        table.c.tenant_id == tenant_id, table.c.name == name
    )
    query = paged(query, table.c.version, after=after, descending=descending)
    return _definitions(await fetch_page(connection, query, limit))


async def version(
    connection: AsyncConnection, kind: DefinitionKind, tenant_id: UUID, name: str, number: int
) -> Definition:
    """Return one version of the definition with this name.

    Raises:
        NotFoundError: the name or the version does not exist.
    """
    await get(connection, kind, tenant_id, name)
    table = kind.versions
    query = select(table).where(
        table.c.tenant_id == tenant_id, table.c.name == name, table.c.version == number
    )
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise NotFoundError(f"{kind.noun} '{name}' has no version {number}")
    return _definition(row)


def _live(kind: DefinitionKind, tenant_id: UUID, name: str) -> Any:
    table = kind.table
    return and_(table.c.tenant_id == tenant_id, table.c.name == name, table.c.deleted_at.is_(None))


def _columns(kind: DefinitionKind, *, full: bool) -> Iterator[ColumnElement[Any]]:
    columns = kind.versions.c
    yield from (columns.name, columns.version, columns.created_at)
    bodies = cast(kind.bodies, ARRAY(Text))
    yield (
        columns.definition
        if full
        else columns.definition.op("-", return_type=JSONB())(bodies).label("definition")
    )


def _current(kind: DefinitionKind, *, full: bool = True) -> Select[Any]:
    table, old = kind.table, kind.versions
    return select(*_columns(kind, full=full)).join_from(
        old,
        table,
        and_(
            old.c.tenant_id == table.c.tenant_id,
            old.c.name == table.c.name,
            old.c.version == table.c.version,
        ),
    )


def _definition(row: Row[Any]) -> Definition:
    return Definition(row.name, row.version, row.definition, row.created_at)


def _definitions(rows: PageItems[dict[str, Any]]) -> PageItems[Definition]:
    fields = ("name", "version", "definition", "created_at")
    return PageItems((Definition(*(row[each] for each in fields)) for row in rows), more=rows.more)


async def _store_version(
    connection: AsyncConnection,
    kind: DefinitionKind,
    tenant_id: UUID,
    name: str,
    number: int,
    content: dict[str, Any],
) -> Definition:
    if number > MOST_VERSIONS:
        raise ConflictError(
            f"{kind.noun} '{name}' has {MOST_VERSIONS} versions, the maximum: store it under "
            "another name",
            code="too_many",
        )
    await require_room(connection, tenant_id)
    created_at = await connection.scalar(
        insert(kind.versions)
        .values(tenant_id=tenant_id, name=name, version=number, definition=content)
        .returning(kind.versions.c.created_at)
    )
    assert created_at is not None
    return Definition(name, number, content, created_at)


async def _refuse_excess(
    connection: AsyncConnection, kind: DefinitionKind, tenant_id: UUID
) -> None:
    """Limit the number of names. Deleted names count, because runs may use their versions."""
    names = select(func.count()).where(kind.table.c.tenant_id == tenant_id)
    if (await connection.scalar(names) or 0) > MOST_NAMES:
        raise ConflictError(
            f"there are {MOST_NAMES} names of {kind.noun}s, the maximum: reuse deleted names",
            code="too_many",
        )


def missing(names: Sequence[str], found_names: Sequence[str]) -> list[str]:
    """Return the names of ``names`` that are not in ``found_names``, without duplicates."""
    there = set(found_names)
    return [name for name in dict.fromkeys(names) if name not in there]


async def forget_source(connection: AsyncConnection, tenant_id: UUID, kind: str, name: str) -> None:
    """Delete the record that names the source of a deleted definition."""
    row = applied_definitions.c
    mine = and_(row.tenant_id == tenant_id, row.kind == kind, row.name == name)
    await connection.execute(sqlalchemy.delete(applied_definitions).where(mine))
