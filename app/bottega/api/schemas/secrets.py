"""Tenants' secrets on the wire."""

import re
from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, SecretStr, StringConstraints
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from bottega.api.schemas.base import Answer, Body
from bottega.errors import InvalidInputError
from bottega.redaction import SHORTEST
from bottega.secrets.hosts import as_compared

_LONGEST = 4096
_WORDS = re.compile(r"[\x21-\x7e]+(?: [\x21-\x7e]+){0,3}")
_EXAMPLE: JsonDict = {"value": "Bearer <token>", "hosts": ["api.example.com"]}


def _can_be_sent(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if len(text) > _LONGEST or not _WORDS.fullmatch(text):
        raise PydanticCustomError(
            "secret",
            "must be at most {longest} printable ASCII characters: one to four words with single "
            "blanks between them",
            {"longest": _LONGEST},
        )
    scheme, _, credential = text.rpartition(" ")
    if len(credential if " " not in scheme else text) < SHORTEST:
        raise PydanticCustomError(
            "secret",
            "is shorter than {shortest} characters (a first word such as Bearer does not "
            "count), too short to be redacted from logs and "
            "answers: use a longer secret",
            {"shortest": SHORTEST},
        )
    return value


def _as_compared(host: str) -> str:
    """Return a host's name or address in the form that a URL's host is compared in."""
    try:
        return as_compared(host)
    except InvalidInputError:
        raise PydanticCustomError(
            "host", "must be a host's name or address in lower case, without scheme and port"
        ) from None


Host = Annotated[
    str,
    StringConstraints(min_length=1, max_length=253, pattern=r"^[0-9a-z_.:-]+$"),
    AfterValidator(_as_compared),
]


class SecretContent(Body):
    """A secret's value, and the hosts that it may be sent to."""

    model_config = ConfigDict(hide_input_in_errors=True, json_schema_extra={"examples": [_EXAMPLE]})

    value: Annotated[
        SecretStr,
        AfterValidator(_can_be_sent),
        Field(
            description="As it is sent: of a provider's key without, in a header with a scheme "
            "such as `Bearer`. No response shows it.",
            json_schema_extra={
                "minLength": SHORTEST,
                "maxLength": _LONGEST,
                "pattern": f"^{_WORDS.pattern}$",
            },
        ),
    ]
    hosts: Annotated[
        list[Host],
        Field(
            min_length=1,
            max_length=20,
            description="Names and addresses of the only hosts that it may be sent to, over https; "
            "over http only to this machine, if the operator has allowed that.",
        ),
    ]


class Secret(Answer):
    """A stored secret, without its value."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "SHOP_KEY",
                    "version": 2,
                    "hosts": ["api.example.com"],
                    "created_at": "2026-11-02T08:30:00Z",
                    "updated_at": "2026-11-20T08:30:00Z",
                }
            ]
        }
    )

    name: str
    version: Annotated[int, Field(description="Raised by each change of the value or the hosts.")]
    hosts: list[str]
    created_at: datetime
    updated_at: datetime
