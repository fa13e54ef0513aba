"""Answers and errors of OpenAI's API; each answer, whole or streamed, is one round of a run.

:class:`Spoken` builds the text of both, so the joined pieces of a stream equal the whole text.

A run without client tools has one round. A run with client tools has one more round for each answer
of the client. This module reads every round from the run's log, so clients can read old rounds
again.
"""

from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from fastapi import Request, Response
from pydantic_core import from_json, to_json
from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.dialects.postgresql import JSONB

from bottega.agents.messages import AssistantMessage
from bottega.agents.query import Ending, continued, ending_of
from bottega.api.routes.openai.forms import ResponsesRequest
from bottega.api.routes.openai.model_request import as_json, id_of
from bottega.api.routes.stream import event_stream
from bottega.api.server.middleware import Translation
from bottega.api.shared.run_follower import HEARTBEAT, RunFollower, leaving, while_connected
from bottega.db.pool import AsyncConnection
from bottega.db.tables import run_events
from bottega.definitions.store import AGENTS
from bottega.engine.replay import replay_run
from bottega.errors import BottegaError, ModelError
from bottega.events.frames import LLM_DELTA, Filter
from bottega.events.types import UNFINISHED, Event, EventType, RunStatus
from bottega.runs import interrupts, messages

_SPENDING = (EventType.LLM_COMPLETED, EventType.LLM_FAILED, EventType.LLM_CANCELLED)
_e = run_events.c


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a run, which makes one answer to the client.

    Attributes:
        until: ``seq`` of the last event of the round.
        said: messages of the root agent's model, in order, without rejected messages.
        calls: interrupts that the client must answer; empty: the run has ended, or continues
            without the client.
        usage: tokens in the form of the run's ``usage``; ``None``: not known yet.
    """

    until: int
    said: Sequence[AssistantMessage]
    calls: Sequence[Mapping[str, Any]]
    usage: Mapping[str, Any] | None


async def round_of(tx: AsyncConnection, run: Mapping[str, Any], after: int) -> Round:
    """Return the round of a run that begins after the event with this ``seq``."""
    calls = await interrupts.of_client(tx, run["tenant_id"], run_id=run["id"])
    own = {each["id"] for each in calls}
    until: int = run["last_seq"]
    asked: Collection[UUID] = ()
    events: list[Event] = []
    for event in await messages.read_events(tx, run, *_since(after)):
        if event.type == EventType.RUN_WAITING:
            asked = own.intersection(map(UUID, event.data.get("interrupts", ())))
            if asked:
                until = event.seq
                break
        events.append(event)
    own_calls = replay_run(events).task(None).calls.values()
    said = [call.answer for call in own_calls if call.answer and not call.is_rejected]
    is_over = not asked and run["status"] not in UNFINISHED
    wanted = [
        each
        for each in calls
        if (each["id"] in asked if asked else not is_over and each["status"] == "pending")
    ]
    spent = run["usage"] if is_over else await _spent(tx, run, until)
    before = await _spent(tx, run, after) if after and spent is not None else None
    return Round(until, said, wanted, _without(spent, before))


class Checks(NamedTuple):
    """The kinds of checks that a run's answer must pass.

    Attributes:
        schema: the answer must fit a JSON Schema of the run or of the agent.
        policy: the agent must have called certain tools.
    """

    schema: bool
    policy: bool


async def checks_of(tx: AsyncConnection, run: Mapping[str, Any]) -> Checks:
    """Return the kinds of checks that the run's answer must pass."""
    versions = AGENTS.versions.c
    names = ("output_schema", "tool_policy")
    query = select(*(versions.definition[name].label(name) for name in names)).where(
        versions.tenant_id == run["tenant_id"],
        versions.name == run["agent"],
        versions.version == run["pinned"]["agents"].get(run["agent"]),
    )
    row = dict((await tx.execute(query)).mappings().one_or_none() or {})
    schema = run["output_schema"] or row.get("output_schema")
    return Checks(schema is not None, bool(row.get("tool_policy")))


def _since(after: int) -> tuple[ColumnElement[bool], ...]:
    """Return SQL conditions for a round's events: the root agent's answers, and ``run.waiting``."""
    of_root = (EventType.LLM_COMPLETED, EventType.ANSWER_REJECTED)
    own = and_(_e.type.in_(of_root), _e.task_id.is_(None))
    return _e.step > after, _e.seq > after, or_(own, _e.type == EventType.RUN_WAITING)


