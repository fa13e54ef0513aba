"""Conversion of requests of OpenAI's API to runs. Pure.

Chat completions and responses are first parsed into a :class:`ModelRequest`. From a
:class:`ModelRequest`, this module makes the run's fields, the messages of the run's history, and
the names of the client's fields in errors.
"""

import json
import mimetypes
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Literal
from urllib.parse import unquote_to_bytes
from uuid import UUID

from pydantic import BaseModel, ConfigDict, JsonValue
from pydantic_core import PydanticCustomError

from bottega.api.shared.pages import storable
from bottega.errors import BottegaError, InvalidInputError, UnknownAgentError

Content = str | list[dict[str, Any]]
"""A text, or parts in the form of a run's input."""
_TEXTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")
_MEDIA_TYPE = re.compile(r"[a-z0-9.+-]{1,60}/[a-z0-9.+-]{1,100}")
_BLANK = re.compile(r"\s")
_UNKNOWN = "application/octet-stream"


def content_of(content: Any, pointer: str, *, is_history: bool) -> tuple[Content, list[str]]:
    """Return a message's content, and the JSON Pointers of its parts if the content is not a text.

    Args:
        pointer: JSON Pointer to the content.
        is_history: true: the message is not from the user, and its unknown parts become text.

    Raises:
        InvalidInputError: the content is invalid, or has a part that runs do not support.
    """
    if content is None or isinstance(content, str):
        return content or "", []
    if not isinstance(content, list):
        raise InvalidInputError("the content must be a text or a list of parts", pointer=pointer)
    found = []
    for number, part in enumerate(content):
        at = f"{pointer}/{number}"
        if part is not None and (made := _part(part, at, is_history)) is not None:
            found.append((made, at))
    parts = [part for part, _ in found]
    if all(part["type"] == "text" for part in parts):
        return text_of(parts), []
    return parts, [at for _, at in found]


def text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the texts of the parts, joined by line breaks."""
    return "\n".join(str(part["text"]) for part in parts if part["type"] == "text")


def _part(part: Any, pointer: str, is_history: bool) -> dict[str, Any] | None:
    match part:
        case str(text) | {"type": "refusal", "refusal": str(text)}:
            return _text(text)
        case {"type": str(kind), "text": text} if kind in _TEXTS and isinstance(text, str | None):
            return _text(text or "")
        case {"type": "image_url" | "input_image", "image_url": str(url) | {"url": str(url)}}:
            return {"type": "image", **source_of(url, pointer)}
        case {"type": "input_audio", "input_audio": {"data": str(data), "format": str(kind)}}:
            made = source_of(data, pointer) if data.startswith("data:") else {"data": data}
            return {"type": "audio", "media_type": f"audio/{kind}"} | made
        case {"type": "file" | "input_file", **more}:
            return _file(more.get("file") or more, pointer)
        case {"type": "input_image", "file_id": str(file)}:
            return {"type": "file", "file": file}
    if is_history:
        return _text(json.dumps(part, ensure_ascii=False))
    raise InvalidInputError(
        "a part must be a text, an image, audio or a file, given as data, URL or id",
        pointer=pointer,
    )


def _text(text: str) -> dict[str, Any] | None:
    return {"type": "text", "text": text} if text else None


def _file(file: Any, pointer: str) -> dict[str, Any]:
    match file:
        case {"file_id": str(known)}:
            return {"type": "file", "file": known}
        case {"file_data": str(source)} | {"file_url": str(source)}:
            name = file.get("filename") or None
            if not re.match(r"data:|https?://", source, re.IGNORECASE):
                kind = mimetypes.guess_type(name or "")[0] or _UNKNOWN
                made = {"media_type": kind, "data": source}
            else:
                made = source_of(source, pointer)
            return {"type": "document", **made, **({"name": name} if name else {})}
    raise InvalidInputError("a file needs file_data, file_url or file_id", pointer=pointer)


def source_of(url: str, pointer: str) -> dict[str, str]:
    """Return a part's source: media type and data of a data URL (RFC 2397), or the URL itself.

    Raises:
        InvalidInputError: a data URL has no comma, or an invalid media type.
    """
    if url[:5].lower() != "data:":
        return {"url": url}
    head, comma, data = url[5:].partition(",")
    media_type, *options = (option.strip().lower() for option in head.split(";"))
    media_type = media_type or "text/plain"
    if not comma or not _MEDIA_TYPE.fullmatch(media_type):
        raise InvalidInputError(
            "a data URL must be data:TYPE;base64,DATA, with a media type such as image/png",
            pointer=pointer,
        )
    if "base64" not in options:
        return {"media_type": media_type, "data": b64encode(unquote_to_bytes(data)).decode()}
    if "%" in data:
        data = unquote_to_bytes(data).decode("latin-1")
    return {"media_type": media_type, "data": _padded(data)}


def _padded(data: str) -> str:
    if len(data) % 4 == 0 and not _BLANK.search(data):
        return data
    data = _BLANK.sub("", data).rstrip("=")
    return data + "=" * (-len(data) % 4)


GRAPH = "graph:"
"""Prefix of the model that runs a graph as a DAG."""
CHANNEL = "openai"
"""Value in an agent's ``expose`` that offers the agent as a model."""

