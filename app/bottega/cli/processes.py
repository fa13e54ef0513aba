"""Parent process that starts, restarts and replaces API and worker processes on one machine.

The parent is a separate program, ``python -m bottega.cli.processes PLAN``. It imports nothing of
the service, so errors of the service cannot end the parent. It imports little of the standard
library (for instance no ``dataclasses``), so it needs only 13 MB of memory. The parent owns the
listening socket, so no connection is refused while a child restarts. The parent also owns the lock
that keeps the embedded PostgreSQL running.

Each child has a socket to the parent. The child writes a byte when it listens or executes runs, and
a second byte when it can replace its predecessor. When the parent closes its socket or is killed,
the child ends, so no child outlives the parent.

SIGHUP replaces the children one after the other. A new child starts while the old child still runs.
When the new child is ready, the old child gets SIGHUP, finishes its work, and ends.
"""

import contextlib
import glob
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

from bottega.clock import monotonic, stamp

_STABLE_S = 60.0
"""Seconds after which a child that dies restarts at once; if it dies earlier, pauses double."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_START_S = 60.0
"""Maximum time for the start of a successor, in seconds."""
_LEAVE_S = 720.0
"""Seconds until a replaced child that has not ended is killed."""


class Child:
    """A process that the parent keeps running.

    Args:
        name: name in the log.
        arguments: arguments for the ``bottega`` command.
        pid: id of the child's first process, if the process already runs.
        link: file descriptor of the socket to the process.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], pid: int | None = None, link: int | None = None
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.pid = pid
        self.link = link


class Plan:
    """The tasks of a parent.

    Args:
        children: processes that the parent keeps running.
        announcement: text for standard error when all children work.
        listener: file descriptor of the listening socket, which all children share.
        logs_json: true: the log has lines of JSON.
        metrics: environment variable for a process's name, and the folder with the metrics of all
            processes; ``None``: each process serves only its own metrics. A restarted process
            continues the counters of the process that had the same name.
        database: folder of the embedded database, and file descriptor of the database's lock.
        ends_with_terminal: true: SIGHUP ends the parent if the terminal was closed (otherwise
            SIGHUP replaces the children).
    """

    def __init__(
        self,
        children: Sequence[Child],
        announcement: str,
        listener: int,
        logs_json: bool,
        metrics: tuple[str, str] | None = None,
        database: tuple[str, int] | None = None,
        ends_with_terminal: bool = False,
    ) -> None:
        self.children = children
        self.announcement = announcement
        self.listener = listener
        self.logs_json = logs_json
        self.metrics = metrics
        self.database = database
        self.ends_with_terminal = ends_with_terminal

    def execute(self) -> None:
        """Replace this program with the parent's program; this function never returns."""
        inherited = [self.listener, *(child.link for child in self.children if child.link)]
        if self.database is not None:
            inherited.append(self.database[1])
        for descriptor in inherited:
            os.set_inheritable(descriptor, True)
        plan = json.dumps(self, default=vars)
        os.execv(sys.executable, [sys.executable, "-m", __name__, plan])  # noqa: S606 (our module)

    @classmethod
    def read(cls, text: str) -> "Plan":
        """Parse a plan from an argument of the command line."""
        value = json.loads(text)
        return cls(**{**value, "children": [Child(**each) for each in value["children"]]})


class _Process:
    """A running child.

    Attributes:
        said: number of bytes that the child has written; 1: the child works; 2: it is ready.
        is_heard: true: the parent still reads the child's socket.
        due: time at which the child is killed; ``None``: it may continue.
    """

    said = 0
    is_heard = True
    due: float | None = None

    def __init__(self, pid: int, name: str, metrics: str, link: socket.socket) -> None:
        self.pid = pid
        self.name = name
        self.metrics = metrics
        self.link = link
        self.began = monotonic()

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class _Slot:
    current: _Process | None = None
    successor: _Process | None = None
    worked = False
    pause_s = 0.0
    start_at = 0.0

    def __init__(self, child: Child) -> None:
        self.child = child