async def _spent(
    tx: AsyncConnection, run: Mapping[str, Any], until: int
) -> Mapping[str, Any] | None:
    usage = func.sum_usage(func.array_agg(_e.data["usage"]), type_=JSONB)
    query = select(usage).where(
        _e.tenant_id == run["tenant_id"],
        _e.run_id == run["id"],
        _e.seq <= until,
        _e.type.in_(_SPENDING),
        _e.data.has_key("usage"),
    )
    row: Mapping[str, Any] | None = await tx.scalar(query)
    return row


def _without(
    spent: Mapping[str, Any] | None, before: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    if spent is None or before is None:
        return spent
    names = ("input", "output", "cached", "reasoning")
    return {name: max(0, spent.get(name, 0) - before.get(name, 0)) for name in names}


_HEARD = frozenset((LLM_DELTA, EventType.LLM_COMPLETED))
_JOINT = "\n\n"


@dataclass(frozen=True, slots=True)
class ClientCall:
    """A call of one of the client's tools; ``arguments`` is a text in JSON."""

    interrupt: UUID
    name: str
    arguments: str

    @property
    def id(self) -> str:
        return id_of("call", self.interrupt)


@dataclass(frozen=True, slots=True)
class RoundAnswer:
    """An answer to a client's request: the content of one round of a run.

    Attributes:
        run: the run, in the form of ``GET /v1/runs/{id}``.
        calls: tool calls at the end of the answer, which the client must answer.
        usage: tokens of this round, in the form of a run's ``usage``; ``None``: not known yet.
    """

    run: Mapping[str, Any]
    text: str
    calls: Sequence[ClientCall]
    usage: Mapping[str, Any] | None

    @property
    def finish(self) -> str:
        """Return the ``finish_reason`` of a chat completion."""
        if self.calls:
            return "tool_calls"
        reason = self.run["stop_reason"]
        return reason if reason in ("length", "content_filter") else "stop"


class Spoken:
    """The text of a round, built from the messages of the round's model.

    The text of a message with tool calls becomes a separate paragraph before the last answer. If a
    message was cut off, the message and the next message become one text.
    """

    def __init__(self) -> None:
        self._paragraphs: list[str] = []
        self._cut = ""
        self._last = ""

    def observe(self, message: AssistantMessage) -> None:
        ending = ending_of(message)
        if ending is Ending.EMPTY:
            return
        self._say(self._last)
        self._last = ""
        text = message.content
        if message.tool_calls:
            self._say(self._cut)
            self._say(text)
            self._cut = ""
            return
        text = continued(self._cut, text) if self._cut else text
        self._cut, self._last = (text, "") if ending is Ending.LENGTH else ("", text)

    def text(self, last: str | None = None) -> str:
        """Return the whole text; ``last``: the run's answer; ``None``: there is no answer yet."""
        return self._with(self._cut or self._last if last is None else last)

    def certain(self, live: str = "") -> str:
        """Return the first part of the text: the part that later messages cannot change.

        Args:
            live: the first part of the next message.
        """
        if self._cut:  # hold back spaces at the end: the next message may repeat them
            return self._with(self._cut.rstrip())
        if not live:
            return self._with(self._last)
        paragraphs = [*self._paragraphs, self._last, live.rstrip()]
        return _JOINT.join(text for text in paragraphs if text.strip())

    def _say(self, text: str) -> None:
        if text.strip():
            self._paragraphs.append(text)

    def _with(self, last: str) -> str:
        return _JOINT.join(text for text in (*self._paragraphs, last) if text.strip())


class _Live:
    def __init__(self) -> None:
        self._call: tuple[int, int] | None = None
        self._text = ""

    def observe(self, call: int, attempt: int, offset: int, text: str) -> str:
        if self._call != (call, attempt):
            self._call, self._text = (call, attempt), ""
        self._text = self._text[:offset] + text
        return self._text


async def pieces(follower: RunFollower) -> AsyncIterator[str | RoundAnswer | None]:
    """Yield an answer's text in pieces, and then the whole answer; ``None`` means a heartbeat.

    If checks may reject the answer, the text is yielded only after the answer has passed the
    checks.

    Raises:
        ModelError: the run failed; or the model's answer broke off, and the next try began with a
            different text.
    """
    run, checks = await _looked_at(follower)
    spoken, live, sent = Spoken(), _Live(), ""
    async for frame in follower.frames(Filter(types=_HEARD, depth=-1)):
        if frame is None:
            yield None
            continue
        if any(checks):
            continue
        data = from_json(frame.body)["data"]
        if frame.type == EventType.LLM_COMPLETED:
            spoken.observe(AssistantMessage.model_validate(data["message"]))
            text = spoken.certain()
        else:
            text = spoken.certain(live.observe(**data))
        if len(text) > len(sent) and text.startswith(sent):
            yield text[len(sent) :]
            sent = text
    answer = await _answer(follower)
    if not answer.text.startswith(sent):
        raise ModelError(
            "the model's answer broke off, and the next try began differently: ignore the text "
            f"that was sent. GET /v1/runs/{run['id']} has the answer",
            code="broken_off",
        )
    if rest := answer.text[len(sent) :]:
        yield rest
    yield answer


async def shown(follower: RunFollower) -> RoundAnswer:
    """Return the answer so far. The run may continue, or may have failed.

    Raises:
        NotFoundError: the run does not exist.
    """
    run, _ = await follower.state()
    return await _made(follower, run)


async def _looked_at(follower: RunFollower) -> tuple[Mapping[str, Any], Checks]:
    run, _ = await follower.state()
    async with follower.begin() as tx:
        return run, await checks_of(tx, run)


async def _answer(follower: RunFollower) -> RoundAnswer:
    run, _ = await follower.answer()
    return await _made(follower, run)


async def _made(follower: RunFollower, run: Mapping[str, Any]) -> RoundAnswer:
    async with follower.begin() as tx:
        return answer_of(run, await round_of(tx, run, follower.after), await checks_of(tx, run))


def answer_of(run: Mapping[str, Any], part: Round, checks: Checks) -> RoundAnswer:
    """Convert one round of a run to an answer of the API. Pure."""
    names = {
        tool["name"]: tool["client_name"]
        for change in (run["overrides"] or {}).values()
        for tool in change.get("tools") or ()
        if tool.get("client_name")
    }
    calls = [
        ClientCall(
            each["id"],
            names.get(each["tool"], each["tool"]),
            as_json(each["arguments"]),
        )
        for each in part.calls
    ]
    is_over = not calls and run["status"] not in UNFINISHED
    last = output_text(run) if is_over and run["status"] == RunStatus.COMPLETED else None
    spoken = Spoken()
    for message in () if checks.schema else part.said:
        spoken.observe(message)
    return RoundAnswer(run, spoken.text(last), calls, part.usage)


def output_text(run: Mapping[str, Any]) -> str:
    """Return a run's output as text: several answers of a DAG become a JSON object, by agent."""
    output = run["output"]
    if output is None or isinstance(output, str):
        return output or ""
    return as_json(output)


def event(body: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: %s\n\n" % to_json(body)


def created_at(run_id: UUID) -> int:
    """Return a run's creation time from its id, in seconds since 1970."""
    return int(run_id.hex[:12], 16) // 1000


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
_MODEL = "/model"


def error_body(
    code: str, message: str, *, status: int = 502, param: str | None = None
) -> dict[str, Any]:
    """Return an error in the form of OpenAI's API."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def translated(status: int, problem: Mapping[str, Any]) -> Translation:
    """Return a problem as an error of OpenAI's API."""
    code = problem["code"]
    errors = problem.get("errors") or [{}]
    pointer = errors[0].get("pointer")
    if code == "unknown_agent" or (code == "unknown_graph" and pointer in (None, _MODEL)):
        status, code, pointer = 404, "model_not_found", _MODEL
    elif status == 422:
        status = 400
    param = None if pointer is None else pointer.strip("/").replace("/", ".")
    message = problem["detail"]
    if param and status == 400:
        message = f"{param}: {errors[0]['detail']}"
    body = error_body(_CODES.get(status, code), message, status=status, param=param)
    # After 429 and 503 no run was started. After other errors, a retry would repeat the failed run.
    repeat = "true" if status in (429, 503) else "false"
    return Translation(status, body, {"x-should-retry": repeat})


class Encoder(Protocol):
    """Writer of an answer in one form: as JSON, or as events of a stream."""

    def whole(self, answer: RoundAnswer) -> object:
        """Return the whole answer as a JSON value."""
        ...

    def begin(self) -> Iterator[bytes]:
        """Yield the events that come before the text."""
        ...

    def delta(self, text: str) -> Iterator[bytes]:
        """Yield the events that send a piece of the text."""
        ...

    def end(self, answer: RoundAnswer) -> Iterator[bytes]:
        """Yield the events that come after the text."""
        ...

    def failed(self, error: BottegaError) -> Iterator[bytes]:
        """Yield the events that end an answer whose run failed."""
        ...


async def respond(
    request: Request,
    follower: RunFollower,
    encoder: Encoder,
    *,
    stream: bool,
    stay: bool,
    headers: Mapping[str, str],
) -> Response:
    """Answer a request with a run's answer; ``stay``: the run survives a disconnect."""
    if stream:
        return event_stream(leaving(follower, _encoded(follower, encoder), stay=stay), headers)
    answer = _whole(follower, encoder)
    return await while_connected(request, follower, answer, stay=stay, headers=headers)


async def _whole(follower: RunFollower, encoder: Encoder) -> object:
    await follower.rest()
    return encoder.whole(await _answer(follower))


async def _encoded(follower: RunFollower, encoder: Encoder) -> AsyncIterator[bytes]:
    for each in encoder.begin():
        yield each
    try:
        async for piece in pieces(follower):
            if piece is None:
                yield HEARTBEAT
                continue
            made = encoder.end(piece) if isinstance(piece, RoundAnswer) else encoder.delta(piece)
            for each in made:
                yield each
    except BottegaError as error:
        for each in encoder.failed(error):
            yield each


DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Completion:
    """Encoder of a chat completion.

    Attributes:
        after: ``seq`` of the last event before the chat completion.
        model: the model's name as the client sent it in the request.
        with_usage: the stream ends with the number of tokens.
    """

    run_id: UUID
    after: int
    model: str
    with_usage: bool = False

    def whole(self, answer: RoundAnswer) -> object:
        """Return a ``chat.completion``."""
        content = (answer.text or None) if answer.calls else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.calls:
            message["tool_calls"] = [_call(each) for each in answer.calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish}
        return self._head("chat.completion") | {"choices": [choice], "usage": usage_of(answer)}

    def begin(self) -> Iterator[bytes]:
        yield self._chunk({"role": "assistant", "content": ""})

    def delta(self, text: str) -> Iterator[bytes]:
        yield self._chunk({"content": text})

    def end(self, answer: RoundAnswer) -> Iterator[bytes]:
        if answer.calls:
            numbered = [{"index": n, **_call(each)} for n, each in enumerate(answer.calls)]
            yield self._chunk({"tool_calls": numbered})
        yield self._chunk({}, answer.finish)
        if self.with_usage:
            usage: dict[str, Any] = {"choices": [], "usage": usage_of(answer)}
            yield event(self._head("chat.completion.chunk") | usage)
        yield DONE

    def failed(self, error: BottegaError) -> Iterator[bytes]:
        yield event(error_body(error.code, error.detail))
        yield DONE

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event(self._head("chat.completion.chunk") | {"choices": [choice]})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.run_id.hex}" + (f"-{self.after}" if self.after else ""),
            "object": kind,
            "created": created_at(self.run_id),
            "model": self.model,
        }