Role = Literal["system", "user", "assistant", "tool"]
_ID = re.compile(r"(resp|msg|call|fc)_([0-9a-f]{32})(?:_([0-9]{1,9}))?")
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST_NAME, MOST_CALLS = 64, 128
_NO_ANSWER, _NO_RESULT = "(no answer)", "(nothing)"
_NO_QUESTION = "(no message of the user follows: go on)"


class Lenient(BaseModel):
    """Base class that ignores unknown fields, for parts of a request."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class NamedUser(Lenient):
    """The fields of a request that may name the end user."""

    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, JsonValue] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call in a history; ``arguments`` is the client's text, which may be invalid JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class HistoryMessage:
    """A message of a history.

    Attributes:
        place: JSON Pointer to the message in the request.
        answers: id of the call that a message of the role ``tool`` answers.
        parts: JSON Pointers to the parts of the message's content, if the content is not a text.
        field: name of the request's field that contains the message's content.
    """

    role: Role
    content: Content
    place: str
    calls: Sequence[Call] = ()
    answers: str | None = None
    parts: Sequence[str] = ()
    field: str = "content"


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of the client; ``place``: JSON Pointer to the object with the tool's name."""

    name: str
    description: str
    parameters: Mapping[str, JsonValue]
    place: str


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request for a chat completion or a response. Pointers are JSON Pointers into its body.

    Attributes:
        messages_at: pointer to the list of messages.
        instructions: system text that applies to this request only.
        choice: parameter ``tool_choice``: a word, or a mapping that has a tool's name.
        params: {name of a run's parameter: (value, pointer to the value)}.
        schema_at: pointer to the schema of the answer.
    """

    model: str
    messages: Sequence[HistoryMessage]
    messages_at: str
    metadata: Mapping[str, JsonValue] | None = None
    instructions: str | None = None
    tools: Sequence[Tool] = ()
    choice: str | Mapping[str, str] | None = None
    params: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    schema: JsonValue = None
    schema_at: str = ""

    def after(self, earlier: Sequence[HistoryMessage]) -> "ModelRequest":
        """Return a copy of the request, with earlier messages before the request's own messages."""
        return replace(self, messages=[*earlier, *self.messages])


@dataclass(frozen=True, slots=True)
class RunBody:
    """The body of ``POST /v1/runs`` for a request.

    ``places`` maps JSON Pointers in this body to JSON Pointers in the client's request.
    """

    fields: dict[str, Any]
    places: Mapping[str, str]

    @contextmanager
    def named_as_sent(self) -> Iterator[None]:
        """Convert the pointers of errors in the block to pointers into the client's request."""
        try:
            yield
        except BottegaError as error:
            if error.pointer is not None:
                error.pointer = self._sent(error.pointer)
            raise

    def _sent(self, pointer: str) -> str:
        head = pointer
        while head not in self.places:
            if not head:
                return pointer
            head = head.rpartition("/")[0]
        if not head and pointer:
            return pointer
        rest = "" if head == "/output_schema" else pointer.removeprefix(head)
        return self.places[head] + rest


def body_of(request: ModelRequest, user: str | None) -> RunBody:
    """Return the body of a run for a request. A ``user`` of ``None`` means no end user.

    Raises:
        UnknownAgentError: the model cannot be the name of an agent or graph.
        InvalidInputError: the request has a field that a run does not support; ``pointer`` names
            this field.
    """
    name, version = versioned(request.model)
    graph = graph_of(name)
    places = dict.fromkeys(("/agent", "/graph", "/version", "/overrides"), "/model")
    places |= {"/output_schema": request.schema_at, "/session_id": "/conversation"}
    names = _names(request.tools)
    messages = _History(names).read(request.messages, request.messages_at)
    places |= {"/input": request.messages_at, "": request.messages_at}
    for number, (message, one) in enumerate(messages):
        places[f"/input/{number}"] = one.place
        places[f"/input/{number}/content"] = f"{one.place}/{one.field}".rstrip("/")
        for part, pointer in enumerate(one.parts):
            places[f"/input/{number}/content/{part}"] = pointer
        _refuse_unstorable(message, one.place)
    for tool in request.tools:
        _refuse_unstorable([tool.name, tool.description], tool.place)
    _refuse_unstorable(request.instructions, "/instructions")
    _refuse_unstorable(request.metadata, "/metadata")
    fields: dict[str, Any] = {"input": [message for message, _ in messages], "version": version}
    fields |= {
        name: value
        for name, value in (
            ("user", user),
            ("metadata", request.metadata or None),
            ("output_schema", request.schema),
        )
        if value is not None
    }
    if graph is not None:
        _refuse_changes(request)
        return RunBody(fields | {"mode": "dag", "graph": graph}, places)
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,63}", name):
        raise UnknownAgentError(f"there is no agent '{request.model}'", pointer="/model")
    change = _change(request, names)
    pointer = f"/overrides/{name}"
    places |= {f"{pointer}/tools": "/tools", f"{pointer}/instructions": "/instructions"}
    places |= {f"{pointer}/tools/{n}": tool.place for n, tool in enumerate(request.tools)}
    places |= {f"{pointer}/params/{key}": at for key, (_, at) in request.params.items()}
    places[f"{pointer}/params/tool_choice"] = "/tool_choice"
    return RunBody(fields | {"agent": name, "overrides": {name: change} if change else {}}, places)


