"""Default headers of responses, most for security, and a reader of requests' headers."""

from starlette.types import Scope

RawHeader = tuple[bytes, bytes]
"""A header in ASGI's form: name, in lower case, and value."""
_ALWAYS: tuple[RawHeader, ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # A browser that shows a response as a page may load and run nothing. Real pages set their
    # own policy.
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)
_OF_API: tuple[RawHeader, ...] = (*_ALWAYS, (b"cache-control", b"no-store"))


def for_path(path: str) -> tuple[RawHeader, ...]:
    """Return the default headers of a response at ``path``."""
    return _OF_API if path.startswith(("/v1/", "/openai/")) else _ALWAYS


def sent(scope: Scope, name: bytes) -> list[bytes]:
    """Return all values that a request sent for a header; ``name`` must be in lower case."""
    return [value for each, value in scope["headers"] if each == name]
