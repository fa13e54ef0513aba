"""The demo, which starts a server, defines a team over HTTP, runs the team, and shows the run.

*learning*: 48 similar tasks; a success check judges each task. The lead agent does not know in
which order to call its sub-agents. A run is a success only if the sub-agents first collected the
facts, then wrote the text, then checked the text.

*support*: a chat with a refund that waits for a person, even over restarts. A file in the data
folder contains the session's name; all other data is in the database.

The server is a separate process, so Ctrl-C reaches only the demo. The server ends when the
demo ends, even if the demo is killed.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle, islice
from pathlib import Path
from shlex import quote
from typing import IO, Any, TypeVar
from uuid import uuid4

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from bottega.cli.chat import Chat, open_session
from bottega.cli.client import RemoteError, RemoteServer, RunEvents
from bottega.cli.people import INTERRUPTED, REFUSED, STATUSES, People
from bottega.cli.scenarios import LEARNING, SUPPORT, USER, Scenario, is_ours
from bottega.cli.terminal import listen
from bottega.cli.transcript import Transcript
from bottega.clock import monotonic
from bottega.db.embedded import data_folder
from bottega.errors import NotFoundError, UnavailableError
from bottega.llm.demo_process import demo_model
from bottega.settings import DEMO_MODEL_NAME, Settings
from bottega.tenants import operator
from bottega.tenants.keys import Scope

T = TypeVar("T")


class DemoError(Exception):
    """The demo cannot continue; the text is the reason."""


TASKS = 48
"""Number of tasks; 16 tasks may use a pattern that was found after the first night."""
NIGHTS = (10, 40)
"""Numbers of finished tasks after which the demo maintains memory, as a service does at night."""
TOPICS = (
    "tides in Venice", "night trains", "wind mills", "urban beekeeping", "printed books",
    "public baths", "salt marshes", "wooden bridges", "fountain pens", "paper making",
    "tram lines", "city wells", "rooftop farms", "stone quarries", "canal locks",
    "olive oil", "glass blowing", "mountain huts", "lighthouses", "street markets",
    "vertical farming", "bell towers", "river ferries", "rice fields", "old orchards",
    "water towers", "cable cars", "clock makers", "fish ladders", "snow sheds",
)  # fmt: skip
_ABOUT = {"domain": "editorial", "task_type": "briefing"}
_SAID = {
    "used": "given the pattern",
    "trial": "given it on trial",
    "withheld": "pattern withheld at random",
    "control": "candidate withheld at random",
}
_RUN_PATIENCE_S = 120.0
_PATIENCE_S = 5.0
"""Seconds for which the demo waits for an unavailable model."""


@dataclass(frozen=True, slots=True)
class _Done:
    """A finished task.

    Attributes:
        arm: arm of the run in the experiment about a pattern; ``None``: no pattern applied.
    """

    run_id: str
    good: bool
    arm: str | None


def learn(server: RemoteServer, scenario: Scenario) -> int:
    """Run all tasks and show what memory learns; return the exit status."""
    done: list[_Done] = []
    since = 0
    for number, topic in enumerate(islice(cycle(TOPICS), TASKS), 1):
        done.append(_one(server, scenario, number, topic))
        if number in NIGHTS:
            _night(server, done[since:])
            since = number
    return _sum_up(server, done)


def _one(server: RemoteServer, scenario: Scenario, number: int, topic: str) -> _Done:
    task = scenario.task.format(topic=topic)
    # Each topic has its own user, because a pattern contains a domain only if three users had tasks
    # of this domain.
    body = {**scenario.run, "input": task, "user": topic, "metadata": _ABOUT}
    where = f"/v1/runs/{server.create('/v1/runs', body)['id']}"
    run = _until(server, where, lambda found: found["ended_at"] is not None)
    if run["status"] != "completed":
        raise DemoError(f"run {run['id']} {run['status']}: {run['error']}")
    started = server.get(f"{where}/events", types="agent.started", limit=100)["items"]
    agents = [event["agent"] for event in started if event["task_id"] is not None]
    recalled = server.get(f"{where}/events", types="context.recalled", limit=100)["items"]
    arms = [event["data"]["arm"] for event in recalled if "arm" in event["data"]]
    judged = _until(server, where, lambda found: found["outcome"]["source"] is not None)
    good = judged["outcome"]["value"] == "SUCCESS"
    mark = "[green]✓[/]" if good else "[red]✗[/]"
    why = f"  [dim]{_SAID[arms[0]]}[/]" if arms else ""
    _console.print(f"{number:>3} {mark} {' → '.join(agents)}{why}", highlight=False)
    return _Done(run["id"], good, arms[0] if arms else None)


def _night(server: RemoteServer, runs_done: Sequence[_Done]) -> None:
    for each in runs_done:
        _until(server, f"/v1/runs/{each.run_id}/learning", _is_over)
    job = server.create("/v1/memory/maintenance", {})
    report = _until(server, f"/v1/memory/reports/{job['id']}", _is_over)
    if report["status"] == "failed":
        raise DemoError(f"maintenance of the memory failed: {report['error']}")
    _console.print("[bold]— maintenance: patterns so far —[/]", highlight=False)
    for pattern in server.get("/v1/patterns")["items"]:
        _console.print(f"    {_render(pattern)}", highlight=False, soft_wrap=True)


def _render(pattern: Mapping[str, Any]) -> str:
    evidence = pattern["evidence"]
    line = f"[bold]{pattern['lifecycle']['state']}[/] {pattern['category']}: {pattern['name']}"
    if evidence["applications"]:
        line += f" ({evidence['success_rate']:.0%} of {evidence['applications']}"
        line += f", confidence {evidence['confidence']:.2f})"
    if decision := pattern["lifecycle"]["decision"]:
        line += f"\n        last look: {decision}"
    return line


def _is_over(run: Mapping[str, Any]) -> bool:
    return run["status"] in ("done", "failed")


def _until(
    server: RemoteServer, path: str, is_met: Callable[[Mapping[str, Any]], bool]
) -> dict[str, Any]:
    began = monotonic()
    while monotonic() - began < _RUN_PATIENCE_S:
        found: dict[str, Any] = server.get(path)
        if is_met(found):
            return found
        time.sleep(0.1)
    raise DemoError(f"{path} did not finish within {_RUN_PATIENCE_S:g} s")


def _sum_up(server: RemoteServer, runs_done: Sequence[_Done]) -> int:
    with_it = [each.good for each in runs_done if each.arm in ("trial", "used")]
    without = [each.good for each in runs_done if each.arm not in ("trial", "used")]
    used = sum(each.arm == "used" for each in runs_done[NIGHTS[-1] :])
    patterns = server.get("/v1/patterns", state="VALIDATED")["items"]
    lines = [f"Successes without a pattern: {_share(without)}; with one: {_share(with_it)}."]
    lines += [_render(each) for each in patterns]
    lines.append(f"{used} of the last {TASKS - NIGHTS[-1]} runs got a validated pattern.")
    _console.print(Panel("\n".join(lines), title="What the runs taught"))
    return 0 if patterns and used else 1


def _share(good: Sequence[bool]) -> str:
    return f"{sum(good)} of {len(good)}"


_console = Console()
_errors = Console(stderr=True)
_AGAIN = "bottega demo --resume"


def run(
    settings: Settings, url: str, scenario: Scenario, log: IO[str], *, resume: bool, keep: bool
) -> int:
    """Start a server that logs to ``log``; run the demo as its client; return the exit status.

    Raises:
        NotFoundError: there is no chat to resume.
        UnavailableError: the port is taken, or the data folder is not writable.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    is_chat, learns = scenario.agents is SUPPORT.agents, scenario.agents is LEARNING.agents
    session = _session(settings, resume=resume) if is_chat else ""
    scopes: tuple[Scope, ...] = ("admin",) if learns else ("run", "define", "approve")
    good_for = timedelta(days=1)  # lifetime of the key, in case the demo cannot remove the key
    made = operator.temporary_key(url, name="demo", good_for=good_for, scopes=scopes)
    variables = {}
    with contextlib.ExitStack() as stack:
        if learns:
            # Give a candidate pattern to more runs than usual, because the demo has few runs.
            variables = {"BOTTEGA_LEARNING_TRIAL_SHARE": "0.65"}
            if settings.uses_demo_model:
                variables["OPENAI_BASE_URL"] = stack.enter_context(_entered(demo_model()))
                variables["BOTTEGA_MODEL"] = DEMO_MODEL_NAME
        address = stack.enter_context(_serving(settings, url, variables, log))
        key = stack.enter_context(_entered(made))
        server = stack.enter_context(RemoteServer(address, key))
        try:
            if is_chat:
                status = talk(server, scenario, session)
            else:
                _define(server, scenario)
                serve = _serve_command(settings)
                status = learn(server, scenario) if learns else show(server, scenario, serve)
        except (RemoteError, DemoError) as error:
            _errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
            return REFUSED if isinstance(error, RemoteError) else 1
        if keep and status != INTERRUPTED:
            _errors.print(f"The server stays up: {address}/console/. Ctrl-C stops it.")
            signal.pause()
    return status


