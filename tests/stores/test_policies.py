"""Isolation of tenants by the database itself, in every way to run the service."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from pydantic import SecretStr

from bottega.cli.scenarios import SOFTWARE
from bottega.db import embedded, migrate
from bottega.db.connect import APP_ROLE, SYSTEM_ROLE, connect
from bottega.db.pool import USER_ROLE, acting_as, open_database
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import UnavailableError
from bottega.settings import Settings
from tests.claims import claim, report
from tests.conftest import at
from tests.fake_model import FakeModel
from tests.service import Running, running
from tests.team import define, start
from tests.tenants import holder

NEVER_FILLED = {  # by a run that is over
    *("run_heads", "run_queue", "run_waits", "run_inbox", "live_text", "budget_slices"),
    "run_children",
    *("model_shares", "retention"),
    *("storage_changes", "tenant_storage", "metric_rollups"),
    *("episodes", "episode_bodies", "episode_reflections", "episode_feedback", "episode_tags"),
    *("episode_failures", "episode_parts", "lessons", "user_facts"),
    *("episode_state", "episode_search", "episode_vectors", "episode_work", "tenant_memory"),
    *("patterns", "pattern_sources", "pattern_applications", "run_learning", "memory_jobs"),
}
OWN = {"tenants", "tenant_queues", "queue_counts"}  # each tenant has a row
OF_USERS = """
SELECT DISTINCT c.relname AS name FROM pg_class c
JOIN pg_attribute a ON a.attrelid = c.oid AND NOT a.attisdropped
JOIN pg_attribute t ON t.attrelid = c.oid AND t.attname = 'tenant_id'
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'
  AND a.attname IN ('user_id', 'session_id', 'run_id')
"""
TABLES = """
SELECT c.relname AS name, c.relrowsecurity AND c.relforcerowsecurity AS secured,
       (SELECT count(*) FROM pg_policy p WHERE p.polrelid = c.oid) AS policies
FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p')
  AND (c.relname = 'tenants' OR EXISTS (
    SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = 'tenant_id'))
