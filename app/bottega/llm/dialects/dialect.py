"""Requests to a model's API: the work on parts, turns and body that is the same for all dialects.

A message is converted to the API's objects once. Later requests reuse these objects.

Content parts that each dialect accepts:

- chat: images; audio as wav or mp3; files as data (developers.openai.com/api/docs, "Images and
  vision", "Audio", "File inputs");
- responses: images; files as data or URL;
- anthropic: images (jpeg, png, gif, webp); PDF, as data or URL
  (platform.claude.com/docs/en/build-with-claude/vision and pdf-support);
- gemini: all parts, as data or URL (ai.google.dev/gemini-api/docs/file-input-methods).

All dialects send a text file as text.

This module also arranges a history's messages into turns that every chat template accepts.
Templates and APIs differ, so a request must satisfy the strictest rules:

- The only system message is at the start: Qwen 3.5 and later on vLLM and llama.cpp ("System message
  must be at the beginning", github.com/vllm-project/vllm/issues/41114).
- User and assistant alternate. A user's message follows only an assistant's message, not a tool's
  message. The last message is not an assistant's message
  (github.com/mistralai/mistral-common/issues/169, and its ``validator.py``).
- No message has empty content (Gemini's OpenAI-compatible endpoint, Anthropic).
- The next turn after tool calls has the results of all calls, and then text (Anthropic and Gemini:
  platform.claude.com/docs/en/agents-and-tools/tool-use/handle-tool-calls,
  ai.google.dev/gemini-api/docs/function-calling).

The history itself does not change. Instructions at the start of the history form the system
message. Context changes with each query, so the module puts the context into the query's turn,
before the query. Therefore prompts have a common prefix, which servers can cache. All other text,
except the model's text, becomes the user's text.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

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
from bottega.llm.dialects.wire import GO_ON, check_extra, encode_json, merged
from bottega.llm.errors import ErrorMapper
from bottega.llm.server import ServerSpec

INSTRUCTION, CONTEXT, ASKED, ANSWER, CALLS, RESULTS = range(6)
"""Kinds of messages in a request, as plain numbers, because each call compares many kinds."""

Fields = Mapping[str, Any]
Block = dict[str, Any]
"""A part of a turn: a text, an image, and so on."""
Item = dict[str, Any]
"""A turn, or a result of a tool."""


class Piece(NamedTuple):
    """A message in the form of an API.

    Attributes:
        items: the items of a model's answer or of tools' results; empty: there is nothing to send.
        said: the text or blocks of an instruction, context or a user's message. For results, the
            blocks that the API accepts only in a user's turn. ``said`` may be empty.
    """

    kind: int
    items: Sequence[Item] = ()
    said: str | Sequence[Block] = ""


@dataclass(frozen=True, slots=True)
class Form:
    """The form that an API's turns have.

    Attributes:
        opening: returns a request's fields, from the instructions (may be empty) and the turns.
        user: returns a user's turn with a text or with blocks.
        text: returns a block of text.
        bridge: the model's turn to send between results and the user's text; ``None``: the text
            follows the results in the same turn.
        results_are_blocks: true: results are blocks of a user's turn; false: a result is a turn.
    """

    opening: Callable[[str, list[Item]], dict[str, Any]]
    user: Callable[[str | Sequence[Block]], Item]
    text: Callable[[str], Block]
    bridge: Item | None
    results_are_blocks: bool

    def turn(self, said: Sequence[str | Sequence[Block]]) -> Item:
        texts = [text for text in said if isinstance(text, str)]
        if len(texts) < len(said):
            return self.user(self._blocks(said))
        return self.user("\n\n".join(texts) or GO_ON)

    def tool_turns(
        self, results: Sequence[Item], said: Sequence[str | Sequence[Block]]
    ) -> list[Item]:
        """Return the turns that are between two turns of the model."""
        if not results:
            return [self.turn(said)]
        items = list(results)
        if self.results_are_blocks:
            after = self._blocks(said) if self.bridge is None else []
            items = [self.user([*results, *after])]
        if said and self.bridge is not None:
            items += [self.bridge, self.turn(said)]
        return items

    def _blocks(self, said: Sequence[str | Sequence[Block]]) -> list[Block]:
        found: list[Block] = []
        for text in said:
            found += [self.text(text)] if isinstance(text, str) else text
        return found


def arranged(
    pieces: Sequence[Piece], asked: Piece | None, form: Form, demand: str = ""
) -> dict[str, Any]:
    """Return a request's fields for instructions and turns.

    Args:
        asked: the query, before which the context is inserted; by default the user's last piece.
        demand: an instruction that follows all other instructions.
    """
    head = next((i for i, piece in enumerate(pieces) if piece.kind > CONTEXT), len(pieces))
    system = [each.said for each in pieces[:head] if each.kind == INSTRUCTION and each.said]
    if demand:
        system.append(demand)
    context = [each.said for each in pieces[:head] if each.kind == CONTEXT and each.said]
    place = _place(pieces, asked) if context else -1
    conversation: list[Item] = []
    said = context if place < 0 else []  # texts of the user's unfinished turn
    results: list[Item] = []
    for index, (kind, items, text) in enumerate(pieces[head:], head):
        if kind == RESULTS:
            results += items
        elif kind >= ANSWER:
            if items:
                if results and not (said or form.results_are_blocks):  # the usual case
                    conversation += results
                else:
                    conversation += form.tool_turns(results, said)
                conversation += items
                said, results = [], []
        elif index == place:
            said[:0] = context
        if text:
            said.append(text)
    conversation += form.tool_turns(results, said)
    return form.opening("\n\n".join(map(str, system)), conversation)


def _place(pieces: Sequence[Piece], asked: Piece | None) -> int:
    places = [i for i, piece in enumerate(pieces) if piece.kind == ASKED]
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
        media_type: the media type; empty: unknown (possible only for a part with a URL).
    """

    type: str
    media_type: str
    data: str | None = None
    url: str | None = None
    name: str | None = None

    @property
    def data_url(self) -> str:
        """The part's URL or, without a URL, the part's content as a ``data:`` URL."""
        return self.url or f"data:{self.media_type};base64,{self.data}"


