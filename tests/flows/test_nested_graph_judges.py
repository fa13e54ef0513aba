"""Three processes as graphs in graphs, each killed at every node, turn and element.

A document pipeline asks once for each page, an evaluator and an optimiser take turns, and a
research team is a graph of its own, with a map inside a loop. Each model call kills the worker
once, on its arrival; the result stays the same, and nothing that was answered is asked again.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx2
import pytest

from tests.fake_model import FakeModel, Reply, gated, text
from tests.flows.test_dag import named
from tests.flows.test_deciding_graphs import edge
from tests.flows.test_graph_judges import Killer, finish, served

Messages = Sequence[Mapping[str, Any]]
Answer = Callable[[str, Messages, Counter[str]], tuple[str, str]]
"""Returns the name of a call and what the model says, by agent, prompt and number of answers."""

LIST = {"type": "object", "properties": {"items": {"type": "array"}}, "required": ["items"]}
OK = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
UNTIL_OK = {"feature": "output_json.ok", "op": "eq", "value": True}


def inner(name: str, graph: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "graph", "graph": graph, **more}


def each(agent: str, source: str, **more: Any) -> dict[str, Any]:
    # One at a time: what is under way elsewhere when a worker dies is asked again.
    elements = {"from": source, "pointer": "/items", "concurrency": 1, **more}
    return {"agent": agent, "for_each": elements}


async def define(client: httpx2.AsyncClient, schemas: Mapping[str, Any], *graphs: Any) -> None:
    for graph in graphs:
        for node in graph["nodes"]:
            name = node if isinstance(node, str) else node.get("agent")
            if name is not None:
                agent = {"system_message": f"You are {name}.", "model": "any"}
                more = {"output_schema": schemas[name]} if name in schemas else {}
                stored = await client.put(f"/v1/agents/{name}", json=agent | more)
                assert stored.status_code in (200, 201), stored.text
        stored = await client.post("/v1/graphs", json=graph)
        assert stored.status_code == 201, stored.text


def answering(model: FakeModel, killer: Killer, answer: Answer) -> None:
    """Let the model answer; a call that kills the worker gets no answer."""
    answered = Counter[str]()

    def decide(request: dict[str, Any]) -> Reply:
        name = named(request)
        call, said = answer(name, request["messages"], answered)
        if killer.meets(call):
            return gated(asyncio.Event(), text("never heard"))
        answered[name] += 1
        return text(said)

    model.decide = decide


async def killed_at(
    database_url: str,
    model: FakeModel,
    graphs: Sequence[Mapping[str, Any]],
    schemas: Mapping[str, Any],
    answer: Answer,
    calls: Sequence[str],
    output: Any,
    only: Sequence[str],
) -> None:
    """Check that the last of some graphs has the same result, killed at any of its calls.

    Args:
        calls: names of all of them.
        only: those at which this test kills the worker; empty text: at none.
    """
    async with served(database_url, model) as (client, port, workers):
        await define(client, schemas, *graphs)
        for call in only:
            killer = Killer(call)
            answering(model, killer, answer)
            body = {"graph": graphs[-1]["name"], "input": "Go."}
            found, _ = await finish(client, port, workers, body, killer)
            assert (found["status"], found["output"]) == ("completed", output), (call, found)
            seen = Counter(calls)
            seen[call] += call in seen
            assert killer.seen == seen, call


def last_text(messages: Messages) -> str:
    content: str = messages[-1]["content"]
    return content


# --- The document pipeline ------------------------------------------------------------------------


def pipeline(**more: Any) -> dict[str, Any]:
    edges = [edge("split", "read"), edge("read", "merge")]
    nodes = ["split", each("read", "split", **more), "merge"]
    return {"name": "pipeline", "nodes": nodes, "edges": edges}


def reads_pages(name: str, messages: Messages, answered: Counter[str]) -> tuple[str, str]:
    if name == "split":
        return name, json.dumps({"items": ["one", "two", "three"]})
    if name == "read":
        page = last_text(messages)
        return f"read {page}", f"about {page}"
    assert '["about one","about two","about three"]' in str(messages)
    return name, "All of it."


PAGES = ["split", "read one", "read two", "read three", "merge"]


async def pipeline_killed_at(
    database_url: str, model: FakeModel, only: Sequence[str], **more: Any
) -> None:
    graph, schemas = pipeline(**more), {"split": LIST}
    await killed_at(database_url, model, [graph], schemas, reads_pages, PAGES, "All of it.", only)


@pytest.mark.deep
async def test_a_document_pipeline_goes_on_at_every_page(
    database_url: str, model: FakeModel
) -> None:
    await pipeline_killed_at(database_url, model, ["", *PAGES])


@pytest.mark.deep
async def test_child_runs_of_pages_go_on(database_url: str, model: FakeModel) -> None:
    await pipeline_killed_at(database_url, model, PAGES, spread_above=1)


# --- Evaluator and optimiser ----------------------------------------------------------------------

TURN = {"name": "turn", "nodes": ["draft", "judge"], "edges": [edge("draft", "judge")]}
OPTIMISER = {
    "name": "optimiser",
    "nodes": [inner("improve", "turn", loop={"until": UNTIL_OK, "max": 5}), "publish"],
    "edges": [edge("improve", "publish")],
}


def improves(name: str, messages: Messages, answered: Counter[str]) -> tuple[str, str]:
    turn = answered[name] + 1
    if name == "draft":
        assert ("Shared context from improve" in str(messages)) == (turn > 1)
        return f"draft {turn}", f"version {turn}"
    if name == "judge":
        assert f"version {turn}" in str(messages)
        return f"judge {turn}", json.dumps({"ok": turn == 3})
    return name, "It is good."


TURNS = [f"{agent} {turn}" for turn in (1, 2, 3) for agent in ("draft", "judge")] + ["publish"]


async def optimiser_killed_at(database_url: str, model: FakeModel, only: Sequence[str]) -> None:
    graphs, schemas = [TURN, OPTIMISER], {"judge": OK}
    await killed_at(database_url, model, graphs, schemas, improves, TURNS, "It is good.", only)


async def test_an_optimiser_goes_on_at_a_turn(database_url: str, model: FakeModel) -> None:
    await optimiser_killed_at(database_url, model, ["judge 2"])


@pytest.mark.deep
async def test_an_optimiser_goes_on_at_every_turn(database_url: str, model: FakeModel) -> None:
    await optimiser_killed_at(database_url, model, ["", *TURNS])


# --- A research team: a map inside a loop inside a sub-graph --------------------------------------

ROUND = {
    "name": "round",
    "nodes": ["plan", each("search", "plan"), "judge"],
    "edges": [edge("plan", "search"), edge("search", "judge")],
}
TEAM = {
    "name": "team",
    "nodes": [inner("rounds", "round", loop={"until": UNTIL_OK, "max": 4}), "summary"],
    "edges": [edge("rounds", "summary")],
}
RESEARCH = {
    "name": "research",
    "nodes": ["brief", inner("team", "team"), "report"],
    "edges": [edge("brief", "team"), edge("team", "report")],
}


def researches(name: str, messages: Messages, answered: Counter[str]) -> tuple[str, str]:
    turn = answered[name] + 1
    if name == "plan":
        assert "Shared context from brief" in str(messages)
        return f"plan {turn}", json.dumps({"items": [f"a{turn}", f"b{turn}"]})
    if name == "search":
        topic = last_text(messages)
        return f"search {topic}", f"found {topic}"
    if name == "judge":
        assert f'["found a{turn}","found b{turn}"]' in str(messages)
        return f"judge {turn}", json.dumps({"ok": turn == 2})
    return name, f"The {name}."


ROUNDS = [
    "brief",
    *(f"{what}{turn}" for turn in (1, 2) for what in ("plan ", "search a", "search b", "judge ")),
    "summary",
    "report",
]


async def research_killed_at(database_url: str, model: FakeModel, only: Sequence[str]) -> None:
    graphs, schemas = [ROUND, TEAM, RESEARCH], {"plan": LIST, "judge": OK}
    await killed_at(database_url, model, graphs, schemas, researches, ROUNDS, "The report.", only)


@pytest.mark.deep
async def test_a_research_team_goes_on_at_an_element(database_url: str, model: FakeModel) -> None:
    await research_killed_at(database_url, model, ["search b2"])


@pytest.mark.deep
async def test_a_research_team_goes_on_at_every_node(database_url: str, model: FakeModel) -> None:
    await research_killed_at(database_url, model, ["", *ROUNDS])
