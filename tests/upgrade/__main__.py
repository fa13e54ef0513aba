"""Make the revision of the baseline, and the database of 0.1.0 with data, again.

    python -m tests.upgrade

Until 0.1.0 is released, run it after a change of the baseline, or of a function's signature or
owner. Afterwards never: a migration takes the database that it made to every later version.
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

from bottega.db import embedded, migrate
from bottega.settings import Settings
from bottega.tenants import operator
from tests.conftest import at
from tests.fake_model import FakeModel
from tests.postgres import BIN
from tests.service import running
from tests.upgrade import DUMP, READ, baseline, data

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
    if len(migrate.revisions()) > 1:
        sys.exit("0.1.0 is released: write a migration instead")
    baseline.write_revision()
    migrate.revisions.cache_clear()
    with tempfile.TemporaryDirectory() as name, embedded.running(Path(name)) as server:
        Path(name).chmod(0o755)
        asyncio.run(create(server))
        url = at(server, "made")
        migrate.upgrade(url)
        answers = asyncio.run(made(url))
        DUMP.write_bytes(gzip.compress(dumped(url).encode(), mtime=0))
    READ.write_text(json.dumps(answers, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{DUMP.name}: {DUMP.stat().st_size} bytes; {migrate.head()}")


if __name__ == "__main__":
    main()
