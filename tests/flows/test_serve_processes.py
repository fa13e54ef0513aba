"""``bottega serve --workers N --api M``: processes below one parent, some of them killed."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import psutil
import pytest
import websockets

from tests import forks
from tests.fake_model import FakeModel, gated
from tests.processes import Command, command
from tests.service import client_of, watch
from tests.team import RUN, define, start
from tests.waiting import deadline, until

SSE = {"accept": "text/event-stream"}


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


@pytest.mark.deep
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


@pytest.mark.deep
def test_a_child_that_cannot_start_ends_the_command() -> None:
    nowhere = {**os.environ, "DATABASE_URL": "postgresql://127.0.0.1:1/none", "COLUMNS": "300"}
    ended = forks.run(["serve", "--workers", "1", "--port", "0"], nowhere)
    assert ended.returncode == 1
    assert "cannot reach PostgreSQL" in ended.stderr


SUPERVISED = """
import os, sys
from bottega.cli import processes
scripts = sys.argv[1:]
def spawn(command, environment):
    if not scripts[0]:
        raise BlockingIOError(11, "no process left", scripts.pop(0))
    script = scripts.pop(0) if len(scripts) > 1 else scripts[0]
    link = command[-1]
    return os.posix_spawn(sys.executable, [sys.executable, "-c", script, link], environment)
processes.spawn = spawn
children = [processes.Child("one", ())]
sys.exit(processes.Supervisor(processes.Plan(children, "All work.", 0, True)).run())
"""
WORKS = "import os, signal, sys; os.write(int(sys.argv[1]), b'..')"
SAYS = "import os; os.write(2, f'pid {os.getpid()}.\\n'.encode())"
STAYS = f"{SAYS}; {WORKS}; signal.pause()"


@asynccontextmanager
async def supervised(*scripts: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Any]]:
    """Start a parent of one child, whose processes run these scripts, the last one for ever.

    Yields the parent, and a function that waits for a line of its and returns it.
    """
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SUPERVISED, *scripts, stderr=PIPE
    )
    assert parent.stderr is not None
    lines = parent.stderr

    async def said(text: str) -> str:
        async with deadline(lambda: text):
            while text not in (line := (await lines.readline()).decode()):
                assert line, f"it ended before it said {text}"
            return line

    try:
        yield parent, said
    finally:
        if parent.returncode is None:
            parent.send_signal(signal.SIGTERM)
            assert await parent.wait() == 0


CLOSED = """
import os, pty, signal, sys
from bottega.cli import processes
pid, terminal = pty.fork()
if pid == 0:
    if sys.argv[1] == "nohup":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ends = processes.ends_with_terminal()
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    os.write(1, b"s")
    signal.sigwait({signal.SIGHUP})
    sys.exit(2 + (ends and not processes.has_terminal()))
os.read(terminal, 64)
os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(("how", "status"), [("plain", 3), ("nohup", 2)])
def test_what_ends_with_its_terminal_stays_below_nohup(how: str, status: int) -> None:
    ended = subprocess.run([sys.executable, "-c", CLOSED, how], timeout=60)
    assert ended.returncode == status


IDLE = """
import sys
from bottega.cli import processes
def select(readable, writable, failed, wait_s):
    sys.exit(f"waits {wait_s}")
processes.select.select = select
processes.monotonic = lambda: 1e6  # seconds since the machine was started
processes.Supervisor(processes.Plan([], "", 0, True)).run()
"""


def test_a_parent_with_nothing_due_sleeps_however_long_the_machine_is_up() -> None:
    ended = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True)
    assert ended.stderr == "waits None\n"


async def test_a_child_that_died_or_cannot_be_forked_is_started_again() -> None:
    async with supervised(WORKS, "", STAYS) as (_, said):
        assert "All work." in await said("All work")
        assert '"status": 0' in await said("process.restarted")
        await said("process.not_started")
        await said("pid ")


