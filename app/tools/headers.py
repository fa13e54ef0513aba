"""Header fields a tool may send, and keeping secrets out of what comes back. Pure."""

import json
import re
from collections.abc import Iterable
from html import escape
from typing import Any
from urllib.parse import quote

from app.errors import InvalidInputError

_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VALUE = re.compile(r"(?:[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)?")
_LONGEST_VALUE = 8192

# They say where a request goes, where it ends and how its answer is packed: that is ours to say.
_OURS = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "expect",
        "host",
        "http2-settings",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_CREDENTIALS = frozenset(
    {"api-key", "authorization", "cookie", "x-access-token", "x-api-key", "x-auth-token"}
)
_SHORTEST_WORD = 8
_LEFT_OUT = "[secret]"


def check_header(name: str, value: str) -> None:
    """Refuse a header field that could change what is sent, or where.

    Raises:
        InvalidInputError: names the field, never its value.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInputError(f"{name[:100]!r} is no name of a header")
    if name.lower() in _OURS or name.lower().startswith("proxy-"):
        raise InvalidInputError(f"the header {name} cannot be set")
    if len(value) > _LONGEST_VALUE or not _VALUE.fullmatch(value):
        raise InvalidInputError(
            f"the value of the header {name} must be printable ASCII, without line breaks and "
            f"blanks at its ends, of at most {_LONGEST_VALUE} characters"
        )


def carries_credentials(name: str) -> bool:
    """Whether a header's value is a credential wherever it is used."""
    return name.lower() in _CREDENTIALS


def _forms(text: str) -> set[str]:
    in_json = json.dumps(text)[1:-1]
    return {text, in_json, in_json.replace("/", r"\/"), escape(text), quote(text, safe="")}


class Redactor:
    """Takes secrets out of text, should a server send them back.

    Long words of a secret count too: of ``Bearer abcdefgh`` a server quotes only the second. So do
    the ways in which JSON, HTML and URLs would write it.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        found: set[str] = set()
        for secret in secrets:
            for word in (secret, *secret.split()):
                if word == secret or len(word) >= _SHORTEST_WORD:
                    found |= _forms(word)
        longest_first = sorted(found - {""}, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def text(self, text: str) -> str:
        return self._pattern.sub(_LEFT_OUT, text)

    def value(self, value: Any) -> Any:
        """The same for all text within JSON; its depth is the caller's to bound."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        return value
