"""The work that all participants do, and the process in which one of them does it.

    python -m benchmarks.peers.work with_langgraph http://127.0.0.1:1234/v1 [DATABASE_URL]

A participant is a module with the names of its ``PACKAGES`` and ``maker(base_url, database_url)``,
an asynchronous context that yields a :class:`Maker`. This module imports nothing else, so it runs
in an environment without Bottega. It prints the versions of the packages, then for each line of
standard input, such as ``{"work": "team", "runs": 60, "at_once": 20}``, a line with the CPU and the
wall time of these runs.
"""

import asyncio
import gc
import importlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import Any, Protocol

LOOP, TEAM, FAN_OUT = "loop", "team", "fan-out"
STEPS, WIDTH = 20, 100
SPECIALISTS = ("requirements", "designer", "implementer")
MODEL = "demo"
ASSISTANT, COORDINATOR, HELPER = "You are an assistant.", "You coordinate.", "You help."
QUERIES = {LOOP: "Find out.", TEAM: "Build a todo app.", FAN_OUT: "Go."}
DONE = "done"
"""The last answer of each run."""

Ask = Callable[[str], Awaitable[object]]
"""Asks an agent, with a history of its own; returns its last answer."""


class Maker(Protocol):
    """Factories of tools and agents of a participant."""

    def calculator(self) -> Any:
        """Return a tool that calls :func:`calculate`."""

    def subagent(self, name: str, prompt: str) -> Any:
        """Return a tool that asks an agent without tools."""

    def agent(self, prompt: str, tools: Sequence[Any]) -> Ask:
        """Return what asks an agent with tools, which it calls side by side."""


def prompt_of(specialist: str) -> str:
    return f"You are the {specialist} specialist."


def described(specialist: str) -> str:
    return f"Asks the {specialist} specialist."


async def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return "60"


def works(maker: Maker) -> dict[str, Ask]:
    """Return the agents of all works."""
    team = [maker.subagent(name, prompt_of(name)) for name in SPECIALISTS]
    return {
        LOOP: maker.agent(ASSISTANT, [maker.calculator()]),
        TEAM: maker.agent(COORDINATOR, team),
        FAN_OUT: maker.agent(COORDINATOR, [maker.subagent("helper", HELPER)]),
    }


async def measure(ask: Ask, work: str, runs: int, at_once: int) -> dict[str, Any]:
    """Return the CPU of some runs, and how long each took, in milliseconds.

    Raises:
        SystemExit: a run ended with another answer than :data:`DONE`.
    """
    slots = asyncio.Semaphore(at_once)
    took = []

    async def run() -> None:
        async with slots:
            began = time.perf_counter()
            answer = await ask(QUERIES[work])
            took.append((time.perf_counter() - began) * 1000)
        if answer != DONE:
            raise SystemExit(f"a run ended with {answer!r}")

    gc.collect()
    spent = time.process_time()
    await asyncio.gather(*(run() for _ in range(runs)))
    return {"cpu_ms": (time.process_time() - spent) * 1000 / runs, "took_ms": took}


async def serve(participant: Any, base_url: str, database_url: str | None = None) -> None:
    """Do what standard input asks for."""
    async with participant.maker(base_url, database_url) as maker:
        agents = works(maker)
        print(json.dumps({name: version(name) for name in participant.PACKAGES}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            found = await measure(agents[asked["work"]], **asked)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    asyncio.run(serve(importlib.import_module(f"benchmarks.peers.{name}"), *rest))
