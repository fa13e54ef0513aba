"""Functions for all commands: settings, event loop, database, and safe texts."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar

import typer
from pydantic_core import to_json

from bottega.clock import stamp
from bottega.environment import ENCODING
from bottega.errors import UnavailableError

if TYPE_CHECKING:
    from rich.console import Console

    from bottega.settings import Settings

T = TypeVar("T")


@cache
def console() -> "Console":
    """Return the output for people, on standard error. Importing rich takes 3 MB of memory."""
    from rich.console import Console

    return Console(stderr=True)


def start(log: TextIO | None = None, **overrides: object) -> "Settings":
    """Read the settings, apply the command line's options (``overrides``), and configure the log.

    Args:
        log: output of the log; ``None``: standard error.
    """
    from dotenv import dotenv_values

    from bottega.logger import Logger
    from bottega.logs import configure_logging
    from bottega.settings import Settings, redactor, unknown_variables

    settings = Settings(**{name: value for name, value in overrides.items() if value is not None})  # type: ignore[arg-type]
    configure_logging(settings.log_level, redactor(settings), settings.log_format, log)
    if unknown := unknown_variables({**dotenv_values(".env", encoding=ENCODING), **os.environ}):
        Logger(__name__).warning("settings.unknown", variables=unknown)
    return settings


def announce(settings: "Settings", text: str, style: str = "") -> None:
    """Write a message about the service's start to standard error: text, or JSON as in the log."""
    from bottega.logs import is_json

    if is_json(settings.log_format):
        line = json.dumps({"event": text, "level": "info", "timestamp": stamp()})
        print(line, file=sys.stderr, flush=True)  # noqa: T201
    else:
        console().print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, with uvloop if it is installed."""
    try:
        import uvloop
    except ImportError:  # this platform has no uvloop
        return asyncio.run(main)
    return uvloop.run(main)


def listen(settings: "Settings") -> socket.socket:
    """Bind the port. Call this function before you start any service.

    Raises:
        UnavailableError: ``port_taken``.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {settings.host} port {settings.port} ({error.strerror}): "
            "stop the process that uses it, or choose another port with --port or BOTTEGA_PORT",
            code="port_taken",
        ) from error


@contextmanager
def database(settings: "Settings") -> Iterator[str]:
    """Yield the URL of the configured or embedded database; migrate the embedded database first."""
    with used_database(settings) as (url, _):
        yield url


@contextmanager
def database_as_it_is(settings: "Settings") -> Iterator[str]:
    """Yield the same URL as :func:`database`, but never create or migrate an embedded server."""
    if settings.server_url is not None:
        yield settings.server_url
        return
    from bottega.db import embedded

    folder = embedded.data_folder(settings.data_dir)
    if not (folder / "postgres").is_dir():
        raise UnavailableError(
            f"there is no database in {folder}: run `bottega migrate`", code="migrations_pending"
        )
    with embedded.running(settings.data_dir) as url, _with_folder(folder):
        yield url


@contextmanager
def used_database(settings: "Settings") -> Iterator[tuple[str, tuple[str, int] | None]]:
    """Yield the same URL as :func:`database`, and the folder and the lock of an embedded server."""
    if settings.server_url is not None:
        yield settings.server_url, None
        return
    # A signal must stop the embedded server, even before the event loop handles signals.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    from bottega.db import embedded, migrate

    with embedded.used(settings.data_dir) as (url, folder, lock), _with_folder(folder):
        migrate.upgrade(url)
        store_bootstrap_key(settings, url)
        yield url, (str(folder), lock)


@contextmanager
def _with_folder(folder: Path) -> Iterator[None]:
    """Add the folder of the embedded database server to the text of an error about the database."""
    try:
        yield
    except UnavailableError as error:
        if error.code != "database_incompatible":
            raise
        raise UnavailableError(
            f"{error.detail} (the database is embedded, in the folder {folder})", code=error.code
        ) from error


def store_bootstrap_key(settings: "Settings", url: str) -> None:
    """Store ``BOTTEGA_BOOTSTRAP_KEY`` as a key, if the setting is set and the key is new."""
    if settings.bootstrap_key is None:
        return
    from bottega.tenants import operator

    key = settings.bootstrap_key.get_secret_value()
    if asyncio.run(operator.store_bootstrap_key(url, key)):
        announce(settings, "Stored BOTTEGA_BOOTSTRAP_KEY as an admin key of the tenant 'default'.")


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def print_json(value: object) -> None:
    """Print a value as JSON, for scripts."""
    print(to_json(value).decode())  # noqa: T201


def print_rows(
    names: Sequence[str], rows: Iterable[Sequence[str]], *, prose: Sequence[str] = ()
) -> None:
    """Print rows as a table; in a pipe, tabs separate the columns, and there is no header.

    The printed table may be wider than the terminal.

    Args:
        names: header of each column.
        prose: names of the columns with long texts, which may be wrapped; all other columns are
            never wrapped.
    """
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(" ".join(cell.split()) for cell in row))  # noqa: T201 (a script reads it)
        return
    from rich.cells import cell_len
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(*(Column(name, no_wrap=name not in prose, overflow="fold") for name in names))
    for row in rows:
        table.add_row(*map(Text, row))
    for column in table.columns:
        texts = [str(cell) for cell in (column.header, *column.cells)]
        words = texts if column.no_wrap else " ".join(texts).split()
        column.min_width = max(map(cell_len, words))
    terminal = Console()
    least = Measurement.get(terminal, terminal.options.update(max_width=10_000), table).minimum
    Console(width=max(terminal.width, least)).print(table)


_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
"""Characters that control a terminal, change the direction of text, hide text, or cannot be
encoded.
"""


def safe(value: Any) -> Any:
    """Replace each unsafe character in the texts of a JSON value. Pure.

    One character replaces each unsafe character, so offsets stay correct; a carriage return becomes
    a space.
    """
    match value:
        case str():
            return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", value.replace("\r", " "))
        case dict():
            return {safe(name): safe(each) for name, each in value.items()}
        case list():
            return [safe(each) for each in value]
    return value


def one_line(text: str, longest: int = 300) -> str:
    """Return a text on one line, cut to ``longest`` characters."""
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
