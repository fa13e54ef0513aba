"""Parameters of model calls."""

import pytest

from bottega.agents import ModelParams, NamedTool
from bottega.agents.params import merged
from bottega.errors import InvalidInputError


def test_parameters_survive_a_round_trip() -> None:
    given = {"temperature": 0, "stop": ["END"], "tool_choice": {"name": "search"}, "seed": 7}
    params = ModelParams.from_dict(given)
    assert params.to_dict() == given
    assert params.names_set == ("temperature", "seed", "stop", "tool_choice")
    assert params.tool_choice == NamedTool("search")
    assert params.stop == ("END",)


def test_null_is_the_default() -> None:
    assert ModelParams.from_dict({"temperature": None}) == ModelParams()


def test_equal_parameters_are_one_key_of_a_cache() -> None:
    one, same = (ModelParams.from_dict({"extra_body": {"top_k": 4}}) for _ in range(2))
    assert {one: "head"}[same] == "head"
    assert one != ModelParams.from_dict({"extra_body": {"top_k": 5}})


@pytest.mark.parametrize(
    ("given", "pointer"),
    [({"temprature": 1}, "/temprature"), ({"tool_choice": "auto"}, "/tool_choice")],
)
def test_what_is_no_parameter_is_refused(given: dict[str, object], pointer: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        ModelParams.from_dict(given)
    assert refused.value.pointer == pointer


def test_overrides_replace_and_take_away_per_key() -> None:
    agents_own = {"temperature": 1, "seed": 3, "extra_body": {"a": 1}}
    assert merged(agents_own, {"temperature": 0, "seed": None}) == {
        "temperature": 0,
        "extra_body": {"a": 1},
    }
    assert merged(None, None) == {}


def test_later_calls_choose_their_tools_freely() -> None:
    params = ModelParams(tool_choice="required", seed=1)
    assert params.without_tool_choice() == ModelParams(seed=1)
