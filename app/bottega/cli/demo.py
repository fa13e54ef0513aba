"""HTTP helpers of the demo.

Demo of learning from earlier runs: thirty similar tasks, each judged by a success check.

The lead agent does not know the right order of its sub-agents. A run is a success only if the facts
were collected before the text was written, and the text written before it was checked.

Course of the demo: start a server, define a team over HTTP, run it, and show it.

Demo of a support desk: a chat with a refund that waits for a person, over any restart.

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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import websockets
from pydantic_core import from_json
from rich.console import Console
from rich.panel import Panel

from bottega.cli.chat import Chat, open_session
from bottega.cli.client import RemoteError, RemoteServer
from bottega.cli.people import REFUSED, People
from bottega.cli.scenarios import LEARNING, USER, Scenario, is_ours
from bottega.cli.terminal import safe
from bottega.cli.transcript import Transcript
from bottega.db.embedded import default_data_dir
from bottega.errors import NotFoundError, UnavailableError
from bottega.llm.demo_process import demo_model
from bottega.main import listen, serve
from bottega.settings import DEMO_MODEL_NAME, Settings
from bottega.tenants import operator
from bottega.tenants.keys import Scope


class DemoError(Exception):
    """The demo cannot continue; the text is the reason."""


async def checked(answer: Any) -> dict[str, Any]:
    """Return the body of a response, or of an awaitable one.

    Raises:
        DemoError: the response is an error.
    """
    response: httpx2.Response = answer if isinstance(answer, httpx2.Response) else await answer
    body: dict[str, Any] = response.json()
    if response.is_error:
        raise DemoError(f"{response.request.method} {response.request.url}: {body['detail']}")
    return body


NIGHTS = (10, 18, 24)
"""Numbers of tasks after which maintenance of the memory runs, as it otherwise does at night."""
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


@dataclass(frozen=True, slots=True)
class _Done:
    """Finished task.

    Attributes:
        arm: the assignment of its run for a pattern, if there was one.
    """

    run_id: str
    good: bool
    arm: str | None


async def watch(client: httpx2.AsyncClient, scenario: Scenario, console: Console) -> int:
    """Run all tasks and show the learning; return the process's exit status."""
    done: list[_Done] = []
    since = 0
    for number, topic in enumerate(TOPICS, 1):
        done.append(await _one(client, scenario, number, topic, console))
        if number in NIGHTS:
            await _night(client, done[since:], console)
            since = number
    return await _sum_up(client, done, console)


async def _one(
    client: httpx2.AsyncClient, scenario: Scenario, number: int, topic: str, console: Console
) -> _Done:
    """Run one task, and wait until its success check has judged it."""
    task = scenario.task.format(topic=topic)
    # One user per topic: a pattern names a domain only if tasks of three users had it.
    body = {**scenario.run, "input": task, "user": topic, "metadata": _ABOUT}
    run = await checked(client.post("/v1/runs", params={"wait": 60}, json=body))
    if run["status"] != "completed":
        raise DemoError(f"run {run['id']} {run['status']}: {run['error'] or 'it took too long'}")
    events = f"/v1/runs/{run['id']}/events"
    started = await checked(client.get(events, params={"types": "agent.started", "limit": 100}))
    asked = [event["agent"] for event in started["items"] if event["task_id"] is not None]
    given = await checked(client.get(events, params={"types": "context.recalled", "limit": 100}))
    arms = [event["data"]["arm"] for event in given["items"] if "arm" in event["data"]]
    where = f"/v1/runs/{run['id']}"
    judged = await _until(client, where, lambda found: found["outcome"]["source"] is not None)
    good = judged["outcome"]["value"] == "SUCCESS"
    mark = "[green]✓[/]" if good else "[red]✗[/]"
    why = f"  [dim]{_SAID[arms[0]]}[/]" if arms else ""
    console.print(f"{number:>3} {mark} {' → '.join(asked)}{why}", highlight=False)
    return _Done(run["id"], good, arms[0] if arms else None)


async def _night(client: httpx2.AsyncClient, done: Sequence[_Done], console: Console) -> None:
    """Run the memory's maintenance, and show the patterns."""
    for each in done:
        await _until(client, f"/v1/runs/{each.run_id}/learning", _is_over)
    job = await checked(client.post("/v1/memory/maintenance", json={}))
    report = await _until(client, f"/v1/memory/reports/{job['id']}", _is_over)
    if report["status"] == "failed":
        raise DemoError(f"maintenance of the memory failed: {report['error']}")
    console.print("[bold]— maintenance: patterns so far —[/]", highlight=False)
    for pattern in (await checked(client.get("/v1/patterns")))["items"]:
        console.print(f"    {_render(pattern)}", highlight=False, soft_wrap=True)


