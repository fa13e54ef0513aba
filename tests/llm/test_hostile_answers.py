"""Bytes of a hostile model server cost little CPU, and none of it for long."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from bottega.agents.messages import HumanMessage
from bottega.agents.provider import DialectName
from bottega.errors import ModelError
from bottega.llm.openai_embedder import OpenAIEmbedder
from bottega.llm.provider import open_provider
from bottega.llm.server import ServerSpec
from tests.accounts import Purse
from tests.hostile import (
    CHUNKS,
    HARMLESS,
    LONGEST_TURN_S,
    MOST_S,
    PIECES_OF_CALLS,
    STREAMS,
    UNKNOWN_FIELDS,
    Body,
    Cost,
    allowed_s,
    cost_of,
    sending,
)

DIALECTS: tuple[DialectName, ...] = ("chat", "responses", "anthropic", "gemini")
CORPUS = {**STREAMS, **PIECES_OF_CALLS, **UNKNOWN_FIELDS, **CHUNKS}


async def cost_of_call(dialect: DialectName, body: Body) -> tuple[Cost, list[ModelError]]:
    failures: list[ModelError] = []
    with sending(body.answer()) as port:
        address = f"http://127.0.0.1:{port}/v1"
        provider = open_provider(
            ServerSpec(dialect=dialect, base_url=address, api_key="k", patience_s=0), "m"
        )

        async def call() -> None:
            try:
                await provider.invoke([HumanMessage(content="x")])
            except ModelError as error:
                failures.append(error)

        cost = await cost_of(call)
        await provider.aclose()
    return cost, failures


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Load what a first call does."""
    for dialect in DIALECTS:
        asyncio.run(cost_of_call(dialect, HARMLESS))


def sampled() -> Iterator[Any]:
    """Pair each body with each dialect; the gate runs two of its four pairs."""
    for number, name in enumerate(CORPUS):
        for dialect in DIALECTS:
            in_gate = dialect in (DIALECTS[0], DIALECTS[1 + number % 3])
            yield pytest.param(name, dialect, marks=() if in_gate else pytest.mark.deep)


@pytest.mark.parametrize(("name", "dialect"), [*sampled()])
async def test_a_hostile_answer_fails_the_call_and_costs_little(
    name: str, dialect: DialectName
) -> None:
    body = CORPUS[name]
    cost, failures = await cost_of_call(dialect, body)
    assert failures
    for _ in range(3):
        if cost.whole_s > allowed_s(body) or cost.turn_s > LONGEST_TURN_S:  # the machine was busy
            cost, _ = await cost_of_call(dialect, body)
    assert cost.whole_s <= allowed_s(body), f"{cost.whole_s / body.steps * 1000:.1f} ms a step"
    assert cost.turn_s <= LONGEST_TURN_S


async def test_the_reason_is_told_and_is_no_outage() -> None:
    with sending(STREAMS["line feeds, packed"].answer()) as port:
        provider = open_provider(
            ServerSpec(dialect="chat", base_url=f"http://127.0.0.1:{port}/v1", api_key="k"), "m"
        )
        with pytest.raises(ModelError, match="more than 500000 lines") as failed:
            await provider.invoke([HumanMessage(content="x")])
        await provider.aclose()
    assert (failed.value.code, failed.value.retryable) == ("model_bad_response", False)


@pytest.mark.parametrize("name", [*STREAMS, *CHUNKS])
async def test_a_hostile_embedder_costs_little(name: str) -> None:
    body = {**STREAMS, **CHUNKS}[name]
    with sending(body.answer()) as port:
        embedder = OpenAIEmbedder(
            "m", Purse(), api_key="k", base_url=f"http://127.0.0.1:{port}/v1", max_tries=1
        )
        cost = await cost_of(lambda: embedder.embed(["x"]))
        await embedder.aclose()
    assert cost.whole_s <= allowed_s(body)
    assert cost.turn_s <= LONGEST_TURN_S


@pytest.mark.parametrize("name", ["line feeds, packed", "zeros, packed", "wide JSON"])
async def test_a_hostile_refusal_costs_little(name: str) -> None:
    body = STREAMS[name]
    refusal = body.answer().replace(b"200 OK", b"400 No", 1)
    with sending(refusal) as port:
        provider = open_provider(
            ServerSpec(dialect="chat", base_url=f"http://127.0.0.1:{port}/v1", api_key="k"), "m"
        )

        async def call() -> None:
            with pytest.raises(ModelError):
                await provider.invoke([HumanMessage(content="x")])

        cost = await cost_of(call)
        await provider.aclose()
    assert cost.whole_s <= MOST_S
    assert cost.turn_s <= LONGEST_TURN_S
