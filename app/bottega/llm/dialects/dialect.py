"""Requests to a model's API: parts, turns and the body, as far as all dialects share them.

A message is encoded once, for its first request. Later requests reuse the message's bytes.

Parts that each dialect accepts:

- chat: images; audio as wav or mp3; files as data (developers.openai.com/api/docs, "Images and
  vision", "Audio", "File inputs");
- responses: images; files as data or URL;
- anthropic: images (jpeg, png, gif, webp); PDF, as data or URL
  (platform.claude.com/docs/en/build-with-claude/vision and pdf-support);
- gemini: all parts, as data or URL (ai.google.dev/gemini-api/docs/file-input-methods).

All dialects send a text file as text.

This module also arranges a history's messages into turns that every chat template accepts.
Templates and APIs differ, so a request satisfies the strictest rules:

- The only system message is at the start: Qwen 3.5 and later on vLLM and llama.cpp ("System message
  must be at the beginning", github.com/vllm-project/vllm/issues/41114).
- User and assistant alternate. A user's message follows only an assistant's message, not a tool's
  message. The last message is not an assistant's message
  (github.com/mistralai/mistral-common/issues/169, and its ``validator.py``).
- No content is empty (Gemini's OpenAI-compatible endpoint, Anthropic).
- The next turn after tool calls has the results of all calls, and then text (Anthropic and Gemini:
  platform.claude.com/docs/en/agents-and-tools/tool-use/handle-tool-calls,
  ai.google.dev/gemini-api/docs/function-calling).

The history itself does not change. Instructions at the start of the history form the system
message. Context changes with each query, so the module puts the context into the query's turn,
before the query. So prompts have a common prefix, and prompt caches hit. All other text, except the
model's text, becomes the user's text.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bottega.agents.messages import (
    AssistantMessage,
    StandardMessage,
    SystemMessage,
    ToolMessage,
)
from bottega.agents.params import ModelParams
from bottega.agents.parts import BYTES_PER_TOKEN, FileContent, FileLoader, Part
from bottega.agents.provider import DialectName, ModelOptions, ToolSchema
from bottega.errors import InvalidInputError
from bottega.llm.dialects.answer import AnswerBuilder
from bottega.llm.dialects.schemas import Output, output_of
from bottega.llm.dialects.wire import GO_ON, encode_head, encode_json, merged
from bottega.llm.errors import ErrorMapper
from bottega.llm.server import ServerSpec

_JOINT = b"\\n\\n"  # in JSON


INSTRUCTION, CONTEXT, ASKED, ANSWER, CALLS, RESULTS = range(6)
"""Kinds of messages in a request, as plain numbers, because each call compares many kinds."""


class Blocks(bytes):
    """Content that is not only text: encoded blocks, joined by commas."""


class ResultsAndBlocks(bytes):
    """Tools' results, with the part of their content that the API accepts only in a user's turn."""

    blocks: Blocks


Piece = tuple[int, bytes]
"""A message's kind and encoding.

