"""Runs whose answer a client of OpenAI's API waits for."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar
from uuid import UUID

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.responses import JSONResponse, Response

from bottega.api.auth import Principal
from bottega.api.errors import field_problem
from bottega.api.routes.openai.requests import graph_of
from bottega.api.schemas.interrupts import NewDecision
from bottega.api.shared.decisions import decide
from bottega.container import Service
from bottega.errors import InvalidInputError, ModelError, UnavailableError
from bottega.events.frames import LLM_DELTA, Filter
from bottega.events.stream import Subscriber
from bottega.events.types import EventType, RunStatus
from bottega.runs import interrupts, read
from bottega.runs.control import request_cancel

HEARTBEAT = b": heartbeat\n\n"
_OF_ROOT = -1
_MOST_CALLS = 128
_cancelling: set[asyncio.Task[Any]] = set()
Calls = Sequence[Mapping[str, Any]]
"""Interrupts of a client's tools, in the order in which they were called."""
Checked = TypeVar("Checked", bound=BaseModel)


class FollowedRun:
    """A run whose answer a client waits for.

    Args:
        after: ``seq`` after which its events are the answer.

    Attributes:
        ended: the client has the answer, or knows that there is none.
    """

    def __init__(self, service: Service, principal: Principal, run_id: UUID, after: int) -> None:
        self.run_id = run_id
        self.after = after
        self.ended = False
        self._service = service
        self._principal = principal

    async def whole(self) -> tuple[dict[str, Any], Calls]:
        """Wait for the answer; see :meth:`answer`."""
        async for _ in self._events():
            pass
        return await self.answer()

    def text(self) -> AsyncIterator[dict[str, Any] | None]:
        """Yield pieces of the root's live text until the run rests; ``None``: a heartbeat."""
        return self._events(LLM_DELTA)

    def cancel(self) -> None:
        """Cancel the run, beside the request: nobody waits for its answer."""
        run_id, tenant = self.run_id, self._principal.tenant_id
        stopping = request_cancel(self._service.database, tenant, run_id, self._principal.actor)
        task = asyncio.ensure_future(stopping)
        _cancelling.add(task)
        task.add_done_callback(_cancelling.discard)

    async def _events(self, *types: str) -> AsyncIterator[dict[str, Any] | None]:
        """Yield the root's live text until the run rests; ``None``: a heartbeat.

        Raises:
            UnavailableError: the server stops, the key was revoked, or the run was deleted.
        """
        service, tenant, run_id = self._service, self._principal.tenant_id, self.run_id
        cursor = await service.streams.cursor_of(tenant, run_id)
        if cursor.waits and await self._calls():
            return
        only = Filter(types=frozenset((*types, EventType.RUN_WAITING)), depth=_OF_ROOT)
        with service.streams.watching(cursor, self.after) as tail:
            reader = Subscriber(tail, self.after, only, service.settings.heartbeat_s)
            with service.keys.watching(self._principal.identity, reader.stop):
                while (frames := await reader.next()) is not None:
                    if not frames:
                        yield None
                    for frame in frames:
                        if frame.is_final:
                            return
                        if frame.type == EventType.RUN_WAITING:
                            if await self._calls():
                                return
                        else:
                            yield from_json(frame.body)["data"]
        raise UnavailableError(
            "the answer broke off: the server stops, the key was revoked, or the run was deleted",
            code="broken_off",
        )

    async def _calls(self) -> Calls:
        """Return the calls of the client's own tools that the run waits for."""
        filters = {
            "status": "pending",
            "kind": "client_tool",
            "run_id": self.run_id,
        }
        tenant = self._principal.tenant_id
        async with self._service.database.begin(tenant) as tx:
            return await interrupts.page(
                tx, tenant, filters, after=None, descending=False, limit=_MOST_CALLS
            )

    async def answer(self) -> tuple[dict[str, Any], Calls]:
        """Return the run, and the calls of the client's tools that it waits for.

        Raises:
            ModelError: the run failed.
        """
        run, calls = await self.state()
        self.ended = True
        if run["status"] in (RunStatus.COMPLETED, RunStatus.WAITING):
            return run, calls
        error = run["error"] or {"code": run["status"], "message": f"the run is {run['status']}"}
        raise ModelError(error["message"], code=error["code"])

    async def state(self) -> tuple[dict[str, Any], Calls]:
        """Return the run as it is, and the calls of the client's tools that it waits for.

        Raises:
            NotFoundError: unknown, or another tenant's.
        """
        tenant = self._principal.tenant_id
        async with self._service.database.begin(tenant) as tx:
            run = await read.get(tx, tenant, self.run_id)
        return run, await self._calls() if run["status"] == RunStatus.WAITING else ()


async def answered(
    service: Service,
    principal: Principal,
    model: str,
    user: str | None,
    answers: Mapping[UUID, str],
) -> FollowedRun | None:
    """Give a waiting run the answers to its calls; ``None``: they are not of one of the caller's.

    A run is the caller's if it was started with the same key, agent and user.
    """
    tenant = principal.tenant_id
    graph = graph_of(model)
    own = (None if graph else model, graph, principal.actor, user)
    async with service.database.begin(tenant) as tx:
        found = await interrupts.of_client(tx, tenant, list(answers))
        runs = {each["run_id"] for each in found}
        of_caller = all(
            (each["agent"], each["graph"], each["principal"], each["user_id"]) == own
            for each in found
        )
        if len(found) < len(answers) or len(runs) != 1 or not of_caller:
            return None
        for interrupt, text in answers.items():
            await decide(tx, principal, interrupt, NewDecision(result=text))
    return FollowedRun(service, principal, found[0]["run_id"], found[0]["last_seq"])


async def while_connected(
    request: Request, followed: FollowedRun, answer: Any, *, stay: bool
) -> Response:
    """Return an awaited answer as JSON; cancel the run if the client gets none.

    Args:
        stay: the run goes on without the client.
    """
    answering = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return JSONResponse(await answering)
        return Response(status_code=499)
    finally:
        answering.cancel()
        gone.cancel()
        if not (followed.ended or stay):
            followed.cancel()


async def leaving(
    followed: FollowedRun, chunks: AsyncIterator[bytes], *, stay: bool
) -> AsyncIterator[bytes]:
    """Yield chunks; cancel the run if the client does not get its answer."""
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        if not (followed.ended or stay):
            followed.cancel()


async def _gone(request: Request) -> None:
    """Return once the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def checked(kind: type[Checked], body: Mapping[str, Any]) -> Checked:
    """Return a validated body.

    Raises:
        InvalidInputError: ``pointer`` names the first wrong field.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        problem = field_problem({**first, "loc": ("body", *first["loc"])}, body)
        raise InvalidInputError(problem.detail, pointer=problem.pointer) from None
