"""Routes of OpenAI's chat completions: a model is an agent, and a completion is a run."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Body, Request, Response
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.responses import JSONResponse

from bottega.api.auth import Principal
from bottega.api.errors import field_problem
from bottega.api.routes.openai.answers import DONE, Completion, SentText, event
from bottega.api.routes.openai.requests import ChatRequest, answers_of, graph_of, run_of
from bottega.api.routes.stream import EventStream
from bottega.api.schemas.interrupts import NewDecision
from bottega.api.schemas.runs import NewRun
from bottega.api.server.openai_errors import error_body
from bottega.api.shared.decisions import decide
from bottega.api.shared.deps import PrincipalDep, ServiceDep, Tenant
from bottega.api.shared.new_runs import submit
from bottega.container import Service
from bottega.errors import BottegaError, InvalidInputError, ModelError, UnavailableError
from bottega.events.frames import LLM_DELTA, Filter
from bottega.events.stream import Subscriber
from bottega.events.types import EventType, RunStatus
from bottega.runs import interrupts, read
from bottega.runs.control import request_cancel

router = APIRouter(prefix="/openai/v1", include_in_schema=False)

_OF_ROOT = -1
_HEARTBEAT = b": heartbeat\n\n"
_MOST_CALLS = 128
_cancelling: set[asyncio.Task[Any]] = set()
Calls = Sequence[Mapping[str, Any]]


@router.post("/chat/completions")
async def create(
    service: ServiceDep,
    principal: PrincipalDep,
    tenant: Tenant,
    body: Annotated[dict[str, Any], Body()],
    request: Request,
) -> Response:
    asked = _checked(ChatRequest, body)
    run_id, after = await _begin(service, principal, asked)
    followed = _Followed(service, principal, Completion(run_id, asked.model), after)
    if asked.stream:
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        return EventStream(
            _leaving(followed, followed.chunks(with_usage=with_usage), stay=bool(asked.store)),
            service.settings,
        )
    answer = asyncio.ensure_future(followed.answer())
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            if not asked.store:
                followed.cancel()
            return Response(status_code=499)
        return JSONResponse(await answer)
    finally:
        answer.cancel()
        gone.cancel()


async def _begin(service: Service, principal: Principal, asked: ChatRequest) -> tuple[UUID, int]:
    """Start a run, or answer the calls that one waits for.

    Returns:
        the run, and the ``seq`` after which its events are the answer to this request.
    """
    if (answers := answers_of(asked.messages)) and (
        waiting := await _answered(service, principal, asked, answers)
    ):
        return waiting
    run = await submit(service, principal, _checked(NewRun, run_of(asked)))
    return UUID(str(run["id"])), 0


async def _answered(
    service: Service, principal: Principal, asked: ChatRequest, answers: Mapping[UUID, str]
) -> tuple[UUID, int] | None:
    """Give a waiting run the answers to its calls; ``None``: they are not of one of the caller's.

    A run is the caller's if it was started with the same key, agent and user.
    """
    tenant = principal.tenant_id
    graph = graph_of(asked.model)
    own = (None if graph else asked.model, graph, principal.actor, asked.user)
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
    return found[0]["run_id"], found[0]["last_seq"]


class _Followed:
    """A run whose answer a client waits for.

    Args:
        after: ``seq`` after which its events are the answer.
    """

    def __init__(
        self, service: Service, principal: Principal, completion: Completion, after: int
    ) -> None:
        self._service = service
        self._principal = principal
        self._completion = completion
        self._after = after
        self.ended = False

    async def answer(self) -> dict[str, Any]:
        """Return the completion.

        Raises:
            ModelError: the run failed.
        """
        async for _ in self._events():
            pass
        run, calls = await self._rest()
        return self._completion.whole(run, calls)

    async def chunks(self, *, with_usage: bool) -> AsyncIterator[bytes]:
        """Yield the completion's chunks; an error is one, too."""
        sent = SentText()
        yield self._completion.chunk({"role": "assistant", "content": ""})
        try:
            async for data in self._events(LLM_DELTA):
                if data is None:
                    yield _HEARTBEAT
                elif text := sent.piece(**data):
                    yield self._completion.chunk({"content": text})
            run, calls = await self._rest()
        except BottegaError as error:
            self.ended = True
            yield event(error_body(error.code, error.detail))
            yield DONE
            return
        if not calls and (text := sent.rest(self._completion.text(run))):
            yield self._completion.chunk({"content": text})
        for chunk in self._completion.last_chunks(run, calls, with_usage=with_usage):
            yield chunk

    def cancel(self) -> None:
        """Cancel the run, beside the request: nobody waits for its answer."""
        run_id, tenant = self._completion.run_id, self._principal.tenant_id
        stopping = request_cancel(self._service.database, tenant, run_id, self._principal.actor)
        task = asyncio.ensure_future(stopping)
        _cancelling.add(task)
        task.add_done_callback(_cancelling.discard)

    async def _events(self, *types: str) -> AsyncIterator[dict[str, Any] | None]:
        """Yield the root's live text until the run rests; ``None``: a heartbeat.

        Raises:
            UnavailableError: the server stops, the key was revoked, or the run was deleted.
        """
        service, tenant, run_id = (
            self._service,
            self._principal.tenant_id,
            self._completion.run_id,
        )
        cursor = await service.streams.cursor_of(tenant, run_id)
        if cursor.waits and await self._calls():
            return
        only = Filter(types=frozenset((*types, EventType.RUN_WAITING)), depth=_OF_ROOT)
        with service.streams.watching(cursor, self._after) as tail:
            reader = Subscriber(tail, self._after, only, service.settings.heartbeat_s)
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
            "run_id": self._completion.run_id,
        }
        tenant = self._principal.tenant_id
        async with self._service.database.begin(tenant) as tx:
            return await interrupts.page(
                tx, tenant, filters, after=None, descending=False, limit=_MOST_CALLS
            )

    async def _rest(self) -> tuple[dict[str, Any], Calls]:
        """Return the run, and the calls that it waits for.

        Raises:
            ModelError: the run failed.
        """
        tenant = self._principal.tenant_id
        async with self._service.database.begin(tenant) as tx:
            run = await read.get(tx, tenant, self._completion.run_id)
        self.ended = True
        if run["status"] == RunStatus.COMPLETED:
            return run, ()
        if run["status"] == RunStatus.WAITING:
            return run, await self._calls()
        error = run["error"] or {"code": run["status"], "message": f"the run is {run['status']}"}
        raise ModelError(error["message"], code=error["code"])


async def _leaving(
    followed: _Followed, chunks: AsyncIterator[bytes], *, stay: bool
) -> AsyncIterator[bytes]:
    """Yield chunks; cancel the run if the client goes away before their end."""
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


def _checked(kind: Any, body: Mapping[str, Any]) -> Any:
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
