"""The header ``Idempotency-Key``; for runs, :mod:`bottega.runs.submit` stores the keys."""

import json
import re
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, Header, Request, Response
from pydantic import BaseModel
from pydantic_core import from_json, to_json
from sqlalchemy import text

from bottega.api.shared.deps import PrincipalDep
from bottega.db.pool import AsyncConnection, acting_user
from bottega.runs.submit import OnceKey, first_answer

HEADER = "idempotency-key"
_KEY = r"^[!-~]{1,255}$"
_EARLIER = text("SELECT CAST(earlier_answer(:tenant, :key, :request_hash) AS text)")
_KEEP = text("SELECT keep_answer(:tenant, :key, :request_hash, CAST(:answer AS jsonb))")


def is_key(value: str) -> bool:
    """Return true if the value of a header has the form of an idempotency key."""
    return re.fullmatch(_KEY, value) is not None


class IdempotencyGuard:
    """Function that creates one resource per key; without a key, each call creates a resource.

    Attributes:
        key: the request's ``Idempotency-Key``; ``None``: the request has no key.
    """

    def __init__(self, request: Request, tenant_id: UUID, key: str | None) -> None:
        self._request = request
        self._tenant_id = tenant_id
        self.key = key

    async def __call__(
        self,
        tx: AsyncConnection,
        response: Response,
        output: type[BaseModel],
        create: Callable[[], Awaitable[Any]],
    ) -> Any:
        """Call ``create`` and return its response; for a known key, return the stored response.

        Args:
            tx: the open transaction in which ``create`` works.
            response: the response in which ``create`` sets headers, which are stored, too.
            output: the schema of the response.

        Raises:
            ConflictError: ``in_flight``: a request with this key is in progress.
            InvalidInputError: ``idempotency_key_reused``: the key belongs to another request.
        """
        once = await self.key_with_hash()
        if once is None:
            return await create()
        values = {"tenant": self._tenant_id, **once._asdict()}
        row = await tx.scalar(_EARLIER, values)
        stored = first_answer(None if row is None else from_json(row))
        if stored is not None:
            response.headers.update(stored["headers"])
            return stored["body"]
        body = output.model_validate(await create()).model_dump(mode="json")
        answer = to_json({"headers": dict(response.headers), "body": body}).decode()
        await tx.execute(_KEEP, {**values, "answer": answer})
        return body

    async def key_with_hash(self) -> OnceKey | None:
        """Return the request's key and the request's hash; ``None``: the request has no key."""
        return None if self.key is None else await once_key(self._request, self.key)


async def once_key(request: Request, key: str) -> OnceKey:
    """Return a key and a hash of path and body; the hash ignores spaces and the order of members.

    If an end user's token sent the key, the hash includes the user, so two users cannot share a
    key.
    """
    if (acting := acting_user.get()) is not None:
        key = f"{sha256(acting.user.encode()).hexdigest()} {key}"
    body = await request.body()
    canonical = json.dumps(from_json(body) if body else None, sort_keys=True)
    return OnceKey(key, sha256(f"{request.url.path}\n{canonical}".encode()).digest())


async def _once(
    request: Request,
    principal: PrincipalDep,
    idempotency_key: Annotated[
        str | None,
        Header(
            pattern=_KEY,
            description=(
                "Your own text, new for each resource to create. For 24 hours, a repeated "
                "request with the same key and body creates nothing and gets the first response. "
                "422 `idempotency_key_reused`: the body differs; 409 `in_flight`: the first "
                "request is in progress. A refused request may be repeated with the same key."
            ),
        ),
    ] = None,
) -> IdempotencyGuard:
    return IdempotencyGuard(request, principal.tenant_id, idempotency_key)


OnceDep = Annotated[IdempotencyGuard, Depends(_once)]
"""Dependency of each route that creates a resource."""
