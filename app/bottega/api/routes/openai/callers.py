"""The end user for whom a client of OpenAI's API asks, and what it is told about memory."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from fastapi import Request
from pydantic import AfterValidator, TypeAdapter, ValidationError

from bottega.api.auth import Acting, Principal, acts_for
from bottega.api.routes.openai.model_request import NamedUser
from bottega.api.schemas.base import UserName
from bottega.api.server.headers import sent
from bottega.api.shared.wanted import storable
from bottega.errors import InvalidInputError
from bottega.users.names import names_nobody

MEMORY = "x-bottega-memory"
"""Header of answers: whether the run could read memory of earlier ones."""
_NAME: TypeAdapter[str] = TypeAdapter(Annotated[UserName, AfterValidator(storable)])


def acting_of(
    request: Request, principal: Principal, headers: Sequence[str], caller: NamedUser
) -> Acting:
    """Return for whom a request acts: the first user that it names; a blank text names nobody.

    Args:
        headers: of chat products that name their users, in this order; they come first.
        caller: the request's body.

    Raises:
        InvalidInputError: a name is too long, or cannot be stored.
        UserRequiredError: the key must name a user.
    """
    body = {
        "/user": caller.user,
        "/safety_identifier": caller.safety_identifier,
        "/metadata/user_id": (caller.metadata or {}).get("user_id"),
    }
    for pointer, value in (*_sent(request, headers), *body.items()):
        if isinstance(value, str) and not names_nobody(value):
            return acts_for(principal, _checked(value, pointer))
    return acts_for(principal, None)


def named_in(request: Request, headers: Sequence[str]) -> str | None:
    """Return the user that a request without a body names; ``None``: nobody."""
    return next((value for _, value in _sent(request, headers)), None)


def memory_headers(user: str | None) -> dict[str, str]:
    """Return the header of an answer that tells its reader why it remembers nothing."""
    return {MEMORY: "off; no user" if user is None else "user"}


def _sent(request: Request, headers: Sequence[str]) -> Iterator[tuple[None, str]]:
    """Yield the user of each header that names one.

    Raises:
        InvalidInputError: it names two.
    """
    for name in headers:
        texts = [_text(value) for value in sent(request.scope, name.lower().encode("latin-1"))]
        named = {text for text in texts if not names_nobody(text)}
        if len(named) > 1:
            raise InvalidInputError(f"the header {name} names two users: send one")
        yield from ((None, text) for text in named)


def _text(value: bytes) -> str:
    """Return a header's text, in UTF-8 if it is that, else in Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _checked(name: Any, pointer: str | None) -> str:
    try:
        return _NAME.validate_python(name)
    except ValidationError as error:
        detail = f"the user's name: {error.errors(include_url=False)[0]['msg']}"
        raise InvalidInputError(detail, pointer=pointer) from None