WriteMedia = Callable[[Media], Block | None]
"""Function that returns a part's block, or ``None`` if the API does not accept the part."""
WriteParts = Callable[[Iterable[Part]], list[Block]]
"""Function that returns the blocks of parts."""


async def load_files(
    messages: Iterable[StandardMessage], load: FileLoader | None, dialect: DialectName
) -> Files:
    """Load the stored files to which messages refer.

    Raises:
        InvalidInputError: ``unknown_file``, or ``files_too_large``.
    """
    wanted = {part.file: None for message in messages for part in _parts(message) if part.file}
    if load is None:
        raise InvalidInputError("this program has no file store", code="unknown_file")
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
    """Return the size in bytes of a text that would have as many tokens as the request.

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
    """Return a part's content, which is a text if the part is a text file."""
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


_NO_PARAMS = ModelParams()


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API, for one model.

    Attributes:
        spec: the server's description.
        path: the endpoint's path, below the base URL.
        fields: fields of every request.
        origin: id of the server to which messages' state may be sent; see :mod:`.opaque`.
        form: form of the turns.
        write_answer: returns the items of a model's message.
        write_results: returns the items of a tool message, and the blocks that the API accepts only
            in a user's turn.
        write_tool: returns the object for a tool.
        write: returns a request's fields, from parameters, a limit of output tokens, and a flag
            that is true if the request has tools.
        write_schema: returns the fields for an output's schema.
        new_answer: makes the builder of an answer, from a flag that is true if the request ends
            with results of tools.
        fit: changes fields of a request that contradict each other.
        list_tools: returns the value of the field ``tools``.
    """

    spec: ServerSpec
    path: str
    fields: Fields
    origin: str
    form: Form
    write_answer: Callable[[AssistantMessage], Sequence[Item]]
    write_results: Callable[[ToolMessage, WriteParts], tuple[Sequence[Item], Sequence[Block]]]
    write_media: WriteMedia
    write_tool: Callable[[ToolSchema], Item]
    write: Callable[[ModelParams, int | None, bool], Fields]
    write_schema: Callable[[Fields], Fields]
    new_answer: Callable[[ErrorMapper, bool], AnswerBuilder]
    fit: Callable[[Fields], Fields] = dict
    list_tools: Callable[[list[Item]], list[Item]] = list

    def __post_init__(self) -> None:
        """Check the server's ``extra_body``.

        Raises:
            InvalidInputError: ``extra_body`` has a reserved field, or a value that is not JSON.
        """
        check_extra(self.spec.extra_body, self.spec)

    def output(self, options: ModelOptions) -> Output | None:
        """Choose how a request contains the answer's schema; ``None``: there is no schema."""
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
        key = f"{self.spec.dialect} {self.origin}"  # only this server may get the state
        write = partial(self._piece, files=files)
        pieces = [message.encoded(key, write) for message in messages]
        asked = None if options.asked is None else options.asked.encoded(key, write)
        demand = ""
        if output is not None:
            demand, tools = output.demand, (*tools, *output.tools)
        request = {**self._fields(options, bool(tools), output)}
        request |= arranged(pieces, asked, self.form, demand)
        if tools:
            request["tools"] = self.list_tools([self._tool(schema) for schema in tools])
        return encode_json(request)

    def _fields(self, options: ModelOptions, has_tools: bool, output: Output | None) -> Fields:
        params, most = options.params, options.max_output_tokens
        if params is None:
            if most is None and output is None:
                return self.fields
            params = _NO_PARAMS
        if params.max_output_tokens is not None:
            most = min(most or params.max_output_tokens, params.max_output_tokens)
        fields = merged(self.fields, self.write(params, most, has_tools))
        if output is not None and output.schema is not None:
            fields = merged(fields, self.write_schema(output.schema))
        extra = params.extra_body or {}
        check_extra(extra, self.spec)
        return self.fit(merged(fields, extra))

    def _tool(self, schema: ToolSchema) -> Item:
        name = self.spec.dialect
        if name not in schema.encodings:
            schema.encodings[name] = self.write_tool(schema)
        return schema.encodings[name]

    def _piece(self, message: StandardMessage, files: Files) -> Piece:
        blocks = partial(self._blocks, files=files)
        if isinstance(message, ToolMessage):
            return Piece(RESULTS, *self.write_results(message, blocks))
        if isinstance(message, AssistantMessage):
            kind = CALLS if message.tool_calls else ANSWER
            is_empty = kind == ANSWER and not message.content.strip()
            return Piece(kind, () if is_empty else self.write_answer(message))
        kind = ASKED
        if isinstance(message, SystemMessage):
            kind = CONTEXT if message.is_context else INSTRUCTION
        elif message.parts:
            return Piece(kind, (), blocks(message.parts))
        return Piece(kind, (), message.content if message.content.strip() else "")

    def _blocks(self, parts: Iterable[Part], files: Files) -> list[Block]:
        """Return the blocks of parts, in order.

        Raises:
            InvalidInputError: ``unsupported_part``.
            MissingFilesError: ``files`` lacks a file.
        """
        blocks = []
        for part in parts:
            if part.text is not None:
                if part.text.strip():
                    blocks.append(self.form.text(part.text))
                continue
            found = loaded(part, files)
            block = self.form.text(found) if isinstance(found, str) else self.write_media(found)
            if block is None:
                assert isinstance(found, Media)
                raise InvalidInputError(
                    f"the dialect {self.spec.dialect} does not accept a part '{part.type}' "
                    f"({found.media_type or 'of unknown type'}, as "
                    f"{'url' if found.url else 'data'})",
                    code="unsupported_part",
                )
            blocks.append(block)
        return blocks


NewDialect = Callable[[ServerSpec, str, str], Dialect]
"""Function (server, model, the server's address) → dialect."""
