"""Header fields that a tool may send. Pure."""

import re

from bottega.errors import InvalidInputError

_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VALUE = re.compile(r"(?:[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)?")
_LONGEST_VALUE = 8192

# Target, end and encoding of a message: only the client sets these.
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
_IN_QUERIES = frozenset(
    {
        "access-token",
        "api-key",
        "apikey",
        "auth-token",
        "client-secret",
        "password",
        "secret",
        "token",
    }
)


def check_header(name: str, value: str) -> None:
    """Refuse a header field that could change the target or framing of a request.

    Raises:
        InvalidInputError: names the field, never its value.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInputError(f"{name[:100]!r} is not a valid header name")
    if name.lower() in _OURS or name.lower().startswith("proxy-"):
        raise InvalidInputError(f"the header {name} cannot be set")
    if len(value) > _LONGEST_VALUE or not _VALUE.fullmatch(value):
        raise InvalidInputError(
            f"the value of the header {name} must be printable ASCII without "
            f"blanks at its ends, of at most {_LONGEST_VALUE} characters"
        )


def carries_credentials(name: str) -> bool:
    """Return true if a header's value is always a credential."""
    return name.lower() in _CREDENTIALS


def is_credential_in_query(key: str) -> bool:
    """Return true if a fixed value of this key in a URL's query is always a credential."""
    return key.lower().replace("_", "-") in _IN_QUERIES
