"""How a model is spoken to: the one difference between the APIs that the provider knows.

A message is encoded once, when it is first sent, and its bytes are joined into every later body.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bottega.agents.messages import StandardMessage
from bottega.agents.provider import ToolSchema
from bottega.llm.answer import AnswerBuilder
from bottega.llm.failures import Reporter
from bottega.llm.turns import Piece, arranged


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API, for one model.

    Attributes:
        path: of the endpoint, below the base URL.
        head: the body up to its messages, the opening bracket of their list included.
        messages_key: under it a message keeps its encoding; another one replaces it.
        encode_message: one message.
        spoken: an item that is text: of a role, and the inside of a JSON string.
        tools_key: under it a tool keeps its encoding.
        encode_tool: one tool.
        most_key: the field that bounds how many tokens the model produces.
        new_answer: makes what reads an answer; told whether that is one to results of tools.
    """

    path: str
    head: bytes
    messages_key: str
    encode_message: Callable[[StandardMessage], Piece]
    spoken: bytes
    tools_key: str
    encode_tool: Callable[[ToolSchema], bytes]
    most_key: bytes
    new_answer: Callable[[Reporter, bool], AnswerBuilder]

    def body(
        self,
        messages: Iterable[StandardMessage],
        tools: Iterable[ToolSchema],
        most: int | None = None,
        asked: StandardMessage | None = None,
    ) -> bytes:
        """The whole body of a request.

        Args:
            most: tokens that the model may produce; ``None``: as it likes.
            asked: the message whose turn context opens; see :class:`ModelOptions`.

        Raises:
            HistoryError: a message that cannot be sent.
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


NewDialect = Callable[[str, Mapping[str, Any], str], Dialect]
"""Makes the dialect for a model: its name, further fields of every request, the server's address.
"""
