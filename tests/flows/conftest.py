from collections.abc import AsyncIterator

import pytest

from bottega.settings import Settings
from tests.fake_model import FakeModel
from tests.service import Running, running


@pytest.fixture
async def model() -> AsyncIterator[FakeModel]:
    async with FakeModel() as model:
        yield model


@pytest.fixture
async def bottega(
    settings: Settings, database_url: str, model: FakeModel
) -> AsyncIterator[Running]:
    """API and worker in this process, asking the fake model over a socket."""
    configured = settings.model_copy(
        update={"openai_base_url": model.base_url, "model_patience_s": 10.0, "drain_grace_s": 0.0}
    )
    async with running(configured, database_url, worker=True) as server:
        yield server
