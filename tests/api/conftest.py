from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import httpx2
import pytest

from bottega.settings import Settings
from tests.conftest import cloned
from tests.rows import unchanged
from tests.service import Running, running
from tests.tenants import holder


@pytest.fixture
async def server_(settings: Settings, database_url: str) -> AsyncIterator[Running]:
    """A server and a database for this test alone; its client acts for the default tenant."""
    async with running(settings, database_url) as server:
        yield server


@pytest.fixture(scope="module")
def shared_url(server: str) -> Iterator[str]:
    """The database of ``shared``."""
    with cloned(server) as url:
        yield url


@pytest.fixture(scope="module")
async def shared(module_settings: Settings, shared_url: str) -> AsyncIterator[Running]:
    """A server for the tests of a module that use ``client``."""
    async with running(module_settings, shared_url) as server:
        yield server


@pytest.fixture
async def client(shared: Running, shared_url: str) -> AsyncIterator[httpx2.AsyncClient]:
    """The client of an administrator, of a tenant that only this test has."""
    administrator = await holder(shared_url, f"tenant-{uuid4().hex}")
    async with administrator.client(shared) as client:
        yield client


@pytest.fixture(scope="module")
async def refusing(module_settings: Settings, module_database_url: str) -> AsyncIterator[Running]:
    """A server for the tests of a module whose requests store nothing; checked at its end."""
    async with (
        running(module_settings, module_database_url) as server,
        unchanged(module_database_url),
    ):
        yield server
