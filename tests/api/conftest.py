from collections.abc import AsyncIterator

import httpx2
import pytest

from bottega.settings import Settings
from tests.service import Running, running


@pytest.fixture
async def server_(settings: Settings, database_url: str) -> AsyncIterator[Running]:
    async with running(settings, database_url) as server:
        yield server


@pytest.fixture
def client(server_: Running) -> httpx2.AsyncClient:
    return server_.client
