"""Split a byte stream into server-sent events."""

_DATA = b"data: "


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
        if (events := self._single_lines(text)) is not None:
            return events
        lines = text.splitlines(keepends=True)
        # Keep a line without its end, also one that ends in CR: LF may follow.
        self._tail = [lines.pop()] if not lines[-1].endswith(b"\n") else []
        return self._events(lines)

    def finish(self) -> list[bytes]:
        """Return the event that the end of the stream completes without a blank line."""
        rest = b"".join(self._tail).splitlines(keepends=True)
        self._tail = []
        return self._events([*rest, b"\n"])

    def _single_lines(self, text: bytes) -> list[bytes] | None:
        """Return the events of the usual stream, one line of data each; ``None``: it is another."""
        *blocks, rest = text.split(b"\n\n")
        if self._data or b"\r" in text or text.count(b"\n") != 2 * len(blocks):
            return None
        events = [block[6:] for block in blocks if block[:6] == _DATA]
        if len(events) != len(blocks) or not all(events):
            return None
        self._tail = [rest] if rest else []
        return events

    def _ends_in_cr(self) -> bool:
        return bool(self._tail) and self._tail[-1].endswith(b"\r")

    def _events(self, lines: list[bytes]) -> list[bytes]:
        events = []
        data = self._data
        for line in lines:
            line = line.rstrip(b"\r\n")
            if line.startswith(b"data:"):
                data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and data:
                events.append(data[0] if len(data) == 1 else b"\n".join(data))
                data.clear()
            elif line == b"data":
                data.append(b"")
        return [event for event in events if event]
