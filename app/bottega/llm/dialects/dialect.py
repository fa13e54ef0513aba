"""The wire format of a model's API: the only difference between APIs in the provider.

A message is encoded once, when it is first sent. Later bodies reuse its bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bottega.agents.messages import StandardMessage
from bottega.agents.params import ModelParams
from bottega.agents.provider import ModelOptions, ToolSchema
from bottega.llm.dialects.answer import AnswerBuilder
from bottega.llm.dialects.parts import NO_FILES, Files, Form, Piece, arranged
from bottega.llm.dialects.schemas import Output, output_of
from bottega.llm.dialects.wire import encode_head, merged
from bottega.llm.errors import ErrorMapper
from bottega.llm.server import ServerSpec

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
        spec: the server.
        path: the endpoint's path, below the base URL.
        fields: fields of every request.
        head: these fields, encoded: an object that is still open.
        origin: identifies the state of messages that go back; see :mod:`.opaque`.
        key: key of cached encodings of messages; another key replaces them.
        encode: encodes a message without stored files.
        encoder: returns the encoder of messages with these files.
        form: templates of turns.
        tools: template of the list of tools.
        encode_tool: encodes one tool.
        write: returns the fields for parameters; its other arguments are the limit of output tokens
            and whether there are tools.
        write_schema: returns the fields for an output's schema.
        new_answer: makes the builder of an answer; its flag says that the answer follows results
            of tools.
        fit: adapts all fields of a request to each other.
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
        """Return the form in which the schema of an answer is sent; ``None``: there is none."""
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
            output: from :meth:`output`.
            files: content of the stored files in messages.

        Raises:
            HistoryError: a message cannot be sent.
            InvalidInputError: ``unsupported_part``, or fields of the caller cannot be sent.
            MissingFilesError: a message holds a file that ``files`` lacks.
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
"""Makes the dialect of a server's model; the last argument is the server's address."""
