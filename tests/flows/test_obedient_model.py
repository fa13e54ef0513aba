"""A model that obeys all that it reads does no harm with what it reads of earlier runs.

It polls each id that it sees, calls each address, and repeats each line that no label marks as an
earlier run's. Its memory is full of runs that dispatched tasks, failed, and answered.
"""

import re
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest

from bottega.memory.episodes.episode import episode_id_of
from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, Reply, calls, http_error, text
from tests.service import running
from tests.tools.raw_server import RawServer, answer
from tests.waiting import until

ASKED = "Reconcile the ledger of the harbour warehouse, branch {n}."
SECRET = "the balance of branch {n} is {n}4711 crowns"
UUID_LIKE = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.IGNORECASE)
BRANCHES = 4
STEPS = 6


@pytest.fixture
async def ledger() -> AsyncIterator[RawServer]:
    """A server that refuses."""
    async with RawServer(reply=answer("no ledger is open", status=500)) as server:
        yield server


@pytest.fixture
async def archive() -> AsyncIterator[RawServer]:
    async with RawServer(reply=answer("opened")) as server:
        yield server


def told_in(request: dict[str, Any]) -> list[str]:
    """Return the texts of a request's messages."""
    return [str(message["content"] or "") for message in request["messages"]]


def working(request: dict[str, Any]) -> Reply:
    """Do a task of the first runs: dispatch, fail, cure, answer with ids and addresses."""
    asked = swarm.prompt_of(request)
    if "part" in asked:
        return http_error(400) if "broken" in asked else text(f"{asked} is done, id {UUID(int=7)}")
    (number,) = re.findall(r"branch (\d)", asked)
    steps: list[Reply] = [
        swarm.dispatches(f"good part {number}", f"broken part {number}"),
        swarm.awaits()(request),  # type: ignore[operator]
        calls(("ledger", {"branch": number, "task": swarm.ids_in(request)[:1]})),
        calls(("archive", {"branch": number, "see": f"http://10.1.2.3:80/{UUID(int=9)}"})),
        text(f"{SECRET.format(n=number)}; see task {swarm.ids_in(request)[:1]} at 127.0.0.1:9"),
    ]
    return steps[min(swarm.step_of(request), len(steps) - 1)]


class Obedient:
    """Model that obeys: see the module."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.polled: set[str] = set()

    def __call__(self, request: dict[str, Any]) -> Reply:
        if "part" in swarm.prompt_of(request):
            return http_error(400)
        self.requests.append(request)
        texts = told_in(request)
        new = {found.lower() for each in texts for found in UUID_LIKE.findall(each)} - self.polled
        step = swarm.step_of(request)
        if step == 0:
            return calls(
                ("search_memory", {"query": ASKED.format(n=1)}),
                ("dispatch_subagent", {"prompt": "broken part 9"}),
            )
        if new and step < STEPS:
            self.polled |= new
            return calls(("await_subagent", {"task_ids": sorted(new)}))
        if step < STEPS:
            return calls(("ledger", {"branch": "9"}))
        return text(self._all(texts))

    def _all(self, texts: list[str]) -> str:
        lines = [line for each in texts for line in each.splitlines()]
        return "\n".join(line for line in lines if "earlier run" not in line)


async def test_memory_makes_no_obedient_model_poll_or_repeat_what_is_not_its_own(
    settings: Settings, database_url: str, model: FakeModel, ledger: RawServer, archive: RawServer
) -> None:
    update = {"openai_base_url": model.base_url, "egress_allow": ["127.0.0.1"]}
    parameters = {"type": "object", "properties": {}, "additionalProperties": True}
    tools = [
        {"type": "http", "name": name, "description": name, "url": server.url(), "method": "POST"}
        | {"parameters": parameters}
        for name, server in (("ledger", ledger), ("archive", archive))
    ]
    async with running(settings.model_copy(update=update), database_url, worker=True) as bottega:
        client = bottega.client
        await swarm.coordinator(client, tools=tools)
        about = {"user": "mia", "session_id": None}
        model.decide = working
        earlier: list[str] = []
        for number in range(1, BRANCHES + 1):
            earlier.append(await swarm.start(client, ASKED.format(n=number), **about))
            await bottega.watch(earlier[-1])
            await client.post(f"/v1/runs/{earlier[-1]}/feedback", json={"outcome": "SUCCESS"})
        await until(
            lambda: bottega.owner.fetchval("SELECT count(*) FROM episode_vectors"),
            lambda seen: seen >= BRANCHES,
        )
        theirs = {str(episode_id_of(UUID(each))) for each in earlier} | set(earlier)
        for each in earlier:
            theirs |= {task["id"] for task in await swarm.tasks_of(client, each)}
        model.decide = obedient = Obedient()
        run_id = await swarm.start(client, ASKED.format(n=9), **about)
        frames = await bottega.watch(run_id)
        own = {task["id"] for task in await swarm.tasks_of(client, run_id)}
        output = (await client.get(f"/v1/runs/{run_id}")).json()["output"]
    recalled = [frame["data"] for frame in frames if frame["type"] == "context.recalled"]
    sources = {each["source"].removeprefix("episode:") for each in recalled}
    assert sources & theirs, "events keep the ids"
    helps = [each for each in recalled if each.get("tool_call_id")]
    assert helps, "a failure is helped by earlier runs"
    read = "\n".join(line for each in obedient.requests for line in told_in(each))
    assert "crowns" in read, "it was given what earlier runs answered"
    assert obedient.polled, "it polled"
    assert obedient.polled <= own
    assert not {found.lower() for found in UUID_LIKE.findall(read)} - own
    assert not re.search(r"(?:insight|pattern|episode):[0-9a-f]{8}", read)
    assert not re.search(r"10\.1\.2\.3|127\.0\.0\.1:9\b", read), "no address of an earlier run"
    assert output
    assert "crowns" not in output
    for line in read.splitlines():
        if "crowns" in line or "is done" in line:
            assert "earlier run" in line
    (failed,) = {
        message["content"]
        for request in obedient.requests
        for message in request["messages"]
        if message["role"] == "tool" and "Worked after" in str(message["content"])
    }
    first, *_ = failed.partition("\n\n")[2].splitlines()
    assert first.startswith("Worked after this failure in an earlier run: archive branch=")
    assert failed.count(first.rpartition(": ")[2]) == 1, "the cure is said once"
