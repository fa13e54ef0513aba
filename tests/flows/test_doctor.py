"""``bottega doctor``, and errors of commands: one sentence, what to do, no traceback."""

import asyncio
import json
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from bottega.db.tables import DEFAULT_TENANT
from tests import forks
from tests.conftest import at, name_of

KEY, OTHER = ("A" * 43 + "=", "B" * 42 + "A=")
CHECKS = (
    *("python", "settings", "database", "encoding", "extension", "schema", "roles", "rights"),
    *("search_path", "isolation", "clock", "disk", "secrets_key"),
    *("object_store", "egress", "model", "embedder"),
)


async def execute(url: str, *statements: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


def examined(folder: Path, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit status of ``bottega doctor --json``, and its checks by name."""
    own = {"COLUMNS": "300", "BOTTEGA_DATA_DIR": str(folder)}
    environment = {**os.environ, **own, **environment}
    ended = forks.run(["doctor", "--json"], environment)
    assert "Traceback" not in ended.stderr
    checks = json.loads(ended.stdout)["checks"]
    assert all(check.keys() == {"name", "ok", "detail", "hint"} for check in checks)
    assert all(check["ok"] or check["hint"] for check in checks)
    return ended.returncode, {check["name"]: check for check in checks}


def failed(checks: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: check["hint"] for name, check in checks.items() if not check["ok"]}


def test_nats_is_checked_where_it_is_configured(database_url: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"nats://127.0.0.1:{port}"
    status, checks = examined(tmp_path, DATABASE_URL=database_url, BOTTEGA_NATS_URL=url)
    assert (status, [*failed(checks)]) == (1, ["nats"])
    assert "BOTTEGA_NATS_URL" in checks["nats"]["hint"]
    assert "refused" in checks["nats"]["detail"] or "no answer" in checks["nats"]["detail"]


def test_a_sound_installation_passes(database_url: str, tmp_path: Path) -> None:
    status, checks = examined(tmp_path, DATABASE_URL=database_url)
    assert failed(checks) == {}
    assert tuple(checks) == CHECKS
    assert "of bodies, " in checks["object_store"]["detail"]
    assert status == 0
    lines = forks.run(
        ["doctor"],
        {
            **os.environ,
            "COLUMNS": "300",
            "DATABASE_URL": database_url,
            "BOTTEGA_DATA_DIR": str(tmp_path),
        },
    ).stdout.splitlines()
    assert len(lines) == len(CHECKS)
    assert all(line.startswith("ok ") for line in lines)


def test_what_is_damaged_or_differs_is_named(database_url: str, tmp_path: Path) -> None:
    columns = "tenant_id, name, version, hosts, value"
    sealed = f"INSERT INTO secrets ({columns}) VALUES ('{DEFAULT_TENANT}',"
    asyncio.run(
        execute(
            database_url,
            "DROP POLICY of_tenant ON runs",
            f"{sealed} 'one', 1, '{{}}', decode(repeat('ab', 60), 'hex'))",
        )
    )
    status, checks = examined(
        tmp_path,
        DATABASE_URL=database_url,
        BOTTEGA_SECRETS_KEY=KEY,
        BOTTEGA_OBJECTS_URL="file:///dev/null/objects",
        OPENAI_BASE_URL="http://127.0.0.1:1/v1",
    )
    hints = failed(checks)
    assert hints.keys() == {"schema", "secrets_key", "object_store", "model"}
    assert "bottega migrate" in hints["schema"]
    assert "reencrypt" in hints["secrets_key"]
    assert status == 1
    _, checks = examined(tmp_path, DATABASE_URL=database_url)
    assert failed(checks).keys() == {"schema", "secrets_key"}


def test_without_a_database_or_settings_the_rest_is_told(tmp_path: Path) -> None:
    status, checks = examined(tmp_path, DATABASE_URL="postgresql://127.0.0.1:1/x")
    assert status == 1
    assert "check DATABASE_URL" in checks["database"]["hint"]
    assert checks["model"]["ok"]
    assert tuple(checks) == CHECKS
    status, checks = examined(tmp_path, BOTTEGA_TAKEOVER_S="soon")
    assert (status, list(failed(checks))) == (1, ["settings"])
    assert "takeover_s" in checks["settings"]["detail"]


@pytest.fixture
def login(server: str) -> Iterator[str]:
    """Make a login without rights, and a database that it owns."""
    name = f"plain_{uuid.uuid4().hex[:12]}"
    asyncio.run(
        execute(server, f"CREATE ROLE {name} LOGIN", f"CREATE DATABASE {name} OWNER {name}")
    )
    yield name
    asyncio.run(
        execute(server, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)", f"DROP OWNED BY {name}")
    )
    asyncio.run(execute(server, f"DROP ROLE {name}"))


@pytest.mark.deep
def test_a_plain_owner_is_led_from_one_sentence_to_the_next(
    server: str, login: str, tmp_path: Path
) -> None:
    admin, url = at(server, login), f"{at(server, login)}&user={login}"

    def migration_error() -> str:
        code, said = command("migrate", DATABASE_URL=url)
        return said if code else ""

    _, checks = examined(tmp_path, DATABASE_URL=url)
    hints = failed(checks)  # all that an administrator must do
    assert "CREATE EXTENSION vector SCHEMA public in the database" in hints["extension"]
    assert "\n" not in hints["extension"]
    assert "TO " + login in hints["rights"]
    assert "CREATE EXTENSION vector" in migration_error()
    asyncio.run(execute(admin, "CREATE EXTENSION vector"))
    assert (
        "GRANT bottega_app, bottega_user, bottega_system, bottega_maintenance TO"
        in migration_error()
    )
    roles = "bottega_app, bottega_user, bottega_system, bottega_maintenance"
    # A schema of its own, before public in its search path, changes nothing.
    asyncio.run(
        execute(
            admin,
            f"GRANT {roles} TO {login} WITH SET TRUE, ADMIN TRUE",
            f"CREATE SCHEMA {login} AUTHORIZATION {login}",
            f"ALTER ROLE {login} SET search_path = {login}",
        )
    )
    assert migration_error() == ""
    status, checks = examined(tmp_path, DATABASE_URL=url)
    assert (status, failed(checks)) == (0, {})


@pytest.mark.deep
def test_a_login_that_only_serves_passes_once_it_has_its_roles(
    server: str, database_url: str, login: str, tmp_path: Path
) -> None:
    url = f"{database_url}&user={login}"
    status, checks = examined(tmp_path, DATABASE_URL=url)
    assert failed(checks).keys() == {"schema", "roles", "rights"}
    code, said = command("migrate", "--check", DATABASE_URL=url)
    assert (code, "GRANT bottega_app" in said) == (1, True)
    grant = checks["roles"]["hint"].removeprefix("run ")
    asyncio.run(execute(server, grant))
    status, checks = examined(tmp_path, DATABASE_URL=url)
    assert (status, failed(checks)) == (0, {})
    assert "may serve" in checks["rights"]["detail"]
    for options in (("migrate", "--check"), ("migrate",)):
        code, said = command(*options, DATABASE_URL=url)
        assert (code, "up to date" in said) == (0, True)


@pytest.mark.deep
def test_only_migrate_uses_the_owner_s_address(
    server: str, database_url: str, login: str, tmp_path: Path
) -> None:
    roles = "bottega_app, bottega_user, bottega_maintenance"
    asyncio.run(execute(server, f"GRANT {roles} TO {login} WITH INHERIT FALSE, SET TRUE"))
    asyncio.run(execute(database_url, "DROP POLICY of_tenant ON runs"))
    serving = {"DATABASE_URL": f"{database_url}&user={login}"}
    code, said = command("migrate", **serving)
    assert (code, "DATABASE_ADMIN_URL" in said) == (1, True)
    both = {**serving, "DATABASE_ADMIN_URL": database_url, "BOTTEGA_BOOTSTRAP_KEY": "k" * 40}
    for options in (("migrate", "--check"), ("migrate",)):
        code, said = command(*options, **both)
        assert (code, "up to date" in said) == ((1, False) if len(options) > 1 else (0, True))
    assert command("migrate", "--check", **serving)[0] == 0
    code, said = command("keys", "list", **both)
    assert (code, "bottega_system" in said) == (1, True)
    _, checks = examined(tmp_path, **both)
    assert f"as {login}" in checks["database"]["detail"]


def test_the_owner_s_address_needs_the_service_s(database_url: str) -> None:
    code, said = command("migrate", DATABASE_ADMIN_URL=database_url)
    assert (code, "DATABASE_ADMIN_URL needs DATABASE_URL" in said) == (2, True)


def command(*arguments: str, **environment: str) -> tuple[int, str]:
    ended = forks.run(arguments, {**os.environ, "COLUMNS": "80", **environment})
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("migrate",), "stranger", "WITH GRANT OPTION"),
        (("migrate",), "LATIN1", "ENCODING 'UTF8'"),
        (("keys", "list"), "empty", "bottega migrate"),
        (("worker",), "empty", "bottega migrate"),
        (("serve", "--no-worker", "--port", "0"), "empty", "bottega migrate"),
        (("serve", "--workers", "1", "--port", "0"), "empty", "bottega migrate"),
    ],
)
def test_errors_of_the_database_are_one_sentence(
    server: str, database_url: str, login: str, arguments: tuple[str, ...], options: str, said: str
) -> None:
    url = at(server, login)
    if options == "stranger":
        url = f"{database_url}&user={login}"
    elif options == "LATIN1":
        make = f"CREATE DATABASE {login} ENCODING LATIN1 LOCALE 'C' TEMPLATE template0"
        asyncio.run(execute(server, f"DROP DATABASE {login}", make))
    code, errors = command(*arguments, DATABASE_URL=url)
    sentences = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert code == 1
    assert "Traceback" not in errors
    assert said in sentences[0]
    assert len(sentences[0]) < 600
    assert name_of(url) in sentences[0] or options == "empty"


def test_a_migration_that_fails_does_not_advise_to_repeat_it(database_url: str) -> None:
    ambiguous = "CREATE FUNCTION find_tenant(p int) RETURNS int LANGUAGE sql AS 'SELECT p'"
    asyncio.run(execute(database_url, ambiguous, "DELETE FROM sql_files"))
    code, said = command("migrate", DATABASE_URL=database_url)
    assert (code, "not unique" in said) == (1, True)
    assert "fails itself, it has changed nothing: report its error" in " ".join(said.split())


def test_a_traceback_is_shown_on_demand(database_url: str) -> None:
    asyncio.run(execute(database_url, "DROP TABLE api_keys CASCADE"))
    listing = ("keys", "list")
    code, errors = command(*listing, DATABASE_URL=database_url)
    assert (code, "Traceback" in errors, "bottega doctor" in errors) == (1, False, True)
    code, errors = command("--debug", *listing, DATABASE_URL=database_url)
    assert (code, "Traceback" in errors, "bottega doctor" in errors) == (1, True, True)