"""


@pytest.fixture
async def model() -> AsyncIterator[FakeModel]:
    async with FakeModel() as model:
        yield model


@pytest.fixture(scope="module")
async def filled(module_settings: Settings, module_database_url: str) -> AsyncIterator[Running]:
    """A server with rows of the default tenant in every table, which tests leave as they are."""
    async with FakeModel() as model:
        configured = module_settings.model_copy(
            update={
                "openai_base_url": model.base_url,
                "webhook_secret": SecretStr(SECRET),
                "secrets_key": SecretStr(SECRETS_KEY),
                "database_url": module_database_url,  # bodies of files are there
            }
        )
        async with running(configured, module_database_url, worker=True) as server:
            await fill(server, module_database_url)
            yield server


async def fill(server: Running, url: str) -> None:
    client = server.client
    await define(client)
    schedule = {"name": "nightly", "cron": "0 3 * * *", "run": {"agent": "coordinator"}}
    schedule["run"]["input"] = "x"  # type: ignore[index]
    assert (await client.post("/v1/schedules", json=schedule)).status_code == 201
    token = {"user": "ada", "actions": ["read"], "expires_in": 60}
    made = (await client.post("/v1/tokens", json=token)).json()
    assert (await client.delete(f"/v1/tokens/{made['jti']}")).status_code == 204
    assert (await client.post("/v1/webhook-secret")).status_code == 201
    applied = {"agents": [{"name": "applied", "system_message": "x"}], "source": "s"}
    assert (await client.post("/v1/apply", json=applied)).status_code == 200
    server_at = {"name": "p", "dialect": "chat", "base_url": "https://203.0.114.1/v1"}
    assert (await client.post("/v1/providers", json=server_at)).status_code == 201
    server_at = {"name": "m", "url": "https://203.0.114.1/mcp"}
    assert (await client.post("/v1/mcp-servers", json=server_at)).status_code == 201
    stored = {"value": "a long secret", "hosts": ["a.example"]}
    assert (await client.put("/v1/secrets/KEY", json=stored)).status_code == 201
    assert (await client.post("/v1/files", files={"file": b"x"})).status_code == 201
    run = {"session_id": "s", "webhook_url": "https://example.com/"}
    run_id = await start(client, **run)
    await server.frames(f"/v1/runs/{run_id}/ws")
    await server.owner.execute(ASKED, UUID(run_id))
    await server.owner.execute(ERASING, DEFAULT_TENANT)
    assert (await client.post("/v1/sessions/s/fork")).status_code == 201
    await server.owner.execute(SENT, UUID(run_id))
    checked = "INSERT INTO run_checks (tenant_id, run_id, status) SELECT tenant_id, id, 'done'"
    await server.owner.execute(f"{checked} FROM runs WHERE id = $1", UUID(run_id))
    gone = {"name": "gone", "system_message": "x"}
    assert (await client.post("/v1/agents", json=gone)).status_code == 201
    assert (await client.delete("/v1/agents/gone")).status_code == 204
    again = {"mode": "dag", "graph": SOFTWARE.graph_name, "input": "x"}
    answer = await client.post("/v1/runs", json=again, headers={"idempotency-key": "k"})
    assert answer.status_code == 202, answer.text
    await server.frames(f"/v1/runs/{answer.json()['id']}/ws")
    client.headers.update((await holder(url, "default")).headers)


SECRET = "whsec_" + "A" * 32
SECRETS_KEY = "A" * 43 + "="
ASKED = """
    INSERT INTO interrupts (tenant_id, id, run_id, kind, call, tool, tool_call_id, arguments,
                            created_at, expires_at)
    SELECT tenant_id, id, id, 'question', 1, 'ask_user', 'a', '{}', now(), now() + interval '1 day'
    FROM runs WHERE id = $1"""
SENT = """
    INSERT INTO run_messages (tenant_id, run_id, number, content)
    SELECT tenant_id, id, 1, '"x"' FROM runs WHERE id = $1"""

ERASING = """
    INSERT INTO user_erasures (tenant_id, user_id, actor, next_at)
    VALUES ($1, 'ada', 'local', now() + interval '1 day')"""


async def other_tenant(owner: asyncpg.Pool) -> UUID:
    tenant: UUID = await owner.fetchval(
        "INSERT INTO tenants (name) VALUES (gen_random_uuid()) RETURNING id"
    )
    return tenant


async def tables(owner: asyncpg.Pool) -> list[str]:
    return [row["name"] for row in await owner.fetch(TABLES)]


async def test_every_table_of_tenants_has_policies_and_they_bind_its_owner(
    owner: asyncpg.Pool,
) -> None:
    rows = await owner.fetch(TABLES)
    assert len(rows) >= 19
    of_users = {row["name"] for row in await owner.fetch(OF_USERS)} | {"metric_rollups"}
    assert of_users > {"runs", "sessions", "files", "interrupts", "run_steps", "episodes"}
    for row in rows:
        policies = 2 + (row["name"] in of_users)
        assert (row["secured"], row["policies"]) == (True, policies), row["name"]
    named = {
        row["tablename"]: row["qual"]
        for row in await owner.fetch("SELECT * FROM pg_policies WHERE policyname = 'of_user'")
    }
    assert named.keys() == of_users
    assert named.pop("metric_rollups") == "false"
    assert all("user_id = current_setting('bottega.user'" in each for each in named.values())


async def as_user(connection: asyncpg.Connection, tenant: UUID, user: str | None) -> None:
    await connection.execute("SELECT set_config('bottega.tenant', $1, true)", str(tenant))
    if user is not None:
        await connection.execute("SELECT set_config('bottega.user', $1, true)", user)
    await connection.execute(f"SET LOCAL ROLE {USER_ROLE}")


async def test_a_transaction_for_a_user_sees_that_user_s_rows_and_without_one_none(
    owner: asyncpg.Pool,
) -> None:
    tenant = await owner.fetchval("INSERT INTO tenants (name) VALUES ('of-users') RETURNING id")
    for user in ("ada", "bob", None):
        await owner.execute(
            "INSERT INTO sessions (tenant_id, id, user_id) VALUES ($1, $2, $3)",
            tenant,
            f"of-{user}",
            user,
        )
    for user, seen in (("ada", ["of-ada"]), ("", []), (None, [])):
        async with owner.acquire() as connection, connection.transaction():
            await as_user(connection, tenant, user)
            rows = await connection.fetch("SELECT id FROM sessions ORDER BY id")
            assert [row["id"] for row in rows] == seen
            written = "UPDATE sessions SET metadata = '{}' WHERE id = 'of-bob'"
            assert await connection.execute(written) == "UPDATE 0"


@pytest.mark.parametrize("table", ["runs", "sessions", "episodes"])
async def test_the_filter_by_user_adds_no_join(owner: asyncpg.Pool, table: str) -> None:
    async with owner.acquire() as connection, connection.transaction():
        await as_user(connection, DEFAULT_TENANT, "ada")
        query = f"EXPLAIN SELECT * FROM {table} WHERE tenant_id = $1 LIMIT 50"
        plan = "\n".join(row[0] for row in await connection.fetch(query, DEFAULT_TENANT))
    assert "bottega.user" in plan
    assert not re.search(r"Join|Nested Loop|SubPlan|Hash", plan), plan


async def test_no_foreign_key_can_cross_tenants(owner: asyncpg.Pool) -> None:
    rows = await owner.fetch("""
        SELECT c.conrelid::regclass::text AS of, c.confrelid::regclass::text AS to,
               own.attname AS own, their.attname AS their
        FROM pg_constraint c
        JOIN pg_attribute own ON own.attrelid = c.conrelid AND own.attnum = c.conkey[1]
        JOIN pg_attribute their ON their.attrelid = c.confrelid AND their.attnum = c.confkey[1]
        WHERE c.contype = 'f' AND c.connamespace = 'public'::regnamespace
    """)
    assert len(rows) >= 12
    for row in rows:
        expected = "id" if row["to"] == "tenants" else "tenant_id"
        assert (row["own"], row["their"]) == ("tenant_id", expected), dict(row)


async def test_functions_across_tenants_are_closed_to_other_roles(owner: asyncpg.Pool) -> None:
    rows = await owner.fetch(
        """
        SELECT p.proname AS name, pg_get_userbyid(p.proowner) AS owner, p.proconfig AS config,
               has_function_privilege($1, p.oid, 'EXECUTE') AS usable,
               EXISTS (SELECT FROM aclexplode(p.proacl) a WHERE a.grantee = 0) AS anyone
        FROM pg_proc p WHERE p.prosecdef AND p.pronamespace = 'public'::regnamespace
        """,
        APP_ROLE,
    )
    assert {"sweep", "claim_due", "due_schedules"} <= {row["name"] for row in rows}
    for row in rows:
        # Only a table's owner may create or drop its indexes; those functions read nothing.
        of_owner = row["name"] in ("ensure_vector_index", "drop_broken_indexes")
        assert (row["owner"] == SYSTEM_ROLE) != of_owner, row["name"]
        assert "search_path=public, pg_temp" in row["config"], row["name"]
        assert row["usable"] == (row["name"] != "drop_broken_indexes"), row["name"]
        assert not row["anyone"], row["name"]


async def test_the_service_s_role_owns_nothing_and_is_bound(
    database_url: str, owner: asyncpg.Pool
) -> None:
    async with open_database(database_url) as database:
        for connection in (await database.connect(), await connect(database_url)):
            assert await connection.fetchval("SELECT current_user") == APP_ROLE
            await connection.close()
        assert await database.pool.fetchval("SELECT current_user") == APP_ROLE
        async with database.begin(DEFAULT_TENANT) as tx:
            assert await tx.driver.fetchval("SELECT current_user") == APP_ROLE
    role = await owner.fetchrow("SELECT * FROM pg_roles WHERE rolname = $1", APP_ROLE)
    powers = ("rolsuper", "rolbypassrls", "rolcanlogin", "rolcreaterole", "rolcreatedb")
    assert [power for power in powers if role[power]] == []
    for catalogue, column in (("pg_class", "relowner"), ("pg_proc", "proowner")):
        owned = f"SELECT count(*) FROM {catalogue} WHERE {column} = '{APP_ROLE}'::regrole"
        assert await owner.fetchval(owned) == 0


async def test_the_running_service_is_bound_by_the_policies(
    settings: Settings, database_url: str
) -> None:
    """Check it with a login that is a superuser, which no policy would bind."""
    agent = {"name": "coordinator", "system_message": "x"}
    async with running(settings, database_url) as server:
        assert (await server.client.post("/v1/agents", json=agent)).status_code == 201
        assert (await server.client.get("/v1/agents")).json()["items"]
        await server.owner.execute("DROP POLICY of_tenant ON agents")
        assert (await server.client.get("/v1/agents")).json()["items"] == []
        assert (await server.client.get("/v1/agents/coordinator")).status_code == 404
        refused = await server.client.post("/v1/agents", json=agent | {"name": "x"})
        assert refused.status_code == 500


async def test_a_tenant_sees_its_own_rows_and_no_others(filled: Running) -> None:
    other, pool = await other_tenant(filled.owner), filled.service.database.pool
    for table in set(await tables(filled.owner)) - NEVER_FILLED:
        query = f"SELECT count(*) FROM {table}"
        async with acting_as(pool, DEFAULT_TENANT) as mine:
            assert await mine.fetchval(query) > 0, table
        async with acting_as(pool, other) as theirs:
            assert await theirs.fetchval(query) == (1 if table in OWN else 0), table


async def test_without_a_tenant_there_is_an_error(filled: Running) -> None:
    pool = filled.service.database.pool
    for table in await tables(filled.owner):
        # Never set, and set in a transaction before.
        connection = await filled.service.database.connect()
        with pytest.raises(asyncpg.UndefinedObjectError):
            await connection.fetch(f"SELECT * FROM {table}")
        await connection.execute(
            "SELECT set_config('bottega.tenant', gen_random_uuid()::text, true)"
        )
        with pytest.raises(asyncpg.InvalidTextRepresentationError):
            await connection.fetch(f"SELECT * FROM {table}")
        await connection.close()
    async with acting_as(pool, DEFAULT_TENANT) as connection:
        assert await connection.fetchval("SELECT count(*) FROM runs") > 0


async def test_nothing_is_written_for_another_tenant(filled: Running) -> None:
    other, pool = await other_tenant(filled.owner), filled.service.database.pool
    for table in set(await tables(filled.owner)) - NEVER_FILLED - OWN:
        row = await filled.owner.fetchval(f"SELECT to_jsonb(t)::text FROM {table} t LIMIT 1")
        columns = await filled.owner.fetchval(
            "SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute "
            "WHERE attrelid = $1::text::regclass AND attnum > 0 AND attgenerated = ''",
            table,
        )
        record = f"jsonb_populate_record(NULL::{table}, $1::jsonb)"
        copy = f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {record}"
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match=r"row-level security"):
            async with acting_as(pool, other) as theirs:
                await theirs.execute(copy, row)
        if table == "audit_log":
            continue
        async with acting_as(pool, other) as theirs:
            assert await theirs.execute(f"DELETE FROM {table}") == "DELETE 0"
            assert await theirs.execute(f"UPDATE {table} SET tenant_id = $1", other) == "UPDATE 0"
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match=r"row-level security"):
            async with acting_as(pool, DEFAULT_TENANT) as mine:
                await mine.execute(f"UPDATE {table} SET tenant_id = $1", other)


async def test_the_audit_log_only_grows(filled: Running) -> None:
    for change in ("UPDATE audit_log SET actor = 'x'", "DELETE FROM audit_log"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="permission denied"):
            async with acting_as(filled.service.database.pool, DEFAULT_TENANT) as mine:
                await mine.execute(change)


async def test_functions_act_as_the_tenant_in_their_argument(filled: Running) -> None:
    """Check that they find nothing if the run is another tenant's."""
    other, pool = await other_tenant(filled.owner), filled.service.database.pool
    run_id = await filled.owner.fetchval("SELECT id FROM runs LIMIT 1")
    assert await pool.fetchval("SELECT cancel_run($1, $2)", other, run_id) is None
    assert await claim(pool, run_id, other) is None
    found = await pool.fetch(
        "SELECT events FROM read_logs($1, $2, $3, 10, 1000, 1000)", [other], [run_id], [0]
    )
    assert [row["events"] for row in found] == [None]
    assert await pool.fetch("SELECT * FROM run_cursor($1, $2)", other, run_id) == []
    assert await report(pool, uuid4(), [(other, run_id, 1)]) == set()


