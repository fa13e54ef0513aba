"""PgBouncer before the tests' database, set up as docs/operate/database.md says."""

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.judges import needed
from tests.waiting import until

ROOT = Path(__file__).parents[1]


class Bouncer:
    """PgBouncer that may be killed and started again.

    Args:
        database_url: of a server on a local socket.
        folder: for its configuration.
        size: most connections to the server.
        login: of these.
    """

    def __init__(self, database_url: str, folder: Path, size: int, login: str) -> None:
        address = urlsplit(database_url)
        host = parse_qs(address.query)["host"][0]
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port: int = free.getsockname()[1]
        self.url = f"postgresql://postgres@127.0.0.1:{self._port}{address.path}"
        folder.chmod(0o755)
        self._file = folder / "pgbouncer.ini"
        self._file.write_text(_configuration(host, self._port, size, login))
        self._user = Path(host).owner() if os.geteuid() == 0 else None  # it refuses root
        self._process: Process

    async def start(self) -> None:
        program = _program()
        assert program is not None
        self._process = await asyncio.create_subprocess_exec(
            program, str(self._file), user=self._user, stdout=DEVNULL, stderr=DEVNULL
        )
        await until(self._listens)

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _listens(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return False
        writer.close()
        await writer.wait_closed()
        return True


@asynccontextmanager
async def pgbouncer(
    database_url: str, size: int = 4, login: str = "postgres"
) -> AsyncIterator[Bouncer]:
    """Run PgBouncer before a database; without it the test is skipped, or fails in the gate."""
    needed(_program(), "pgbouncer is missing: install the package pgbouncer")
    with tempfile.TemporaryDirectory() as folder:
        bouncer = Bouncer(database_url, Path(folder), size, login)
        await bouncer.start()
        try:
            yield bouncer
        finally:
            await bouncer.kill()


def _program() -> str | None:
    return shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")


def _configuration(host: str, port: int, size: int, login: str) -> str:
    """Return the configuration of docs/operate/database.md for a server that trusts all."""
    page = (ROOT / "docs/operate/database.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("```ini\n[databases]")
    text, _, _ = rest.partition("```")
    changes = {
        "bottega = host=10.0.0.5 port=5432": f"* = host={host} user={login}",
        "listen_addr = 10.0.0.6": "listen_addr = 127.0.0.1\nunix_socket_dir =",
        "listen_port = 6432": f"listen_port = {port}",
        "auth_type = scram-sha-256": "auth_type = any",
        "auth_file = /etc/pgbouncer/userlist.txt": "",
        "default_pool_size = 40": f"default_pool_size = {size}",
    }
    for old, new in changes.items():
        assert old in text, f"docs/operate/database.md does not say {old!r}"
        text = text.replace(old, new)
    return f"[databases]{text}"
