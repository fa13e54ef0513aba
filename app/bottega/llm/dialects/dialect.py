"""The wire format of a model's API: the only difference between APIs in the provider.

A message is encoded once, when it is first sent. Later bodies reuse its bytes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bottega.agents.messages import StandardMessage
from bottega.agents.provider import ToolSchema
from bottega.llm.dialects.answer import AnswerBuilder
from bottega.llm.dialects.turns import Piece, arranged
from bottega.llm.errors import ErrorMapper
from bottega.llm.server import ServerSpec


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API, for one model.

    Attributes:
        path: the endpoint's path, below the base URL.
        head: the body up to its messages, including the opening bracket of their list.
        messages_key: key of a message's cached encoding; another key replaces it.
        encode_message: encodes one message.
        spoken: template of a text item: role, and the inside of a JSON string.
        tools_key: key of a tool's cached encoding.
        encode_tool: encodes one tool.
        most_key: the field that limits output tokens.
        new_answer: makes the builder of an answer; its flag says that the answer follows results
            of tools.
    """

    path: str
    head: bytes
    messages_key: str
    encode_message: Callable[[StandardMessage], Piece]
    spoken: bytes
    tools_key: str
    encode_tool: Callable[[ToolSchema], bytes]
    most_key: bytes
    new_answer: Callable[[ErrorMapper, bool], AnswerBuilder]

    def body(
        self,
        messages: Iterable[StandardMessage],
        tools: Iterable[ToolSchema],
        most: int | None = None,
        asked: StandardMessage | None = None,
    ) -> bytes:
        """Return the body of a request.

        Args:
            most: limit of output tokens; ``None``: no limit.
            asked: the message that the context precedes; see :class:`ModelOptions`.

        Raises:
            HistoryError: a message cannot be sent.
        """
        key, encode = self.messages_key, self.encode_message
        pieces = [message.encoded(key, encode) for message in messages]
        piece = None if asked is None else asked.encoded(key, encode)
        items = b",".join(arranged(pieces, piece, self.spoken))
        schemas = b",".join([self._tool(schema) for schema in tools])
        end = b'],"tools":[%b]' % schemas if schemas else b"]"
        end += b"}" if most is None else b',"%b":%d}' % (self.most_key, most)
        return b"".join((self.head, items, end))

    def _tool(self, schema: ToolSchema) -> bytes:
        encoded = schema.encodings.get(self.tools_key)
        if encoded is None:
            encoded = schema.encodings[self.tools_key] = self.encode_tool(schema)
        return encoded


NewDialect = Callable[[ServerSpec, str, str], Dialect]
"""Makes the dialect of a server's model; the last argument is the server's address."""