def _serve_command(settings: Settings) -> str:
    if settings.database_url is not None:
        return "bottega serve"
    return f"BOTTEGA_DATA_DIR={quote(str(settings.data_dir))} bottega serve"


def show(server: RemoteServer, scenario: Scenario, serve: str) -> int:
    """Run the team and show its work; suggest the command ``serve``; return the exit status."""
    run = server.create("/v1/runs", scenario.run)
    _console.print(
        f"[dim]POST {server.address}/v1/runs → run {run['id']}[/]", highlight=False, soft_wrap=True
    )
    transcript = Transcript(_console)
    try:
        for event in RunEvents(server, run["id"], transcript.note):
            transcript.show(event)
    except KeyboardInterrupt:
        transcript.note(f"Stopped. Run {run['id']} continues with: {serve}")
        return INTERRUPTED
    run = server.get(f"/v1/runs/{run['id']}")
    transcript.end(run)
    address = f"http://127.0.0.1:{Settings.model_fields['port'].default}"
    _console.print(
        f"Next: [bold]{escape(serve)}[/], then look at the run: "
        f"{address}/console/#/runs/{run['id']}",
        highlight=False,
        soft_wrap=True,
    )
    return STATUSES.get(run["status"], 1)


def talk(server: RemoteServer, scenario: Scenario, session: str) -> int:
    """Define the support desk; begin or continue a chat; return the exit status."""
    _define(server, scenario)
    _, user = open_session(server, session, USER)
    approvals = People(server, _errors, asks=True, tools={"refund": _refund})
    chat = Chat(server, _errors, approvals, scenario.coordinator, session, user, _AGAIN)
    if server.get("/v1/runs", session_id=session, limit=1)["items"]:
        chat.show_history()
        return chat.talk()
    _say("A customer writes to the support desk. Its refunds above 100 need you.")
    _say(f"Leave with Ctrl-C, or even kill this process, while a refund waits: {_AGAIN} continues.")
    return chat.talk([scenario.task])