# --- Plans -------------------------------------------------------------------------------------


async def used(owner: asyncpg.Pool, url: str, query: str, *arguments: Any) -> set[str]:
    """Return the indexes that a query of the service's role uses, also inside functions."""
    before = await scans(owner)
    # Some tables are so small here that reading all of one is cheaper than any index.
    options = {"enable_seqscan": "off", "bottega.tenant": str(DEFAULT_TENANT), "role": APP_ROLE}
    connection = await asyncpg.connect(url, server_settings=options)
    await connection.fetch(query, *arguments)
    await connection.execute("SELECT pg_stat_force_next_flush()")
    await connection.close()
    return {name for name, count in (await scans(owner)).items() if count > before[name]}


async def scans(owner: asyncpg.Pool) -> dict[str, int]:
    async with owner.acquire() as connection:
        await connection.execute("SELECT pg_stat_clear_snapshot()")
        rows = await connection.fetch(
            "SELECT indexrelname AS name, idx_scan AS count FROM pg_stat_user_indexes"
        )
    return {row["name"]: row["count"] for row in rows}


async def test_runs_are_found_by_their_metadata_through_its_index(
    owner: asyncpg.Pool, database_url: str
) -> None:
    for tenant, count in ((DEFAULT_TENANT, 4000), (await other_tenant(owner), 4000)):
        await owner.execute(
            """
            INSERT INTO runs (tenant_id, mode, input, pinned, timeout_s, ended_at, metadata)
            SELECT $1, 'dag', '"x"', '{}', 1, now(),
                   jsonb_build_object('customer', n::text, 'kind', 'all')
            FROM generate_series(1, $2::integer) n
            """,
            tenant,
            count,
        )
    await owner.execute("VACUUM ANALYZE runs")
    query = "SELECT ids_by_metadata('runs', $1, '[]', true, 10)"
    rare = '[[{"customer": "17"}]]'
    assert "ix_runs_metadata" in await used(owner, database_url, query, rare)
    # The same as a plain query of the application's cannot use it.
    plain = "SELECT id FROM runs WHERE metadata @> '{\"customer\": \"17\"}' AND metadata <> '{}'"
    assert "ix_runs_metadata" not in await used(owner, database_url, plain)


