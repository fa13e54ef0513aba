"""Keys of the tables with rows of tenants begin with the tenant.

So a table can be split by tenant, and no foreign key leads to the rows of another tenant.
"""

import asyncpg

KEYS = """
SELECT i.indexrelid::regclass::text AS name, a.attname AS first
FROM pg_class c
JOIN pg_index i ON i.indrelid = c.oid AND i.indisunique
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = i.indkey[0]
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
  AND EXISTS (SELECT FROM pg_attribute t WHERE t.attrelid = c.oid AND t.attname = 'tenant_id')
"""
WITHOUT = {
    "uq_api_keys_key_hash": "a key is looked up before its tenant is known",
    "pk_run_queue": "one index alone leads to all rows of a tenant, so that no plan reads them",
}


async def test_every_key_of_a_tenant_s_table_begins_with_the_tenant(owner: asyncpg.Pool) -> None:
    keys = {row["name"]: row["first"] for row in await owner.fetch(KEYS)}
    assert {name for name, first in keys.items() if first != "tenant_id"} == set(WITHOUT)


async def test_a_foreign_key_leads_to_rows_of_the_same_tenant(owner: asyncpg.Pool) -> None:
    ends = await owner.fetch("""
        SELECT f.conname AS name, f.conrelid::regclass::text AS from_table,
               f.confrelid::regclass::text AS to_table,
               (SELECT attname FROM pg_attribute
                WHERE attrelid = f.conrelid AND attnum = f.conkey[1]) AS from_column,
               (SELECT attname FROM pg_attribute
                WHERE attrelid = f.confrelid AND attnum = f.confkey[1]) AS to_column
        FROM pg_constraint f
        WHERE f.contype = 'f' AND f.connamespace = 'public'::regnamespace AND f.conparentid = 0
    """)
    assert ends
    for end in ends:
        first = "id" if end["to_table"] == "tenants" else "tenant_id"
        assert (end["from_column"], end["to_column"]) == ("tenant_id", first), dict(end)
