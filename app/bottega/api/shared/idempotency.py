"""``Idempotency-Key``: a repeated request creates nothing.

The response is stored in the transaction that creates, so a crash leaves both or neither. The sweep
deletes old responses.
"""

import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from hashlib import sha256
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, Header, Request, Response
from pydantic import BaseModel
from pydantic_core import from_json
from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.api.shared.deps import PrincipalDep
from bottega.db.tables import idempotency_keys
from bottega.errors import ConflictError, InvalidInputError

KEPT = timedelta(hours=24)

_keys = idempotency_keys.c


class Once:
    """Creates once per key; without a key, on every call.

    Attributes:
        key: of the request, or ``None``.
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
        """Return the response of ``create``, or the one stored at the key's first use.

        Args:
            tx: the uncommitted transaction that creates.
            response: its headers, as ``create`` leaves them, are stored too.
            output: the schema of the response.

        Raises:
            ConflictError: ``in_flight``: a request with this key is in progress.
            InvalidInputError: ``idempotency_key_reused``: the key belongs to another request.
        """
        if self.key is None:
            return await create()
        lock = func.hashtextextended(f"{self._tenant_id} {self.key}", 0)
        if not await tx.scalar(select(func.pg_try_advisory_xact_lock(lock))):
            raise ConflictError(
                "a request with this Idempotency-Key is in progress: repeat it in a moment",
                code="in_flight",
            )
        asked = await self._hash()
        kept = select(_keys.request_hash, _keys.answer).where(
            _keys.tenant_id == self._tenant_id,
            _keys.key == self.key,
            _keys.created_at > func.now() - KEPT,
        )
        if stored := (await tx.execute(kept)).one_or_none():
            if stored.request_hash != asked:
                raise InvalidInputError(
                    "this Idempotency-Key was used for a request with another body or path: use "
                    "a new key for a new request",
                    code="idempotency_key_reused",
                )
            response.headers.update(stored.answer["headers"])
            return stored.answer["body"]
        body = output.model_validate(await create()).model_dump(mode="json")
        await self._store(tx, asked, {"headers": dict(response.headers), "body": body})
        return body

    async def _hash(self) -> bytes:
        """Return a hash of path and body, independent of spaces and the order of keys."""
        body = await self._request.body()
        plain = json.dumps(from_json(body) if body else None, sort_keys=True)
        return sha256(f"{self._request.url.path}\n{plain}".encode()).digest()

    async def _store(self, tx: AsyncConnection, asked: bytes, answer: dict[str, Any]) -> None:
        row = {"request_hash": asked, "answer": answer, "created_at": func.now()}
        await tx.execute(
            insert(idempotency_keys)
            .values(tenant_id=self._tenant_id, key=self.key, **row)
            .on_conflict_do_update(index_elements=[_keys.tenant_id, _keys.key], set_=row)
        )


async def _once(
    request: Request,
    principal: PrincipalDep,
    idempotency_key: Annotated[
        str | None,
        Header(
            pattern=r"^[!-~]{1,255}$",
            description=(
                "Your own text, new for each resource to create. For 24 hours, a repeated "
                "request with the same key and body creates nothing and gets the first response. "
                "422 `idempotency_key_reused`: the body is another; 409 `in_flight`: the first "
                "request is in progress. A refused request may be repeated with the same key."
            ),
        ),
    ] = None,
) -> Once:
    return Once(request, principal.tenant_id, idempotency_key)


OnceDep = Annotated[Once, Depends(_once)]
"""Dependency of every route that creates."""
