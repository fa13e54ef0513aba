"""Bottega's commands at a terminal: a pseudo-terminal that a test types on and reads."""

import contextlib
import os
import pty
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests import forks

CTRL_C, CTRL_D = "\x03", "\x04"


@dataclass(slots=True)
class Terminal:
    """A command at a terminal.

    Attributes:
        text: all that it wrote.
        returncode: ``None`` until :meth:`ends`.
    """

    pid: int
    text: str = ""
    returncode: int | None = None
    _ours: int = -1
    _status: int = -1
    _seen: int = 0
    _rest: bytes = field(default=b"")

    def says(self, *texts: str, within: float = 30) -> None:
        """Wait until it has written the texts in this order, behind what was waited for last."""
        until = time.monotonic() + within
        for text in texts:
            while (at := self.text.find(text, self._seen)) < 0:
                left = until - time.monotonic()
                assert left > 0, f"no {text!r} in {self.text!r}"
                assert self._read(left), f"ended without {text!r}: {self.text!r}"
            self._seen = at + len(text)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self, *texts: str) -> None:
        """Press Ctrl-C until the command reacts and writes the texts.

        Python sees a signal late that comes just before it begins to wait for input.
        """
        for _ in range(10):
            self.type(CTRL_C)
            with contextlib.suppress(AssertionError):
                return self.says(*texts, within=3)
        raise AssertionError(f"no {texts!r} in {self.text!r}")

    def kill(self) -> None:
        """Send SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the terminal, as when its window or its connection ends."""
        os.close(self._ours)
        self._ours = -1

    def ends(self, within: float = 30) -> int:
        """Wait until it has ended; return its exit status."""
        until = time.monotonic() + within
        more = self._ours != -1
        while more and (left := until - time.monotonic()) > 0:
            more = self._read(left)
        left = max(5.0, until - time.monotonic())
        assert select.select([self._status], [], [], left)[0], self.text
        self.returncode = int(os.read(self._status, 16))
        return self.returncode

    def _read(self, within: float) -> bool:
        """Read once; return false at the end."""
        if not select.select([self._ours], [], [], within)[0]:
            return True
        try:
            found = os.read(self._ours, 1 << 16)
        except OSError:  # Linux: the other end is closed
            return False
        self.text += found.decode(errors="replace").replace("\r\n", "\n")
        return bool(found)


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    """Start ``bottega …`` at a terminal; kill it at the end of the block if it still runs."""
    ours, theirs = pty.openpty()
    whole = {**os.environ, "COLUMNS": "300", "TERM": "dumb", **environment}
    try:
        pid, status = forks.on_terminal(arguments, whole, theirs)
    finally:
        os.close(theirs)
    started = Terminal(pid, _ours=ours, _status=status)
    try:
        yield started
    finally:
        if started.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                started.kill()
        if started._ours != -1:
            os.close(ours)
        os.close(status)
