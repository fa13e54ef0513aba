"""Course of the demo: start a server, define a team over HTTP, run it, and show it."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import httpx2
import websockets
from pydantic_core import from_json
from rich.console import Console
from rich.markdown import Markdown
from rich.panel import Panel
from rich.text import Text

from bottega.cli.demo import learning
from bottega.cli.demo.client import DemoError, checked
from bottega.cli.demo.scenarios import LEARNING, Scenario, is_ours
from bottega.cli.remote.screen import drawing
from bottega.cli.texts import safe
from bottega.main import serve
from bottega.settings import Settings
from bottega.tenants import operator
from bottega.tenants.keys import Scope

_console = Console()
_LONGEST = timedelta(hours=1)
"""Lifetime of the demo's API key, should its removal fail."""
_PATIENCE_S = 5.0
"""Seconds that the demo waits for an unavailable model."""

Headers = dict[str, str]


async def run(settings: Settings, url: str, scenario: Scenario, *, keep: bool) -> int:
    """Start a server on loopback and be its client; return the process's exit status."""
    patience_s = min(_PATIENCE_S, settings.model_patience_s)
    update = {"model_patience_s": patience_s, "shared_memory": True}
    settings = settings.model_copy(update=update)
    learns = scenario.agents is LEARNING.agents
    if learns:
        faster = {"learning_trial_share": learning.TRIAL_SHARE, "demo_latency_ms": 0}
        settings = settings.model_copy(update=faster)
    scopes: tuple[Scope, ...] = ("admin",) if learns else ("run", "define")  # admin: maintenance
    async with operator.temporary_key(url, name="demo", good_for=_LONGEST, scopes=scopes) as key:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
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
            return await learning.watch(client, scenario, _console)
        run_id = (await checked(client.post("/v1/runs", json=scenario.run)))["id"]
        _console.print(f"[dim]POST {base_url}/v1/runs → run {run_id}[/]", highlight=False)
        await _watch(f"ws://127.0.0.1:{listening.result()}/v1/runs/{run_id}/ws", headers)
        ended = await checked(client.get(f"/v1/runs/{run_id}"))
    if ended["ended_at"] is None:  # Ctrl-C: the server closed the socket first
        _console.print(
            f"Stopped. Run {run_id} continues when the next server starts.", soft_wrap=True
        )
        return 130
    _show_end(settings, ended)
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


async def _watch(url: str, headers: Headers) -> None:
    """Draw the run until it is over."""
    with drawing(_console) as show:
        async for event in _events(url, headers):
            show(event)


def _show_end(settings: Settings, run: dict[str, Any]) -> None:
    if run["status"] == "completed":
        model = settings.default_model
        _console.print(Panel(Markdown(str(run["output"])), title=f"The answer (model: {model})"))
    else:
        error = run["error"] or {"message": run["status"]}
        _console.print(Panel(Text(error["message"]), title=f"The run {run['status']}", style="red"))
