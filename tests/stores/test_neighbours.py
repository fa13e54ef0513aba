"""What a worker does for many tenants at once, and that none of them can hold up the others."""

from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json

from app.db.engine import Database, acting_as
from tests.stores.test_turns import accept, tenants


async def impatient(database: Database) -> asyncpg.Connection:
    """A connection on which who waits for a lock fails."""
    connection = await database.connect()
    await connection.execute("SET lock_timeout = '1s'")
    return connection


async def claimed(database: Database, tenant: UUID) -> tuple[UUID, dict[str, Any]]:
    """A run of a tenant that a worker has, and its claim."""
    async with acting_as(database.pool, tenant) as connection:
        run_id = await accept(connection, tenant)
    claim = await database.pool.fetchval("SELECT claim_run($1, $2, 60)", tenant, run_id)
    return run_id, from_json(claim)


async def test_leases_are_renewed_though_a_run_is_being_deleted(
    database: Database, owner: asyncpg.Pool
) -> None:
    names = await tenants(owner, 2)
    runs = [(await claimed(database, tenant))[0] for tenant in names]
    await owner.execute("UPDATE runs SET leased_until = now()")
    renewing = await impatient(database)
    async with acting_as(database.pool, names[0]) as deleting:
        await deleting.execute("SELECT FROM runs WHERE id = $1 FOR UPDATE", runs[0])
        query = "SELECT renew_leases($1, $2, $3, 60) AS id"
        rows = await renewing.fetch(query, names, runs, [1, 1])
    assert {row["id"] for row in rows} == set(runs)  # both are still this worker's
    renewed = await owner.fetch("SELECT id FROM runs WHERE leased_until > now()")
    assert [row["id"] for row in renewed] == [runs[1]]
    rows = await renewing.fetch(query, names, runs, [1, 2])
    assert [row["id"] for row in rows] == [runs[0]]
    await renewing.close()
