"""Security headers of every response."""

from starlette.types import Scope

RawHeader = tuple[bytes, bytes]
"""Name, in lower case, and value: a header in ASGI's form."""
_ALWAYS: tuple[RawHeader, ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # Responses are not pages: one that a browser shows anyway may load and run nothing. Pages
    # set their own policy.
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)
_OF_API: tuple[RawHeader, ...] = (*_ALWAYS, (b"cache-control", b"no-store"))


def for_path(path: str) -> tuple[RawHeader, ...]:
    """Return the default headers of a response at ``path``."""
    return _OF_API if path.startswith(("/v1/", "/openai/")) else _ALWAYS


def sent(scope: Scope, name: bytes) -> list[bytes]:
    """Return the values of a request's header; ``name`` is in lower case."""
    return [value for each, value in scope["headers"] if each == name]