For an instruction, context or a user's message, the encoding is the text as the inside of a JSON
string, or :class:`Blocks`. For other messages, the encoding is all items, joined by commas. The
encoding is empty if there is nothing to send.
"""

Items = Callable[[AssistantMessage | ToolMessage], bytes]
"""Function that encodes a message of a model or a tool as items joined by commas."""

Shown = Callable[[StandardMessage], Blocks]
"""Function that encodes the content of a message that has parts."""


@dataclass(frozen=True, slots=True)
class Form:
    """Templates of the turns of an API; ``%b`` is the inside of a JSON string, or blocks.

    Attributes:
        system: the instructions, and the opening of the list of turns.
        user: a user's turn with one text.
        user_blocks: a user's turn with blocks.
        text: a block of text.
        results: a turn with results, or ``None`` if each result is a separate item.
        bridge: a model's turn between results and the user's text, or ``None`` if the text follows
            the results in the same turn.
    """

    system: bytes
    no_system: bytes
    user: bytes
    user_blocks: bytes
    text: bytes
    results: bytes | None
    bridge: bytes | None

    def opening(self, system: Sequence[bytes]) -> bytes:
        """Return the instructions and the opening of the list of turns."""
        return self.system % _JOINT.join(system) if system else self.no_system

    def turn(self, said: Sequence[bytes]) -> bytes:
        if any(type(text) is Blocks for text in said):
            return self.user_blocks % self._blocks(said)
        return self.user % (_JOINT.join(said) or GO_ON.encode())

    def tool_turns(self, results: list[bytes], said: Sequence[bytes]) -> list[bytes]:
        """Return the turns between two turns of the model."""
        if not results:
            return [self.turn(said)]
        if self.results is not None:
            after = [self._blocks(said)] if said and self.bridge is None else []
            results = [self.results % b",".join(results + after)]
        if said and self.bridge is not None:
            return [*results, self.bridge, self.turn(said)]
        return results

    def _blocks(self, said: Sequence[bytes]) -> bytes:
        return b",".join([text if type(text) is Blocks else self.text % text for text in said])


def piece_of(message: StandardMessage, items: Items, shown: Shown) -> Piece:
    if isinstance(message, ToolMessage):
        return (RESULTS, items(message))
    if isinstance(message, AssistantMessage):
        if message.tool_calls:
            return (CALLS, items(message))
        return (ANSWER, items(message) if message.content.strip() else b"")
    kind = ASKED
    if isinstance(message, SystemMessage):
        kind = CONTEXT if message.is_context else INSTRUCTION
    elif message.parts:
        return (kind, shown(message))
    return (kind, encode_json(message.content)[1:-1] if message.content.strip() else b"")


def arranged(
    pieces: Sequence[Piece], asked: Piece | None, form: Form, demand: bytes = b""
) -> bytes:
    """Return the encoded instructions and turns of a request.

    Args:
        asked: the piece that follows the inserted context; by default the user's last piece.
        demand: an instruction after all other instructions, as the inside of a JSON string.
    """
    head = next((i for i, (kind, _) in enumerate(pieces) if kind > CONTEXT), len(pieces))
    system = [data for kind, data in pieces[:head] if kind == INSTRUCTION and data]
    if demand:
        system.append(demand)
    context = [data for kind, data in pieces[:head] if kind == CONTEXT and data]
    place = _place(pieces, asked) if context else -1
    items: list[bytes] = []
    said = context if place < 0 else []  # texts of the user's unfinished turn
    results: list[bytes] = []
    for index, (kind, data) in enumerate(pieces[head:], head):
        if kind == RESULTS:
            results.append(data)
            if type(data) is ResultsAndBlocks:
                said.append(data.blocks)
        elif kind >= ANSWER:
            if data:
                if results and not said and form.results is None:  # a shortcut for the usual case
                    items += results
                else:
                    items += form.tool_turns(results, said)
                items.append(data)
                said, results = [], []
        else:
            if index == place:
                said[:0] = context
            if data:
                said.append(data)
    return form.opening(system) + b",".join(items + form.tool_turns(results, said))


def _place(pieces: Sequence[Piece], asked: Piece | None) -> int:
    """Return the index of the piece that follows the context, or -1 without such a piece."""
    places = [i for i, (kind, _) in enumerate(pieces) if kind == ASKED]
    return next((i for i in places if pieces[i] is asked), places[-1] if places else -1)


Files = Mapping[str, FileContent]
"""Content of stored files by id."""

NO_FILES: Files = {}

_LARGEST: Mapping[DialectName, int] = {
    "chat": 32_000_000,
    "responses": 32_000_000,
    "anthropic": 23_000_000,
    "gemini": 32_000_000,
}
"""Size limit of all files of a request, in bytes, by dialect. Base64 makes files a third longer.

