"""The next step of a query's loop, and incomplete answers of a model.

Providers report them in a message's metadata: ``finish_reason`` (``length``: cut off;
``content_filter``) and ``refusal``. Any other answer that is not empty is complete.
"""

import re
from collections.abc import Sequence
from enum import StrEnum
from functools import reduce
from json import JSONDecoder
from typing import Literal, NamedTuple

from pydantic_core import from_json

from bottega.agents.messages import AssistantMessage, HumanMessage, StandardMessage

OnLength = Literal["continue", "fail", "accept"]
"""The policy for an answer that is cut off at the model's limit."""


class FinalAnswer(NamedTuple):
    """The next step of a loop: end with this answer.

    Attributes:
        reason: the response's ``stop_reason``.
        deferred: messages that hooks injected; they come after the answer.
    """

    message: AssistantMessage
    reason: str
    deferred: Sequence[StandardMessage] = ()


class RunAgain(NamedTuple):
    """The next step of a loop: call the model with what the history has now."""


RUN_AGAIN = RunAgain()
NextStep = FinalAnswer | RunAgain
"""The step of a loop after an iteration. A failure is an exception. Tool calls that wait for people
suspend the whole run inside an iteration."""


class Ending(StrEnum):
    """Reason why an answer is incomplete; also the failed query's ``stop_reason``."""

    LENGTH = "length"
    FILTER = "content_filter"
    REFUSAL = "refusal"
    EMPTY = "empty"

    @property
    def code(self) -> str:
        return _CODES[self]

    @property
    def text(self) -> str:
        return _TEXTS[self]


_CODES = {
    Ending.LENGTH: "model_length",
    Ending.FILTER: "model_filtered",
    Ending.REFUSAL: "model_refused",
    Ending.EMPTY: "model_empty",
}
_TEXTS = {
    Ending.LENGTH: "the model's answer was cut off at its limit; raise its maximum of output "
    "tokens, lower its reasoning effort, or ask for less",
    Ending.FILTER: "the model's answer was withheld by its content filter; rephrase the request",
    Ending.REFUSAL: "the model refused to answer; rephrase the request",
    Ending.EMPTY: "the model's answer is empty; rephrase the request, or use another model",
}
_NUDGES = {
    Ending.LENGTH: "Your answer was cut off at its limit. Go on exactly where it stops: repeat "
    "nothing, and say nothing about this.",
    Ending.EMPTY: "Your answer was empty. Please answer.",
}
_DECODER = JSONDecoder()
_CUT_OFF = frozenset(("length", "max_tokens", "incomplete"))
_OVERLAP_LETTERS = 5
_LONGEST_OVERLAP = 4_000  # characters: the search takes some milliseconds
_LETTER = re.compile(r"[^\W\d_]")
_WORD = re.compile(r"(?<!\w)\S|[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]")
"""Places where an overlap may begin: at a word, or anywhere in scripts without spaces."""


def ending_of(message: AssistantMessage) -> Ending | None:
    """Return the reason why an answer is incomplete; ``None``: it is complete or calls tools."""
    reason = str(message.metadata.get("finish_reason"))
    if reason.startswith("content_filter"):
        return Ending.FILTER
    if message.metadata.get("refusal") and not message.tool_calls:
        return Ending.REFUSAL
    if reason in _CUT_OFF:
        return Ending.LENGTH
    is_empty = not message.tool_calls and not message.content.strip()
    return Ending.EMPTY if is_empty else None


def stop_reason_of(code: str) -> str:
    """Return the ``stop_reason`` for an error code."""
    return next((ending for ending, known in _CODES.items() if known == code), "error")


class PendingAnswer:
    """An answer that may take several model calls: at most one continuation and one retry.

    Attributes:
        kept: parts and nudges in the history; the caller removes them after the answer.
    """

    def __init__(self) -> None:
        self.kept: list[StandardMessage] = []
        self._parts: list[AssistantMessage] = []
        self._tried: set[Ending] = set()

    def nudge(
        self, message: AssistantMessage, ending: Ending, on_length: OnLength
    ) -> list[StandardMessage]:
        """Return messages that ask for the rest; ``[]`` if the answer cannot be completed."""
        if ending in self._tried or ending not in _NUDGES:
            return []
        added: list[StandardMessage] = [
            HumanMessage(content=_NUDGES[ending], metadata={"nudge": str(ending)})
        ]
        if ending is Ending.LENGTH:
            if on_length != "continue" or not is_text(self.joined(message)):
                return []
            self._parts.append(message)
            added.insert(0, message)
        self._tried.add(ending)
        self.kept += added
        return added

    def repeats(self, message: AssistantMessage) -> bool:
        """Return true if a continuation says nothing new: the text was whole already."""
        said = self.joined(self._parts[-1]) if self._parts else None
        return said is not None and self.joined(message).content.strip() == said.content.strip()

    def joined(self, message: AssistantMessage) -> AssistantMessage:
        """Return the whole answer; ``message`` is its last part."""
        if not self._parts:
            return message
        text = reduce(continued, [part.content for part in (*self._parts, message)])
        return message.model_copy(update={"content": text, "state": {}})


def continued(text: str, more: str) -> str:
    """Join a cut-off text and its continuation, which may repeat some or all of what was said.

    An overlap counts if it is the whole text, or has five letters and begins with a word: shorter
    ones occur by chance (``Bana`` and ``na``).
    """
    begun, said = more.lstrip(), text.strip()
    if begun.startswith(said):
        margin = text[: len(text) - len(text.lstrip())]
        return margin + begun if len(begun.rstrip()) > len(said) else text
    if said.startswith(begun.rstrip()) and len(_LETTER.findall(begun)) >= _OVERLAP_LETTERS:
        return text
    for start in _WORD.finditer(text, max(0, len(text) - _LONGEST_OVERLAP)):
        rest = text[start.start() :]
        if begun.startswith(rest) and len(_LETTER.findall(rest)) >= _OVERLAP_LETTERS:
            return text[: start.start()] + begun
    return text + more


def is_text(message: AssistantMessage) -> bool:
    """Return true if a cut-off message can be continued: plain text without calls or JSON."""
    text = message.content.strip()
    if message.tool_calls or not text:
        return False
    text = text.removeprefix("```json").lstrip()
    if not text.startswith(("{", "[")):
        return bool(text)
    try:
        _, end = _DECODER.raw_decode(text)
    except ValueError:
        return not _begins_json(text)
    return bool(text[end:].strip(" \n`"))  # more than JSON


def _begins_json(text: str) -> bool:
    try:
        from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return False
    return True


class QueryFailed(Exception):  # noqa: N818
    """An error that ends a query with a response; never leaves the loop.

    Attributes:
        reason: the response's ``stop_reason``.
        content: the response's partial text.
    """

    def __init__(self, text: str, code: str, reason: str = "error", content: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.code = code
        self.reason = reason
        self.content = content
