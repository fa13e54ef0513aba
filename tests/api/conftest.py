from collections.abc import AsyncIterator

import httpx2
import pytest

from bottega.settings import Settings
from tests.rows import unchanged
from tests.service import Running, running


@pytest.fixture
async def server_(settings: Settings, database_url: str) -> AsyncIterator[Running]:
    async with running(settings, database_url) as server:
        yield server


@pytest.fixture
def client(server_: Running) -> httpx2.AsyncClient:
    return server_.client


@pytest.fixture(scope="module")
async def refusing(module_settings: Settings, module_database_url: str) -> AsyncIterator[Running]:
    """A server for the tests of a module whose requests store nothing; checked at its end."""
    async with (
        running(module_settings, module_database_url) as server,
        unchanged(module_database_url),
    ):
        yield server
