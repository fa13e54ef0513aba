"""A reader with limits for bytes from outside: from models, tools, MCP servers and uploads.

The reader decompresses and parses bytes in small steps. The event loop runs after each step, so
that a message delays all other work by only one step. A message's number of bytes, its number of
units (lines, events, parts) and its CPU time are limited; a message beyond a limit is its sender's
error. CPU time is measured only after the first 64 KB, because most messages are shorter, and
measuring needs 10 % more CPU time.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from types import TracebackType

from bottega.clock import cpu_s

STEP_BYTES = 64 * 1024
MOST_UNITS = 200_000
MOST_CPU_S = 1.0
MOST_VALUES = MOST_UNITS
"""Maximum number of values in one JSON document, which are all made in one step of about 40 ms."""
_SHORT_JSON = STEP_BYTES
_INFLATED = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Window bits of zlib, by content-encoding."""
_RAW = -15
_PACKED_BYTES = 4096
_CALLS_AT_ONCE = 256


class OutsideError(Exception):
    """Bytes from outside are unreadable, or would cost too much CPU time.

    Attributes:
        detail: what the sender sent, such as "chunks of a few bytes".
    """

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class BoundedReader:
    """Reader of one message.

    Args:
        bytes_: maximum size of the decompressed message in bytes.
        units: maximum number of units that :meth:`count` counts.
        encoding: the message's content-encoding.

    Raises:
        OutsideError: the encoding is unknown.
    """

    def __init__(self, bytes_: int, *, units: int = MOST_UNITS, encoding: str = "") -> None:
        self._left = self._most = bytes_
        self._units_left = self._most_units = units
        self._cpu_left = MOST_CPU_S
        self._began: float | None = None
        self._calls = 0
        self._inflate = _Inflate.of(encoding.strip().lower())

    async def steps(self, raw: bytes) -> AsyncIterator[bytes]:
        """Yield decompressed bytes in steps of at most 64 KB; the event loop runs after each step.

        Raises:
            OutsideError: the bytes are not in the message's encoding, or the message has too many
                bytes.
        """
        self._calls += 1
        if self._calls % _CALLS_AT_ONCE == 0:  # many short pieces came
            await asyncio.sleep(0)
        if self._inflate is None and len(raw) <= STEP_BYTES:  # the usual case
            if raw:
                yield self._taken(raw)
            return
        pieces = self._pieces(raw)
        with self:
            piece = next(pieces, None)
        while piece is not None:
            yield self._taken(piece)
            with self:
                piece = next(pieces, None)
            if piece is not None:
                await asyncio.sleep(0)

    def _taken(self, piece: bytes) -> bytes:
        self._left -= len(piece)
        if self._left < 0:
            raise OutsideError(f"more than {self._most} bytes")
        return piece

    def count(self, units: int) -> None:
        """Count lines, events or parts.

        Raises:
            OutsideError: the number of units exceeds the limit.
        """
        self._units_left -= units
        if self._units_left < 0:
            raise OutsideError(f"more than {self._most_units} lines or parts")

    def __enter__(self) -> None:
        """Start to parse.

        The block must not await, because the CPU time of the whole thread is charged.
        """
        self._began = cpu_s() if self._most - self._left > STEP_BYTES else None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop parsing.

        Raises:
            OutsideError: the message has cost too much.
        """
        if self._began is not None:
            self._cpu_left -= cpu_s() - self._began
            if kind is None:
                self.charge(0.0)

    def charge(self, cpu: float) -> None:
        """Charge for seconds of CPU time that the message took outside of the block.

        Raises:
            OutsideError: the message has cost too much.
        """
        self._cpu_left -= cpu
        if self._cpu_left < 0:
            raise OutsideError(f"a message that takes more than {MOST_CPU_S:g} s of CPU to read")

    def _pieces(self, raw: bytes) -> Iterator[bytes]:
        if self._inflate is not None:
            yield from self._inflate.pieces(raw)
        else:
            for start in range(0, len(raw), STEP_BYTES):
                yield raw[start : start + STEP_BYTES]


class _Inflate:
    """Decompresses one zlib stream, in pieces of at most 64 KB; ignores bytes after the stream."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._stream = zlib.decompressobj(bits)
        self._begun = False

    @classmethod
    def of(cls, encoding: str) -> "_Inflate | None":
        if encoding in ("", "identity"):
            return None
        if encoding not in _INFLATED:
            raise OutsideError(f"the unknown content-encoding {encoding[:50]!r}")
        return cls(_INFLATED[encoding])

    def pieces(self, raw: bytes) -> Iterator[bytes]:
        for start in range(0, len(raw), _PACKED_BYTES):
            packed, found = raw[start : start + _PACKED_BYTES], b""
            # If a piece was full, the stream may have more output.
            while (packed or len(found) == STEP_BYTES) and not self._stream.eof:
                if found := self._inflated(packed):
                    yield found
                packed = self._stream.unconsumed_tail

    def _inflated(self, packed: bytes) -> bytes:
        try:
            found = self._stream.decompress(packed, STEP_BYTES)
        except zlib.error:
            if self._begun or self._bits != _INFLATED["deflate"]:
                raise OutsideError("content that is not compressed as its header says") from None
            # Some servers leave out the zlib header (RFC 9110, 8.4.1.2).
            self._bits, self._stream = _RAW, zlib.decompressobj(_RAW)
            return self._inflated(packed)
        self._begun = True
        return found


def check_json(document: bytes | bytearray | str) -> None:
    """Check before a JSON document is parsed that it does not have too many values.

    Raises:
        OutsideError: the document has too many values.
    """
    if len(document) <= _SHORT_JSON:
        return
    text = document.encode("utf-8", "replace") if isinstance(document, str) else document
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MOST_VALUES:
        raise OutsideError(f"more than {MOST_VALUES} values")
