"""Requests with an ``Idempotency-Key``: a repeated one creates nothing, and gets the first answer.

The answer is stored in the transaction that creates, so a crash leaves both or neither. The sweep
deletes old answers.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from bottega.errors import BottegaError, ConflictError, InvalidInputError


class OnceKey(NamedTuple):
    """The key of a request, and a hash of the request."""

    key: str
    request_hash: bytes


def first_answer(found: Mapping[str, Any] | None) -> Any:
    """Return the stored answer that the SQL function ``earlier_answer`` found, or ``None``.

    Raises:
        ConflictError: ``in_flight``: a request with this key is in progress.
        InvalidInputError: ``idempotency_key_reused``: the key belongs to another request.
    """
    if found is None:
        return None
    if (reason := found.get("refused")) is not None:
        raise refused_key(reason)
    return found["answer"]


def refused_key(reason: str) -> BottegaError:
    """Return the error of a key that is refused."""
    if reason == "in_flight":
        return ConflictError(
            "a request with this Idempotency-Key is in progress: repeat it in a moment",
            code=reason,
        )
    return InvalidInputError(
        "this Idempotency-Key was used for a request with another body or path: use a new key "
        "for a new request",
        code=reason,
    )


REFUSED_KEYS = ("in_flight", "idempotency_key_reused")