def _refuse_unstorable(value: Any, pointer: str) -> None:
    try:
        storable(value)
    except PydanticCustomError as error:
        raise InvalidInputError(error.message(), pointer=pointer) from None


def versioned(model: str) -> tuple[str, int | None]:
    """Split a model into name and version; a version of ``None`` means the current version.

    Raises:
        UnknownAgentError: the version is not a number.
    """
    name, at, version = model.partition("@")
    if not at:
        return name, None
    if not re.fullmatch(r"[1-9][0-9]{0,8}", version):
        raise UnknownAgentError(f"there is no model '{model}'", pointer="/model")
    return name, int(version)


def graph_of(model: str) -> str | None:
    """Return the name of a model's graph; ``None``: the model is an agent."""
    return model.removeprefix(GRAPH) if model.startswith(GRAPH) else None


def model_of(run: Mapping[str, Any]) -> str:
    """Return the name of the model that stands for a run's agent or graph."""
    return str(run["agent"]) if run["agent"] else f"{GRAPH}{run['graph']}"


def id_of(kind: str, own: UUID, after: int = 0) -> str:
    """Return the id of a response, an item or a call that clients see.

    Args:
        kind: ``resp``: a response; ``msg``: the response's item with the text; ``call``: a call of
            the client's tool; ``fc``: the item with a call.
        own: id of the run; for a call, the id of the call's interrupt.
        after: ``seq`` of the last event before the response.
    """
    return f"{kind}_{own.hex}" + (f"_{after}" if after else "")