class Supervisor:
    """The parent process, which keeps the plan's processes running until SIGINT or SIGTERM."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._slots = [_Slot(child) for child in plan.children]
        self._running: dict[int, _Process] = {}
        self._to_replace: list[_Slot] = []
        self._reload_wanted = False
        self._announced = False
        self._stopping = False
        self._status = 0

    def run(self) -> int:
        """Keep the children running; return the exit status.

        If a child ends before it reports that it works, end all children, and return its status.
        """
        signals = _signals()
        for slot in self._slots:
            if slot.child.pid is not None and slot.child.link is not None:
                link = socket.socket(fileno=slot.child.link)
                os.set_inheritable(slot.child.link, False)
                slot.current = self._note(slot.child.pid, slot.child.name, slot.child.name, link)
        while not self._stopping or self._running:
            self._start_what_is_due()
            self._replace_next()
            self._wait(signals)
            self._reap()
        return self._status

    def _wait(self, signals: socket.socket) -> None:
        """Wait for signals and for bytes from children, or until a restart or kill is due."""
        links = {each.link: each for each in self._running.values() if each.is_heard}
        due = self._due_times()
        wait_s = max(0.0, min(due) - monotonic()) if due else None
        readable, _, _ = select.select([signals, *links], [], [], wait_s)
        for each in readable:
            if each is signals:
                for number in signals.recv(4096):
                    self._obey(number)
            elif data := each.recv(2):
                links[each].said += len(data)
            else:  # the child ends; SIGCHLD follows
                links[each].is_heard = False
        if not self._announced and all(_works(slot) for slot in self._slots):
            self._announced = True
            if self.plan.logs_json:
                self._log("info", self.plan.announcement)
            else:
                _write(self.plan.announcement)

    def _due_times(self) -> list[float]:
        due = [each.due for each in self._running.values() if each.due is not None]
        if not self._stopping:
            due += [slot.start_at for slot in self._slots if slot.current is None]
        return due

    def _obey(self, number: int) -> None:
        if number == signal.SIGHUP and self.plan.ends_with_terminal and not has_terminal():
            number = signal.SIGTERM  # the terminal was closed
        if number == signal.SIGHUP:
            self._reload_wanted = True
        elif number in (signal.SIGINT, signal.SIGTERM):
            self._stop()

    def _stop(self) -> None:
        self._stopping = True
        for process in self._running.values():
            process.send(signal.SIGTERM)

    def _start_what_is_due(self) -> None:
        for slot in self._slots:
            if slot.current is None and not self._stopping and monotonic() >= slot.start_at:
                slot.current = self._start(slot)
                if slot.current is None:
                    self._pause(slot, lived_s=0.0)

    def _replace_next(self) -> None:
        if self._stopping:
            return
        if self._reload_wanted and self._announced and not self._to_replace:
            self._reload_wanted = False
            self._to_replace = list(self._slots)
            self._log("info", "processes.replacing")
        while self._to_replace and self._is_replaced(self._to_replace[0]):
            del self._to_replace[0]
            if not self._to_replace:
                self._log("info", "processes.replaced")

    def _is_replaced(self, slot: _Slot) -> bool:
        """Return true if a ready successor has replaced the child. If needed, start a successor."""
        if slot.successor is None:
            slot.successor = self._start(slot)
            if slot.successor is None:
                self._give_up(slot, "it cannot be started")
            else:
                slot.successor.due = monotonic() + _START_S
            return False
        if slot.successor.said < 2:
            return False
        old, slot.current, slot.successor = slot.current, slot.successor, None
        slot.current.due = None
        if old is not None:
            old.due = monotonic() + _LEAVE_S
            old.send(signal.SIGHUP)
        return True

    def _give_up(self, slot: _Slot, why: str) -> None:
        """Stop replacing children; children without a successor keep running."""
        self._log("error", "process.not_replaced", process=slot.child.name, error=why)
        slot.successor = None
        self._to_replace.clear()

    def _reap(self) -> None:
        now = monotonic()
        for process in self._running.values():
            if process.due is not None and now >= process.due:
                process.send(signal.SIGKILL)
                process.due = now + 1.0
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if (
                pid in self._running
            ):  # otherwise the process is an orphan: a child of a killed child
                self._ended(self._running.pop(pid), os.waitstatus_to_exitcode(status))

    def _ended(self, process: _Process, status: int) -> None:
        with contextlib.suppress(BlockingIOError):
            process.said += len(process.link.recv(2))
        process.link.close()
        if self.plan.metrics is not None:
            forget_gauges(process.metrics, self.plan.metrics[1])
        for slot in self._slots:
            if slot.successor is process:
                self._give_up(slot, "the new process did not become ready")
            elif slot.current is process:
                _works(slot)
                slot.current = None
                self._restart(slot, process, status)

    def _restart(self, slot: _Slot, process: _Process, status: int) -> None:
        """Restart a child after a pause; stop all children if the child never worked."""
        if self._stopping:
            return
        if not slot.worked:
            self._status = status if status > 0 else 1
            self._stop()
            return
        self._pause(slot, monotonic() - process.began)
        after_s = round(slot.pause_s, 1)
        name = slot.child.name
        self._log("warning", "process.restarted", process=name, status=status, after_s=after_s)

    def _pause(self, slot: _Slot, lived_s: float) -> None:
        longer_s = min(max(_FIRST_PAUSE_S, 2 * slot.pause_s), _LONGEST_PAUSE_S)
        slot.pause_s = 0.0 if lived_s >= _STABLE_S else longer_s
        slot.start_at = monotonic() + slot.pause_s

    def _start(self, slot: _Slot) -> _Process | None:
        child = slot.child
        metrics = next(
            name
            for name in (f"{child.name.replace(' ', '-')}.{n}" for n in range(1000))
            if all(name != each.metrics for each in self._running.values())
        )
        environment = dict(os.environ)
        if self.plan.metrics is not None:
            environment[self.plan.metrics[0]] = metrics
        ours, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        os.set_inheritable(self.plan.listener, "--listener" in child.arguments)
        command = [sys.executable, "-m", "bottega.cli.commands", *child.arguments]
        command += ["--parent", str(theirs.fileno())]
        with theirs:
            try:
                pid = spawn(command, environment)
            except OSError as error:
                ours.close()
                why = error.strerror
                self._log("error", "process.not_started", process=child.name, error=why)
                return None
        return self._note(pid, child.name, metrics, ours)

    def _note(self, pid: int, name: str, metrics: str, link: socket.socket) -> _Process:
        link.setblocking(False)
        process = _Process(pid, name, metrics, link)
        self._running[pid] = process
        if self._stopping:
            process.send(signal.SIGTERM)
        return process

    def _log(self, level: str, event: str, **fields: object) -> None:
        if self.plan.logs_json:
            entry = {"event": event, "level": level, "timestamp": stamp(), **fields}
            _write(json.dumps(entry))
        else:
            pairs = " ".join(f"{name}={value}" for name, value in fields.items())
            _write(f"{stamp()} [{level:<8}] {event:<30} {pairs}")


def _works(slot: _Slot) -> bool:
    slot.worked |= slot.current is not None and slot.current.said > 0
    return slot.worked


def spawn(command: Sequence[str], environment: dict[str, str]) -> int:
    """Start a process that does not get the terminal's Ctrl-C; return the process's id."""
    nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    return os.posix_spawn(
        command[0], list(command), environment, file_actions=[nothing], setsid=True, setsigmask=()
    )


def forget_gauges(name: str, folder: str) -> None:
    """Remove the gauges of an ended process from the metrics; the counters of the process stay."""
    for path in glob.glob(os.path.join(glob.escape(folder), f"gauge_live*_{glob.escape(name)}.db")):
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


def _signals() -> socket.socket:
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setblocking(False)
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    obeyed = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    for number in obeyed:
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, obeyed)  # blocked since the start, perhaps
    return ours


def ends_with_terminal() -> bool:
    """Return true if this process ends when the terminal closes; false under ``nohup``."""
    return has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def has_terminal() -> bool:
    """Return true if this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _write(line: str) -> None:
    with contextlib.suppress(OSError):  # standard error was closed
        os.write(2, f"{line}\n".encode())


