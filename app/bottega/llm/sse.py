"""Split a byte stream into server-sent events."""

_DATA = b"data:"
_USUAL = b"data: "


class SSESplitter:
    """Extracts the ``data`` of events from pieces of a stream that may be cut anywhere.

    Lines may end in LF, CRLF or CR. Several ``data`` lines of one event are joined by LF.
    Comments, other fields (``event``, ``id``, ``retry``) and events without data are dropped.
    """

    def __init__(self) -> None:
        self._tail: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the events that ``piece`` completes, in order."""
        if not piece:
            return []
        if b"\n" not in piece and b"\r" not in piece and not self._ends_in_cr():
            self._tail.append(piece)  # joined at the line's end: linear time
            return []
        text = b"".join([*self._tail, piece]) if self._tail else piece
        self._tail = []
        kept = b"\r" if text.endswith(b"\r") else b""  # LF may follow
        if b"\r" in text:
            text = text[: len(text) - len(kept)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *blocks, rest = text.split(b"\n\n")
        events = self._single_lines(text, blocks)
        if events is None:
            if self._data and blocks:
                blocks[0] = blocks[0] or b"\n"  # it ends an event, too
            events = [event for block in blocks if block and (event := self._event(block))]
        lines, end, unfinished = rest.rpartition(b"\n")
        self._take(lines)
        # Another end of a line would be a blank line.
        if end or unfinished or kept:
            self._tail.append(end + unfinished + kept)
        return events

    def finish(self) -> list[bytes]:
        """Return the event that the end of the stream completes without a blank line."""
        event = self._event(b"".join(self._tail).rstrip(b"\r"))
        self._tail = []
        return [event] if event else []

    def _single_lines(self, text: bytes, blocks: list[bytes]) -> list[bytes] | None:
        """Return the events of the usual stream, one line of data each; ``None``: it is another."""
        if self._data or text.count(b"\n") != 2 * len(blocks) or not text.startswith(_USUAL):
            return None
        events = [block[6:] for block in blocks if block[:6] == _USUAL]
        return events if len(events) == len(blocks) and all(events) else None

    def _event(self, block: bytes) -> bytes:
        """Return the data of an event that ends with a block of lines; empty without data."""
        if block[:5] == _DATA and b"\n" not in block and not self._data:
            return block[6:] if block[5:6] == b" " else block[5:]
        self._take(block)
        data, self._data = self._data, []
        return data[0] if len(data) == 1 else b"\n".join(data)

    def _take(self, lines: bytes) -> None:
        """Keep the data in whole lines."""
        for line in lines.split(b"\n"):
            if line[:5] == _DATA:
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                self._data.append(b"")

    def _ends_in_cr(self) -> bool:
        return bool(self._tail) and self._tail[-1].endswith(b"\r")
