"""Checks of a tenant beside judges of others that never answer."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from bottega.settings import Settings
from tests.fake_model import FakeModel, gated, text
from tests.flows.conftest import asking
from tests.flows.test_outcomes import checked, define, finished, verdict
from tests.service import Running, running
from tests.tenants import holder
from tests.waiting import until

HANG = {"type": "judge", "criteria": "Never answer."}
CONTAINS = {"type": "contains", "value": "blue"}
JSON = {"type": "json_schema", "schema": {"type": "object"}}
JUDGE = {"type": "judge", "criteria": "It names a colour."}


@pytest.fixture
async def judging(
    settings: Settings, database_url: str, model: FakeModel
) -> AsyncIterator[Running]:
    async with running(asking(model, settings), database_url, worker=True) as server:
        yield server


@pytest.mark.parametrize("tenants", [1, pytest.param(12, marks=pytest.mark.deep)])
async def test_judges_that_hang_hold_up_no_check_of_others_and_none_without_a_model(
    judging: Running, database_url: str, model: FakeModel, tenants: int
) -> None:
    gate = asyncio.Event()
    asked = 0

    def answer(request: dict[str, Any]) -> Any:
        nonlocal asked
        told = request["messages"][0]["content"]
        if HANG["criteria"] in told:
            asked += 1
            return gated(gate, verdict(True))
        return verdict(True) if told.startswith("You judge") else text("blue")

    model.decide = answer

    async def user(name: str) -> Running:
        held = await holder(database_url, name)
        return replace(judging, client=held.client(judging), headers=held.headers)

    hanging = [await user(f"hangs-{number}") for number in range(tenants)]
    other = await user("other")
    for each in hanging:
        await define(each, [HANG] * 10, model="any")
        for _ in range(3):
            await finished(each)
    await until(lambda: asked, lambda count: count == 30 * tenants)
    for each in (other, hanging[0]):
        await define(each, [CONTAINS, JSON], name="b")
        run = await checked(each, await finished(each, agent="b"))
        assert [one["passed"] for one in run["success_check"]["results"]] == [True, False]
    await define(other, [JUDGE, CONTAINS], name="c", model="any")
    run = await checked(other, await finished(other, agent="c"))
    assert [one["passed"] for one in run["success_check"]["results"]] == [True, True]
    # What needs no model is known before the judge of the same run has answered.
    await define(other, [HANG, CONTAINS], name="d", model="any")
    run = await finished(other, agent="d")

    async def shown() -> Any:
        return (await other.client.get(f"/v1/runs/{run['id']}")).json()["success_check"]

    check = await until(shown, lambda found: bool(found["results"]))
    assert check["status"] == "pending"
    assert [one["passed"] for one in check["results"]] == [None, True]
    gate.set()
    for each in (other, *hanging):
        await each.client.aclose()
