"""Reading of bytes from outside, with limits: from models, tools, MCP servers and uploads.

The reader decompresses a message in small steps, and lets the event loop run after each step, so
one message never delays all other work for long. A message's bytes, its units (lines, events,
parts) and its CPU time are limited; a message above a limit is the sender's error. The CPU time
of the first 64 KB is not measured, because most messages are shorter, and the measurement needs
10 % more CPU time.
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
"""Maximum number of values in a JSON document. One step of about 40 ms can make this number."""
_SHORT_JSON = STEP_BYTES
_INFLATED = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Window bits of zlib, by content-encoding."""
_RAW = -15
_PACKED_BYTES = 4096
_CALLS_AT_ONCE = 256


class OutsideError(Exception):
    """Bytes from outside are unreadable, or would cost too much CPU time.

    Attributes:
        detail: the wrong content, such as "chunks of a few bytes".
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
            OutsideError: the bytes are not compressed as the encoding says, or there are too many.
        """
        self._calls += 1
        if self._calls % _CALLS_AT_ONCE == 0:  # after many short pieces
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
        """Count units (lines, events or parts) of the message.

        Raises:
            OutsideError: the message has too many units.
        """
        self._units_left -= units
        if self._units_left < 0:
            raise OutsideError(f"more than {self._most_units} lines or parts")

    def __enter__(self) -> None:
        """Start the measurement of CPU time for parsing.

        The block must not await, because the CPU time of the whole thread is measured.
        """
        self._began = cpu_s() if self._most - self._left > STEP_BYTES else None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the measurement, and charge the CPU time to the message.

        Raises:
            OutsideError: the message has cost too much CPU time.
        """
        if self._began is not None:
            self._cpu_left -= cpu_s() - self._began
            if kind is None:
                self.charge(0.0)

    def charge(self, cpu: float) -> None:
        """Charge seconds of CPU time that were measured outside of a block.

        Raises:
            OutsideError: the message has cost too much CPU time.
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
    """Decompressor of one zlib stream, in steps of 64 KB. Bytes after the stream are ignored."""

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
            # If a piece has the full 64 KB, the decompressor may have more output.
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
            # Some servers omit the zlib header (RFC 9110, 8.4.1.2).
            self._bits, self._stream = _RAW, zlib.decompressobj(_RAW)
            return self._inflated(packed)
        self._begun = True
        return found


def check_json(document: bytes | bytearray | str) -> None:
    """Check the number of values in a JSON document, before the document is parsed.

    Raises:
        OutsideError: the document has too many values.
    """
    if len(document) <= _SHORT_JSON:
        return
    text = document.encode("utf-8", "replace") if isinstance(document, str) else document
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MOST_VALUES:
        raise OutsideError(f"more than {MOST_VALUES} values")
