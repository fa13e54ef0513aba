"""Make a database of this version with data, before the version is released.

    python -m tests.upgrade

A released database never changes: the migrations must work with it.
"""

import asyncio
import gzip
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import asyncpg

import bottega
from bottega.db import embedded, migrate
from bottega.settings import Settings
from bottega.tenants import operator
from tests.conftest import at
from tests.fake_model import FakeModel
from tests.postgres import BIN
from tests.service import running
from tests.upgrade import answers_of, data, dump_of

_OPTIONS = ("--inserts", "--no-owner", "--no-privileges")
"""Statements that any client can run, as any owner; ``bottega migrate`` gives rights."""


async def made(url: str) -> data.Answers:
    """Make the data in a migrated database; return what the API says about it."""
    await operator.store_bootstrap_key(url, data.KEY)
    async with FakeModel() as model:
        settings = Settings(
            _env_file=None,
            database_url=url,  # not the embedded one, beside which the files would be
            openai_api_key="k",
            openai_base_url=model.base_url,
            port=0,
        )
        async with (
            running(settings, url, worker=True) as server,
            data.client(server.port) as client,
        ):
            await data.make(client, model)
        async with running(settings, url) as server, data.client(server.port) as client:
            return await data.read(client)


def dumped(url: str) -> str:
    """Return the statements that make the database again, roles included."""
    command = [str(BIN / "pg_dump"), *_OPTIONS, url]
    text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    plain = re.sub(r"^\\(un)?restrict .*\n", "", text, flags=re.MULTILINE)  # for psql alone
    return f"{migrate.roles_script()}\n{plain}"


async def create(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute("CREATE DATABASE made")
    await connection.close()


def main() -> None:
    dump = dump_of(bottega.__version__)
    if dump.exists():
        sys.exit(f"{dump.name} is there already: set the next version of the package first")
    with tempfile.TemporaryDirectory() as name, embedded.running(Path(name)) as server:
        Path(name).chmod(0o755)
        asyncio.run(create(server))
        url = at(server, "made")
        migrate.upgrade(url)
        answers = asyncio.run(made(url))
        script = dumped(url)
    text = json.dumps(answers, indent=1, sort_keys=True)
    answers_of(bottega.__version__).write_text(f"{text}\n", encoding="utf-8")
    dump.write_bytes(gzip.compress(script.encode(), mtime=0))
    print(f"{dump.name}: {dump.stat().st_size} bytes; {migrate.head()}")


if __name__ == "__main__":
    main()