async def test_a_reload_during_another_is_kept_for_after_it() -> None:
    async with supervised(STAYS) as (parent, said):
        pids = [await said("pid ")]
        parent.send_signal(signal.SIGHUP)  # perhaps before all work
        await said("processes.replacing")
        parent.send_signal(signal.SIGHUP)
        pids.append(await said("pid "))
        await said("processes.replaced")
        await said("processes.replacing")
        pids.append(await said("pid "))
        await said("processes.replaced")
        assert len(set(pids)) == 3


@pytest.mark.parametrize("script", ["", "raise SystemExit(3)"])
async def test_a_child_without_a_successor_stays(script: str) -> None:
    async with supervised(STAYS, script, STAYS) as (parent, said):
        first = int((await said("pid "))[4:-2])
        parent.send_signal(signal.SIGHUP)
        await said("process.not_replaced")
        assert psutil.pid_exists(first)
        parent.send_signal(signal.SIGHUP)
        await said("processes.replaced")
        await until(lambda: not psutil.pid_exists(first))


class Load:
    """Requests without a pause, over connections that stay open; none may fail."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client
        self._tasks = [asyncio.ensure_future(self._ask(number)) for number in range(3)]
        self.answers = 0
        self.runs: list[str] = []

    async def _ask(self, number: int) -> None:
        while True:
            assert (await self._client.get("/readyz")).status_code == 200
            if number == 0 and len(self.runs) < 30:
                self.runs.append(await start(self._client))
            self.answers += 1

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended


@pytest.mark.deep
async def test_a_reload_replaces_the_process_and_loses_nothing(
    database_url: str, model: FakeModel
) -> None:
    gate = asyncio.Event()
    hold_answers(model, gate)
    async with (
        command("serve", "--port", "0", **with_model(database_url, model)) as parent,
        client_of(parent.port, timeout=120) as client,
    ):
        (old,) = psutil.Process(parent.process.pid).children()
        assert psutil.Process(parent.process.pid).memory_info().rss < 20_000_000
        await define(client)
        run_id = await start(client)
        await model.received(1)
        path = f"/v1/runs/{run_id}"
        async with (
            websockets.connect(f"ws://127.0.0.1:{parent.port}{path}/ws") as socket,
            client.stream("GET", f"{path}/events", headers=SSE) as events,
        ):
            ask = client.post("/v1/runs", params={"wait": 60}, json=RUN)
            waiting = asyncio.ensure_future(ask)
            await model.received(2)
            load = Load(client)
            parent.process.send_signal(signal.SIGHUP)
            lines = [line async for line in events.aiter_lines()]
            assert "retry: 0" in lines
            with pytest.raises(websockets.ConnectionClosedError):
                async for _ in socket:
                    pass
            assert socket.close_code == 1012
            assert "resume after=" in (socket.close_reason or "")
            answered = load.answers
            await until(lambda: load.answers > answered + 20, within=90)
            await load.stop()
        await parent.says("processes.replaced")
        gate.set()
        assert (await waiting).json()["status"] == "completed"
        for each in [run_id, *load.runs[:3]]:
            assert (await watch(parent.port, each))[-1]["type"] == "run.completed"
        await until(lambda: not old.is_running(), within=60)
        (new,) = children(parent, "serve")
        parent.process.send_signal(signal.SIGTERM)
        assert await parent.process.wait() == 0
        assert not psutil.pid_exists(new)


@pytest.mark.deep
async def test_a_reload_replaces_one_process_after_the_other(
    database_url: str, model: FakeModel
) -> None:
    options = ("--workers", "2", "--api", "2", "--port", "0")
    async with (
        command("serve", *options, **with_model(database_url, model)) as parent,
        client_of(parent.port) as client,
    ):
        old = children(parent, "serve") | children(parent, "worker")
        assert len(old) == 4
        await define(client)
        load = Load(client)
        parent.process.send_signal(signal.SIGHUP)
        await parent.says("processes.replaced")
        await until(lambda: not any(map(psutil.pid_exists, old)), within=60)
        await load.stop()
        assert len(children(parent, "serve") | children(parent, "worker")) == 4
        for each in load.runs:
            assert (await watch(parent.port, each))[-1]["type"] == "run.completed"


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
ParentLink(int(sys.argv[1]), 0.1).works()
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
