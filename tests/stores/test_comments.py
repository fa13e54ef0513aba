"""Comments in the database."""

from bottega.db.connect import connect

UNCOMMENTED = """
SELECT format('%s %s', c.relkind, c.relname) FROM pg_class c
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p', 'v')
  AND coalesce(obj_description(c.oid, 'pg_class'), '') = ''
UNION ALL
SELECT format('function %s', p.oid::regprocedure) FROM pg_proc p
WHERE p.pronamespace = 'public'::regnamespace
  AND coalesce(obj_description(p.oid, 'pg_proc'), '') = ''
  AND p.proname <> 'uuidv7'  -- PostgreSQL's own since 18
  AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = p.oid AND d.deptype = 'e')
UNION ALL
SELECT format('column %s.%s', c.relname, a.attname) FROM pg_attribute a
JOIN pg_class c ON c.oid = a.attrelid
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND a.attnum > 0
  AND NOT a.attisdropped AND a.atttypid IN ('jsonb'::regtype, 'bytea'::regtype)
  AND col_description(c.oid, a.attnum) IS NULL
UNION ALL
SELECT format('column %s.%s', c.relname, a.attname) FROM pg_attribute a
JOIN pg_class c ON c.oid = a.attrelid
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'v' AND a.attnum > 0
  AND col_description(c.oid, a.attnum) IS NULL
  AND a.attname !~ '^(tenant_id|run_id|task_id|session_id|user_id|type|graph|status|at|.*_at)$'
"""
"""A column of JSON or bytes has a form that its name does not say; people read the views."""


async def test_nothing_is_without_a_comment(database_url: str) -> None:
    connection = await connect(database_url, role=None)
    try:
        assert [row[0] for row in await connection.fetch(UNCOMMENTED)] == []
        told = await connection.fetch(
            "SELECT obj_description(oid, 'pg_proc') AS text FROM pg_proc"
            " WHERE pronamespace = 'public'::regnamespace AND proname <> 'uuidv7'"
        )
        rights = [row["text"] for row in told if "execute: " in (row["text"] or "")]
        assert (len(told) > 100, rights) == (True, [])
        column = "SELECT col_description('runs'::regclass, attnum) FROM pg_attribute"
        column += " WHERE attrelid = 'runs'::regclass AND attname = 'attempt'"
        assert await connection.fetchval(column) == "Number of claims: each increases it."
    finally:
        await connection.close()
