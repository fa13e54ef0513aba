"""Cost of a turn of a conversation, by the turns before it.

python -m benchmarks.conversations [--turns 1000] [--memory off]

One process with API and worker, the embedded database, a model that costs next to nothing. One
client asks question after question in one session. Told are means of ten turns: CPU of the service
and of the database, the time from the request to the answer, and the prompt's tokens. Compare only
figures of the same invocation.
"""

import argparse
import asyncio
import time
from dataclasses import dataclass, fields

import httpx2

from benchmarks.harness import cpu_s, process, temporary_database
from benchmarks.model import fast_model

SAMPLE = 10
_QUESTION = "What is the state of my order? " * 8


@dataclass(frozen=True, slots=True)
class Turn:
    """Means of a sample of turns."""

    service_ms: float
    database_ms: float
    took_ms: float
    tokens: float


async def sample(client: httpx2.AsyncClient, pids: tuple[int, int], memory: str) -> Turn:
    """Ask :data:`SAMPLE` questions; return what each cost."""
    before = [cpu_s(pid) for pid in pids]
    began = time.perf_counter()
    tokens = 0
    for _ in range(SAMPLE):
        tokens += await ask(client, memory)
    took = time.perf_counter() - began
    service, database = (cpu_s(pid) - spent for pid, spent in zip(pids, before, strict=True))
    per = 1000 / SAMPLE
    return Turn(service * per, database * per, took * per, tokens / SAMPLE)


async def ask(client: httpx2.AsyncClient, memory: str) -> int:
    """Take a turn; return the tokens of its prompt."""
    body = {"agent": "clerk", "session_id": "s", "input": _QUESTION, "memory": memory}
    run = (await client.post("/v1/runs?wait=30", json=body)).json()
    if run["status"] != "completed":
        raise SystemExit(f"the run did not complete: {run}")
    tokens: int = run["usage"]["input"]
    return tokens


async def measure(
    client: httpx2.AsyncClient, pids: tuple[int, int], turns: int, memory: str
) -> None:
    agent = {"name": "clerk", "system_message": "You answer customers."}
    (await client.post("/v1/agents", json=agent)).raise_for_status()
    for _ in range(20):  # to warm up, in no conversation
        body = {"agent": "clerk", "input": _QUESTION, "memory": memory}
        await client.post("/v1/runs?wait=30", json=body)
    print("    turn" + "".join(f"{each.name:>14}" for each in fields(Turn)))
    done = 0
    for first in (1, 10, 100, 1000, 10_000):
        if first > turns:
            break
        while done < first - 1:
            done += 1
            await ask(client, memory)
        found = await sample(client, pids, memory)
        done += SAMPLE
        values = (getattr(found, each.name) for each in fields(Turn))
        print(f"{first:8}" + "".join(f"{value:14.1f}" for value in values))


async def served(url: str, postmaster: int, turns: int, memory: str) -> None:
    """Measure a service on this database."""
    async with (
        fast_model() as model,
        process(
            *("serve", "--port", "0"),
            ready="listens on",
            DATABASE_URL=url,
            OPENAI_API_KEY="none",
            OPENAI_BASE_URL=model.base_url,
        ) as (child, line),
    ):
        base_url = "http://127.0.0.1:" + line.split("http://127.0.0.1:")[1].split()[0]
        async with httpx2.AsyncClient(base_url=base_url, timeout=60) as client:
            await measure(client, (child.pid, postmaster), turns, memory)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--memory", choices=("off", "read", "full"), default="off")
    options = parser.parse_args()
    with temporary_database() as (url, postmaster):
        asyncio.run(served(url, postmaster, options.turns, options.memory))


if __name__ == "__main__":
    main()
