"""Chunks of a stream that differ only in their text.

Most chunks of an answer repeat the same bytes around a few letters. Decoding each as JSON costs
more than all other work of a model call.
"""

from collections.abc import Callable, Sequence
from typing import Any

from pydantic_core import from_json

from bottega.llm.dialects.wire import encode_json

_TRIES = 4
_PROBE = "probe"


class TextChunks:
    """Recognises chunks that hold only text, by the bytes around it.

    Args:
        only_text: returns the text of a decoded chunk, ``None`` if it holds more.
        names: the field of the text in JSON, with its colon.
    """

    def __init__(self, only_text: Callable[[Any], str | None], names: tuple[bytes, ...]) -> None:
        self._only_text = only_text
        self._names = names
        self._tries = _TRIES
        self._before = self._after = b""

    def leading(self, chunks: Sequence[bytes], start: int) -> tuple[int, str | None]:
        """Read the chunks from ``start`` that are like the one learned.

        Returns:
            Their number, and their text; ``None``: they must be decoded as JSON.
        """
        before, after = self._before, self._after
        if not before:
            return 0, None
        begin, end = len(before), -len(after)
        texts = []
        for index in range(start, len(chunks)):
            chunk = chunks[index]
            if not (chunk.startswith(before) and chunk.endswith(after)):
                break
            texts.append(chunk[begin:end])
        try:
            decoded = from_json(b'["%b"]' % b'","'.join(texts))
        except ValueError:
            return len(texts), None
        # A chunk that holds more than text has quotes of its own, which add to the list.
        return len(texts), "".join(decoded) if len(decoded) == len(texts) else None

    def learn(self, chunk: bytes, text: str) -> None:
        """Learn the form of a decoded chunk with this text, if it holds only text."""
        if self._before or not self._tries or not text:
            return
        self._tries -= 1
        for name in self._names:
            before, found, after = chunk.partition(name + encode_json(text))
            before, after = before + name + b'"', b'"' + after
            if found and self._is_form(before, after):
                self._before, self._after = before, after

    def _is_form(self, before: bytes, after: bytes) -> bool:
        try:
            probe = from_json(b"%b%b%b" % (before, _PROBE.encode(), after))
            return self._only_text(probe) == _PROBE
        except (ValueError, AttributeError, TypeError, LookupError):
            return False