async def test_a_run_and_its_log_are_found_by_their_keys(
    filled: Running, module_database_url: str
) -> None:
    run_id = await filled.owner.fetchval("SELECT id FROM runs WHERE last_seq > 20 LIMIT 1")
    places = "ARRAY[$1::uuid], ARRAY[$2::uuid], ARRAY[3::bigint]"
    read = f"SELECT * FROM read_logs({places}, 500, 100000, 100000)"
    for query, index in (
        (read, "pk_run_steps"),
        ("SELECT * FROM run_cursor($1, $2)", "pk_runs"),
    ):
        asked = (query, DEFAULT_TENANT, run_id)
        assert index in await used(filled.owner, module_database_url, *asked)


# --- Logins ------------------------------------------------------------------------------------


async def run_as(url: str, *statements: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


@pytest.fixture
def fresh_server() -> Any:
    """A server on which no role of ours exists yet."""
    from tests.conftest import data_folder

    with data_folder() as folder, embedded.running(Path(folder)) as url:
        yield url


@pytest.mark.deep
async def test_neither_owner_nor_login_need_be_superusers(
    fresh_server: str, settings: Settings, model: FakeModel
) -> None:
    """Check with one login that owns and migrates, and one that only acts as the application."""
    import anyio.to_thread

    await run_as(
        fresh_server,
        "CREATE ROLE keeper LOGIN CREATEROLE",
        "CREATE ROLE server LOGIN",
        "CREATE DATABASE kept OWNER keeper",
    )
    with pytest.raises(Exception, match="CREATE EXTENSION vector"):
        await anyio.to_thread.run_sync(
            migrate.upgrade, at(fresh_server, "kept").replace("postgres@", "keeper@")
        )
    await run_as(at(fresh_server, "kept"), "CREATE EXTENSION vector")
    database = at(fresh_server, "kept")
    keeper = database.replace("postgres@", "keeper@")
    server = database.replace("postgres@", "server@")
    await anyio.to_thread.run_sync(migrate.upgrade, keeper)
    await run_as(keeper, f"GRANT {APP_ROLE} TO server WITH INHERIT FALSE, SET TRUE")
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with running(configured, server, worker=True) as bottega:
        await define(bottega.client)
        run_id = await start(bottega.client)
        frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
        assert frames[-1]["type"] == "run.completed"
    with pytest.raises(UnavailableError, match=SYSTEM_ROLE):
        await connect(server, role=SYSTEM_ROLE)
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await run_as(
            server,
            f"SELECT set_config('bottega.tenant', '{DEFAULT_TENANT}', false)",
            "SELECT * FROM runs",
        )
    owners = await asyncpg.connect(keeper)
    with pytest.raises(asyncpg.UndefinedObjectError):  # the policies bind the owner, too
        await owners.fetch("SELECT * FROM runs")
    await owners.execute("DELETE FROM sql_files")  # so that all functions are replaced
    await owners.close()
    await anyio.to_thread.run_sync(migrate.upgrade, keeper)
    async with open_database(server) as served:
        await migrate.require_current(served.pool)


@pytest.mark.deep
async def test_a_login_without_the_application_role_is_refused(
    fresh_server: str,
) -> None:
    import anyio.to_thread

    with pytest.raises(UnavailableError, match="bottega migrate"):
        await connect(fresh_server)
    await anyio.to_thread.run_sync(migrate.upgrade, fresh_server)
    await run_as(fresh_server, "CREATE ROLE stranger LOGIN")
    stranger = fresh_server.replace("postgres@", "stranger@")
    with pytest.raises(UnavailableError, match="GRANT bottega_app"):
        await connect(stranger)
    await run_as(
        fresh_server,
        "UPDATE alembic_version SET version_num = '0000'",
        "GRANT ALL ON SCHEMA public TO stranger WITH GRANT OPTION",
    )
    with pytest.raises(asyncpg.InsufficientPrivilegeError):  # no error of Alembic's connection
        await anyio.to_thread.run_sync(migrate.upgrade, stranger)


@pytest.mark.deep
async def test_a_second_owner_without_rights_to_the_roles_gets_advice(fresh_server: str) -> None:
    """Check it with two databases: roles belong to the whole server, and the first created them."""
    import anyio.to_thread

    for name in ("first", "second"):
        await run_as(
            fresh_server,
            f"CREATE ROLE {name} LOGIN CREATEROLE",
            f"CREATE DATABASE {name} OWNER {name}",
        )
    for name in ("first", "second"):
        await run_as(at(fresh_server, name), "CREATE EXTENSION vector")
    first, second = (
        at(fresh_server, name).replace("postgres@", f"{name}@") for name in ("first", "second")
    )
    await anyio.to_thread.run_sync(migrate.upgrade, first)
    with pytest.raises(
        Exception, match="GRANT bottega_app, bottega_user, bottega_system, bottega_maintenance TO"
    ):
        await anyio.to_thread.run_sync(migrate.upgrade, second)
    await run_as(
        fresh_server,
        "GRANT bottega_app, bottega_user, bottega_system, bottega_maintenance TO second"
        " WITH SET TRUE, ADMIN TRUE",
    )
    await anyio.to_thread.run_sync(migrate.upgrade, second)