class ParentLink:
    """Link of this child to its parent: reports that the child is ready; ends an orphaned child.

    Args:
        descriptor: file descriptor of the child's socket to the parent.
        patience_s: seconds from the parent's end until this process, if it still runs, is killed.
    """

    def __init__(self, descriptor: int, patience_s: float) -> None:
        self._patience_s = patience_s
        self._socket = socket.socket(fileno=descriptor)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        self._socket.recv(1)  # returns when the parent ends, because the parent never writes
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._patience_s)  # a process that stops normally ends this thread, too
        os.kill(os.getpid(), signal.SIGKILL)

    def works(self) -> None:
        """Report that this process works."""
        self._socket.send(b".")

    def is_ready(self) -> None:
        """Report that this process is ready to replace its predecessor."""
        self._socket.send(b".")


def main() -> int:
    """Run as the parent with the plan of the command line; return the exit status."""
    plan = Plan.read(sys.argv[1])
    if plan.database is not None:
        os.set_inheritable(plan.database[1], False)
    try:
        return Supervisor(plan).run()
    finally:
        if plan.metrics is not None:
            import shutil

            shutil.rmtree(plan.metrics[1], ignore_errors=True)
        if plan.database is not None:
            from bottega.db import embedded

            embedded.release(*plan.database)


if __name__ == "__main__":
    sys.exit(main())
