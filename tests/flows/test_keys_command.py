"""``bottega keys`` and ``tenants``, the first key of a new server, and its key requirement."""

import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from bottega import main
from bottega.errors import InvalidInputError
from bottega.settings import Settings
from bottega.tenants.keys import ROLES
from tests import forks
from tests.processes import command
from tests.service import client_of
from tests.tenants import holder
from tests.terminals import terminal
from tests.waiting import until

KEY = r"btg_[a-z0-9]{8}_[A-Za-z0-9_-]{43}"
BOOTSTRAP = "bootstrap-key-of-at-least-32-characters"


@pytest.fixture
def bottega(database_url: str) -> Any:
    """Run a command that ends by itself, as the database's owner."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return forks.run(
            arguments,
            {
                "PATH": "",
                "PYTHONPATH": str(Path(__file__).parents[2] / "app"),
                "COLUMNS": "300",
                "DATABASE_URL": database_url,
                **environment,
            },
        )

    return run


def create(bottega: Any, *more: str, tenant: str = "acme", scope: str = "run") -> str:
    ended = bottega("keys", "create", "--tenant", tenant, "--scope", scope, *more)
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(f"{KEY}\n", ended.stdout)
    assert ended.stdout.strip() not in ended.stderr
    key: str = ended.stdout.strip()
    return key


async def status(port: int | None, key: str, path: str = "/v1/runs") -> int:
    async with client_of(port) as client:
        answer = await client.get(path, headers={"authorization": f"Bearer {key}"})
        return answer.status_code


@pytest.fixture
async def api(database_url: str) -> AsyncIterator[int | None]:
    """The port of a server in a process of its own."""
    serve = ("serve", "--no-worker", "--port", "0")
    async with command(*serve, DATABASE_URL=database_url, OPENAI_API_KEY="k") as api:
        yield api.port


async def test_a_key_is_printed_once_and_works_until_it_is_revoked(bottega: Any, api: int) -> None:
    key = create(bottega, "--name", "reports", "--expires", "90d")
    prefix = key[:12]
    await until(lambda: status(api, "none"), lambda seen: seen == 401)  # it was open
    assert await status(api, key) == 200
    assert await status(api, key, "/v1/keys") == 403
    listed = bottega("keys", "list").stdout
    assert prefix in listed
    assert "reports" in listed
    assert key not in listed
    assert "acme" in bottega("keys", "list", "--tenant", "acme").stdout
    assert prefix not in bottega("keys", "list", "--tenant", "umbrella").stdout
    tenants = bottega("tenants", "list").stdout
    assert re.search(r"^acme\t1\t", tenants, re.MULTILINE)
    assert re.search(r"^default\t0\t", tenants, re.MULTILINE)
    ended = bottega("keys", "revoke", prefix)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert prefix in ended.stderr
    await until(lambda: status(api, key), lambda seen: seen == 401)
    assert bottega("keys", "revoke", "btg_nothing").returncode == 1


def test_a_list_is_whole_in_a_pipe_and_in_a_narrow_terminal(
    bottega: Any, database_url: str
) -> None:
    name = "reports " * 12
    prefix = create(bottega, "--name", name.strip(), "--scope", "define")[:12]
    row = bottega("keys", "list", COLUMNS="80").stdout.splitlines()[-1].split("\t")
    assert row[:4] == ["acme", prefix, "run, define", name.strip()]
    assert len(row) == 9
    with terminal("keys", "list", DATABASE_URL=database_url, COLUMNS="80") as at:
        at.says(prefix, "run,", name.strip(), row[4], row[-1])
        assert at.ends() == 0


def test_a_key_may_have_several_scopes(bottega: Any) -> None:
    create(bottega, "--scope", "define", scope="run")
    assert "run, define" in bottega("keys", "list").stdout


def test_a_key_may_have_a_role_and_limits(bottega: Any) -> None:
    limits = '{"agents": ["helper"], "addresses": ["10.0.0.0/8"], "tokens_per_day": 1000}'
    for role, scopes in ROLES.items():
        words = ("keys", "create", "--tenant", "acme", "--role", role, "--limits", limits)
        made = bottega(*words)
        assert made.returncode == 0, made.stderr
        said = " ".join(made.stderr.split())
        assert f"may {', '.join(scopes)}, within {limits}" in said
    for wrong, said in (
        (("--role", "owner"), "owner"),
        (("--role", "viewer", "--scope", "run"), "either"),
        ((), "either"),
        (("--role", "viewer", "--limits", '{"agent": []}'), "agent: Extra inputs"),
        (("--role", "viewer", "--limits", "x"), "limits: Invalid JSON"),
    ):
        refused = bottega("keys", "create", "--tenant", "acme", *wrong)
        assert refused.returncode == 2, refused.stderr
        assert said in " ".join(refused.stderr.split()), refused.stderr


def test_a_key_may_have_to_name_a_user(bottega: Any, database_url: str) -> None:
    for more, said in (((), False), (("--require-user",), True)):
        made = bottega("keys", "create", "--tenant", "acme", "--scope", "run", *more)
        assert ("for the user that a request names" in made.stderr) is said


async def test_a_key_may_be_revoked_by_its_id(bottega: Any, database_url: str) -> None:
    held = await holder(database_url)
    assert bottega("keys", "revoke", str(held.key_id).upper()).returncode == 0
    connection = await asyncpg.connect(database_url)
    assert await connection.fetchval("SELECT revoked_at FROM api_keys") is not None
    noted = await connection.fetch("SELECT actor, action, target FROM audit_log ORDER BY id")
    assert [tuple(row) for row in noted] == [
        ("cli", "key.create", held.prefix),
        ("cli", "key.revoke", held.prefix),
    ]
    await connection.close()


@pytest.mark.parametrize("expires", ["30m", "2h", "1d", "2100-01-01", "2100-01-01T12:00+02:00"])
def test_an_expiry_is_a_time_from_now_or_a_date(bottega: Any, expires: str) -> None:
    create(bottega, "--expires", expires)


@pytest.mark.parametrize(
    "expires",
    [
        "soon",
        "0d",
        "2001-01-01",
        "90",
        "-1d",
        "9" * 30 + "d",
        "9999-12-31T23:59-12:00",
        "0001-01-01T00+12",
    ],
)
def test_an_invalid_expiry_is_refused(bottega: Any, expires: str) -> None:
    options = ("--tenant", "acme", "--scope", "run", f"--expires={expires}")
    ended = bottega("keys", "create", *options)
    assert ended.returncode in (1, 2)
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


def test_names_cannot_play_tricks_on_a_terminal(bottega: Any) -> None:
    create(bottega, "--name", "[red]x[/nothing]")
    assert "[red]x[/nothing]" in bottega("keys", "list").stdout
    refused = bottega("keys", "create", "--tenant", "a", "--scope", "run", "--name", "\x1b[2J")
    assert refused.returncode == 2


async def test_a_login_without_rights_gets_an_error(bottega: Any, database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    await connection.execute(
        "DO $$ BEGIN CREATE ROLE nobody LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$"
    )
    await connection.close()
    url = database_url.replace("//postgres@", "//nobody@").replace("//postgres:", "//nobody:")
    ended = bottega("keys", "list", DATABASE_URL=url)
    assert ended.returncode == 1
    assert "may not act as the role bottega_system" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


def test_a_reachable_server_needs_a_key_first(bottega: Any) -> None:
    ended = bottega("serve", "--host", "0.0.0.0", "--port", "0")
    assert ended.returncode == 1
    assert "bottega keys create --tenant default --scope admin" in ended.stderr


async def test_a_server_with_a_key_may_be_reachable(
    bottega: Any, settings: Settings, database_url: str
) -> None:
    elsewhere = settings.model_copy(update={"host": "0.0.0.0"})
    with pytest.raises(InvalidInputError, match="keys create"):
        await main.require_keys(elsewhere, database_url)
    create(bottega, scope="read")
    await main.require_keys(elsewhere, database_url)


@pytest.mark.deep
async def test_migrating_stores_the_first_key_and_no_second_time(
    bottega: Any, server: str, database_url: str
) -> None:
    connection = await asyncpg.connect(database_url)
    for _ in range(2):
        ended = bottega("migrate", BOTTEGA_BOOTSTRAP_KEY=BOOTSTRAP)
        assert ended.returncode == 0, ended.stderr
        assert BOOTSTRAP not in ended.stdout + ended.stderr
    rows = await connection.fetch(
        "SELECT k.*, t.name AS tenant FROM api_keys k JOIN tenants t ON t.id = k.tenant_id"
    )
    assert [(row["tenant"], row["scopes"], row["name"]) for row in rows] == [
        ("default", ["admin"], "bootstrap")
    ]
    assert re.fullmatch("bootstrap_[0-9a-f]{8}", rows[0]["prefix"])  # nothing of the key
    serve = ("serve", "--no-worker", "--port", "0")
    async with command(*serve, DATABASE_URL=database_url, OPENAI_API_KEY="k") as api:
        assert await status(api.port, BOOTSTRAP, "/v1/keys") == 200
        await connection.execute("UPDATE api_keys SET revoked_at = now()")
        bottega("migrate", BOTTEGA_BOOTSTRAP_KEY=BOOTSTRAP)
        await until(lambda: status(api.port, BOOTSTRAP, "/v1/keys"), lambda seen: seen == 401)
    await connection.close()


@pytest.mark.deep
async def test_the_embedded_server_gets_its_first_key_too(folder: Path) -> None:
    settings = {
        "BOTTEGA_DATA_DIR": str(folder),
        "DATABASE_URL": "",
        "OPENAI_API_KEY": "k",
        "BOTTEGA_BOOTSTRAP_KEY": BOOTSTRAP,
    }
    for _ in range(2):
        async with command("serve", "--no-worker", "--port", "0", **settings) as api:
            assert await status(api.port, BOOTSTRAP, "/v1/keys") == 200
            assert await status(api.port, "none") == 401


def test_a_short_first_key_is_refused(bottega: Any) -> None:
    ended = bottega("migrate", BOTTEGA_BOOTSTRAP_KEY="too short")
    assert ended.returncode == 2
    assert "openssl rand -hex 32" in ended.stderr
    assert "too short" not in ended.stderr


@pytest.mark.deep
async def test_the_demo_works_with_keys(bottega: Any, database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    held = await holder(database_url)
    ended = bottega("demo")
    assert ended.returncode == 0, ended.stderr
    assert await connection.fetchval("SELECT count(*) FROM runs WHERE status = 'completed'") == 1
    left = await connection.fetch("SELECT id FROM api_keys")
    assert [row["id"] for row in left] == [held.key_id]
    await connection.close()


@pytest.mark.deep
async def test_the_demo_shows_how_runs_learn(bottega: Any, database_url: str) -> None:
    held = await holder(database_url)
    ended = bottega("demo", "--scenario", "learning")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "VALIDATED decomposition: " in ended.stdout
    assert "given the pattern" in ended.stdout
    connection = await asyncpg.connect(database_url)
    left = await connection.fetch("SELECT id FROM api_keys")
    assert [row["id"] for row in left] == [held.key_id], "that it administered with goes with it"
    await connection.close()
    ended = bottega("demo", "--scenario", "learning", "--task", "x")
    assert (ended.returncode, "leave out --task" in ended.stderr) == (1, True)


def test_database_errors_are_printed(bottega: Any, server: str) -> None:
    ended = bottega("keys", "list", DATABASE_URL="postgresql://127.0.0.1:1/x")
    assert (ended.returncode, "cannot reach" in ended.stderr) == (1, True)
    ended = bottega("keys", "list", DATABASE_URL=server)
    assert ended.returncode == 1
    assert "bottega migrate" in ended.stderr
    assert "Traceback" not in ended.stderr
