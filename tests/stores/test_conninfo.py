"""Forms of DATABASE_URL: each works as in libpq, or is refused by the name of what is wrong."""

import os
import string
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import asyncpg
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bottega.db.connect import connect
from bottega.db.conninfo import servers
from bottega.errors import BottegaError, InvalidInputError, UnavailableError
from tests.conftest import at, name_of
from tests.examples import examples

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
HOSTS = st.text(string.ascii_lowercase + string.digits + ".-", min_size=1)


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


@given(user=TEXTS, password=TEXTS, database=TEXTS, host=HOSTS, port=st.integers(1, 65535))
@settings(max_examples=examples(200))
def test_every_form_has_the_same_parts_whatever_their_characters(
    user: str, password: str, database: str, host: str, port: int
) -> None:
    """Check that the name of the database is never that of the user, which is its default."""
    assume(user != database)
    escaped = {
        name: quote(value, safe="")
        for name, value in {"user": user, "password": password, "dbname": database}.items()
    }
    login, name = f"{escaped['user']}:{escaped['password']}", escaped["dbname"]
    query = "&".join(f"{key}={value}" for key, value in escaped.items())
    forms = (
        f"postgresql://{login}@{host}:{port}/{name}",
        f"postgres://{login}@{host}:{port}?dbname={name}",
        f"postgresql+asyncpg://{login}@/{name}?host={host}&port={port}",
        f"postgresql:///?{query}&host={host}&port={port}",
        f"postgresql://?{query}&host={host}&port={port}",
        (
            f"host = {host} port={port} user={quoted(user)} "
            f"password={quoted(password)} dbname={quoted(database)}"
        ),
    )
    for form in forms:
        (server,) = servers(form)
        assert (server.user, server.password, server.database) == (user, password, database)
        assert (server.host, server.port) == (host, port)


def parts(conninfo: str) -> list[tuple[str | None, int, str]]:
    return [(each.host, each.port, each.database) for each in servers(conninfo)]


@pytest.mark.parametrize(
    ("conninfo", "expected"),
    [
        ("postgresql://u:p%40@a:1,b:2/d", [("a", 1, "d"), ("b", 2, "d")]),
        ("postgresql://u@/d?host=/run/a,b&port=1,2", [("/run/a", 1, "d"), ("b", 2, "d")]),
        ("postgresql:///?host=a,b&port=5&user=me", [("a", 5, "me"), ("b", 5, "me")]),
        ("postgresql://u@[::1],[::2]:3/d", [("::1", 5432, "d"), ("::2", 3, "d")]),
        ("postgresql://u@%2Fvar%2Frun:7/d", [("/var/run", 7, "d")]),
        ("postgresql://u@h?password=a+b", [("h", 5432, "u")]),
        ("postgresql://u:a?b#c@h/d", [("h", 5432, "d")]),
        ("host=::1 user=u", [("::1", 5432, "u")]),
        ("user=u dbname=", [(None, 5432, "u")]),
        ("user=u dbname=a\\ b", [(None, 5432, "a b")]),
        ("user=u fallback_application_name=x sslmode=disable client_encoding=UTF8", None),
        ("postgresql://u@h/d?ssl=true&channel_binding=prefer&gssencmode=disable", None),
    ],
)
def test_hosts_ports_and_names_are_read_as_in_libpq(
    conninfo: str, expected: list[tuple[str, int, str]] | None
) -> None:
    assert expected in (None, parts(conninfo))
    assert servers(conninfo)