Limits of a request: 32 MB at Anthropic (platform.claude.com/docs/en/api/overview), 50 MB at OpenAI
(developers.openai.com/api/docs/guides/pdf-files), 100 MB at Google (ai.google.dev/gemini-api/docs/
file-input-methods).
"""

_TEXTS = re.compile(r"text/|application/(json|xml|yaml|x-ndjson|toml)\b|.*\+(json|xml)\b")


class MissingFilesError(Exception):
    """Error of a message that refers to stored files that are not loaded yet."""


@dataclass(frozen=True, slots=True)
class Media:
    """A part that is not text, with the part's content or URL.

    Attributes:
        data: the content in base64.
        media_type: the type, or empty if unknown. Only a part with a URL may have an unknown type.
    """

    type: str
    media_type: str
    data: str | None = None
    url: str | None = None
    name: str | None = None

    @property
    def data_url(self) -> str:
        """The part's URL, or its content as a ``data:`` URL."""
        return self.url or f"data:{self.media_type};base64,{self.data}"


WritePart = Callable[[Media], dict[str, Any] | None]
"""Function that returns a part's block, or ``None`` if the dialect does not accept the part."""

WriteText = Callable[[str], dict[str, Any]]


def blocks_of(
    parts: Iterable[Part], files: Files, dialect: DialectName, text: WriteText, media: WritePart
) -> list[dict[str, Any]]:
    """Return the blocks of parts, in order.

    Raises:
        InvalidInputError: ``unsupported_part``.
        MissingFilesError: ``files`` lacks a file.
    """
    blocks = []
    for part in parts:
        if part.text is not None:
            if part.text.strip():
                blocks.append(text(part.text))
            continue
        found = loaded(part, files)
        if isinstance(found, str):
            blocks.append(text(found))
            continue
        block = media(found)
        if block is None:
            raise InvalidInputError(
                f"the dialect {dialect} does not accept a part '{part.type}' "
                f"({found.media_type or 'of unknown type'}, as {'url' if found.url else 'data'})",
                code="unsupported_part",
            )
        blocks.append(block)
    return blocks


def encoded_blocks(blocks: Iterable[dict[str, Any]]) -> Blocks:
    return Blocks(b",".join([encode_json(block) for block in blocks]))


async def load_files(
    messages: Iterable[StandardMessage], load: FileLoader | None, dialect: DialectName
) -> Files:
    """Load the stored files to which messages refer.

    Raises:
        InvalidInputError: ``unknown_file``, or ``files_too_large``.
    """
    wanted = {part.file: None for message in messages for part in _parts(message) if part.file}
    if load is None:
        raise InvalidInputError("this program has no store of files", code="unknown_file")
    found: dict[str, FileContent] = {}
    size = 0
    for name in wanted:
        content = found[name] = await load(name)
        size += len(content.data)
        if size > _LARGEST[dialect]:
            raise InvalidInputError(
                f"the files of a request of the dialect {dialect} must not exceed "
                f"{_LARGEST[dialect] // 10**6} MB together",
                code="files_too_large",
            )
    return found


def size_as_text(size: int, messages: Iterable[StandardMessage], files: Files) -> int:
    """Return the size in bytes of a text with the same number of tokens as a request.

    Args:
        size: size of the request in bytes, with media in base64.
    """
    for message in messages:
        for part in _parts(message):
            media = part.text or loaded(part, files)
            if isinstance(media, Media) and media.data is not None:
                size += part.tokens * BYTES_PER_TOKEN - len(media.data)
    return size


def _parts(message: StandardMessage) -> Iterable[Part]:
    yield from message.parts
    if isinstance(message, ToolMessage):
        for result in message.tool_results:
            yield from result.parts


def loaded(part: Part, files: Files) -> Media | str:
    """Return a part's content, as text if the part is a text file."""
    media_type, data, name = part.media_type or "", part.data, part.name
    if part.file is not None:
        content = files.get(part.file)
        if content is None:
            raise MissingFilesError
        data, media_type = content.data, content.media_type
        name = name or content.name
    if data is None:
        return Media(part.type, media_type, url=part.url, name=name)
    kind = media_type.partition(";")[0].strip().lower()
    if part.type in ("document", "file") and _TEXTS.match(kind):
        text = data.decode("utf-8", "replace")
        return f"{name}:\n{text}" if name else text or "(empty)"
    return Media(part.type, kind, data=b64encode(data).decode(), name=name)


