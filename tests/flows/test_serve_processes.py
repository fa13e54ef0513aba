"""``bottega serve --workers N --api M``: processes below one parent, some of them killed."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from bottega.cli.processes import Child, Supervisor
from tests import forks
from tests.fake_model import FakeModel, gated
from tests.processes import Command, command
from tests.service import watch
from tests.team import define, start
from tests.waiting import until


def children(parent: Command, word: str) -> set[int]:
    """Return the pids of the parent's running children with a word in their command line."""
    found = set()
    for child in psutil.Process(parent.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends at this moment
            if word in child.cmdline() and child.is_running():
                found.add(child.pid)
    return found


def with_model(database_url: str, model: FakeModel) -> dict[str, str]:
    return {
        "DATABASE_URL": database_url,
        "OPENAI_API_KEY": "test-key",
        "OPENAI_BASE_URL": model.base_url,
        "BOTTEGA_TAKEOVER_S": "2",
    }


async def test_processes_below_one_parent_serve_and_end_together(
    database_url: str, model: FakeModel
) -> None:
    options = ("--workers", "1", "--api", "1", "--port", "0")
    async with command("serve", *options, **with_model(database_url, model)) as parent:
        left = children(parent, "worker") | children(parent, "serve")
        assert len(left) == 2
        base_url = f"http://127.0.0.1:{parent.port}"
        async with httpx2.AsyncClient(base_url=base_url, timeout=30) as client:
            await define(client)
            run_id = await start(client)
        frames = await watch(parent.port, run_id)
        assert frames[-1]["type"] == "run.completed"
        async with httpx2.AsyncClient(base_url=base_url, timeout=30) as client:
            report = (await client.get("/metrics")).text  # of the API's process and the worker's
        assert 'bottega_runs_total{mode="orchestrated",status="completed"} 1.0' in report
        assert 'route="/v1/runs",status="202"} 1.0' in report
        assert "bottega_workers 1.0" in report
        parent.process.send_signal(signal.SIGTERM)
        assert await parent.process.wait() == 0
        assert not any(map(psutil.pid_exists, left))


@pytest.mark.deep
async def test_dead_processes_are_replaced_and_runs_go_on(
    database_url: str, model: FakeModel
) -> None:
    gate = asyncio.Event()
    hold_answers(model, gate)
    options = ("--workers", "1", "--api", "1", "--port", "0")
    async with command("serve", *options, **with_model(database_url, model)) as parent:
        workers, apis = children(parent, "worker"), children(parent, "serve")
        assert len(workers) == len(apis) == 1
        base_url = f"http://127.0.0.1:{parent.port}"
        async with httpx2.AsyncClient(base_url=base_url, timeout=30) as client:
            await define(client)
            run_id = await start(client)
            await model.received(1)
            for pid in workers | apis:
                os.kill(pid, signal.SIGKILL)
            gate.set()
            await until(lambda: children(parent, "worker") - workers)
            await until(lambda: children(parent, "serve") - apis)
            assert (await client.get("/healthz")).is_success  # it waits for the new process
        frames = await watch(parent.port, run_id)
        assert frames[-1]["type"] == "run.completed"
        assert any("process.restarted" in line for line in parent.log)
        left = children(parent, "worker") | children(parent, "serve")
        parent.process.send_signal(signal.SIGTERM)
        assert await parent.process.wait() == 0
        assert not any(map(psutil.pid_exists, left))


@pytest.mark.deep
async def test_children_end_with_a_killed_parent(database_url: str, model: FakeModel) -> None:
    options = ("--workers", "2", "--api", "2", "--port", "0")
    async with command("serve", *options, **with_model(database_url, model)) as parent:
        left = children(parent, "worker") | children(parent, "serve")
        assert len(left) == 4
        parent.kill()
        await until(lambda: not any(map(psutil.pid_exists, left)))


def test_a_child_that_cannot_start_ends_the_command() -> None:
    nowhere = {**os.environ, "DATABASE_URL": "postgresql://127.0.0.1:1/none", "COLUMNS": "300"}
    ended = forks.run(["serve", "--workers", "1", "--port", "0"], nowhere)
    assert ended.returncode == 1
    assert "cannot reach PostgreSQL" in ended.stderr


async def test_a_child_that_died_or_cannot_be_forked_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = "import os, sys; os.write(int(sys.argv[1]), b'.'); os.read(0, 1)"
    spawn, left = asyncio.create_subprocess_exec, [DEVNULL, None, PIPE]

    async def fake(*command: str, stdin: int, **options: Any) -> asyncio.subprocess.Process:
        kind = left.pop(0)
        if kind is None:
            raise BlockingIOError(errno.EAGAIN, "no process left")
        if not left:
            asyncio.get_running_loop().call_later(1, signal.raise_signal, signal.SIGTERM)
        return await spawn(sys.executable, "-c", script, command[-1], stdin=kind, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fake)
    ready: list[bool] = []
    supervisor = Supervisor({}, str(tmp_path))
    assert await supervisor.run([Child("one", ())], lambda: ready.append(True)) == 0
    assert not left
    assert ready == [True]


def hold_answers(model: FakeModel, gate: asyncio.Event) -> None:
    """Let the fake model hold back its answers until ``gate`` is set."""
    decide = model.decide

    def held(request: dict[str, Any]) -> Any:
        return gated(gate, decide(request))

    model.decide = held


HANGING = """
import signal, socket, sys
from bottega.cli.processes import ParentLink
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ParentLink(int(sys.argv[1]), 0.1).is_ready()
while True:
    signal.pause()
"""


async def test_a_child_that_hangs_is_killed_after_its_parent() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            arguments = "-c", HANGING, str(theirs.fileno())
            child = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, pass_fds=(theirs.fileno(),)
            )
        assert await asyncio.to_thread(ours.recv, 1) == b"."
    assert await child.wait() == -signal.SIGKILL
