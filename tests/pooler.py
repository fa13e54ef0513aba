"""A pooler that ignores start-up parameters, as PgBouncer does if configured so."""

import asyncio
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import parse_qs, urlsplit

from benchmarks.chaos.proxy import Proxy

_SSL_REQUEST = 80877103


@asynccontextmanager
async def ignoring(database_url: str, ignored: Callable[[str], bool]) -> AsyncIterator[str]:
    """Serve a proxy before the database that removes some start-up parameters; yield its URL.

    Args:
        ignored: of a parameter's name.
    """
    address = urlsplit(database_url)
    path = f"{parse_qs(address.query)['host'][0]}/.s.PGSQL.5432"
    startup = partial(_startup, ignored)
    async with Proxy(lambda: asyncio.open_unix_connection(path), startup) as proxy:
        yield f"postgresql://postgres@127.0.0.1:{proxy.port}{address.path}"


async def _startup(
    ignored: Callable[[str], bool], reader: StreamReader, writer: StreamWriter
) -> bytes:
    """Return the client's StartupMessage without the ignored parameters."""
    length, protocol = struct.unpack("!II", await reader.readexactly(8))
    if protocol == _SSL_REQUEST:
        writer.write(b"N")
        length, protocol = struct.unpack("!II", await reader.readexactly(8))
    texts = (await reader.readexactly(length - 8)).decode().rstrip("\0").split("\0")
    kept = b"".join(
        f"{name}\0{value}\0".encode()
        for name, value in zip(texts[::2], texts[1::2], strict=True)
        if not ignored(name)
    )
    return struct.pack("!II", len(kept) + 9, protocol) + kept + b"\0"