def _render(pattern: Mapping[str, Any]) -> str:
    known = pattern["evidence"]
    line = f"[bold]{pattern['lifecycle']['state']}[/] {pattern['category']}: {pattern['name']}"
    if known["applications"]:
        line += f" ({known['success_rate']:.0%} of {known['applications']}, e = "
        line += f"{known['e_value']:.1f}, confidence {known['confidence']:.2f})"
    return line


def _is_over(found: Mapping[str, Any]) -> bool:
    return found["status"] in ("done", "failed")


async def _until(
    client: httpx2.AsyncClient, path: str, is_met: Callable[[Mapping[str, Any]], bool]
) -> dict[str, Any]:
    """Poll a path until its body meets a condition; return the body."""
    try:
        async with asyncio.timeout(_RUN_PATIENCE_S):
            while True:
                found = await checked(client.get(path))
                if is_met(found):
                    return found
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise DemoError(f"{path} did not finish within {_RUN_PATIENCE_S:g} s") from None


async def _sum_up(client: httpx2.AsyncClient, done: Sequence[_Done], console: Console) -> int:
    with_it = [each.good for each in done if each.arm in ("trial", "used")]
    without = [each.good for each in done if each.arm not in ("trial", "used")]
    used = sum(each.arm == "used" for each in done[NIGHTS[-1] :])
    page = await checked(client.get("/v1/patterns", params={"state": "VALIDATED"}))
    lines = [f"Successes without a pattern: {_share(without)}; with one: {_share(with_it)}."]
    lines += [_render(each) for each in page["items"]]
    lines.append(f"{used} of the last {len(TOPICS) - NIGHTS[-1]} runs were given it.")
    console.print(Panel("\n".join(lines), title="What the runs taught"))
    return 0 if page["items"] and used else 1


def _share(good: Sequence[bool]) -> str:
    return f"{sum(good)} of {len(good)}"


_console = Console()
_LONGEST = timedelta(hours=1)
"""Lifetime of the demo's API key, should its removal fail."""
_PATIENCE_S = 5.0
"""Seconds that the demo waits for an unavailable model."""

Headers = dict[str, str]


async def run(settings: Settings, url: str, scenario: Scenario, *, keep: bool) -> int:
    """Start a server on loopback and be its client; return the process's exit status."""
    patience_s = min(_PATIENCE_S, settings.model_patience_s)
    update: dict[str, Any] = {"model_patience_s": patience_s, "shared_memory": True}
    settings = settings.model_copy(update=update)
    learns = scenario.agents is LEARNING.agents
    scopes: tuple[Scope, ...] = ("admin",) if learns else ("run", "define")  # admin: maintenance
    async with (
        operator.temporary_key(url, name="demo", good_for=_LONGEST, scopes=scopes) as key,
        contextlib.AsyncExitStack() as stack,
    ):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        if learns:
            # More than usual, since there are only thirty runs.
            update = {"learning_trial_share": 0.8}
            if settings.uses_demo_model:  # without its usual latency, since there are many calls
                base_url = await stack.enter_async_context(demo_model())
                update |= {"openai_base_url": base_url, "model": DEMO_MODEL_NAME}
            settings = settings.model_copy(update=update)
        return await _run(settings, url, headers, scenario, keep)


async def _run(
    settings: Settings, url: str, headers: Headers, scenario: Scenario, keep: bool
) -> int:
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(serve(settings, url, on_listening=listening.set_result))
    client = asyncio.ensure_future(_client(settings, listening, headers, scenario, keep))
    try:
        await asyncio.wait([serving, client], return_when=asyncio.FIRST_COMPLETED)
        if not client.done():  # Ctrl-C stopped the server
            client.cancel()
            await asyncio.gather(client, return_exceptions=True)
            await serving
            return 130
        return client.result()
    except DemoError as error:
        _console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 1
    finally:
        if not serving.done():
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


