"""The answer to a request of OpenAI's API: a round of a run, whole or as it comes.

A text in pieces is the whole text, cut: both are made of the same messages by :class:`Spoken`.

Errors of OpenAI's API: problems, in the form that its clients read.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic_core import from_json, to_json

from bottega.agents.messages import AssistantMessage
from bottega.agents.query import Ending, continued, ending_of
from bottega.api.routes.openai.model_request import as_json, id_of
from bottega.api.server.middleware import Translation
from bottega.api.shared.followed import FollowedRun
from bottega.errors import ModelError
from bottega.events.frames import LLM_DELTA, Filter
from bottega.events.types import UNFINISHED, EventType, LlmCompleted, RunStatus
from bottega.runs.rounds import Checks, Round, checks_of, round_of

_HEARD = frozenset((LLM_DELTA, EventType.LLM_COMPLETED))
_OF_ROOT = -1
_JOINT = "\n\n"


@dataclass(frozen=True, slots=True)
class ClientCall:
    """A call of a tool of the client; ``arguments``: JSON."""

    interrupt: UUID
    name: str
    arguments: str

    @property
    def id(self) -> str:
        return id_of("call", self.interrupt)


@dataclass(frozen=True, slots=True)
class RoundAnswer:
    """An answer.

    Attributes:
        run: as ``GET /v1/runs/{id}`` shows it.
        calls: which the client is to answer; the answer to its request ends with them.
        usage: tokens of this answer, as a run's; ``None``: not known yet.
    """

    run: Mapping[str, Any]
    text: str
    calls: Sequence[ClientCall]
    usage: Mapping[str, Any] | None

    @property
    def finish(self) -> str:
        """Return why a chat's choice ends."""
        if self.calls:
            return "tool_calls"
        reason = self.run["stop_reason"]
        return reason if reason in ("length", "content_filter") else "stop"


class Spoken:
    """The text of a round, from the messages of its model.

    What the model says beside calls of tools are paragraphs of their own, before its last answer. A
    message that was cut off is one text with what follows it.
    """

    def __init__(self) -> None:
        self._said: list[str] = []
        self._cut = ""
        self._last = ""

    def hear(self, message: AssistantMessage) -> None:
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
        """Return the whole text; ``last``: the run's answer; ``None``: it has none yet."""
        return self._with(self._cut or self._last if last is None else last)

    def certain(self, live: str = "") -> str:
        """Return the beginning of the text, as far as nothing can change it any more.

        Args:
            live: the beginning of the next message.
        """
        if self._cut:  # what follows may repeat its end
            return self._with(self._cut.rstrip())
        if not live:
            return self._with(self._last)
        said = [*self._said, self._last, live.rstrip()]
        return _JOINT.join(text for text in said if text.strip())

    def _say(self, text: str) -> None:
        if text.strip():
            self._said.append(text)

    def _with(self, last: str) -> str:
        return _JOINT.join(text for text in (*self._said, last) if text.strip())


class _Live:
    """The text of the model call under way."""

    def __init__(self) -> None:
        self._call: tuple[int, int] | None = None
        self._text = ""

    def hear(self, call: int, attempt: int, offset: int, text: str) -> str:
        if self._call != (call, attempt):
            self._call, self._text = (call, attempt), ""
        self._text = self._text[:offset] + text
        return self._text


async def whole(followed: FollowedRun) -> RoundAnswer:
    """Wait for an answer.

    Raises:
        ModelError: the run failed.
    """
    await followed.rest()
    return await _answer(followed)


async def pieces(followed: FollowedRun) -> AsyncIterator[str | RoundAnswer | None]:
    """Yield an answer's text in pieces, and then the answer; ``None``: a heartbeat.

    Text that a check may still refuse is sent once it has passed.

    Raises:
        ModelError: the run failed, or its model answered twice, with other words.
    """
    run, checks = await _looked_at(followed)
    spoken, live, sent = Spoken(), _Live(), ""
    async for frame in followed.frames(Filter(types=_HEARD, depth=_OF_ROOT)):
        if frame is None:
            yield None
            continue
        if any(checks):
            continue
        data = from_json(frame.body)["data"]
        if frame.type == EventType.LLM_COMPLETED:
            spoken.hear(AssistantMessage.model_validate(LlmCompleted.of(data).message))
            text = spoken.certain()
        else:
            text = spoken.certain(live.hear(**data))
        if len(text) > len(sent) and text.startswith(sent):
            yield text[len(sent) :]
            sent = text
    answer = await _answer(followed)
    if not answer.text.startswith(sent):
        raise ModelError(
            "the model's answer broke off, and its next one began with other words: the text that "
            f"was sent is no part of it. GET /v1/runs/{run['id']} has the answer",
            code="broken_off",
        )
    if rest := answer.text[len(sent) :]:
        yield rest
    yield answer


async def shown(followed: FollowedRun) -> RoundAnswer:
    """Return an answer as it is now; its run may go on, or have failed.

    Raises:
        NotFoundError: there is no such run.
    """
    run, _ = await followed.state()
    return await _made(followed, run)


async def _looked_at(followed: FollowedRun) -> tuple[Mapping[str, Any], Checks]:
    run, _ = await followed.state()
    async with followed.begin() as tx:
        return run, await checks_of(tx, run)


async def _answer(followed: FollowedRun) -> RoundAnswer:
    run, _ = await followed.answer()
    return await _made(followed, run)


async def _made(followed: FollowedRun, run: Mapping[str, Any]) -> RoundAnswer:
    async with followed.begin() as tx:
        return answer_of(run, await round_of(tx, run, followed.after), await checks_of(tx, run))


def answer_of(run: Mapping[str, Any], part: Round, checks: Checks) -> RoundAnswer:
    """Return the answer that a round of a run is. Pure."""
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
        spoken.hear(message)
    return RoundAnswer(run, spoken.text(last), calls, part.usage)


def output_text(run: Mapping[str, Any]) -> str:
    """Return a run's output as a text; a DAG's with several answers as JSON by agent."""
    output = run["output"]
    if output is None or isinstance(output, str):
        return output or ""
    return as_json(output)


def event(body: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: %s\n\n" % to_json(body)


def created_at(run_id: UUID) -> int:
    """Return the time at which a run was made, in seconds since 1970: its id begins with it."""
    return int(run_id.hex[:12], 16) // 1000


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
_MODEL = "/model"
_REPEATABLE = (429, 503)
"""Statuses of requests that started nothing; of others clients would repeat a failed run."""


def error_body(
    code: str, message: str, *, status: int = 502, param: str | None = None
) -> dict[str, Any]:
    """Return an error as OpenAI's clients expect it."""
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
    repeat = "true" if status in _REPEATABLE else "false"
    return Translation(status, body, {"x-should-retry": repeat})
