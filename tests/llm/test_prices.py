"""Prices of model calls."""

from decimal import Decimal

import pytest

from bottega.agents.messages import HumanMessage, Usage
from bottega.agents.provider import ModelOptions
from bottega.llm.provider import open_provider
from bottega.llm.server import ServerSpec
from bottega.llm.usage import TokenPrices, prices_of
from tests.fake_model import FakeModel, chunk, sse

OPENAI = "https://api.openai.com/v1"
ANTHROPIC = "https://api.anthropic.com"


def test_a_known_model_is_priced_by_the_public_lists() -> None:
    prices = prices_of("gpt-4o-mini", OPENAI)
    assert prices is not None
    assert prices.cost(Usage(input=1000, output=100, cached=200)) == Decimal("0.000195")


def test_tokens_written_to_the_cache_have_their_own_price() -> None:
    prices = prices_of("claude-sonnet-4-5", ANTHROPIC)
    assert prices is not None
    assert prices.cost(Usage(input=1000, written=1000)) == Decimal("0.00375")


def test_a_long_input_has_the_price_of_its_step() -> None:
    prices = prices_of("claude-sonnet-4-5", ANTHROPIC)
    assert prices is not None
    assert prices.cost(Usage(input=100_000)) == Decimal("0.3")
    assert prices.cost(Usage(input=300_000)) == Decimal("1.8")


@pytest.mark.parametrize(
    ("model", "address"), [("gpt-4o", "http://127.0.0.1:8000/v1"), ("no-such-model", OPENAI)]
)
def test_a_server_or_a_model_that_the_lists_do_not_know_has_no_price(
    model: str, address: str
) -> None:
    assert prices_of(model, address) is None


def test_own_prices_replace_the_public_ones() -> None:
    own = {"gpt-4o-mini": TokenPrices.from_dict({"input": 1, "output": "2.5"})}
    prices = prices_of("gpt-4o-mini", OPENAI, own)
    assert prices is not None
    assert prices.cost(Usage(input=1_000_000, output=1_000_000, cached=10)) == Decimal("3.5")


def test_costs_add_up_and_say_if_a_part_is_unknown() -> None:
    priced = Usage(input=10, cost=Decimal("0.10"))
    unknown = Usage(output=5)
    assert (priced + priced).to_dict()["cost"] == {
        "amount": "0.2",
        "currency": "USD",
        "complete": True,
    }
    both = priced + unknown
    assert both.to_dict()["cost"] == {"amount": "0.1", "currency": "USD", "complete": False}
    assert (both + Usage()) == both == (Usage() + both)
    assert unknown.to_dict()["cost"]["complete"] is False
    assert Usage().to_dict()["cost"]["complete"] is True


@pytest.mark.parametrize(
    "usage",
    [
        Usage(),
        Usage(input=3),
        Usage(input=3, cost=Decimal(0)),
        Usage(input=3, cost=Decimal("1E-7")),
        Usage(input=3, cost=Decimal(2000), part_unpriced=True),
    ],
)
def test_usage_comes_back_from_its_stored_form(usage: Usage) -> None:
    assert Usage.from_dict(usage.to_dict()) == usage


async def test_an_answer_costs_what_the_prices_of_its_server_say(model: FakeModel) -> None:
    usage = {"prompt_tokens": 1_000_000, "completion_tokens": 200_000}
    answer = sse(chunk("hi", finish_reason="stop"), {"choices": [], "usage": usage})
    model.script(answer, answer)
    prices = {"known": TokenPrices.from_dict({"input": "0.5", "output": 2})}
    spec = ServerSpec(base_url=model.base_url, prices=prices)
    provider = open_provider(spec, "known")
    asked = [HumanMessage(content="hello")]
    assert (await provider.invoke(asked)).usage.cost == Decimal("0.9")
    options = ModelOptions(model="unknown")
    assert (await provider.invoke(asked, options=options)).usage.cost is None
    await provider.aclose()