async def _client(
    settings: Settings,
    listening: "asyncio.Future[int]",
    headers: Headers,
    scenario: Scenario,
    keep: bool,
) -> int:
    base_url = f"http://127.0.0.1:{await listening}"
    async with httpx2.AsyncClient(base_url=base_url, timeout=30, headers=headers) as client:
        await _define(client, scenario)
        if scenario.agents is LEARNING.agents:
            return await watch(client, scenario, _console)
        run_id = (await checked(client.post("/v1/runs", json=scenario.run)))["id"]
        _console.print(f"[dim]POST {base_url}/v1/runs → run {run_id}[/]", highlight=False)
        transcript = Transcript(_console)
        address = f"ws://127.0.0.1:{listening.result()}/v1/runs/{run_id}/ws"
        async for event in _events(address, headers):
            transcript.show(event)
        ended = await checked(client.get(f"/v1/runs/{run_id}"))
    if ended["ended_at"] is None:  # Ctrl-C: the server closed the socket first
        _console.print(
            f"Stopped. Run {run_id} continues when the next server starts.", soft_wrap=True
        )
        return 130
    transcript.end(ended)
    where = f"console/#/runs/{run_id}"
    if keep:
        _console.print(f"Look at the run: {base_url}/{where}", highlight=False, soft_wrap=True)
        _console.print("The server stays up; Ctrl-C stops it.")
        await asyncio.Event().wait()
    address = f"http://127.0.0.1:{Settings.model_fields['port'].default}"
    _console.print(
        f"Next: [bold]bottega serve[/], then look at the run: {address}/{where}",
        highlight=False,
        soft_wrap=True,
    )
    return 0 if ended["status"] == "completed" else 1


async def _define(client: httpx2.AsyncClient, scenario: Scenario) -> None:
    """Create the team, or update what an earlier demo created; leave other agents unchanged."""
    for agent in scenario.agents:
        content = {key: value for key, value in agent.items() if key != "name"}
        await _create(client, "agents", agent, content, is_ours)
    if scenario.graph is not None:
        await _create(client, "graphs", scenario.graph, {}, lambda found: False)


async def _create(
    client: httpx2.AsyncClient, kind: str, body: dict[str, Any], content: dict[str, Any], ours: Any
) -> None:
    answer = await client.post(f"/v1/{kind}", json=body)
    if answer.status_code != 409:
        await checked(answer)
        return
    found = await checked(client.get(f"/v1/{kind}/{body['name']}"))
    if ours(found) and any(
        found[key] != value for key, value in content.items() if key != "subagents"
    ):
        await checked(client.put(f"/v1/{kind}/{body['name']}", json=content))


async def _events(url: str, headers: Headers) -> AsyncIterator[dict[str, Any]]:
    async with websockets.connect(url, max_size=None, additional_headers=headers) as socket:
        async for message in socket:
            frame = from_json(message)
            if frame["type"] != "heartbeat":
                yield safe(frame)


_LONGEST_CHAT = timedelta(days=1)
"""Lifetime of the demo's API key, should its removal fail."""
_AGAIN = "bottega demo --resume"

_errors = Console(stderr=True)


def run_support(
    settings: Settings, url: str, scenario: Scenario, *, resume: bool, keep: bool
) -> int:
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
            _errors.print(f"error: {error.detail}", style="red", markup=False, highlight=False)
            return REFUSED
        if keep:
            _errors.print(f"The server stays up: {address}/console/. Ctrl-C stops it.")
            signal.pause()
    return status


def talk(server: RemoteServer, scenario: Scenario, session: str) -> int:
    """Define the desk, and begin its chat or go on with it; return the exit status."""
    for agent in scenario.agents:
        _define_support(server, agent)
    _, user = open_session(server, session, USER)
    people = People(server, _errors, asks=True, tools={"refund": _refund})
    chat = Chat(server, _errors, people, scenario.coordinator, session, user, _AGAIN)
    if server.get("/v1/runs", session_id=session, limit=1)["items"]:
        chat.show_history()
        return chat.talk()
    _say("A customer writes to the support desk. Its refunds above 100 need you.")
    _say(f"Leave with Ctrl-C, or even kill this process, while one waits: {_AGAIN} goes on.")
    return chat.talk([scenario.task])


def _say(text: str) -> None:
    _errors.print(text, style="dim", highlight=False, soft_wrap=True)


def _refund(arguments: Mapping[str, Any]) -> str:
    return f"{arguments.get('amount')} were paid back to the customer's card"


def _define_support(server: RemoteServer, agent: Mapping[str, Any]) -> None:
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
        made = operator.temporary_key(url, name="demo", good_for=_LONGEST_CHAT, scopes=scopes)
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
                process.wait(settings.drain_grace_s + 30.0)
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
