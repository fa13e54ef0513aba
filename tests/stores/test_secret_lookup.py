"""Values of stored secrets in a worker: read after a change, kept without the database."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from bottega.db.pool import Database
from bottega.db.tables import DEFAULT_TENANT
from bottega.events.listener import NotifyListener
from bottega.sealing import CannotOpenError, Keyring, Place
from bottega.secrets import lookup as lookup_module
from bottega.secrets import rows
from bottega.secrets.lookup import SecretLookup, SecretRules
from bottega.tenants import operator
from bottega.tenants.keys import BELIEVED_S
from bottega.tools.guard import ModelHosts
from bottega.tools.secrets import TenantSecrets
from tests.waiting import until

RING = Keyring([bytes(32)])
FIRST, SECOND = "tok-first-1234567890", "tok-second-1234567890"
Read = Callable[[UUID], Awaitable[Sequence[Mapping[str, Any]]]]


async def is_open() -> bool:
    return True


class Ticks:
    """A clock that stands still."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def lookup(read: Read, ticks: Ticks | None = None) -> SecretLookup:
    rules = SecretRules(
        keyring=lambda: RING,
        environment=lambda: TenantSecrets({}),
        hosts=lambda tenant, name: None,
        allowed=ModelHosts((), None, is_open).allowed,
        is_open=is_open,
    )
    return SecretLookup(rules, read, ticks or Ticks())


async def put(database: Database, value: str) -> None:
    async with database.begin(DEFAULT_TENANT) as tx:
        about = {"name": "KEY", "value": value, "hosts": ["a.example"], "if_version": None}
        await rows.put(tx, DEFAULT_TENANT, "test", RING, **about)  # type: ignore[arg-type]


async def value_of(secrets: SecretLookup) -> str:
    return await secrets.bound(DEFAULT_TENANT, "default", "https://a.example/x")("KEY")


async def test_a_change_is_read_and_redacted_without_a_use(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_module, "_LOOK_S", 600.0)
    secrets = lookup(partial(rows.read, database.pool))
    async with watched(database, secrets):
        await put(database, FIRST)
        assert await value_of(secrets) == FIRST
        redactor = secrets.redactor(DEFAULT_TENANT)
        await put(database, SECOND)
        await until(lambda: redactor.finds(SECOND))
        assert redactor.text(f"{FIRST} {SECOND}") == "[secret] [secret]"
        assert await value_of(secrets) == SECOND


async def test_a_replaced_or_deleted_value_is_forgotten_within_a_minute(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_module, "_LOOK_S", 0.01)
    ticks = Ticks()
    secrets = lookup(partial(rows.read, database.pool), ticks)
    async with watched(database, secrets):
        await put(database, FIRST)
        redactor = await secrets.known(DEFAULT_TENANT, "default")
        assert redactor.finds(FIRST)
        await put(database, SECOND)
        await until(lambda: redactor.finds(SECOND))
        ticks.now += 50
        await until(lambda: not redactor.finds(FIRST))
        assert redactor.finds(SECOND)
        async with database.begin(DEFAULT_TENANT) as tx:
            await rows.delete(tx, DEFAULT_TENANT, "test", "KEY", None)
        await until(lambda: secrets.stored(DEFAULT_TENANT), lambda found: not found)
        ticks.now += 50
        await until(lambda: not redactor.finds(SECOND))


async def test_a_run_redacts_all_values_however_many_tenants_come_after_its_own(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_module, "_MOST_TENANTS", 1)
    monkeypatch.setattr(lookup_module, "_LOOK_S", 600.0)
    others = [uuid4() for _ in range(2)]
    secrets = lookup(partial(rows.read, database.pool))
    await put(database, FIRST)
    of_run = secrets.redactor(DEFAULT_TENANT)  # as a run does, before it reads the values
    of_others = [secrets.redactor(each) for each in others]
    assert await secrets.known(DEFAULT_TENANT, "default") is of_run
    assert of_run.finds(FIRST)
    assert [secrets.redactor(each) for each in others] == of_others
    assert secrets.of_name("default") is of_run
    async with watched(database, secrets):
        await put(database, SECOND)
        await until(lambda: of_run.finds(SECOND))


