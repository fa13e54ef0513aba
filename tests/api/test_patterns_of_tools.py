"""Costly regular expressions in tools: refused at once, or compiled without delaying others."""

import asyncio
import os
import time
from typing import Any

import httpx2
import pytest

from bottega.api.shared import schemas
from tests.api.test_bad_input import GOOD, problem
from tests.service import Running

UUID = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"


def agent(*tools: list[str]) -> dict[str, Any]:
    """Return an agent whose tools have these patterns."""
    made = [
        {
            "type": "http",
            "name": f"tool{number}",
            "description": "x",
            "method": "POST",
            "url": "https://api.example.com/",
            "parameters": {
                "properties": {str(index): {"pattern": each} for index, each in enumerate(patterns)}
            },
        }
        for number, patterns in enumerate(tools)
    ]
    return GOOD | {"tools": made}


async def longest_gap(until: asyncio.Task[Any]) -> float:
    """Return the longest CPU time for which the event loop did nothing else."""
    longest, last = 0.0, time.process_time()
    while not until.done():
        await asyncio.sleep(0)
        longest, last = max(longest, (now := time.process_time()) - last), now
    return longest


def bomb(start: int, count: int) -> list[str]:
    return [f"{start + number}z\\w{{90}}" for number in range(count)]


@pytest.mark.parametrize(
    ("tools", "pointer"),
    [
        ([bomb(0, 100)], "/tools/0/parameters/properties/8/pattern"),
        ([bomb(0, 50), bomb(50, 50)], "/tools/0/parameters/properties/8/pattern"),
        ([["a"] * 50] * 4 + [["a"]], "/tools/4/parameters/properties/0/pattern"),
        ([["a", "(a{40}){40}"]], "/tools/0/parameters/properties/1/pattern"),
    ],
)
async def test_too_large_patterns_are_refused_at_once(
    refusing: Running, tools: list[list[str]], pointer: str
) -> None:
    client = refusing.client
    sent = asyncio.ensure_future(client.post("/v1/agents", json=agent(*tools)))
    assert await longest_gap(sent) < 0.2
    body = problem(await sent, 422)
    assert body["code"] == "pattern_too_large"
    assert [error["pointer"] for error in body["errors"]] == [pointer]
    assert (await client.get("/v1/agents")).json()["items"] == []


async def test_other_requests_are_answered_while_patterns_are_compiled(
    client: httpx2.AsyncClient,
) -> None:
    """Compile patterns of 0.4 s together; in this process, none of its threads would run."""
    patterns = bomb(900, 8)
    before = os.times()
    sent = asyncio.ensure_future(client.post("/v1/agents", json=agent(patterns)))
    assert await longest_gap(sent) < 0.2
    assert (await sent).status_code == 201, (await sent).text
    assert os.times().children_user > before.children_user


async def test_a_common_pattern_is_accepted_in_each_of_many_tools(
    client: httpx2.AsyncClient,
) -> None:
    body = agent(*[[UUID, r"^[\w.-]{1,64}$"]] * 40)
    assert (await client.post("/v1/agents", json=body)).status_code == 201
    stored = (await client.get("/v1/agents/a")).json()
    assert stored["tools"][39]["parameters"] == body["tools"][39]["parameters"]
    for number, patterns in enumerate((["("], [*bomb(0, 1), "("])):
        broken = {name: value for name, value in agent(patterns).items() if name != "name"}
        error = problem(await client.put("/v1/agents/a", json=broken), 422)["errors"][0]
        assert error["pointer"] == f"/tools/0/parameters/properties/{number}/pattern"


async def test_few_costly_patterns_are_tried_at_a_time(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hold the trial of patterns."""
    gate = asyncio.Event()

    async def held(*about: Any) -> bytes:
        await gate.wait()
        return b"null"

    monkeypatch.setattr(schemas._processes, "output", held)
    bodies = [agent(bomb(100 * number, 8)) | {"name": f"a{number}"} for number in range(3)]
    sent = [asyncio.ensure_future(client.post("/v1/agents", json=body)) for body in bodies]
    done, waiting = await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED)
    (refused,) = done
    assert problem(refused.result(), 429)["code"] == "pattern_checks"
    assert refused.result().headers["retry-after"] == "5"
    gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [201, 201]


async def test_costly_patterns_that_take_too_long_are_refused(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas._processes, "_longest_s", 0.0)
    answer = await client.post("/v1/agents", json=agent(bomb(0, 8)))
    assert problem(answer, 503)["code"] == "patterns_too_slow"
