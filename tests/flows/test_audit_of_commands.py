"""Each command that changes something leaves an entry in the audit log that names who did it.

The commands are those of the program: a new one without a decision below fails.
"""

import base64
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import typer

from bottega.cli.commands import cli
from bottega.sealing import Keyring, Place
from tests import forks
from tests.tenants import holder

OLD, NEW = (base64.b64encode(bytes([each]) * 32).decode() for each in (1, 2))
CHANGES: tuple[tuple[tuple[str, ...], set[str]], ...] = (
    # what follows "bottega", and the actions that are noted; in an order in which each has work
    (("keys", "create", "--tenant", "acme", "--role", "admin"), {"key.create"}),
    (("keys", "revoke", "PREFIX"), {"key.revoke"}),
    (("secrets", "reencrypt"), {"secret.reencrypt"}),
    (("tenants", "retain", "acme", "--audit", "90d"), {"retention.change"}),
    (("prune", "--older-than", "30d"), {"retention.prune"}),
    (("migrate",), {"key.create"}),  # the operator's first key
    (("tenants", "delete", "acme", "--yes"), {"tenant.delete"}),
)
BY_API = {"apply", "batch", "cancel", "chat", "evals start", "fork", "run", "interrupts resolve"}
"""They send requests, whose changes name the key."""
SERVE = {"serve", "worker", "demo", "demo-model"}
"""They serve, or start what serves; the first key is stored as by ``migrate``."""
READS = {
    *("doctor", "evals list", "evals show", "export", "interrupts list", "interrupts show"),
    *("keys list", "providers test", "settings", "tenants list", "watch"),
}


def commands(group: Any, *names: str) -> Iterator[str]:
    """Yield the names of all commands, those of groups too."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *names, name)
        else:
            yield " ".join((*names, name))


def test_each_command_has_a_decision() -> None:
    found = set(commands(typer.main.get_command(cli)))
    changing = {
        each
        for each in found
        for words, _ in CHANGES
        if f"{' '.join(words)} ".startswith(f"{each} ")
    }
    assert len(changing) == len(CHANGES)
    assert found == changing | BY_API | SERVE | READS


async def filled(url: str) -> str:
    """Store what the commands change; return the prefix of a key."""
    held = await holder(url, "acme")
    connection = await asyncpg.connect(url)
    place = Place(held.tenant_id, "stock", 1)
    await connection.execute(
        "INSERT INTO secrets (tenant_id, name, version, value, hosts) VALUES ($1, $2, 1, $3, '{}')",
        held.tenant_id,
        place.name,
        Keyring.parse(OLD).seal("value", place),
    )
    await connection.execute(
        "INSERT INTO runs (tenant_id, mode, input, pinned, timeout_s, status, ended_at)"
        " VALUES ($1, 'dag', '\"x\"', '{}', 1, 'completed', now() - interval '60 days')",
        held.tenant_id,
    )
    await connection.close()
    return held.prefix


@pytest.mark.deep
async def test_each_change_names_who_made_it(database_url: str) -> None:
    prefix = await filled(database_url)
    connection = await asyncpg.connect(database_url)
    for words, actions in CHANGES:
        before = await connection.fetchval("SELECT max(id::text) FROM audit_log") or ""
        ended = bottega([word.replace("PREFIX", prefix) for word in words], database_url)
        assert ended.returncode == 0, (words, ended.stderr)
        rows = await connection.fetch(
            "SELECT action, actor FROM audit_log WHERE id::text > $1", before
        )
        noted = {(row["action"], row["actor"]) for row in rows}
        assert {(action, "cli") for action in actions} <= noted, words
        assert {actor for _, actor in noted} == {"cli"}
    await connection.close()


def bottega(words: list[str], url: str) -> subprocess.CompletedProcess[str]:
    return forks.run(
        words,
        {
            "PATH": "",
            "COLUMNS": "300",
            "PYTHONPATH": str(Path(__file__).parents[2] / "app"),
            "DATABASE_URL": url,
            "BOTTEGA_SECRETS_KEY": f"{NEW},{OLD}",
            "BOTTEGA_BOOTSTRAP_KEY": "bootstrap-key-of-at-least-32-characters",
        },
    )
