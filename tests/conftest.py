"""One PostgreSQL server per test process, one migrated template, and a clone of it per test."""

import uuid
from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest

from app.db import embedded, migrate
from app.db.engine import Database, open_database
from app.settings import Settings


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server of this test process's own, with a migrated template database."""
    with embedded.running(tmp_path_factory.mktemp("data")) as url:
        _execute(url, "ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()")
        _execute(url, "CREATE DATABASE template_bottega")
        migrate.upgrade(at(url, "template_bottega"))
        yield url


@pytest.fixture
def database_url(server: str) -> Iterator[str]:
    """A migrated database of this test's own."""
    name = f"test_{uuid.uuid4().hex}"
    _execute(server, f"CREATE DATABASE {name} TEMPLATE template_bottega STRATEGY FILE_COPY")
    yield at(server, name)
    _execute(server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with open_database(database_url) as database:
        yield database


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings that no environment and no .env file has touched."""
    for name in ("DATABASE_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return Settings(_env_file=None, openai_api_key="test-key", port=0)


def at(url: str, name: str) -> str:
    """The URL of another database on the same server."""
    return url.replace("/postgres?", f"/{name}?")


def _execute(url: str, *statements: str) -> None:
    import asyncio

    async def run() -> None:
        connection = await asyncpg.connect(url)
        for statement in statements:
            await connection.execute(statement)
        await connection.close()

    asyncio.run(run())
