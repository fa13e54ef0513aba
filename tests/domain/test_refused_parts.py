"""An agent refuses what is no part of an agent, and says what to write instead."""

from typing import Any

import pytest
from pydantic import BaseModel

from bottega.agents import BaseAgent, HumanMessage, InvalidQueryError, ToolRequirement, tool
from bottega.errors import InvalidInputError


class Notes(BaseModel):
    title: str


def echo(city: str) -> str:
    return city


WEATHER = tool(name="weather", description="Tells the weather.")(echo)
POET = BaseAgent("You write poems.", agent_name="poet")


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"tools": [echo]}, r"@tool\(name=…, description=…\)"),
        ({"tools": ["weather"]}, r"@tool\(name=…, description=…\)"),
        ({"tools": [Notes]}, r"@tool\(name=…, description=…\)"),
        ({"tools": WEATHER}, "a list of tools"),
        ({"tools": [POET]}, r"register_agent\("),
        ({"provider": "gpt-5-mini"}, r"OpenAIProvider\("),
        ({"params": {"temperature": 0}}, r"ModelParams\("),
        ({"output_schema": Notes}, r"Notes\.model_json_schema\(\)"),
        ({"output_schema": "Notes"}, "a JSON Schema"),
        ({"exit_on_success": "weather"}, "a list of names"),
        ({"tool_policy": ["weather"]}, r"ToolRequirement\("),
        ({"tool_policy": ToolRequirement("weather")}, r"a list of ToolRequirement\("),
        ({"system_message": 5}, "system_message"),
    ],
)
def test_what_is_no_part_of_an_agent_is_refused(parts: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        BaseAgent(**{"system_message": "You help.", **parts})


@pytest.mark.parametrize("name", ["", " "])
def test_a_tool_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="needs a name"):
        BaseAgent("You help.", tools=[tool(name=name, description="-")(echo)])
    with pytest.raises(InvalidInputError, match="needs a name"):
        BaseAgent("You help.").register_agent(POET, name=name, description="-")


def test_one_message_is_no_list_of_messages() -> None:
    asked: Any = HumanMessage(content="hi")
    with pytest.raises(InvalidQueryError, match="a list of messages, not HumanMessage"):
        POET.execute_query(asked)
