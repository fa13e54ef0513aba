"""Settings of MCP servers."""

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, field_validator
from pydantic_settings import BaseSettings

from bottega.settings.providers import is_credential

_KEY = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")

_Text = Annotated[str, StringConstraints(max_length=8192, pattern=r"^[^\x00]*$")]


class StdioServer(BaseModel):
    """A program that is an MCP server on its standard input and output."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    command: Annotated[_Text, Field(min_length=1)]
    args: Annotated[tuple[_Text, ...], Field(max_length=100, strict=False)] = ()
    env: Annotated[dict[str, SecretStr], Field(max_length=100)] = Field(default_factory=dict)

    @field_validator("env")
    @classmethod
    def _variables(cls, env: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, value in env.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name[:100]!r} is not a name of an environment variable")
            if "\0" in value.get_secret_value():
                raise ValueError(f"the value of {name} has a NUL character")
        return env

    @property
    def plain_env(self) -> dict[str, str]:
        """Return its variables in clear, for the program."""
        return {name: value.get_secret_value() for name, value in self.env.items()}

    @property
    def secrets(self) -> list[str]:
        """Values of variables that probably hold secrets, by their names."""
        return [value.get_secret_value() for name, value in self.env.items() if is_credential(name)]


class McpSettings(BaseSettings):
    """A group of :class:`bottega.settings.Settings`."""

    mcp_stdio: Annotated[
        dict[str, StdioServer],
        Field(
            default_factory=dict,
            description="Programs that tenants may use as MCP servers, as JSON: "
            '{"time": {"command": "mcp-server-time", "args": [], "env": {}}}. Each gets PATH, '
            "HOME, LANG and its env, nothing else of this process's environment.",
        ),
    ]

    @field_validator("mcp_stdio")
    @classmethod
    def _keys(cls, commands: dict[str, StdioServer]) -> dict[str, StdioServer]:
        for key in commands:
            if not _KEY.fullmatch(key):
                raise ValueError(
                    f"{key[:100]!r} is not a name: small letters, digits, _ and -, at most 64"
                )
        return commands
