"""An installation of one user: loopback, the embedded database, no keys and no variables."""

import errno
import os
import stat
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from pydantic import SecretStr

from bottega.cli import doctor
from bottega.db.embedded import DataFolderError, make_secrets_key, secrets_key
from bottega.sealing import Keyring
from bottega.settings import Settings, keyring
from tests.fake_model import FakeModel, text
from tests.service import Running, frames, running
from tests.tenants import holder
from tests.waiting import until

SECRET = {"value": "sk-local-0123456789", "hosts": ["127.0.0.1"]}


def folder_at(url: str) -> Path:
    """Return the data folder of the embedded server that the tests share."""
    return Path(parse_qs(urlsplit(url).query)["host"][0]).parent


@pytest.fixture
def local(settings: Settings, database_url: str) -> Settings:
    """Settings of an installation whose database is the embedded one, with the demo model."""
    own = {"data_dir": folder_at(database_url), "openai_api_key": None}
    return settings.model_copy(update=own)


@pytest.fixture(autouse=True)
def no_key_stays(database_url: str) -> Any:
    yield
    (folder_at(database_url) / "secrets.key").unlink(missing_ok=True)


@pytest.fixture
async def bottega(local: Settings, database_url: str) -> AsyncIterator[Running]:
    async with running(local, database_url, worker=True) as server:
        yield server


def provider(model: FakeModel, **fields: Any) -> dict[str, Any]:
    return {"dialect": "chat", "base_url": model.base_url, **fields}


async def finished(bottega: Running, headers: Mapping[str, str] = {}) -> dict[str, Any]:
    """Run the agent to its end; return the run."""
    body = {"agent": "a", "input": "hello"}
    started = await bottega.client.post("/v1/runs", json=body, headers=headers)
    assert started.status_code == 202, started.text
    address = f"/v1/runs/{started.json()['id']}"
    await frames(bottega.port, f"{address}/ws", headers)
    run: dict[str, Any] = (await bottega.client.get(address, headers=headers)).json()
    return run


async def test_a_key_of_secrets_is_made_at_the_first_use(
    bottega: Running, local: Settings, database_url: str
) -> None:
    path = folder_at(database_url) / "secrets.key"
    assert not path.exists()
    assert (await bottega.client.put("/v1/secrets/LOCAL", json=SECRET)).status_code == 201
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text_ = path.read_text()
    assert (await bottega.client.put("/v1/secrets/LOCAL", json=SECRET)).status_code == 200
    assert path.read_text() == text_
    assert sorted(each.name for each in path.parent.glob("secrets*")) == ["secrets.key"]
    stored = await bottega.owner.fetchval("SELECT value FROM secrets")
    assert Keyring.parse(text_).opens(stored)
    check = await doctor._secrets_key(local, database_url)
    assert (check.ok, check.detail) == (True, "set")


async def test_another_key_seals_first_and_the_file_s_still_opens(
    bottega: Running, local: Settings, database_url: str
) -> None:
    await bottega.client.put("/v1/secrets/LOCAL", json=SECRET)
    stored = await bottega.owner.fetchval("SELECT value FROM secrets")
    folder = folder_at(database_url)
    new = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
    for setting in (new, f"{new},{(folder / 'secrets.key').read_text()}"):
        both = keyring(local.model_copy(update={"secrets_key": SecretStr(setting)}), folder)
        assert both is not None
        assert (both.opens(stored), both.is_current(stored)) == (True, False)


async def test_a_loopback_server_with_a_key_answers_and_only_while_there_are_no_keys(
    bottega: Running, database_url: str
) -> None:
    client = bottega.client
    async with FakeModel() as model:
        await client.put("/v1/secrets/LOCAL", json=SECRET)
        own = provider(model, name="own", key={"secret": "LOCAL"})
        assert (await client.post("/v1/providers", json=own)).status_code == 201
        agent = {"name": "a", "system_message": "x", "model": "own/m"}
        assert (await client.post("/v1/agents", json=agent)).status_code == 201
        model.script(text("from the own server"))
        run = await finished(bottega)
        assert (run["status"], run["output"]) == ("completed", "from the own server")
        assert model.headers[0]["authorization"] == f"Bearer {SECRET['value']}"

        # With the first key there may be tenants: loopback is closed to them.
        administrator = await holder(database_url, "default")
        async with administrator.client(bottega) as keyed:
            await until(lambda: not bottega.service.keys.may_be_open, within=10)
            run = await finished(bottega, administrator.headers)
            assert (run["status"], len(model.headers)) == ("failed", 1)
            refused = await keyed.put("/v1/providers/own", json=provider(model))
            assert refused.json()["code"] == "egress_forbidden"


@pytest.mark.parametrize(
    "address", ["http://10.0.0.9/v1", "http://169.254.169.254/v1", "http://[fe80::1]/v1"]
)
async def test_other_addresses_stay_closed(bottega: Running, address: str) -> None:
    body = {"name": "own", "dialect": "chat", "base_url": address}
    answer = await bottega.client.post("/v1/providers", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "egress_forbidden")


@pytest.mark.parametrize("changed", ["another database", "not on loopback"])
async def test_any_other_installation_makes_no_key(
    local: Settings, database_url: str, tmp_path: Path, changed: str
) -> None:
    others: dict[str, dict[str, object]] = {
        "another database": {"data_dir": tmp_path},
        "not on loopback": {"host": "0.0.0.0"},
    }
    settings = local.model_copy(update=others[changed])
    administrator = await holder(database_url) if changed == "not on loopback" else None
    headers = {} if administrator is None else administrator.headers
    async with running(settings, database_url) as server, FakeModel() as model:
        answer = await server.client.put("/v1/secrets/LOCAL", json=SECRET, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (409, "no_secrets_key")
        own = provider(model, name="own")
        answer = await server.client.post("/v1/providers", json=own, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (422, "egress_forbidden")
    assert not (folder_at(database_url) / "secrets.key").exists()


def test_a_broken_key_file_is_reported_in_words(tmp_path: Path) -> None:
    (tmp_path / "secrets.key").write_text("none")
    with pytest.raises(DataFolderError, match="restore this file from a backup"):
        secrets_key(tmp_path)


def test_a_key_outlives_a_power_failure_and_a_full_disk_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []

    def note(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))

    monkeypatch.setattr(os, "fsync", note)
    make_secrets_key(tmp_path)
    assert synced == [False, True]  # the file, and then its name
    (tmp_path / "secrets.key").unlink()

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DataFolderError, match="No space left"):
        make_secrets_key(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_of_two_processes_the_first_makes_the_key(tmp_path: Path) -> None:
    make_secrets_key(tmp_path)
    first = secrets_key(tmp_path)
    make_secrets_key(tmp_path)
    assert first is not None
    assert secrets_key(tmp_path) == first
    assert [each.name for each in tmp_path.iterdir()] == ["secrets.key"]
