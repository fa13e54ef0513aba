"""The work that all participants do, and the process in which one of them does it.

    python -m benchmarks.peers.work with_langgraph http://127.0.0.1:1234/v1 [DATABASE_URL]

It imports nothing but the participant, so it runs in an environment without Bottega. It prints the
versions of the participant's packages, then for each line of standard input, such as ``{"work":
"team", "runs": 60, "at_once": 20}``, a line with the CPU and the wall time of these runs.
"""

import asyncio
import gc
import importlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from typing import Any

LOOP, TEAM, FAN_OUT = "loop", "team", "fan-out"
STEPS, WIDTH = 20, 100
SPECIALISTS = ("requirements", "designer", "implementer")
MODEL = "demo"
ASSISTANT, COORDINATOR, HELPER = "You are an assistant.", "You coordinate.", "You help."
FIND_OUT, BUILD, GO = "Find out.", "Build a todo app.", "Go."
DONE = "done"
"""The last answer of each run."""

Run = Callable[[], Awaitable[Any]]
"""Does one run of a work, and fails if it did not end with :data:`DONE`."""


def prompt_of(specialist: str) -> str:
    return f"You are the {specialist} specialist."


def described(specialist: str) -> str:
    return f"Asks the {specialist} specialist."


async def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return "60"


def check(answer: object) -> None:
    """Fail if a run's last answer is another one.

    Raises:
        SystemExit: it is.
    """
    if answer != DONE:
        raise SystemExit(f"a run ended with {answer!r}")


async def measure(run: Run, runs: int, at_once: int) -> dict[str, Any]:
    """Return the CPU of some runs, and how long each took, in milliseconds."""
    slots = asyncio.Semaphore(at_once)
    took = []

    async def one() -> None:
        async with slots:
            began = time.perf_counter()
            await run()
            took.append((time.perf_counter() - began) * 1000)

    gc.collect()
    spent = time.process_time()
    await asyncio.gather(*(one() for _ in range(runs)))
    return {"cpu_ms": (time.process_time() - spent) * 1000 / runs, "took_ms": took}


async def serve(participant: Any, *addresses: str) -> None:
    """Do what standard input asks for."""
    async with participant.works(*addresses) as works:
        runs: Mapping[str, Run] = works
        versions = {name: version(name) for name in participant.PACKAGES}
        print(json.dumps({"versions": versions, "works": list(runs)}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            found = await measure(runs[asked["work"]], asked["runs"], asked["at_once"])
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    asyncio.run(serve(importlib.import_module(f"benchmarks.peers.{name}"), *rest))
