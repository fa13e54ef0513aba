"""Parameters of model calls, under names that are the same for all dialects."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

from bottega.errors import InvalidInputError

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
ToolChoiceScope = Literal["first", "all"]
"""The model calls of a query to which ``tool_choice`` applies."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A ``tool_choice`` that forces a call of the named tool."""

    name: str


ToolChoice = Literal["required", "none"] | NamedTool


@dataclass(frozen=True, slots=True)
class ModelParams:
    """Parameters of a model call. For a parameter that is ``None``, the model uses its default.

    Equal parameters give equal requests, so providers may use the parameters as a cache key.

    Attributes:
        max_output_tokens: limit of output tokens; a budget may set a lower limit.
        stop: texts that end the answer.
        tool_choice: ``required`` if the model must call a tool, ``none`` if the model must not.
        extra_body: further fields of the request, under the server's own names.
    """

    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: ToolChoice | None = None
    service_tier: str | None = None
    extra_body: Mapping[str, Any] | None = field(default=None, hash=False)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Build parameters from JSON; null means the default.

        Raises:
            InvalidInputError: a parameter is unknown (``unknown_param``), or ``tool_choice`` has a
                wrong form.
        """
        values = {name: value for name, value in fields.items() if value is not None}
        if unknown := sorted(values.keys() - PARAMETERS):
            raise InvalidInputError(
                f"there is no parameter '{unknown[0]}'; put it into extra_body if the model's "
                "server supports it",
                code="unknown_param",
                pointer=f"/{unknown[0]}",
            )
        if "stop" in values:
            values["stop"] = tuple(values["stop"])
        if "tool_choice" in values:
            values["tool_choice"] = _tool_choice(values["tool_choice"])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.names_set}
        if self.stop is not None:
            values["stop"] = list(self.stop)
        if isinstance(self.tool_choice, NamedTool):
            values["tool_choice"] = {"name": self.tool_choice.name}
        return values

    @property
    def names_set(self) -> tuple[str, ...]:
        return tuple(name for name in PARAMETERS if getattr(self, name) is not None)

    def without_tool_choice(self) -> Self:
        """Return a copy without ``tool_choice``, for the later model calls of a query."""
        return self if self.tool_choice is None else replace(self, tool_choice=None)


PARAMETERS = {each.name: None for each in fields(ModelParams)}.keys()
"""Names of all parameters."""


def _tool_choice(value: Any) -> ToolChoice:
    match value:
        case "required" | "none" | NamedTool():
            return value
        case {"name": str(name)}:
            return NamedTool(name)
    raise InvalidInputError(
        "tool_choice must be 'required', 'none' or {'name': TOOL}", pointer="/tool_choice"
    )


def merged(params: Mapping[str, Any] | None, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Merge two JSON objects of parameters by key; a null in ``overrides`` removes the key."""
    values = {**(params or {}), **(overrides or {})}
    return {name: value for name, value in values.items() if value is not None}
