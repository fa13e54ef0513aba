"""Scripted models for runs of coordinators with asynchronous sub-agents.

A script is a table: for each prompt the model's answers, step by step. An agent is recognised
by its prompt, the first line of its query, and its step by the number of its earlier answers.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import asyncpg
import httpx2
from starlette.types import ASGIApp, Receive, Scope, Send

from bottega.llm.demo_model.rules import Answer, read
from tests import waiting
from tests.fake_model import FakeModel, Reply, calls, gated, response, text

Step = Answer | Callable[[dict[str, Any]], Reply]
"""An answer, or a function that makes one from the request."""

FINAL = ("completed", "failed", "timeout", "cancelled")


def prompt_of(request: dict[str, Any]) -> str:
    """Return the first line of the query of a request's agent."""
    first = next(i for i, each in enumerate(request["messages"]) if each["role"] == "user")
    asked = read(request | {"messages": request["messages"][: first + 1]}).asked
    return asked.split("\n")[0]


def step_of(request: dict[str, Any]) -> int:
    """Return the number of earlier answers to the agent of a request."""
    return sum(each["role"] == "assistant" for each in request["messages"])


def plays(script: Mapping[str, Sequence[Step]]) -> Callable[[dict[str, Any]], Reply]:
    """Build a model that follows a script; it answers other prompts with "PROMPT is done"."""

    def decide(request: dict[str, Any]) -> Reply:
        prompt = prompt_of(request)
        steps = script.get(prompt, (text(f"{prompt} is done"),))
        step = steps[min(step_of(request), len(steps) - 1)]
        return step if isinstance(step, Answer) else step(request)

    return decide


def held(gate: asyncio.Event, answer: Reply) -> Step:
    """Return a step that waits for a gate."""
    return lambda request: gated(gate, answer)


def never(request: dict[str, Any]) -> Reply:
    """Return a step that never comes."""
    return gated(asyncio.Event(), text("never"))


def speaks(gate: asyncio.Event) -> Reply:
    """Return a streamed answer that stops in the middle until the gate opens."""

    def make(body: dict[str, Any]) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
            piece = _chunk({"role": "assistant", "content": "so far"})
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await gate.wait()
            end = _chunk({"content": " and done"}, "stop") + b"data: [DONE]\n\n"
            await send({"type": "http.response.body", "body": end})

        return app

    return make


_EVENTS = [(b"content-type", b"text/event-stream")]


def _chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    data = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return b"data: " + json.dumps({**data, "choices": [choice]}).encode() + b"\n\n"


def dispatches(*prompts: str, **common: Any) -> Answer:
    """Dispatch a task for each prompt, all in one message."""
    return calls(*[("dispatch_subagent", {"prompt": prompt, **common}) for prompt in prompts])


def awaits(**arguments: Any) -> Step:
    """Await all that was dispatched so far."""

    def step(request: dict[str, Any]) -> Reply:
        return calls(("await_subagent", {"task_ids": ids_in(request), **arguments}))

    return step


def polls(**arguments: Any) -> Step:
    """Poll all that was dispatched so far."""
    return lambda request: calls(("poll_subagent", {"task_ids": ids_in(request), **arguments}))