def known_by(kind: str, text: str | None) -> tuple[UUID, int] | None:
    """Parse an id of :func:`id_of` into ``own`` and ``after``; ``None``: a different form."""
    match = _ID.fullmatch(text or "")
    return None if match is None or match[1] != kind else (UUID(hex=match[2]), int(match[3] or 0))


def interrupt_of(call: str | None) -> UUID | None:
    """Return the interrupt's id in a call's id; ``None``: the call's id has a different form."""
    return (known := known_by("call", call)) and known[0]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refuse_changes(request: ModelRequest) -> None:
    changed = [at for _, at in request.params.values()]
    changed += ["/tools"] if request.tools else []
    changed += ["/tool_choice"] if request.choice else []
    if changed:
        raise InvalidInputError(
            "a graph accepts no parameters and no tools: set them on its agents", pointer=changed[0]
        )


def _change(request: ModelRequest, names: Mapping[str, str]) -> dict[str, Any]:
    params = {name: value for name, (value, _) in request.params.items()}
    if isinstance(request.choice, Mapping):
        tool_name = request.choice["name"]
        params["tool_choice"] = {"name": names.get(tool_name, tool_name)}
    elif request.choice:
        params["tool_choice"] = request.choice
    tools = [
        {
            "type": "client",
            "name": names[tool.name],
            "description": tool.description or tool.name,
            "parameters": tool.parameters,
            **({} if names[tool.name] == tool.name else {"client_name": tool.name}),
        }
        for tool in request.tools
    ]
    fields = {"params": params, "tools": tools, "instructions": request.instructions}
    return {name: value for name, value in fields.items() if value}


def _names(tools: Sequence[Tool]) -> dict[str, str]:
    """Return {name of a tool that the client sent: name that models see}.

    Raises:
        InvalidInputError: ``duplicate_tool``; or a name is empty, too long, or has a space.
    """
    made: dict[str, str] = {}
    for tool in tools:
        at = f"{tool.place}/name"
        if not tool.name or len(tool.name) > _LONGEST_NAME or re.search(r"[\s\x00]", tool.name):
            raise InvalidInputError(
                f"a tool's name must have 1 to {_LONGEST_NAME} characters and no space", pointer=at
            )
        if tool.name in made:
            raise InvalidInputError(
                f"two tools have the name '{tool.name}'", code="duplicate_tool", pointer=at
            )
        name = _fit(tool.name)
        if name in made.values() or (name != tool.name and any(t.name == name for t in tools)):
            name = f"{name[:55]}_{sha256(tool.name.encode()).hexdigest()[:8]}"
        made[tool.name] = name
    return made


def _fit(name: str) -> str:
    name = _UNFIT.sub("_", name)
    return (name if name[:1].isalpha() else f"t{name}")[:_LONGEST_NAME]


@dataclass(slots=True)
class _OpenCall:
    sent: str
    id: str
    answer: HistoryMessage | None = None


Kept = tuple[dict[str, Any], HistoryMessage]
"""A message of a run's input, and the client's message from which it was made."""


