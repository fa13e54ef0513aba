from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from bottega.settings import Settings
from tests.conftest import cloned
from tests.fake_model import FakeModel
from tests.service import Running, running
from tests.tenants import holder
from tests.waiting import until


@pytest.fixture
async def model() -> AsyncIterator[FakeModel]:
    async with FakeModel() as model:
        yield model


@pytest.fixture
async def bottega(
    settings: Settings, database_url: str, model: FakeModel
) -> AsyncIterator[Running]:
    """API and worker in this process, asking the fake model over a socket."""
    async with running(asking(model, settings), database_url, worker=True) as server:
        yield server


def asking(model: FakeModel, settings: Settings) -> Settings:
    """Return the settings of a service that asks the model."""
    return settings.model_copy(
        update={"openai_base_url": model.base_url, "model_patience_s": 10.0, "drain_grace_s": 0.0}
    )


@pytest.fixture(scope="module")
def shared_url(server: str) -> Iterator[str]:
    """The database of ``shared``."""
    with cloned(server) as url:
        yield url


@pytest.fixture(scope="module")
async def shared_model() -> AsyncIterator[FakeModel]:
    """The model of ``shared``; only one test at a time asks it."""
    async with FakeModel() as model:
        yield model


@pytest.fixture(scope="module")
async def shared(
    module_settings: Settings, shared_url: str, shared_model: FakeModel
) -> AsyncIterator[Running]:
    """A service like ``bottega`` for the tests of a module that use ``guest``."""
    async with running(asking(shared_model, module_settings), shared_url, worker=True) as server:
        yield server


@pytest.fixture
def guest_model(shared_model: FakeModel) -> Iterator[FakeModel]:
    """The shared model; what one test asked and scripted is forgotten before the next."""
    yield shared_model
    shared_model.forget()


@pytest.fixture
async def guest(shared: Running, shared_url: str, guest_model: FakeModel) -> AsyncIterator[Running]:
    """The shared service for a tenant that only this test has; its runs end with the test."""
    held = await holder(shared_url, f"tenant-{uuid4().hex}")
    async with held.client(shared) as client:
        yield replace(shared, client=client, headers=held.headers)
        live = "SELECT id FROM runs WHERE tenant_id = $1 AND status IN ('queued', 'running')"
        for row in await shared.owner.fetch(live, held.tenant_id):
            await client.post(f"/v1/runs/{row['id']}/cancel")
        await until(lambda: shared.owner.fetch(live, held.tenant_id), lambda rows: not rows)


@pytest.fixture
def configured(settings: Settings, model: FakeModel) -> Callable[..., Settings]:
    def change(**changes: Any) -> Settings:
        changed = {"openai_base_url": model.base_url, "drain_grace_s": 0.0, "model_patience_s": 0.0}
        return settings.model_copy(update=changed | changes)

    return change
