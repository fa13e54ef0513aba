"""Background services that die are started again; one that keeps dying is named."""

import asyncio
from collections.abc import Iterator

import pytest

from bottega import services as services_module
from bottega.services import MANY, Services, background
from bottega.settings import Settings
from bottega.tenants.retention import StorageSums
from tests.fake_model import FakeModel
from tests.flows.conftest import asking
from tests.service import running
from tests.waiting import until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pauses be short."""
    monkeypatch.setattr(services_module, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(services_module, "_LONGEST_PAUSE_S", 0.01)


class Service:
    """A service that raises errors at its first starts, and then runs.

    Attributes:
        starts: number of them so far.
    """

    def __init__(self, errors: Iterator[BaseException]) -> None:
        self.starts = 0
        self._errors = errors

    async def run(self) -> None:
        self.starts += 1
        for error in self._errors:
            raise error
        await asyncio.Event().wait()


def always(error: BaseException) -> Iterator[BaseException]:
    while True:
        yield error


async def test_a_service_that_dies_once_is_started_again() -> None:
    services, service = Services(), Service(iter([ValueError("once")]))
    async with services.running(one=service.run):
        await until(lambda: service.starts == 2)
        assert services.failing() == {}


async def test_a_service_that_keeps_dying_is_named_and_the_others_go_on() -> None:
    services, service = Services(), Service(always(ValueError("each time")))
    well = Service(iter([]))
    async with services.running(bad=service.run, well=well.run):
        await until(lambda: service.starts > MANY)
        assert services.failing().keys() == {"bad"}
        assert well.starts == 1
    ended = service.starts
    await asyncio.sleep(0)
    assert service.starts == ended


async def test_one_that_runs_well_again_is_no_longer_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(services_module, "WELL_S", 0.5)
    services, service = Services(), Service(iter([ValueError("x")] * MANY))
    async with services.running(bad=service.run):
        await until(services.failing)
        await until(lambda: not services.failing())
        assert service.starts == MANY + 1


async def test_the_database_is_not_the_fault_of_a_service() -> None:
    services, service = Services(), Service(always(ConnectionResetError("away")))
    async with services.running(waits=service.run):
        await until(lambda: service.starts > MANY)
        assert services.failing() == {}


async def test_a_cancellation_from_within_is_a_death_and_a_return_is_none() -> None:
    async def over() -> None:
        starts.append(1)

    starts: list[int] = []
    cancelled = Service(iter([asyncio.CancelledError()]))
    async with background(cancelled.run, over):
        await until(lambda: cancelled.starts == 2)
        assert starts == [1]


async def test_readiness_names_the_service_that_keeps_dying(
    settings: Settings, database_url: str, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: StorageSums) -> float:
        raise ValueError("a bug")

    async with running(asking(model, settings), database_url, worker=True) as bottega:
        assert (await bottega.client.get("/readyz")).status_code == 200
    monkeypatch.setattr(StorageSums, "add_up", broken)
    async with running(asking(model, settings), database_url, worker=True) as bottega:
        answer = await until(
            lambda: bottega.client.get("/readyz"), lambda answer: answer.status_code == 503
        )
        assert answer.json()["code"] == "service_failing"
        assert "'storage' keeps dying" in answer.json()["detail"]
        assert (await bottega.client.get("/healthz")).status_code == 200