def results_in(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of the tool calls in a request; of failed ones their text as ``error``."""
    contents = [each["content"] for each in request["messages"] if each["role"] == "tool"]
    return [
        json.loads(content) if content.startswith("{") else {"error": content}
        for content in contents
    ]


def ids_in(request: dict[str, Any]) -> list[str]:
    """Return the ids from the answers to dispatches, in order."""
    return [each["task_id"] for each in results_in(request) if "task_id" in each]


def reports(request: dict[str, Any]) -> Reply:
    """Report the results of the tasks, from the last tool result: one line for each."""
    tasks = results_in(request)[-1]["tasks"]
    lines = [f"{task['status']}: {task.get('final_output', task.get('error'))}" for task in tasks]
    return text("\n".join(lines))


def after(look: Callable[[], Awaitable[Any]], step: Step) -> Step:
    """Return a step that is made once ``look`` has returned."""

    def make(request: dict[str, Any]) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await look()
            reply = step if isinstance(step, Answer) else step(request)
            await response(reply, request)(scope, receive, send)

        return app

    return lambda request: make


async def coordinator(client: httpx2.AsyncClient, name: str = "boss", **fields: Any) -> None:
    """Create an agent that dispatches; ``names`` and ``limits`` are of its sub-agents."""
    subagents = {"mode": "async", "names": [], **fields.pop("subagents", {})}
    await agent(client, name, subagents=subagents, **fields)


async def agent(client: httpx2.AsyncClient, name: str, **fields: Any) -> None:
    body = {"name": name, "description": name, "system_message": f"You are {name}.", **fields}
    answer = await client.post("/v1/agents", json=body)
    assert answer.status_code == 201, answer.text


async def start(client: httpx2.AsyncClient, prompt: str = "root", **fields: Any) -> str:
    """Start a run of the coordinator; return its id."""
    answer = await client.post("/v1/runs", json={"agent": "boss", "input": prompt, **fields})
    assert answer.status_code == 202, answer.text
    run_id: str = answer.json()["id"]
    return run_id


async def tasks_of(client: httpx2.AsyncClient, run_id: str) -> list[dict[str, Any]]:
    """Read all tasks of a run."""
    items: list[dict[str, Any]] = []
    cursor = ""
    while True:
        page = (await client.get(f"/v1/runs/{run_id}/tasks?limit=200{cursor}")).json()
        items += page["items"]
        if not page.get("next_cursor"):
            return items
        cursor = f"&cursor={page['next_cursor']}"


def moves(frames: Sequence[Mapping[str, Any]], task_id: str) -> list[str]:
    """Return the states that a task entered, in order."""
    return [
        frame["data"]["to"]
        for frame in frames
        if frame["type"] == "subagent.status_changed" and frame["task_id"] == task_id
    ]


def dispatched(frames: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return ids of the tasks in a log, by prompt."""
    return {
        frame["data"]["prompt"]: frame["task_id"]
        for frame in frames
        if frame["type"] == "subagent.dispatched"
    }


def assert_whole(frames: Sequence[Mapping[str, Any]], end: str = "run.completed") -> None:
    """Check that a log is complete, and that each task in it ended once, by one move."""
    assert [frame["seq"] for frame in frames] == list(range(1, len(frames) + 1))
    assert frames[-1]["type"] == end, frames[-1]
    ids = [f["task_id"] for f in frames if f["type"] == "subagent.dispatched"]
    assert len(ids) == len(set(ids))
    kinds = {f"subagent.{status}": status for status in FINAL}
    ends = [(f["task_id"], kinds[f["type"]]) for f in frames if f["type"] in kinds]
    assert Counter(task for task, _ in ends) == Counter(ids)
    last = [
        (f["task_id"], f["data"]["to"])
        for f in frames
        if f["type"] == "subagent.status_changed" and f["data"]["to"] in FINAL
    ]
    assert sorted(last) == sorted(ends)


async def until(url: str, query: str, *arguments: object) -> None:
    """Wait until a database query returns a true value."""
    connection = await asyncpg.connect(url)
    try:
        await waiting.until(lambda: connection.fetchval(query, *arguments))
    finally:
        await connection.close()


async def polls_a_child_run(client: httpx2.AsyncClient, model: FakeModel) -> None:
    """Poll a child run in the middle of its answer, twice, and then let an await time out."""
    gate, is_shown = asyncio.Event(), asyncio.Event()
    polls = calls(("poll_subagent", {}))

    def ends(request: dict[str, Any]) -> Reply:
        gate.set()
        return text("done")

    model.decide = plays(
        {
            "root": [
                dispatches("leaf"),
                held(is_shown, polls),
                polls,
                awaits(timeout_ms=1000),
                ends,
            ],
            "leaf": [lambda request: speaks(gate)],
        }
    )
    await coordinator(client, subagents={"limits": {"spread_above": 0}})
    run_id = await start(client)
    talks = lambda tasks: tasks and tasks[0]["partial_output"]  # noqa: E731
    (task,) = await waiting.until(lambda: tasks_of(client, run_id), talks)
    assert (task["status"], task["partial_output"]) == ("running", "so far")
    is_shown.set()
    await waiting.until(gate.is_set)
    asked = [each for each in model.requests if prompt_of(each) == "root"][-1]
    first, second, awaited = (each["tasks"][0] for each in results_in(asked)[1:])
    assert first["partial_output"] == "so far"
    assert "partial_output" not in second
    assert awaited["partial_output"] == "so far"
