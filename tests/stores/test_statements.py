"""Statements that SQLAlchemy composes and the driver executes."""

import asyncio
from uuid import uuid4

import asyncpg
import pytest
from sqlalchemy import delete, insert, select, text

from bottega.db.pool import Database
from bottega.db.tables import DEFAULT_TENANT, agent_versions, agents, files


async def test_each_execution_has_its_own_values(database: Database) -> None:
    async with database.begin(DEFAULT_TENANT) as tx:
        for name in "abc":
            new = {"tenant_id": DEFAULT_TENANT, "name": name, "version": 1}
            await tx.execute(insert(agents).values(new))
            await tx.execute(insert(agent_versions), {**new, "definition": {"is": name}})
        for names in (["a"], ["c", "b"], [], ["b"]):
            found = select(agent_versions.c.name).where(agent_versions.c.name.in_(names))
            assert sorted(await tx.scalars(found)) == sorted(names)
        for name in "ab":
            own = text("SELECT definition FROM agent_versions WHERE name = :name")
            assert await tx.scalar(own, {"name": name}) == {"is": name}
            row = (await tx.execute(select(agent_versions).filter_by(name=name))).one()
            assert (row.name, row.definition) == (name, {"is": name})
        gone = await tx.execute(delete(agent_versions).where(agent_versions.c.name > "a"))
        assert gone.rowcount == 2
        assert (await tx.execute(delete(files).where(files.c.id == uuid4()))).rowcount == 0


async def test_transactions_that_also_use_the_pool_do_not_block_each_other(
    database: Database,
) -> None:
    async def use() -> int:
        async with database.begin(uuid4()):
            found: int = await database.pool.fetchval("SELECT 1")
            return found

    size = database.pool.get_max_size()
    async with asyncio.timeout(5):
        assert await asyncio.gather(*(use() for _ in range(size))) == [1] * size


@pytest.mark.parametrize(
    "result", ["OUT b text, OUT a jsonb", "OUT n text, OUT a jsonb, OUT b text"]
)
async def test_a_result_s_new_columns_are_seen(
    database: Database, owner: asyncpg.Pool, result: str
) -> None:
    """Check it because an older process runs on after a newer version has migrated."""
    for columns in ("OUT a jsonb, OUT b text", result):
        values = columns.replace("OUT ", "").replace("jsonb", "").replace("text", "")
        values = values.replace("a ", "'{}'::jsonb").replace("b ", "'1'").replace("n ", "'2'")
        await owner.execute("DROP FUNCTION IF EXISTS seen")
        await owner.execute(f"CREATE FUNCTION seen({columns}) LANGUAGE sql AS $$SELECT {values}$$")
        await database.pool.expire_connections()
        async with database.begin(DEFAULT_TENANT) as tx:
            row = (await tx.execute(text("SELECT * FROM seen()"))).one()
            assert (row.a, row.b) == ({}, "1")