@pytest.mark.parametrize(
    ("conninfo", "named"),
    [
        ("mysql://h/d", "postgresql:// URL"),
        ("nonsense", "or key=value pairs"),
        ("user='open", "begins at character 1"),
        ("postgresql://u@a,b,c/d?port=1,2", "3 servers and 2 ports"),
        ("postgresql://u@h:0/d", "wrong port"),
        ("postgresql://u@h:x/d", "wrong port"),
        ("postgresql://u:p@ss@h/d", "%40"),
        ("postgresql://u:p%s@h/d", "the password"),
        ("postgresql://u@h/d?sslmode", "without a value"),
        ("postgresql://u@h/d?schema=x", "'schema'"),
        ("postgresql://u@h/d?statement_timeout=5", "options=-c"),
        ("user=u hostaddr=10.0.0.1", "'hostaddr'"),
        ("user=u keepalives_idle=10", "'keepalives_idle'"),
        ("user=u require_auth=scram-sha-256", "'require_auth'"),
        ("postgresql://u@h/d?channel_binding=require", "channel_binding=prefer"),
        ("user=u client_encoding=LATIN1", "client_encoding=LATIN1"),
        ("user=u load_balance_hosts=random", "load_balance_hosts"),
        ("user=u connect_timeout=soon", "connect_timeout"),
        ("postgresql://u@h/d?sslmode=verify-full&sslrootcert=/nowhere.pem", "sslrootcert"),
        ("user=u service=reports", "'reports'"),
    ],
)
def test_what_does_not_work_is_refused_by_name(conninfo: str, named: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        servers(conninfo)
    assert named in refused.value.detail
    assert len(refused.value.detail) < 400


@pytest.mark.parametrize("option", ["sslmode=sideways", "ssl_min_protocol_version=TLSv9"])
async def test_a_wrong_value_of_the_driver_s_options_is_told(option: str) -> None:
    with pytest.raises(InvalidInputError, match=r"sslmode|TLS"):
        await connect(f"postgresql://u@127.0.0.1:1/d?sslmode=require&{option}")


def test_a_service_fills_in_what_the_address_leaves_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "services"
    file.write_text(
        "# ours\n[other]\nhost=no\n[reports]\nhost=db.example\nport=6000\ndbname=a=b%c\n"
        "user=someone\npassword=x y\n"
    )
    for conninfo in (
        f"service=reports servicefile={file} user=me",
        f"postgresql://me@?service=reports&servicefile={quote(str(file), safe='')}",
    ):
        (server,) = servers(conninfo)
        assert (server.host, server.port, server.database) == ("db.example", 6000, "a=b%c")
        assert (server.user, server.password) == ("me", "x y")
    monkeypatch.setenv("PGSERVICEFILE", str(file))
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGAPPNAME", "reports")
    (server,) = servers("service=reports")
    assert (server.user, server.port) == ("someone", 6000)
    assert server.settings == {"application_name": "reports"}
    monkeypatch.setenv("PGSERVICE", "other")
    assert servers("postgresql://")[0].host == "no"
    file.write_text("no file of services")
    with pytest.raises(InvalidInputError, match="no valid service file"):
        servers("service=reports")


@pytest.fixture
def odd(server: str) -> Iterator[SimpleNamespace]:
    """Make a login and a database whose names need quotes and differ."""
    import asyncio

    user, database = "a 'user' %@:/\\", 'it\'s "one" é?#'
    identifiers = ['"{}"'.format(name.replace('"', '""')) for name in (user, database)]

    async def run(*statements: str) -> None:
        connection = await asyncpg.connect(server)
        for statement in statements:
            await connection.execute(statement)
        await connection.close()

    login, name = identifiers
    asyncio.run(run(f"CREATE ROLE {login} LOGIN", f"CREATE DATABASE {name} OWNER {login}"))
    host = server.split("host=")[1]
    yield SimpleNamespace(user=user, database=database, host=host)
    asyncio.run(run(f"DROP DATABASE {name} WITH (FORCE)", f"DROP ROLE {login}"))


async def test_odd_names_are_reached_in_each_form(odd: SimpleNamespace) -> None:
    user, name = quote(odd.user, safe=""), quote(odd.database, safe="")
    forms = (
        f"postgresql://{user}@/{name}?host={odd.host}",
        f"postgresql:///?user={user}&dbname={name}&host={odd.host}",
        (
            f"user={quoted(odd.user)} dbname={quoted(odd.database)} host={odd.host} "
            "options='-c search_path=elsewhere -c geqo=off' application_name=mine"
        ),
    )
    for form in forms:
        session = await connect(form, role=None)
        found = await session.fetchrow(
            "SELECT current_database(), session_user, current_setting('search_path'),"
            " current_setting('geqo'), current_setting('application_name')"
        )
        await session.close()
        options = ("off", "mine") if "geqo" in form else ("on", "bottega")
        assert tuple(found) == (odd.database, odd.user, "public", *options)


async def test_another_database_than_asked_for_is_refused(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = asyncpg.connect

    async def connect_to_postgres(**arguments: object) -> object:
        return await driver(**arguments | {"database": "postgres"})  # as a proxy could do

    monkeypatch.setattr(asyncpg, "connect", connect_to_postgres)
    with pytest.raises(UnavailableError) as refused:
        await connect(database_url)
    assert f"asks for the database '{name_of(database_url)}' and leads" in refused.value.detail
    assert "'postgres'" in refused.value.detail


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ("dbname=nowhere", "CREATE DATABASE"),
        ("user=nobody-here", "check the user"),
        ("options=-c%20no_such_setting%3D1", "no_such_setting"),
        ("options=-c%20geqo_seed%3Dmany", "geqo_seed"),
    ],
)
async def test_what_the_server_refuses_is_told_with_what_to_do(
    server: str, change: str, advice: str
) -> None:
    url = f"{at(server, 'postgres')}&{change}"
    with pytest.raises(BottegaError) as refused:
        await connect(url)
    assert advice in refused.value.detail
    assert "no role" not in refused.value.detail


async def test_a_host_without_an_address_may_be_a_part_of_the_password() -> None:
    with pytest.raises(BottegaError, match="%40 %3A %2F"):
        await connect("postgresql://user:p@ss.invalid/w#rd@127.0.0.1/agents")


async def test_a_login_that_may_not_connect_is_told_so(server: str, database_url: str) -> None:
    owner = await asyncpg.connect(database_url)
    await owner.execute("CREATE ROLE stranger LOGIN")
    try:
        name = name_of(database_url)
        await owner.execute(f'REVOKE CONNECT ON DATABASE "{name}" FROM public')
        with pytest.raises(BottegaError, match="GRANT CONNECT"):
            await connect(f"{database_url}&user=stranger")
    finally:
        await owner.execute("DROP ROLE stranger")
        await owner.close()