class _History:
    """A history that model APIs accept: answers follow in the order of the calls, one per call.

    Args:
        names: {name of a tool that the client sent: name that models see}.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._ids: set[str] = set()
        self._seen: set[str] = set()
        self._renamed = 0
        self._kept: list[Kept] = []
        self._open: list[_OpenCall] = []
        self._caller: HistoryMessage | None = None

    def read(self, said: Sequence[HistoryMessage], messages: str) -> list[Kept]:
        """Return pairs of a message for the run and the client's message from which it was made.

        Empty messages are skipped. An answer with an id belongs to the first open call with this
        id; an answer without an id belongs to the first open call. If a call has no answer, an
        answer is added that says that the result is missing. An answer for which no call is open
        becomes a user message.

        Raises:
            InvalidInputError: an answer belongs to no call, a message has too many calls, or no
                message has content.
        """
        for one in said:
            if one.role == "tool":
                self._answer(one)
            elif one.content or one.calls:
                self._close()
                self._say(one)
        self._close()
        self._end_with_question(messages)
        return self._kept

    def _say(self, one: HistoryMessage) -> None:
        if one.role in ("system", "assistant") and not isinstance(one.content, str):
            shown = [at for at, part in enumerate(one.content) if part["type"] != "text"]
            seen = replace(
                one,
                role="user",
                content=[one.content[at] for at in shown],
                calls=(),
                parts=[one.parts[at] for at in shown if at < len(one.parts)],
            )
            rest = replace(one, content=text_of(one.content), parts=())
            for each in (seen, rest) if one.role == "assistant" else (rest, seen):
                if each.content or each.calls:
                    self._say(each)
            return
        message: dict[str, Any] = {"role": one.role}
        if one.content:
            message["content"] = one.content
        if len(one.calls) > MOST_CALLS:
            raise InvalidInputError(
                f"a message may have at most {MOST_CALLS} calls of tools", pointer=one.place
            )
        if one.calls:
            self._caller, made = one, []
            for call in one.calls:
                own = self._new_id(call.id)
                self._open.append(_OpenCall(call.id, own))
                name = self._names.get(call.name) or _fit(call.name)
                made.append({"id": own, "name": name, "arguments": _arguments(call.arguments)})
            message["tool_calls"] = made
        self._kept.append((message, one))

    def _new_id(self, call_id: str) -> str:
        self._seen.add(call_id)
        own = call_id if 0 < len(call_id) <= 200 else "call"
        while own in self._ids:
            self._renamed += 1
            own = f"call#{self._renamed}"
        self._ids.add(own)
        return own

    def _answer(self, one: HistoryMessage) -> None:
        for call in self._open:
            if call.answer is None and one.answers in (call.sent, ""):
                call.answer = one
                return
        if one.answers not in self._seen:
            raise InvalidInputError(
                "no earlier message has the tool call that this message answers", pointer=one.place
            )
        self._close()
        late = replace(one, role="user", content=one.content or _NO_RESULT)
        self._kept.append(({"role": "user", "content": late.content}, late))

    def _close(self) -> None:
        for call in self._open:
            assert self._caller is not None
            one = call.answer or self._caller
            content = _NO_ANSWER if call.answer is None else call.answer.content or _NO_RESULT
            answer = {"role": "tool", "tool_call_id": call.id, "content": content}
            self._kept.append((answer, one))
        self._open = []

    def _end_with_question(self, messages: str) -> None:
        """Make the history end with a question or with tool results, as agents require.

        If the history does not end with a question, a note in brackets is added as the user's
        message. No other text is added as the user's message.
        """
        if not self._kept:
            raise InvalidInputError("all messages are empty: send a question", pointer=messages)
        roles = [message["role"] for message, _ in self._kept]
        end = max((at for at, role in enumerate(roles, 1) if role != "system"), default=0)
        if "user" in roles:
            question = max(at for at, role in enumerate(roles) if role == "user")
            self._kept[question:] = [*self._kept[end:], *self._kept[question:end]]
        if "user" not in roles or roles[end - 1] == "assistant":
            note = HistoryMessage("user", _NO_QUESTION, messages)
            self._kept.append(({"role": "user", "content": _NO_QUESTION}, note))


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = storable(json.loads(text or "{}"))
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": text}


def result_of(one: HistoryMessage) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """Return the text of a tool's answer, and those parts of the answer that are not text."""
    if isinstance(one.content, str):
        return one.content, ()
    return text_of(one.content), [part for part in one.content if part["type"] != "text"]
