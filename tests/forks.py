"""Process that has imported the service and forks it, because an import takes seconds of a core.

The test process starts ``python -m tests.forks FD`` once and asks it over the socket ``FD`` for
children. Each child goes on as ``bottega …``, with its own environment, standard output and
standard error. ``PYTHONPATH`` may add modules, but not replace what is imported. A process between
the two waits for the child and writes its exit code.

The process that forks only imports: it has one thread, no event loop and no connection.
"""

import asyncio
import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import random
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import traceback
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryFile

LONGEST_REQUEST = 1 << 17
"""Bytes of arguments and environment."""

AT_START = (
    "openai",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "uvloop",
)
"""Modules that the service imports only when it starts."""


class Forked:
    """Child process, with the part of :class:`asyncio.subprocess.Process` that tests use.

    Attributes:
        returncode: ``None`` while it runs; minus the number of the signal that ended it.
    """

    def __init__(self, pid: int, stderr: asyncio.StreamReader, status: asyncio.StreamReader):
        self.pid = pid
        self.stderr = stderr
        self.returncode: int | None = None
        self._ended = asyncio.ensure_future(self._wait(status))

    async def _wait(self, status: asyncio.StreamReader) -> int:
        self.returncode = int(await status.read())
        return self.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


_server: socket.socket | None = None


def on_terminal(
    arguments: Sequence[str], environment: Mapping[str, str], terminal: int
) -> tuple[int, int]:
    """Start ``bottega`` with a terminal as input, output and errors.

    Args:
        terminal: descriptor of the end that the process gets.

    Returns:
        Its pid, and a descriptor that says its exit code at its end.
    """
    status = _ask(arguments, environment, terminal, terminal, is_terminal=True)
    pid = b""
    while not pid.endswith(b"\n"):
        pid += os.read(status, 1)
    return int(pid), status


async def fork(arguments: Sequence[str], environment: Mapping[str, str]) -> Forked:
    """Start ``bottega`` with these arguments and this whole environment."""
    stderr, of_child = os.pipe()
    try:
        status = await _reader(_ask(arguments, environment, 1, of_child))
    finally:
        os.close(of_child)
    pid = int(await status.readline())
    return Forked(pid, await _reader(stderr), status)


def run(
    arguments: Sequence[str], environment: Mapping[str, str], *, within: float = 60
) -> "subprocess.CompletedProcess[str]":
    """Do the same and wait until it has ended by itself.

    Args:
        within: seconds; after them the process is killed and the test fails.
    """
    with TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
        status = _ask(arguments, environment, stdout.fileno(), stderr.fileno())
        with os.fdopen(status, "rb", 0) as ended:
            pid = int(ended.readline())
            if not select.select([ended], [], [], within)[0]:
                os.kill(pid, signal.SIGKILL)
            code = int(ended.read())
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())


def _ask(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    stdout: int,
    stderr: int,
    *,
    is_terminal: bool = False,
) -> int:
    """Request a child; return a descriptor that says its pid, and its exit code at its end."""
    request = json.dumps([list(arguments), dict(environment), is_terminal]).encode()
    assert len(request) < LONGEST_REQUEST
    status, of_child = os.pipe()
    socket.send_fds(_running(), [request], [stdout, stderr, of_child])
    os.close(of_child)
    return status


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
    )
    return reader


def _running() -> socket.socket:
    """Return the socket of the process that forks, after starting it if there is none."""
    global _server
    if _server is None:
        _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        atexit.register(_stop, _server, process)
    return _server


def _stop(server: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    server.close()
    process.wait()


def main() -> None:
    """Import the service, then fork at each request; in a child, go on as ``bottega``."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for name in AT_START:
        importlib.import_module(name)
    import bottega

    for module in pkgutil.walk_packages(bottega.__path__, "bottega."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)  # also what a command imports when it needs it
    from bottega.cli import commands

    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be there after a fork"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's, for the test process
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        request = _next_child(asked)
    if request is not None:
        _become(*request)
        _end(_status_of(commands.main))


def _status_of(main: Callable[[], None]) -> int:
    """Return the exit status of a program."""
    try:
        main()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> None:
    """Do what the interpreter does at its end, except to free each imported object.

    That would copy the memory that the child shares with the others, for 0.15 s of a core.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _next_child(
    asked: socket.socket,
) -> tuple[list[str], dict[str, str], list[int], bool] | None:
    """Fork at each request, and return it in the child; ``None`` when there are no more."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, LONGEST_REQUEST, 3)
        if not message:
            _reap(0)
            return None
        *outputs, status = descriptors
        if os.fork() == 0:
            if (pid := os.fork()) == 0:
                os.close(status)
                arguments, environment, is_terminal = json.loads(message)
                return arguments, environment, outputs, is_terminal
            asked.close()
            os.write(status, f"{pid}\n".encode())
            for each in (1, 2, *outputs):
                os.close(each)
            _, ended = os.waitpid(pid, 0)
            os.write(status, str(os.waitstatus_to_exitcode(ended)).encode())
            os._exit(0)
        for each in descriptors:
            os.close(each)
        _reap(os.WNOHANG)


def _reap(options: int) -> None:
    """Collect the processes between that have ended; without ``WNOHANG``, wait for all."""
    with contextlib.suppress(ChildProcessError):
        while True:
            ended, _ = os.waitpid(-1, options)
            if not ended:
                return


def _become(
    arguments: list[str], environment: dict[str, str], outputs: list[int], is_terminal: bool
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_terminal:
        os.setsid()
        fcntl.ioctl(outputs[0], termios.TIOCSCTTY, 0)
        os.dup2(outputs[0], 0)
    for number, descriptor in enumerate(outputs, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if is_terminal:  # the old ones know the files of the process that forks
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    more = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [each for each in more if each not in sys.path]
    for name, value in environment.items():
        if name.startswith("bottega."):  # a constant, such as bottega.container.MAX_CRASHES
            module, _, constant = name.rpartition(".")
            setattr(importlib.import_module(module), constant, literal_eval(value))
    random.seed()
    sys.argv = ["bottega", *arguments]


if __name__ == "__main__":
    main()
