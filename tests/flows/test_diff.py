"""Two runs compared, agent by agent."""

import asyncio
from time import process_time
from typing import Any
from uuid import uuid4

import pytest

from bottega.runs.diff import MOST_CHARACTERS, MOST_LINES, output_difference
from tests.fake_model import FakeModel, calls, gated, http_error, text
from tests.flows.test_dag import DIAMOND, run_dag, says
from tests.flows.test_retry import again, ended
from tests.service import Running
from tests.team import define, define_graph, start
from tests.waiting import until


async def diff(bottega: Running, run_id: str, other: str, **params: Any) -> dict[str, Any]:
    query = {"with": other, **params}
    answer = await bottega.client.get(f"/v1/runs/{run_id}/diff", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def both(before: Any, after: Any) -> dict[str, Any]:
    return {"before": before, "after": after}


async def test_two_runs_are_compared_agent_by_agent(guest: Running, guest_model: FakeModel) -> None:
    await define(guest.client)
    asked = calls(("requirements", {"query": "go"}))
    guest_model.script(asked, text("R1\nsame"), text("done"))
    first, _ = await ended(guest, await start(guest.client))
    guest_model.script(asked, text("R2\nsame"), calls(("designer", {"query": "go"})), text("D"))
    guest_model.script(text("done"))
    second, _ = await ended(guest, (await again(guest, first["id"], "start"))["id"])
    found = await diff(guest, first["id"], second["id"])
    assert (found["before"]["id"], found["after"]["id"]) == (first["id"], second["id"])
    usages = [run["usage"] for run in (first, second)]
    assert found["total"]["tokens"] == both(*(each["input"] + each["output"] for each in usages))
    assert found["total"]["model_calls"] == both(3, 5)
    assert found["total"]["tool_calls"] == both(1, 2)
    agents = {each["agent"]: each for each in found["agents"]}
    assert [*agents] == sorted(agents) == ["coordinator", "designer", "requirements"]
    for name in ("tokens", "model_calls", "tool_calls"):
        sums = [sum(each[name][side] for each in agents.values()) for side in ("before", "after")]
        assert both(*sums) == found["total"][name]
    requirements = agents["requirements"]
    assert requirements["version"] == both(1, 1)
    assert requirements["output"]["diff"].splitlines()[3:] == ["-R1", "+R2", " same"]
    assert agents["coordinator"]["output"]["diff"] == ""
    designer = agents["designer"]
    lines = "--- before\n+++ after\n@@ -0,0 +1 @@\n+D"
    assert designer["output"] == {**both(None, "D"), "diff": lines, "truncated": False}
    assert (designer["queries"], designer["duration_ms"]["before"]) == (both(0, 1), None)
    assert designer["duration_ms"]["after"] >= 0
    assert designer["received"] == [
        {"source": "requirements", "version": both(None, 1), "times": both(0, 1), "is_same": False}
    ]


async def test_it_shows_what_agents_received_and_comes_in_pages(
    guest: Running, guest_model: FakeModel
) -> None:
    await define_graph(guest.client, "g", *DIAMOND)
    guest_model.decide = says(a=text("A"), b=text("B"), c=text("C"), d=text("D"))
    first = await run_dag(guest)
    guest_model.decide = says(a=text("A"), b=text("other"), c=text("C"), d=http_error(400))
    second = await run_dag(guest)
    page = await diff(guest, first["id"], second["id"], limit=3)
    assert [each["agent"] for each in page["agents"]] == ["a", "b", "c"]
    page = await diff(guest, first["id"], second["id"], limit=3, cursor=page["next_cursor"])
    assert page["next_cursor"] is None
    (last,) = page["agents"]
    assert last["output"]["after"] is None
    assert last["received"] == [
        {"source": name, "version": both(1, 1), "times": both(1, 1), "is_same": same}
        for name, same in (("b", False), ("c", True))
    ]
    down = await diff(guest, first["id"], second["id"], order="desc", limit=1)
    assert [each["agent"] for each in down["agents"]] == ["d"]


async def test_a_run_under_way_is_compared_as_far_as_it_is(
    guest: Running, guest_model: FakeModel
) -> None:
    await define(guest.client)
    go_on = asyncio.Event()
    guest_model.script(
        calls(("requirements", {"query": "go"})), text("R1"), gated(go_on, text("x"))
    )
    run_id = await start(guest.client)
    await guest_model.received(3)
    found = await until(
        lambda: diff(guest, run_id, run_id),
        lambda found: found["total"]["tokens"]["before"] is None and len(found["agents"]) == 2,
    )
    assert found["before"]["status"] == "running"
    go_on.set()


@pytest.mark.parametrize("missing", ["path", "query"])
async def test_an_unknown_run_is_not_compared(guest: Running, missing: str) -> None:
    await define(guest.client)
    known, other = await start(guest.client), str(uuid4())
    first, second = (other, known) if missing == "path" else (known, other)
    answer = await guest.client.get(f"/v1/runs/{first}/diff?with={second}")
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert other in answer.json()["detail"]


def test_long_outputs_are_compared_in_part() -> None:
    many = "\n".join(f"{i}" for i in range(MOST_LINES + 1))
    found = output_difference(side(many), side(many + "\nmore"))
    assert (found["diff"], found["truncated"]) == ("", True)
    found = output_difference(side("x"), side("x" * MOST_CHARACTERS, MOST_CHARACTERS + 1))
    assert found["truncated"]
    assert not output_difference(side("x"), {})["truncated"]


def test_the_worst_texts_are_compared_soon() -> None:
    """Lines that repeat in another order; a second would be too long."""
    old, new = ("\n".join(str(i * step % 97) for i in range(5000)) for step in (1, 61))
    begun = process_time()
    output_difference(side(old), side(new))
    assert process_time() - begun < 1


def side(output: str, length: int | None = None) -> dict[str, Any]:
    return {"output": output, "length": length or len(output)}
