"""Servers and HTTP clients for the tests of tools."""

from collections.abc import AsyncIterator

import pytest

from bottega.tools.egress import Egress
from tests.tools.raw_server import RawServer


@pytest.fixture
async def web() -> AsyncIterator[RawServer]:
    async with RawServer() as server:
        yield server


@pytest.fixture
async def egress() -> AsyncIterator[Egress]:
    """An egress client that may reach this machine."""
    egress = Egress(allow=["127.0.0.1"])
    yield egress
    await egress.aclose()
