"""Demo of a support desk: a chat with a refund that waits for a person, over any restart.

The server is a process of its own, so that Ctrl-C is for the chat alone, and ends with this one
even if that is killed. The session's name is in the data folder; all else is in the database.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console

from bottega.cli.demo.scenarios import USER, Scenario, is_ours
from bottega.cli.remote.chat import Chat, open_session
from bottega.cli.remote.following import REFUSED
from bottega.cli.remote.people import People
from bottega.cli.remote.server import RemoteError, RemoteServer
from bottega.db.embedded import default_data_dir
from bottega.errors import NotFoundError, UnavailableError
from bottega.main import listen
from bottega.settings import Settings
from bottega.tenants import operator
from bottega.tenants.keys import Scope

_LONGEST = timedelta(days=1)
"""Lifetime of the demo's API key, should its removal fail."""
_PATIENCE_S = 5.0
"""Seconds that the demo waits for an unavailable model."""
_TO_END_S = 30.0
_AGAIN = "bottega demo --resume"

_console = Console(stderr=True)


def run(settings: Settings, url: str, scenario: Scenario, *, resume: bool, keep: bool) -> int:
    """Start a server and talk with its support desk; return the exit status.

    Raises:
        NotFoundError: there is no chat to resume.
        UnavailableError: the port is taken, or the data folder is not writable.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    session = _session(settings, resume=resume)
    with _serving(settings, url) as address, _key(url) as key, RemoteServer(address, key) as server:
        try:
            status = talk(server, scenario, session)
        except RemoteError as error:
            _console.print(f"error: {error.detail}", style="red", markup=False, highlight=False)
            return REFUSED
        if keep:
            _console.print(f"The server stays up: {address}/console/. Ctrl-C stops it.")
            signal.pause()
    return status


def talk(server: RemoteServer, scenario: Scenario, session: str) -> int:
    """Define the desk, and begin its chat or go on with it; return the exit status."""
    for agent in scenario.agents:
        _define(server, agent)
    _, user = open_session(server, session, USER)
    people = People(server, _console, asks=True, tools={"refund": _refund})
    chat = Chat(server, _console, people, scenario.coordinator, session, user, _AGAIN)
    if server.get("/v1/runs", session_id=session, limit=1)["items"]:
        chat.show_history()
        return chat.talk()
    _say("A customer writes to the support desk. Its refunds above 100 need you.")
    _say(f"Leave with Ctrl-C, or even kill this process, while one waits: {_AGAIN} goes on.")
    return chat.talk([scenario.task])


def _say(text: str) -> None:
    _console.print(text, style="dim", highlight=False, soft_wrap=True)


def _refund(arguments: Mapping[str, Any]) -> str:
    return f"{arguments.get('amount')} were paid back to the customer's card"


def _define(server: RemoteServer, agent: Mapping[str, Any]) -> None:
    """Create the agent, or update that of an older demo; leave one of the user's unchanged."""
    path = f"/v1/agents/{agent['name']}"
    try:
        server.create("/v1/agents", agent)
    except RemoteError as error:
        if error.status != 409:
            raise
        if is_ours(server.get(path)):
            server.replace(path, {name: agent[name] for name in agent if name != "name"})


def _session(settings: Settings, *, resume: bool) -> str:
    """Return the session's name: that of the last chat, or a new one, which is kept."""
    folder = (settings.data_dir or default_data_dir()).expanduser().absolute()
    place = folder / "demo-support-session"
    if resume:
        with contextlib.suppress(OSError, ValueError):
            if session := place.read_text().strip():
                return session
        begin = "bottega demo --scenario support"
        raise NotFoundError(f"there is no chat to resume: begin one with `{begin}`")
    session = f"demo-{uuid4().hex[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(place, session)
    except OSError as error:
        raise UnavailableError(
            f"cannot write to {folder} ({error.strerror}): set BOTTEGA_DATA_DIR to a folder this "
            "user may write to"
        ) from None
    return session


def _write(place: Path, text: str) -> None:
    """Replace a file at once: after a crash it has either text."""
    beside = place.with_suffix(".new")
    beside.write_text(text)
    beside.replace(place)


@contextmanager
def _key(url: str) -> Iterator[str | None]:
    """Yield a key of the default tenant, if it needs one."""
    with asyncio.Runner() as runner:
        scopes: tuple[Scope, ...] = ("run", "define", "approve")
        made = operator.temporary_key(url, name="demo", good_for=_LONGEST, scopes=scopes)
        key = runner.run(made.__aenter__())
        try:
            yield key
        finally:
            runner.run(made.__aexit__(None, None, None))


@contextmanager
def _serving(settings: Settings, url: str) -> Iterator[str]:
    """Run ``bottega serve`` during the block; yield its address.

    Raises:
        UnavailableError: it did not start; its own text says why.
    """
    ours, theirs = socket.socketpair()
    with listen(settings) as listener, ours:
        with theirs:
            process = _start(settings, url, listener.fileno(), theirs.fileno())
        try:
            if not ours.recv(1):
                raise UnavailableError("the demo's server did not start")
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.terminate()
            try:
                process.wait(settings.drain_grace_s + _TO_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _start(settings: Settings, url: str, listener: int, link: int) -> "subprocess.Popen[bytes]":
    patience_s = min(_PATIENCE_S, settings.model_patience_s)
    database = settings.pooler_url or url
    more = {"DATABASE_URL": database, "BOTTEGA_MODEL_PATIENCE_S": str(patience_s)}
    more |= {"BOTTEGA_SHARED_MEMORY": "true"}
    ends = ("--listener", str(listener), "--parent", str(link))
    return subprocess.Popen(  # noqa: S603 (our own command)
        [sys.executable, "-m", "bottega.cli.commands", "serve", "--host", settings.host, *ends],
        env={**os.environ, **more, "BOTTEGA_LOG_LEVEL": "error"},
        stdin=subprocess.DEVNULL,
        pass_fds=(listener, link),
        start_new_session=True,
    )