def usage_of(answer: RoundAnswer) -> dict[str, Any] | None:
    """Return the number of tokens of an answer; ``None``: not known yet."""
    usage = answer.usage
    if usage is None:
        return None
    return {
        "prompt_tokens": usage["input"],
        "completion_tokens": usage["output"],
        "total_tokens": usage["input"] + usage["output"],
        "prompt_tokens_details": {"cached_tokens": usage.get("cached", 0)},
        "completion_tokens_details": {"reasoning_tokens": usage.get("reasoning", 0)},
    }


def _call(call: ClientCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


_STATUSES = {
    "queued": "queued",
    "running": "in_progress",
    "waiting": "in_progress",
    "completed": "completed",
    "cancelled": "cancelled",
}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """A response of OpenAI's API, which may be incomplete.

    Attributes:
        after: ``seq`` of the last event before the response.
        request: the client's request; ``None``: it was not stored.
    """

    run_id: UUID
    after: int
    model: str
    request: ResponsesRequest | None = None

    def body(self, status: str = "in_progress") -> dict[str, Any]:
        """Return the response without output."""
        request = self.request
        return {
            "id": id_of("resp", self.run_id, self.after),
            "object": "response",
            "created_at": created_at(self.run_id),
            "status": status,
            "background": bool(request and request.background),
            "error": None,
            "incomplete_details": None,
            "instructions": request and request.instructions,
            "max_output_tokens": request and request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": (request and request.metadata) or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": not request or request.parallel_tool_calls is not False,
            "previous_response_id": request and request.previous_response_id,
            "reasoning": {
                "effort": request and request.reasoning and request.reasoning.effort,
                "summary": None,
            },
            "service_tier": "default",
            "store": not request or request.store is not False,
            "temperature": request and request.temperature,
            "text": {
                "format": (request and request.text and request.text.format) or {"type": "text"}
            },
            "tool_choice": (request and request.tool_choice) or "auto",
            "tools": (request and request.tools) or [],
            "top_logprobs": 0,
            "top_p": request and request.top_p,
            "truncation": (request and request.truncation) or "disabled",
            "usage": None,
            "user": request and request.user,
        }

    def whole(self, answer: RoundAnswer) -> dict[str, Any]:
        """Return the response object for an answer, which may be incomplete."""
        run = answer.run
        body = self.body("completed" if answer.calls else _STATUSES.get(run["status"], "failed"))
        said = body["status"] == "completed" and (answer.text or not answer.calls)
        body["output"] = [self.message(answer.text)] if said else []
        body["output"] += map(item_of, answer.calls)
        if not answer.calls and (reason := _INCOMPLETE.get(run["stop_reason"] or "")):
            body |= {"status": "incomplete", "incomplete_details": {"reason": reason}}
        if body["status"] == "failed":
            error = run["error"] or {"message": f"the run is {run['status']}"}
            body["error"] = {"code": "server_error", "message": error["message"]}
        if (usage := usage_of(answer)) is not None:
            body["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            }
        return body

    def message(self, text: str, status: str = "completed") -> dict[str, Any]:
        """Return the response's item that has the text; an ``in_progress`` item has no text."""
        return {
            "id": id_of("msg", self.run_id, self.after),
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [] if status == "in_progress" else [part(text)],
        }


def item_of(call: ClientCall) -> dict[str, Any]:
    """Return the response's item for a call of a client's tool."""
    return {
        "id": id_of("fc", call.interrupt),
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


def part(text: str) -> dict[str, Any]:
    """Return a text as a part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseEvents:
    """The events of a streamed response, with their numbers."""

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._number = 0
        self._text = ""
        self._is_open = False

    def whole(self, answer: RoundAnswer) -> object:
        return self._response.whole(answer)

    def begin(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response.body())

    def delta(self, text: str) -> Iterator[bytes]:
        if not self._is_open:
            self._is_open = True
            item = self._response.message("", "in_progress")
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._at_part("response.content_part.added", part=part(""))
        self._text += text
        yield self._at_part("response.output_text.delta", delta=text, logprobs=[])

    def end(self, answer: RoundAnswer) -> Iterator[bytes]:
        if not (self._is_open or answer.calls):
            yield from self.delta("")
        if self._is_open:
            item = self._response.message(self._text)
            yield self._at_part("response.output_text.done", text=self._text, logprobs=[])
            yield self._at_part("response.content_part.done", part=part(self._text))
            yield self._event("response.output_item.done", output_index=0, item=item)
        for number, call in enumerate(answer.calls):
            item, at = item_of(call), {"output_index": number + self._is_open}
            begun = {**item, "status": "in_progress", "arguments": ""}
            yield self._event("response.output_item.added", **at, item=begun)
            at_item = {**at, "item_id": item["id"]}
            arguments = item["arguments"]
            kind = "response.function_call_arguments"
            yield self._event(f"{kind}.delta", **at_item, delta=arguments)
            yield self._event(f"{kind}.done", **at_item, name=item["name"], arguments=arguments)
            yield self._event("response.output_item.done", **at, item=item)
        whole = self._response.whole(answer)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: BottegaError) -> Iterator[bytes]:
        fields = {"code": "server_error", "message": error.detail}
        whole = self._response.body("failed") | {"error": fields}
        yield self._event("response.failed", response=whole)

    def _at_part(self, kind: str, **more: Any) -> bytes:
        item = self._response.message("", "in_progress")["id"]
        return self._event(kind, item_id=item, output_index=0, content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), to_json(body))