def _say(text: str) -> None:
    _errors.print(text, style="dim", highlight=False, soft_wrap=True)


def _refund(arguments: Mapping[str, Any]) -> str:
    return f"{arguments.get('amount')} were paid back to the customer's card"


def _define(server: RemoteServer, scenario: Scenario) -> None:
    for agent in scenario.agents:
        path = f"/v1/agents/{agent['name']}"
        try:
            server.create("/v1/agents", agent)
        except RemoteError as error:
            if error.status != 409:
                raise
            stored, content = server.get(path), {**agent}
            del content["name"]
            differs = any(stored[key] != content[key] for key in content if key != "subagents")
            if is_ours(stored) and differs:
                server.replace(path, content)
    if scenario.graph is not None:
        try:
            server.create("/v1/graphs", scenario.graph)
        except RemoteError as error:
            if error.status != 409:
                raise


def _session(settings: Settings, *, resume: bool) -> str:
    folder = data_folder(settings.data_dir)
    path = folder / "demo-support-session"
    if resume:
        with contextlib.suppress(OSError, ValueError):
            if session := path.read_text().strip():
                return session
        begin = "bottega demo --scenario support"
        raise NotFoundError(f"there is no chat to resume: begin one with `{begin}`")
    session = f"demo-{uuid4().hex[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, session)
    except OSError as error:
        raise UnavailableError(
            f"cannot write to {folder} ({error.strerror}): set BOTTEGA_DATA_DIR to a folder this "
            "user may write to"
        ) from None
    return session


def _write(path: Path, text: str) -> None:
    """Replace a file atomically: after a crash, the file has either the old or the new text."""
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.replace(path)


@contextmanager
def _entered(context: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enter an asynchronous context manager from code without an event loop."""
    with asyncio.Runner() as runner:
        value = runner.run(context.__aenter__())
        try:
            yield value
        finally:
            runner.run(context.__aexit__(None, None, None))


@contextmanager
def _serving(
    settings: Settings, url: str, variables: Mapping[str, str], log: IO[str]
) -> Iterator[str]:
    ours, theirs = socket.socketpair()
    with listen(settings) as listener, ours:
        with theirs:
            process = _start(settings, url, listener.fileno(), theirs.fileno(), variables, log)
        try:
            if not ours.recv(1):
                why = Path(log.name).read_text(errors="replace")[-2000:]
                raise UnavailableError(f"the demo's server did not start: {why}")
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.terminate()
            try:
                process.wait(settings.drain_grace_s + 30.0)
            except subprocess.TimeoutExpired:
                process.kill()


def _start(
    settings: Settings,
    url: str,
    listener: int,
    link: int,
    variables: Mapping[str, str],
    log: IO[str],
) -> "subprocess.Popen[bytes]":
    patience_s = min(_PATIENCE_S, settings.model_patience_s)
    database = settings.pooler_url or url
    more = {"DATABASE_URL": database, "BOTTEGA_MODEL_PATIENCE_S": str(patience_s)}
    more |= {"BOTTEGA_DATA_DIR": str(settings.data_dir), "BOTTEGA_SHARED_MEMORY": "true"}
    more |= variables
    ends = ("--listener", str(listener), "--parent", str(link))
    return subprocess.Popen(  # noqa: S603 (our own command)
        [sys.executable, "-m", "bottega.cli.commands", "serve", "--host", settings.host, *ends],
        env={**os.environ, **more},
        stdin=subprocess.DEVNULL,
        stderr=log,
        pass_fds=(listener, link),
        start_new_session=True,
    )
