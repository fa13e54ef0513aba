"""Split a byte stream into server-sent events."""


class SSESplitter:
    """Turns pieces of a stream, cut anywhere, into the ``data`` of its events.

    Lines may end in LF, CRLF or CR. Several ``data`` lines of one event are joined by LF.
    Comments and the other fields (``event``, ``id``, ``retry``) are dropped: chat streams say
    everything in ``data``. Events whose data is empty are dropped too.
    """

    def __init__(self) -> None:
        self._tail: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that ``piece`` completes, in order."""
        if not piece:
            return []
        if b"\n" not in piece and b"\r" not in piece and not self._ends_in_cr():
            self._tail.append(piece)  # joined only once a line ends: a long line stays linear
            return []
        text = b"".join([*self._tail, piece]) if self._tail else piece
        lines = text.splitlines(keepends=True)
        # A line without its end waits for it; so does CR, which may be the first half of CRLF.
        self._tail = [lines.pop()] if not lines[-1].endswith(b"\n") else []
        return self._events(lines)

    def finish(self) -> list[bytes]:
        """What the end of the stream completes: an event whose last blank line is missing."""
        rest = b"".join(self._tail).splitlines(keepends=True)
        self._tail = []
        return self._events([*rest, b"\n"])

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