async def test_tenants_without_a_run_are_forgotten_beyond_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def read(tenant_id: UUID) -> Sequence[Mapping[str, Any]]:
        return []

    monkeypatch.setattr(lookup_module, "_MOST_TENANTS", 1)
    secrets = lookup(read)
    await secrets.known(DEFAULT_TENANT, "default")
    await secrets.known(uuid4(), "other")
    gc.collect()
    assert secrets.of_name("default") is None
    assert secrets.of_name("other") is not None


@asynccontextmanager
async def watched(database: Database, secrets: SecretLookup) -> AsyncIterator[None]:
    """Let it hear of changes during the block."""
    listener = NotifyListener(database.connect)
    secrets.watch(listener)
    tasks = [asyncio.ensure_future(each) for each in (listener.run(), secrets.run())]
    await until(lambda: listener.hears(rows.CHANNEL))
    yield
    for task in tasks:
        task.cancel()


async def test_a_lost_notification_costs_seconds(database: Database) -> None:
    ticks, reads = Ticks(), 0

    async def read(tenant_id: UUID) -> Sequence[Mapping[str, Any]]:
        nonlocal reads
        reads += 1
        return await rows.read(database.pool, tenant_id)

    secrets = lookup(read, ticks)
    await put(database, FIRST)
    found = await asyncio.gather(*(value_of(secrets) for _ in range(20)))
    assert (set(found), reads) == ({FIRST}, 1)
    await put(database, SECOND)
    ticks.now += BELIEVED_S
    assert (await value_of(secrets), reads) == (FIRST, 1)
    ticks.now += 0.1
    assert (await value_of(secrets), reads) == (SECOND, 2)
    stored = await secrets.stored(DEFAULT_TENANT)
    ticks.now += 2 * BELIEVED_S
    assert await secrets.stored(DEFAULT_TENANT) is stored  # so that clients are kept
    ticks.now += 0.1
    assert await secrets.stored(DEFAULT_TENANT, fresh=True) is stored
    assert reads == 4


async def test_while_the_database_is_away_known_values_stay(database: Database) -> None:
    ticks = Ticks()
    failures: list[Exception] = [OSError("away"), asyncpg.ConnectionDoesNotExistError("away")]

    async def read(tenant_id: UUID) -> Sequence[Mapping[str, Any]]:
        if failures:
            raise failures.pop()
        return await rows.read(database.pool, tenant_id)

    secrets = lookup(read, ticks)
    await put(database, FIRST)
    assert await value_of(secrets) == FIRST  # the first look waits for the database
    await put(database, SECOND)
    ticks.now += BELIEVED_S + 0.1
    failures.append(OSError("away"))
    assert await value_of(secrets) == FIRST
    ticks.now += BELIEVED_S + 0.1
    assert await value_of(secrets) == SECOND
    ticks.now += 0.1
    failures.append(ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        await secrets.stored(DEFAULT_TENANT, fresh=True)


async def test_all_secrets_are_sealed_again_in_pages(
    database: Database, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_AT_ONCE", 2)
    new = bytes(range(32))
    both, lost = Keyring([new, bytes(32)]), Keyring([bytes(reversed(new))])
    for name, ring in (("A", RING), ("B", lost), ("C", RING), ("D", both), ("E", RING)):
        async with database.begin(DEFAULT_TENANT) as tx:
            about: dict[str, Any] = {"name": name, "value": FIRST, "hosts": [], "if_version": None}
            await rows.put(tx, DEFAULT_TENANT, "test", ring, **about)
    pages: list[tuple[int, int]] = []
    after = None
    async with operator.transactions(database_url) as begin:
        while not pages or after is not None:
            async with begin() as tx:
                page = await rows.seal_again(tx, "cli", both, after)
            pages.append((page.changed, page.unreadable))
            after = page.last
    assert pages == [(1, 1), (1, 0), (1, 0), (0, 0)]
    opened = {}
    for row in await rows.read(database.pool, DEFAULT_TENANT):
        place = Place(DEFAULT_TENANT, row["name"], row["version"])
        with contextlib.suppress(CannotOpenError):
            opened[row["name"]] = Keyring([new]).open(row["value"], place)
    assert opened == dict.fromkeys("ACDE", FIRST)
