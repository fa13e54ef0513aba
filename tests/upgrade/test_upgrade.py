"""Databases of each release with data: migrated to this version, they read and work as before."""

import asyncio
import gzip
import json
import os
import uuid
from collections.abc import Iterator

import asyncpg
import httpx2
import pytest

from bottega.settings import Settings
from tests import forks
from tests.conftest import at
from tests.fake_model import FakeModel
from tests.flows.conftest import model
from tests.flows.test_processes import environment
from tests.processes import command
from tests.service import running
from tests.stores.test_migrations import NEWER, catalogue, execute
from tests.upgrade import RELEASES, answers_of, data, dump_of
from tests.waiting import until

__all__ = ["model"]


async def load(url: str, release: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(gzip.decompress(dump_of(release).read_bytes()).decode())
    finally:
        await connection.close()


def migrated(url: str) -> tuple[int, str]:
    """Run ``bottega migrate``; return its exit status and what it said."""
    done = forks.run(["migrate"], {**os.environ, "COLUMNS": "500", "DATABASE_URL": url})
    return done.returncode, done.stderr


@pytest.fixture
def old_url(server: str, release: str) -> Iterator[str]:
    """Yield a database of a release, not migrated since."""
    name = f"old_{uuid.uuid4().hex}"
    asyncio.run(execute(server, f"CREATE DATABASE {name}"))
    asyncio.run(load(at(server, name), release))
    yield at(server, name)
    asyncio.run(execute(server, f"DROP DATABASE {name} WITH (FORCE)"))


def test_there_is_a_database_of_the_first_release() -> None:
    assert RELEASES[:1] == ["0.1.0"]


@pytest.mark.parametrize("release", RELEASES)
def test_the_dump_is_small(release: str) -> None:
    assert dump_of(release).stat().st_size <= 1_000_000


@pytest.mark.parametrize("release", RELEASES)
async def test_a_database_of_a_release_reads_and_works_as_before(
    release: str, old_url: str, database_url: str, settings: Settings
) -> None:
    status, said = await asyncio.to_thread(migrated, old_url)
    assert status == 0, said
    assert await catalogue(old_url) == await catalogue(database_url)
    async with FakeModel() as model:
        changes = {"openai_base_url": model.base_url, "database_url": old_url}
        asking = settings.model_copy(update=changes)
        async with running(asking, old_url) as server, data.client(server.port) as client:
            before = json.loads(answers_of(release).read_text(encoding="utf-8"))
            assert len(before) > 30
            assert data.missing(before, await data.read(client)) == []
        async with (
            running(asking, old_url, worker=True) as server,
            data.client(server.port) as client,
        ):
            await data.answer_question(client, model)


async def test_processes_of_this_version_run_beside_and_after_a_newer_one(
    database_url: str, model: FakeModel
) -> None:
    """Migrate as a newer version would, while a process of this one serves, then start another."""
    settings = environment(database_url, model)
    async with command("serve", "--port", "0", **settings) as old:
        await answers(old.port)
        await execute(database_url, *NEWER)
        await answers(old.port)
    now = await catalogue(database_url)
    status, _ = await asyncio.to_thread(migrated, database_url)
    assert (status, await catalogue(database_url)) == (0, now)
    async with command("serve", "--port", "0", **settings) as returned:
        await answers(returned.port)


async def answers(port: int | None) -> None:
    """Look that a process is ready, and that it executes a run."""
    url = f"http://127.0.0.1:{port}"
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        agent = {"name": f"a{uuid.uuid4().hex}", "system_message": "You help."}
        assert (await client.post("/v1/agents", json=agent)).status_code == 201

        async def ready() -> int:
            return (await client.get("/readyz")).status_code

        await until(ready, lambda status: status == 200)
        asked = {"agent": agent["name"], "input": "Hello."}
        ended = await client.post("/v1/runs?wait=30", json=asked)
        assert ended.json()["status"] == "completed", ended.text
