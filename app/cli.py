"""The ``bottega`` command."""

import asyncio
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer
from pydantic import SecretStr, ValidationError
from rich.console import Console
from rich.table import Table

from app.errors import BottegaError
from app.settings import Settings

cli = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Teams of LLM agents on Postgres, with every step visible.",
    pretty_exceptions_enable=False,
)
console = Console(stderr=True)
T = TypeVar("T")


def _settings(**overrides: object) -> Settings:
    return Settings(**{name: value for name, value in overrides.items() if value is not None})  # type: ignore[arg-type]


@contextmanager
def _database(settings: Settings) -> Iterator[str]:
    """The URL of the database to use: the configured one, or our own, started and migrated."""
    # Until the event loop takes over: a signal must not leave our server running.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    if settings.database_url is not None:
        yield settings.database_url.get_secret_value()
        return
    from app.db import embedded, migrate

    with embedded.running(settings.data_dir) as url:
        if not asyncio.run(migrate.is_current(url)):
            migrate.upgrade(url)
        yield url


def _run(main: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:  # not on this platform
        return asyncio.run(main)
    return uvloop.run(main)


def _announce_model(settings: Settings) -> None:
    if settings.uses_demo_model:
        console.print(
            "[bold yellow]The built-in demo model answers: its texts are canned.[/] "
            "Set OPENAI_API_KEY (and OPENAI_BASE_URL) for a real one."
        )


@cli.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks one.")] = None,
    no_worker: Annotated[bool, typer.Option(help="Serve the API only.")] = False,
) -> None:
    """Serve the API and execute runs, in one process."""
    settings = _start(host=host, port=port)
    from app import main as web

    def listening(number: int) -> None:
        shown = f"[{settings.host}]" if ":" in settings.host else settings.host
        console.print(f"Bottega listens on http://{shown}:{number} (docs at /docs)")

    with _database(settings) as url:
        if not no_worker:
            _announce_model(settings)
        _run(web.serve(settings, url, worker=not no_worker, on_listening=listening))


@cli.command()
def worker() -> None:
    """Execute runs. Start as many as wanted, on any machine that reaches the database."""
    settings = _start()
    from app import worker as process

    with _database(settings) as url:
        _announce_model(settings)
        ready = lambda: console.print("Bottega's worker is ready")  # noqa: E731
        _run(process.work(settings, url, ready))


@cli.command()
def migrate() -> None:
    """Bring the database's schema to this version."""
    settings = _start()
    from app.db import migrate as migrations

    with _database(settings) as url:
        migrations.upgrade(url)
    console.print("The database is up to date.")


@cli.command()
def demo(
    keep: Annotated[bool, typer.Option(help="Leave the server up afterwards.")] = False,
    port: Annotated[int, typer.Option(help="Port of the API; 0 picks one.")] = 0,
    task: Annotated[str, typer.Option(help="What the team is to build.")] = "Build a todo app.",
) -> None:
    """Run the requirements → designer → implementer team and watch it live."""
    settings = _start(port=port)
    from app.demo import session

    with _database(settings) as url:
        _announce_model(settings)
        status = _run(session.run(settings, url, task=task, keep=keep))
    sys.exit(status)


@cli.command(
    "demo-model",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def demo_model(context: typer.Context) -> None:
    """Serve the built-in, OpenAI-compatible demo model on loopback."""
    import subprocess

    command = [sys.executable, "-m", "app.llm.demo_model", *context.args]
    sys.exit(subprocess.call(command))  # noqa: S603 (our own module)


@cli.command("settings")
def show_settings() -> None:
    """Print every setting with its value; secrets are masked."""
    settings = _settings()
    table = Table("variable", "value", "meaning")
    for name, field in Settings.model_fields.items():
        value = getattr(settings, name)
        shown = "********" if isinstance(value, SecretStr) else "" if value is None else str(value)
        variable = field.validation_alias or f"BOTTEGA_{name.upper()}"
        table.add_row(str(variable), shown, field.description or "")
    Console().print(table)


def _start(**overrides: object) -> Settings:
    from app.telemetry import configure_logging

    settings = _settings(**overrides)
    configure_logging(settings.log_level)
    return settings


def main() -> None:
    """Entry point: errors of ours are one line for a person, not a traceback."""
    try:
        cli()
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"]) or "settings"
            console.print(f"error: {name}: {problem['msg']}", style="red", markup=False)
        sys.exit(2)
    except BottegaError as error:
        console.print(f"error: {error.detail}", style="red", markup=False, highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