Fields = Mapping[str, Any]
Encode = Callable[[StandardMessage], Piece]
"""Encodes a message."""

_NO_PARAMS = ModelParams()


def _as_they_are(fields: Fields) -> Fields:
    return fields


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API, for one model.

    Attributes:
        spec: the server's description.
        path: the endpoint's path, below the base URL.
        fields: fields of every request.
        head: the encoded ``fields``: the start of an object, without the closing brace.
        origin: id of the server that may receive the state of messages; see :mod:`.opaque`.
        key: cache key of encoded messages. A message with another key is encoded again.
        encode: encodes a message without stored files.
        encoder: returns an encoder of messages that refer to the given files.
        form: templates of turns.
        tools: template of the list of tools.
        encode_tool: encodes one tool.
        write: returns the fields for parameters, for a limit of output tokens, and for a flag that
            is true if the request has tools.
        write_schema: returns the fields for an output's schema.
        new_answer: makes the builder of an answer, from a flag that is true if the request ends
            with results of tools.
        fit: removes contradictory fields of a request.
    """

    spec: ServerSpec
    path: str
    fields: Fields
    head: bytes
    origin: str
    key: str
    encode: Encode
    encoder: Callable[[Files], Encode]
    form: Form
    tools: bytes
    encode_tool: Callable[[ToolSchema], bytes]
    write: Callable[[ModelParams, int | None, bool], Fields]
    write_schema: Callable[[Fields], Fields]
    new_answer: Callable[[ErrorMapper, bool], AnswerBuilder]
    fit: Callable[[Fields], Fields] = _as_they_are

    def output(self, options: ModelOptions) -> Output | None:
        """Return the form of the answer's schema in the request, or ``None`` without a schema."""
        schema = options.output_schema
        return None if schema is None else output_of(schema, self.spec)

    def body(
        self,
        messages: Sequence[StandardMessage],
        tools: Sequence[ToolSchema],
        options: ModelOptions,
        output: Output | None = None,
        files: Files = NO_FILES,
    ) -> bytes:
        """Return the body of a request.

        Args:
            output: result of :meth:`output`.
            files: content of the stored files to which messages refer.

        Raises:
            HistoryError: a message cannot be sent.
            InvalidInputError: ``unsupported_part``, or the caller's fields cannot be sent.
            MissingFilesError: a message refers to a file that ``files`` lacks.
        """
        key = self.key
        encode = self.encoder(files) if files else self.encode
        pieces = [message.encoded(key, encode) for message in messages]
        asked = None if options.asked is None else options.asked.encoded(key, encode)
        demand = b""
        if output is not None:
            demand, tools = output.demand, (*tools, *output.tools)
        turns = arranged(pieces, asked, self.form, demand)
        end = b"]}"
        if tools:
            end = self.tools % b",".join([self._tool(schema) for schema in tools])
        return b"".join((self._head(options, bool(tools), output), turns, end))

    def _head(self, options: ModelOptions, has_tools: bool, output: Output | None) -> bytes:
        params, most = options.params, options.max_output_tokens
        if params is None:
            if most is None and output is None:
                return self.head
            params = _NO_PARAMS
        if params.max_output_tokens is not None:
            most = min(most or params.max_output_tokens, params.max_output_tokens)
        fields = merged(self.fields, self.write(params, most, has_tools))
        if output is not None and output.schema is not None:
            fields = merged(fields, self.write_schema(output.schema))
        extra = params.extra_body or {}
        return encode_head(self.fit(merged(fields, extra)), self.spec, extra)

    def _tool(self, schema: ToolSchema) -> bytes:
        name = self.spec.dialect
        encoded = schema.encodings.get(name)
        if encoded is None:
            encoded = schema.encodings[name] = self.encode_tool(schema)
        return encoded


NewDialect = Callable[[ServerSpec, str, str], Dialect]
"""Function (server, model, the server's address) → dialect."""
