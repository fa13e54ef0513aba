"""A follower of a run, for clients of MCP and OpenAI's API that wait for the run's answer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, TypeVar
from uuid import UUID

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse, Response

from bottega.api.auth import Principal
from bottega.api.errors import field_problem
from bottega.container import Service
from bottega.db.pool import AsyncConnection
from bottega.errors import (
    InvalidInputError,
    ModelError,
    UnauthenticatedError,
    UnavailableError,
)
from bottega.events.frames import Filter, Frame
from bottega.events.listener import happens
from bottega.events.stream import Subscriber
from bottega.events.types import UNFINISHED, EventType, RunStatus
from bottega.runs import interrupts, read
from bottega.runs.control import request_cancel

SLOW_POLL_S = 5.0
HEARTBEAT = b": heartbeat\n\n"
_cancelling: set[asyncio.Task[Any]] = set()
Calls = Sequence[Mapping[str, Any]]
"""Interrupts that the client must answer, in the order of their tool calls."""
Checked = TypeVar("Checked", bound=BaseModel)


async def until_rest(service: Service, principal: Principal, run_id: UUID) -> int:
    """Wait until the run ends or waits for people, or until this process is about to stop.

    Returns:
        ``seq`` of the run's last event; 0 if this process stops.

    Raises:
        UnauthenticatedError: the caller's key is no longer valid.
    """
    lost, news = asyncio.Event(), asyncio.Event()

    def lose() -> None:
        lost.set()
        news.set()

    with contextlib.ExitStack() as stack:
        stack.callback(service.wakeups.watch(run_id, news.set))
        with service.keys.watching(principal.identity, lose):
            while not service.wakeups.closed.is_set():
                if lost.is_set():
                    raise UnauthenticatedError(
                        "your key was revoked or expired while you waited, or somebody made the "
                        "server's first key; the run was accepted before",
                        code="bad_key",
                    )
                news.clear()
                run = await service.streams.cursor_of(principal.tenant_id, run_id)
                if run.over or run.waits:
                    return run.last_seq
                await happens(news, SLOW_POLL_S)
    return 0


class RunFollower:
    """Follower of a run for a client that waits for the run's answer.

    A run *rests* when it has ended, or when it waits for interrupts that the client must answer.

    Args:
        after: ``seq`` of the last event before the answer.
        kind: kind of the interrupts that the client must answer; ``None``: interrupts of any kind.

    Attributes:
        ended: true if the client has the answer, or knows that there is no answer.
        place: ``seq`` of the last event that the follower has read.
        asked: interrupts that the client has already got; they no longer make the run rest.
    """

    def __init__(
        self,
        service: Service,
        principal: Principal,
        run_id: UUID,
        after: int,
        *,
        kind: str | None = "client_tool",
    ) -> None:
        self.run_id = run_id
        self.after = after
        self.ended = False
        self.asked: set[UUID] = set()
        self.place = after
        self._kind = kind
        self._service = service
        self._principal = principal

    async def rest(self) -> None:
        """Wait until the run rests; this costs less than reading the run's events."""
        await until_rest(self._service, self._principal, self.run_id)

    def begin(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Begin a transaction of the run's tenant."""
        return self._service.database.begin(self._principal.tenant_id)

    def cancel(self) -> asyncio.Task[Any]:
        """Cancel the run in the background, because nobody waits for its answer."""
        run_id, tenant = self.run_id, self._principal.tenant_id
        stopping = request_cancel(self._service.database, tenant, run_id, self._principal.actor)
        task = asyncio.ensure_future(stopping)
        _cancelling.add(task)
        task.add_done_callback(_cancelling.discard)
        return task

    async def frames(self, events: Filter) -> AsyncIterator[Frame | None]:
        """Yield frames until the run has ended or waits for the client; ``None`` means a heartbeat.

        The next call continues after the last frame.

        Args:
            events: filter of the frames; the filter must name types.

        Raises:
            UnavailableError: the server stops, the key was revoked, or the run was deleted.
        """
        service, tenant, run_id = self._service, self._principal.tenant_id, self.run_id
        cursor = await service.streams.cursor_of(tenant, run_id)
        if cursor.waits and await self._calls():
            return
        assert events.types is not None
        only = replace(events, types=events.types | {EventType.RUN_WAITING})
        with service.streams.watching(cursor, self.place) as run_stream:
            reader = Subscriber(run_stream, self.place, only)
            with service.keys.watching(self._principal.identity, reader.stop):
                while (frames := await reader.next()) is not None:
                    if not frames:
                        yield None
                    for frame in frames:
                        self.place = frame.seq or self.place
                        if frame.is_final:
                            return
                        if frame.type == EventType.RUN_WAITING:
                            if await self._calls():
                                return
                        else:
                            yield frame
        raise UnavailableError(
            "the answer broke off: the server stops, the key was revoked, or the run was deleted",
            code="broken_off",
        )

    async def _calls(self) -> Calls:
        filters = {"status": "pending", "kind": self._kind, "run_id": self.run_id}
        tenant = self._principal.tenant_id
        async with self.begin() as tx:
            rows = await interrupts.page(
                tx, tenant, filters, after=None, descending=False, limit=128
            )
        return [each for each in rows if each["id"] not in self.asked]

    async def answer(self) -> tuple[dict[str, Any], Calls]:
        """Wait until the run rests; return the run, and the interrupts that the client must answer.

        Raises:
            ModelError: the run failed.
        """
        run, calls = await self.state()
        while run["status"] in UNFINISHED and not calls:
            async for _ in self.frames(Filter(types=frozenset(), depth=-1)):
                pass
            run, calls = await self.state()
        self.ended = True
        if run["status"] in (RunStatus.COMPLETED, RunStatus.WAITING):
            return run, calls
        error = run["error"] or {"code": run["status"], "message": f"the run is {run['status']}"}
        raise ModelError(error["message"], code=error["code"])

    async def state(self) -> tuple[dict[str, Any], Calls]:
        """Return the run's current state and the interrupts that the client must answer.

        Raises:
            NotFoundError: the run is unknown, or it belongs to another tenant.
        """
        async with self.begin() as tx:
            run = await read.get(tx, self._principal.tenant_id, self.run_id)
        return run, await self._calls() if run["status"] == RunStatus.WAITING else ()


async def while_connected(
    request: Request,
    follower: RunFollower,
    answer: Any,
    *,
    stay: bool,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Await an answer and return it as JSON; cancel the run if the client disconnects earlier.

    Args:
        answer: awaitable of the answer. If the answer is a :class:`Response`, it is returned
            unchanged, and must itself cancel the run.
        stay: true: the run continues if the client disconnects.
        headers: headers of the JSON response.
    """
    answering = asyncio.ensure_future(answer)
    disconnection = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((answering, disconnection), return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            made = await answering
            stay = stay or isinstance(made, Response)
            return made if isinstance(made, Response) else JSONResponse(made, headers=headers)
        return Response(status_code=499)
    finally:
        # Wait for the tasks, because a shutdown closes the database once this request has ended.
        ending = {answering, disconnection}
        for task in ending:
            task.cancel()
        if not (follower.ended or stay):
            ending.add(follower.cancel())
        await asyncio.wait(ending)


async def leaving(
    follower: RunFollower, chunks: AsyncIterator[bytes], *, stay: bool
) -> AsyncIterator[bytes]:
    """Yield chunks.

    Cancel the run if the client leaves before the answer, unless ``stay`` is true.
    """
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        if not (follower.ended or stay):
            follower.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def checked(kind: type[Checked], body: Mapping[str, Any]) -> Checked:
    """Validate a body.

    Raises:
        InvalidInputError: the error's ``pointer`` names the first wrong field.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        problem = field_problem({**first, "loc": ("body", *first["loc"])}, body)
        raise InvalidInputError(problem.detail, pointer=problem.pointer) from None
