"""An eval's batch in the database."""

import asyncpg
import pytest

from bottega.db.connect import APP_ROLE
from bottega.db.tables import DEFAULT_TENANT
from tests.many import fill

_EVALS = """
INSERT INTO runs (tenant_id, timeout_s, mode, input, pinned, batch)
SELECT $1, 60, 'batch', '""', '{}', jsonb_build_object('eval', 'e' || n)
FROM generate_series(1, 20) AS n
"""
_PLAN = """
EXPLAIN SELECT id FROM runs
WHERE tenant_id = current_setting('bottega.tenant')::uuid AND eval = 'e7'
"""


async def test_an_eval_is_found_by_its_name_without_other_runs(owner: asyncpg.Pool) -> None:
    await fill(owner, DEFAULT_TENANT, 3_000)
    await owner.execute(_EVALS, DEFAULT_TENANT)
    await owner.execute("ANALYZE runs")
    async with owner.acquire() as connection, connection.transaction():
        acting = "SELECT set_config('role', $1, true), set_config('bottega.tenant', $2, true)"
        await connection.execute(acting, APP_ROLE, str(DEFAULT_TENANT))
        plan = "\n".join(row[0] for row in await connection.fetch(_PLAN))
    assert "uq_runs_eval" in plan, plan
    with pytest.raises(asyncpg.UniqueViolationError, match="uq_runs_eval"):
        await owner.execute(_EVALS, DEFAULT_TENANT)
