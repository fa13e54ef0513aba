"""Random graphs with conditions, loops, maps and graphs in them, against the reference interpreter.

Each agent adds the numbers that it reads, in its question and in what others have said, so that its
answer tells what it got. A sum of six is a failure.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.graph.decisions import NodeEnd
from tests.examples import examples
from tests.fake_model import FakeModel, Reply, gated, http_error, text
from tests.flows.test_agent_data import create
from tests.flows.test_dag import named
from tests.flows.test_deciding_graphs import nodes_of, run, taken
from tests.flows.test_graph_judges import Killer, finish, served
from tests.graph_reference import Reference, text_of
from tests.service import Running

AGENTS = [f"a{number}" for number in range(5)]
NUMBER = {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}
ABOUT = {"metadata": {"n": 2, "list": [{"n": 1}, {"n": 2}, {"n": 4}]}}
_SHARED = re.compile(r"<shared-context-(\w+)>(.*?)</shared-context-\1>", re.DOTALL)


def numbers(text: str) -> int:
    return sum(int(found) for found in re.findall(r'"n":\s?(\d+)', text))


def sum_of(agent: str, texts: Sequence[str], question: str) -> int:
    return (int(agent[1:]) + numbers(question) + sum(map(numbers, texts))) % 7


def work(agent: str, texts: Sequence[str], question: str) -> NodeEnd:
    """Return the end of an agent, as the reference interpreter sees it."""
    found = sum_of(agent, texts, question)
    if found == 6:
        return NodeEnd(agent, is_failed=True)
    answer = {"n": found}
    return NodeEnd(agent, output=text_of(answer), output_json=answer)


def answer(request: dict[str, Any]) -> Reply:
    """Return the same, as the model says it."""
    messages = request["messages"]
    texts = [found for _, found in _SHARED.findall("\n".join(m["content"] for m in messages[:-1]))]
    found = sum_of(named(request), texts, messages[-1]["content"])
    return http_error(400) if found == 6 else text(text_of({"n": found}))


_tests = st.one_of(
    st.builds(
        lambda value: {"feature": "output_json.n", "op": "gt", "value": value}, st.integers(0, 4)
    ),
    st.builds(
        lambda value: {"feature": "status", "op": "eq", "value": value},
        st.sampled_from(["completed", "failed"]),
    ),
)


@st.composite
def contents(draw: st.DrawFn, inner: Sequence[str]) -> dict[str, Any]:
    """Return a graph that may contain some others."""
    names = [f"n{number}" for number in range(draw(st.integers(1, 4)))]
    nodes: list[dict[str, Any]] = []
    edges: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        node: dict[str, Any] = {"name": name, "agent": draw(st.sampled_from(AGENTS))}
        if draw(st.booleans()) and inner:
            node = {"name": name, "type": "graph", "graph": draw(st.sampled_from(inner))}
            if draw(st.booleans()):
                most, on_max = draw(st.integers(1, 3)), draw(st.sampled_from(["fail", "continue"]))
                node["loop"] = {"until": draw(_tests), "max": most, "on_max": on_max}
        node["join"] = draw(st.sampled_from(["any", "all"]))
        node["on_error"] = draw(st.sampled_from(["fail", "continue", "continue"]))
        above = [edge["source"] for edge in edges if edge["target"] == name]
        lists = [each["name"] for each in nodes if "for_each" in each and each["name"] in above]
        if draw(st.integers(0, 2)) == 0:
            node["for_each"] = {
                "from": draw(st.sampled_from(["run", *lists])),
                "on_error": draw(st.sampled_from(["fail", "skip", "collect"])),
                "spread_above": draw(st.sampled_from([50, 50, 1])),
            }
            if node["for_each"]["from"] == "run":
                node["for_each"]["pointer"] = "/metadata/list"
        is_text = "for_each" in node
        for target in [each for each in names[number + 1 :] if draw(st.booleans())]:
            edge: dict[str, Any] = {"source": name, "target": target}
            if draw(st.booleans()):
                status = {"feature": "status", "op": "eq", "value": "completed"}
                edge["when"] = status if is_text else draw(_tests)
            edges.append(edge)
        nodes.append(node)
    return {"nodes": nodes, "edges": edges, "output": names[-1]}


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Return three graphs by name, each of which may contain those before it."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("g0", "g1", "g"):
        found[name] = draw(contents(list(found)))
    return found


async def stored(client: httpx2.AsyncClient, defined: dict[str, dict[str, Any]]) -> bool:
    """Store graphs; return false if they were refused as impossible."""
    for name, content in defined.items():
        answer = await client.put(f"/v1/graphs/{name}", json=content)
        if answer.status_code == 422 and "can never run" in answer.text:
            return False
        assert answer.status_code in (200, 201), (answer.text, json.dumps(defined))
    return True


def compare(
    found: dict[str, Any], log: list[dict[str, Any]], defined: dict[str, dict[str, Any]]
) -> None:
    """Compare a run of graphs with the reference."""
    reference = Reference(defined["g"], work, ABOUT, defined)
    statuses, edges = reference.results()
    expected = reference.result()
    shown = json.dumps(defined)
    top = {name: each for name, each in nodes_of(log).items() if "/" not in name}
    assert top == statuses, shown
    decided = {key: each for key, each in taken(log).items() if "/" not in key}
    assert decided == {f"{a}-{b}": value for (a, b), value in edges.items()}, shown
    assert (found["status"] == "failed") == expected.is_failed, (found, shown)
    if not expected.is_failed:
        assert re.sub(r'{"code.*?}', "1", found["output"] or "") == (expected.output or ""), shown


def drawn(number: int) -> list[dict[str, dict[str, Any]]]:
    """Return so many random graphs, in the profile of the deep tests."""
    found: list[dict[str, dict[str, Any]]] = []

    @given(graphs())
    @settings(max_examples=examples(number))
    def collect(each: dict[str, dict[str, Any]]) -> None:
        found.append(each)

    collect()
    return found


async def test_random_graphs_end_as_the_reference_says(
    guest: Running, guest_model: FakeModel
) -> None:
    for agent in AGENTS:
        await create(guest, agent, output_schema=NUMBER)
    guest_model.decide = answer
    ran = 0
    for defined in drawn(60):
        if await stored(guest.client, defined):
            found, log = await run(guest, memory="off", **ABOUT)
            compare(found, log, defined)
            ran += 1
    assert ran


@pytest.mark.deep
async def test_random_graphs_go_on_when_a_worker_is_killed(
    database_url: str, model: FakeModel
) -> None:
    """Kill the worker at one of the first calls of each; those with fewer calls are left out."""
    killed = 0
    async with served(database_url, model) as (client, port, workers):
        for agent in AGENTS:
            body = {"name": agent, "system_message": f"You are {agent}.", "model": "any"}
            made = await client.post("/v1/agents", json={**body, "output_schema": NUMBER})
            assert made.status_code == 201, made.text
        for number, defined in enumerate(drawn(1000)):
            asked = Counter[str]()

            def counted(agent: str, *said: Any, asked: Counter[str] = asked) -> NodeEnd:
                asked["all"] += 1
                return work(agent, *said)

            Reference(defined["g"], counted, ABOUT, defined).result()
            at = 1 + number % 4
            if killed >= 12 or asked["all"] <= at or not await stored(client, defined):
                continue
            killer, calls = Killer(str(at)), count(1)

            def decide(
                request: dict[str, Any], killer: Killer = killer, calls: Iterator[int] = calls
            ) -> Reply:
                if killer.meets(str(next(calls))):
                    return gated(asyncio.Event(), text("never heard"))
                return answer(request)

            model.decide = decide
            asked_for: dict[str, Any] = {"graph": "g", "input": "The question.", **ABOUT}
            compare(*await finish(client, port, workers, asked_for, killer), defined)
            killed += 1
    assert killed
