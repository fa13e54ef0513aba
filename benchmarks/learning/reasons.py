"""A world where only the reason of a failure helps: the fault is in the answer, not in the steps.

    python -m benchmarks.learning.reasons [--tasks 40]

Each task has a term of its own that its answer must contain, one of eight, which nothing in the
task tells. It is tried twice through the service, by a scripted model that reads: a reason tells it
the term; otherwise it guesses a term that it does not see in an earlier answer. With reasons, a
success check judges the runs; without, a person says the outcome and nothing else. Both recall the
first try. The figure is the success of the second try where the first failed, with a 95 % interval
(bootstrap over tasks).
"""

import argparse
import asyncio
import re
from collections.abc import Sequence
from random import Random
from typing import Any

import httpx2
from pydantic_core import from_json

from benchmarks.harness import served, temporary_database
from benchmarks.learning.intervals import of_mean
from benchmarks.model import ModelConnection, encoded
from bottega.llm.demo_model.rules import Answer

_TERMS = ("alum", "borax", "cobalt", "dolomite", "ebonite", "feldspar", "gypsum", "halite")
_REASON = re.compile(r'did not contain "(\w+)"')


class _Reader(ModelConnection):
    """A model that does what a reason says, and else guesses."""

    guesses = Random(1)

    def parts(self, body: bytes) -> Sequence[bytes]:
        request: dict[str, Any] = from_json(body)
        read = "\n".join(str(message["content"]) for message in request["messages"])
        if said := _REASON.search(read):
            return encoded(Answer(f"It takes {said[1]}."), request)
        unseen = [each for each in _TERMS if each not in read]
        return encoded(Answer(f"It takes {self.guesses.choice(unseen)}."), request)


async def _judged(client: httpx2.AsyncClient, run_id: str) -> bool:
    """Return whether a run was a success, as soon as somebody judged it."""
    for _ in range(600):
        outcome = (await client.get(f"/v1/runs/{run_id}")).json()["outcome"]
        if outcome["source"] is not None:
            return bool(outcome["value"] == "SUCCESS")
        await asyncio.sleep(0.05)
    raise SystemExit(f"run {run_id} was not judged")


async def _try(client: httpx2.AsyncClient, number: int, term: str, reasons: bool) -> bool:
    agent = f"{'told' if reasons else 'untold'}-{number}"
    task = f"Name the mineral of recipe {number * 7919} for glazing pot {number * 104729}."
    body = {"agent": agent, "input": task, "user": agent}
    run = (await client.post("/v1/runs?wait=30", json=body)).raise_for_status().json()
    if not reasons:
        outcome = "SUCCESS" if term in run["output"] else "FAILURE"
        path = f"/v1/runs/{run['id']}/feedback"
        (await client.post(path, json={"outcome": outcome})).raise_for_status()
    return await _judged(client, run["id"])


async def _second_tries(client: httpx2.AsyncClient, tasks: int, reasons: bool) -> list[bool]:
    """Return the success of each second try after a first one that failed."""
    terms, found = Random(2), []
    for number in range(1, tasks + 1):
        term = terms.choice(_TERMS)
        agent: dict[str, Any] = {"name": f"{'told' if reasons else 'untold'}-{number}"}
        agent["system_message"] = "You answer in one line."
        if reasons:
            agent["success_check"] = [{"type": "contains", "value": term}]
        (await client.post("/v1/agents", json=agent)).raise_for_status()
        if not await _try(client, number, term, reasons):
            found.append(await _try(client, number, term, reasons))
    return found


async def _measure(database_url: str, tasks: int) -> None:
    loop = asyncio.get_running_loop()
    model = await loop.create_server(_Reader, "127.0.0.1", 0)
    port = model.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    async with (
        served(database_url, url, BOTTEGA_EMBEDDING_MODEL="builtin") as service,
        httpx2.AsyncClient(base_url=service.base_url, timeout=60) as client,
    ):
        for name, reasons in (("with reasons", True), ("without", False)):
            found = await _second_tries(client, tasks, reasons)
            print(f"{name:14} {len(found):3} second tries  {of_mean([*map(float, found)])}")
    model.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning.reasons",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--tasks", type=int, default=40)
    asked = parser.parse_args()
    with temporary_database() as (database_url, _):
        asyncio.run(_measure(database_url, asked.tasks))


if __name__ == "__main__":
    main()
