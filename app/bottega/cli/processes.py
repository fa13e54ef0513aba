"""Several processes of one machine: a parent starts API and worker processes, and restarts them.

Each child has a socket to its parent. It writes a byte there once it is ready, and ends when the
other end is closed, so that no child outlives a killed parent.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from bottega import metrics
from bottega.clock import monotonic

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Child:
    """A process to keep running.

    Attributes:
        name: for the log.
        arguments: of the ``bottega`` command.
        descriptors: file descriptors that it inherits.
    """

    name: str
    arguments: Sequence[str]
    descriptors: Sequence[int] = ()

    @property
    def label(self) -> str:
        """Return the name in the form that fits into names of files."""
        return self.name.replace(" ", "-")


@dataclass(slots=True)
class Supervisor:
    """The parent of some processes.

    Attributes:
        environment: variables for the children, besides this process's own.
        metrics_folder: where they keep their metrics, so that each can report the sum.
    """

    environment: Mapping[str, str]
    metrics_folder: str
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _running: "dict[str, asyncio.subprocess.Process]" = field(default_factory=dict)
    _status: int = 0

    async def run(self, children: Sequence[Child], on_ready: Callable[[], None]) -> int:
        """Keep the children running until SIGINT or SIGTERM; return the exit status.

        A child that ends before it was ever ready ends them all: its status is returned.

        Args:
            on_ready: called once all of them are ready.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop)
        ready = [loop.create_future() for _ in children]
        kept = [self._keep(*each) for each in zip(children, ready, strict=True)]
        keeping = asyncio.gather(*kept)
        await asyncio.wait([asyncio.gather(*ready), keeping], return_when=asyncio.FIRST_COMPLETED)
        if not self._stopping.is_set():
            on_ready()
        await keeping
        return self._status

    def _stop(self) -> None:
        self._stopping.set()
        for process in self._running.values():
            _terminate(process)

    async def _keep(self, child: Child, ready: asyncio.Future[None]) -> None:
        """Start a child again each time it ends, until this process is to stop."""
        pause_s = 0.0
        while not self._stopping.is_set():
            began = monotonic()
            status = await self._run_once(child, ready)
            if self._stopping.is_set():
                break
            if not ready.done():  # its own message says why
                self._status = status if status > 0 else 1
                self._stop()
                break
            lived_s = monotonic() - began
            # One that lived so long is restarted at once; others wait, each time twice as long.
            stable = lived_s >= 60.0
            pause_s = 0.0 if stable else min(max(0.5, 2 * pause_s), 30.0)
            log.warning(
                "process.restarted", process=child.name, status=status, after_s=round(pause_s, 1)
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
        if not ready.done():
            ready.cancel()

    async def _run_once(self, child: Child, ready: asyncio.Future[None]) -> int:
        """Run a child until it ends; return its status, negative for a signal."""
        ours, theirs = socket.socketpair()
        with ours:
            try:
                with theirs:
                    process = await self._start(child, theirs.fileno())
            except OSError as error:  # too many processes, or too little memory
                log.error("process.not_started", process=child.name, error=error.strerror)
                return 1
            self._running[child.name] = process
            if self._stopping.is_set():
                _terminate(process)
            ours.setblocking(False)
            if await asyncio.get_running_loop().sock_recv(ours, 1) and not ready.done():
                ready.set_result(None)
            status = await process.wait()
            del self._running[child.name]
            metrics.forget_process(child.label, self.metrics_folder)
            return status

    async def _start(self, child: Child, link: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bottega.cli.commands"),
            *(*child.arguments, "--parent", str(link)),
            env={
                **os.environ,
                **self.environment,
                metrics.FOLDER: self.metrics_folder,
                metrics.NAME: child.label,
            },
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(*child.descriptors, link),
            start_new_session=True,  # a terminal's Ctrl-C is for the parent alone
        )


def _terminate(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        process.terminate()


class ParentLink:
    """A child's link to its parent: reports readiness, and ends this process with the parent.

    Args:
        descriptor: of the child's end of the socket; ``None``: this process has no such parent.
        patience_s: seconds from the parent's end until this process is killed, if it hangs.
    """

    def __init__(self, descriptor: int | None, patience_s: float) -> None:
        self._patience_s = patience_s
        self._socket = None if descriptor is None else socket.socket(fileno=descriptor)
        if self._socket is not None:
            watching = threading.Thread(target=self._watch, args=(self._socket,), daemon=True)
            watching.start()

    def _watch(self, link: socket.socket) -> None:
        link.recv(1)  # the parent never writes: this is its end
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._patience_s)  # this thread dies with a process that stops in order
        os.kill(os.getpid(), signal.SIGKILL)

    def is_ready(self) -> None:
        """Report that this process does its work."""
        if self._socket is not None:
            self._socket.send(b".")
