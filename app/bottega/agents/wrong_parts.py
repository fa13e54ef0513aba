"""Refusals of what is no part of an agent. Pure.

Type checkers see these mistakes, but many programs run without one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from bottega.agents.messages import SystemMessage
from bottega.agents.params import ModelParams
from bottega.agents.policy import ToolRequirement
from bottega.agents.tools import ToolBase

_Fits = Callable[[object], bool]


def _is_policy(value: object) -> bool:
    return isinstance(value, Sequence) and all(isinstance(one, ToolRequirement) for one in value)


_PARTS: Mapping[str, tuple[_Fits, str]] = {
    "system_message": (lambda value: isinstance(value, str | SystemMessage), "a text"),
    "provider": (
        lambda value: hasattr(value, "invoke"),
        "an object with `invoke`, such as OpenAIProvider('gpt-5-mini')",
    ),
    "tools": (lambda value: isinstance(value, Iterable), "a list of tools"),
    "tool_policy": (_is_policy, "a list of ToolRequirement(…)"),
    "exit_on_success": (
        lambda value: isinstance(value, Iterable) and not isinstance(value, str),
        "a list of names of tools",
    ),
    "params": (lambda value: isinstance(value, ModelParams), "ModelParams(…)"),
    "output_schema": (
        lambda value: isinstance(value, Mapping),
        "a JSON Schema as a dict (that of a Pydantic model: {name}.model_json_schema())",
    ),
}


def refuse_wrong_parts(**parts: object) -> None:
    """Check an agent's arguments, by their names; ``None`` is absent.

    Raises:
        TypeError: one has another type; the text says what to write.
    """
    for name, value in parts.items():
        fits, what = _PARTS[name]
        if value is not None and not fits(value):
            described = what.format(name=value.__name__ if isinstance(value, type) else "MODEL")
            raise TypeError(f"an agent's {name} takes {described}, not {_kind(value)}")


def refuse_no_tool(value: object) -> None:
    """Check that a value is a tool, or a class of tools.

    Raises:
        TypeError: it is neither; the text says how to make one.
    """
    if not (
        isinstance(value, ToolBase) or (isinstance(value, type) and issubclass(value, ToolBase))
    ):
        how = (
            "add it by register_agent(agent, name=…, description=…)"
            if hasattr(value, "execute_query")
            else "make it one with @tool(name=…, description=…)"
        )
        raise TypeError(f"{_kind(value)} is no tool: {how}")


def _kind(value: object) -> str:
    named = getattr(value, "__qualname__", None)
    return f"'{named}'" if isinstance(named, str) else type(value).__name__
