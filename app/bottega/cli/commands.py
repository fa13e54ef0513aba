"""The ``bottega`` command."""

import asyncio
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from tempfile import mkdtemp, mkstemp
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from bottega import __version__
from bottega.cli import daily, doctor
from bottega.cli.admin import keys, providers, prune, secrets, tenants
from bottega.cli.daily import evals, interrupts
from bottega.cli.processes import Child, ParentLink, Plan, ends_with_terminal, has_terminal
from bottega.cli.scenarios import SCENARIOS, ScenarioName
from bottega.cli.terminal import (
    AsJson,
    announce,
    console,
    database,
    database_as_it_is,
    listen,
    print_json,
    print_rows,
    run,
    start,
    store_bootstrap_key,
    used_database,
)
from bottega.errors import InvalidInputError

if TYPE_CHECKING:
    from bottega.settings import Settings

_DEBUG = "--debug"
_TO_END_S = 30.0
"""Maximum seconds in which a process stops after the grace period of its runs."""

cli = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cli.command("run")(daily.start_run)
cli.command("fork")(daily.fork)
cli.command("watch")(daily.watch)
cli.command("chat")(daily.chat)
cli.command("cancel")(daily.cancel)
cli.command("batch")(daily.batch)
cli.command("apply")(daily.apply)
cli.command("export")(daily.export)
cli.command("prune")(prune)
cli.command("doctor")(doctor.doctor)
cli.add_typer(evals, name="evals")
cli.add_typer(interrupts, name="interrupts")
cli.add_typer(keys, name="keys")
cli.add_typer(tenants, name="tenants")
cli.add_typer(providers, name="providers")
cli.add_typer(secrets, name="secrets")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"bottega {__version__}")
        raise typer.Exit


@cli.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option(_DEBUG, help="Show the traceback of an error: bottega --debug COMMAND.")
    ] = False,
) -> None:
    """Run teams of LLM agents on Postgres, with every step visible."""


def _announce_models(settings: "Settings") -> None:
    if settings.uses_demo_model:
        announce(
            settings,
            "Unless you connect another model, the built-in demo model answers, with fixed texts. "
            "Choose Connect a model in the console, or set OPENAI_API_KEY.",
            "yellow",
        )
    if settings.memory != "off":
        from bottega.memory_services import embedder_of

        announce(settings, embedder_of(settings), "dim")


_Descriptor = Annotated[int | None, typer.Option(hidden=True)]


@cli.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks one.")] = None,
    no_worker: Annotated[bool, typer.Option("--no-worker", help="Serve only the API.")] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=0, max=256, help="Number of worker processes; also starts API processes."),
    ] = None,
    api: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="Number of API processes; also starts workers."),
    ] = None,
    listener: _Descriptor = None,
    parent: _Descriptor = None,
) -> None:
    """Serve the API and execute runs, in one process.

    With --workers or --api, the command starts separate processes, and restarts a process that
    dies. The API processes share a port. Each number defaults to 1.
    """
    settings = start(host=host, port=port)
    if no_worker and workers:
        raise InvalidInputError("--no-worker and --workers contradict: leave one of them out")
    if listener is not None and parent is not None:
        with database(settings) as url:
            _serve(settings, url, socket.socket(fileno=listener), parent, worker=not no_worker)
        return
    from bottega.logs import is_json

    is_one = workers is None and api is None
    with_terminal = ends_with_terminal()
    # SIGHUP is blocked until the parent can handle it, because a request to reload may arrive
    # early.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    with listen(settings) as listening, used_database(settings) as (url, lock):
        if not no_worker and workers != 0:
            _announce_models(settings)
        if lock is not None or settings.pooler_url is not None:
            os.environ["DATABASE_URL"] = settings.pooler_url or url
        options = ["--host", settings.host, "--listener", str(listening.fileno())]
        metrics = None
        if is_one:
            options += ["--no-worker"] * no_worker
            children = [_first_child(settings, url, listening, options, worker=not no_worker)]
        else:
            children = _several_children(options, apis=api or 1, workers=workers)
            metrics = _metrics_of_several()
        Plan(
            children=children,
            announcement=_announcement(settings, listening.getsockname()[1]),
            listener=listening.fileno(),
            logs_json=is_json(settings.log_format),
            metrics=metrics,
            database=lock,
            ends_with_terminal=with_terminal,
        ).execute()


def _serve(
    settings: "Settings", url: str, listener: socket.socket, parent: int, *, worker: bool
) -> None:
    from bottega import main as web

    link = ParentLink(parent, settings.drain_grace_s + _TO_END_S)
    run(
        web.serve(
            settings,
            url,
            listener,
            worker=worker,
            on_listening=lambda _: link.works(),
            on_ready=link.is_ready,
        )
    )


def _first_child(
    settings: "Settings", url: str, listener: socket.socket, options: list[str], *, worker: bool
) -> Child:
    """Start the only child as a fork of this process: a fork imports no modules again."""

    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) == 0:
        status: Any = 1
        try:
            ours.close()
            os.setsid()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
            main(partial(_serve, settings, url, listener, theirs.detach(), worker=worker))
            status = 0
        except SystemExit as ended:
            status = ended.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)  # exit without cleaning up, because the parent cleans up
    theirs.close()
    return Child("server", ["serve", *options], pid, ours.detach())


def _several_children(options: list[str], *, apis: int, workers: int | None) -> list[Child]:
    served = ["serve", "--no-worker", *options]
    children = [Child(f"API {number}", served) for number in range(1, apis + 1)]
    count = 1 if workers is None else workers
    return children + [Child(f"worker {number}", ["worker"]) for number in range(1, count + 1)]


def _metrics_of_several() -> tuple[str, str]:
    """Create the metrics folder; return (environment variable for a process's name, folder)."""
    from bottega import metrics

    folder = mkdtemp(prefix="bottega-metrics-")
    os.environ[metrics.FOLDER] = folder
    return metrics.NAME, folder


def _announcement(settings: "Settings", port: int) -> str:
    display = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"Bottega listens on http://{display}:{port} (console at /console/, docs at /docs)"


@cli.command()
def worker(parent: _Descriptor = None) -> None:
    """Execute runs. Start any number of workers on machines that can reach the database."""
    with_terminal = ends_with_terminal()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # until the loop handles SIGHUP
    settings = start()
    from bottega import worker as process

    link = None if parent is None else ParentLink(parent, settings.drain_grace_s + _TO_END_S)

    def ready() -> None:
        if link is None:
            announce(settings, "Bottega's worker is ready")
        else:
            link.works()
            link.is_ready()

    with database(settings) as url:
        if parent is None:
            _announce_models(settings)
        # If there is a parent process, the API processes report the metrics of all processes.
        port = settings.metrics_port if parent is None else None
        is_reload = run(process.work(settings, url, ready, port=port))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    if is_reload and parent is None and (has_terminal() or not with_terminal):
        sys.stderr.flush()
        command = [sys.executable, "-m", "bottega.cli.commands", *sys.argv[1:]]
        os.execv(sys.executable, command)  # noqa: S606 (our own module)


@cli.command()
def migrate(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 1 if there is work.")
    ] = False,
    sql: Annotated[
        bool, typer.Option("--sql", help="Print the statements for an empty database, for psql.")
    ] = False,
) -> None:
    """Migrate the database's schema to this version, or repair it."""
    from bottega.db import migrate as migrations

    if sql:
        sys.stdout.buffer.write(migrations.whole_script().encode())
        return
    settings = start()
    if settings.database_admin_url is not None:
        owner = {"database_url": settings.database_admin_url, "listen_url": None}
        settings = settings.model_copy(update=owner)
    if check:
        with database_as_it_is(settings) as url:
            asyncio.run(migrations.check(url))
        console().print("The database is up to date.")
        return
    with database(settings) as url:
        migrations.upgrade(url)
        store_bootstrap_key(settings, url)
    console().print("The database is up to date.")


@cli.command()
def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the server running afterwards.")
    ] = False,
    port: Annotated[int, typer.Option(help="Port of the API; 0 picks one.")] = 0,
    scenario: Annotated[ScenarioName, typer.Option(help="The team to run.")] = "software",
    task: Annotated[
        str | None, typer.Option(help="Task of the team, in place of the scenario's task.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the last chat of support.")
    ] = False,
) -> None:
    """Run a team and show its work live.

    software: the agents requirements, designer and implementer, whose answers flow along a graph.
    research: an agent that dispatches many tasks, which run in parallel.
    learning: 48 similar tasks, from which memory finds, validates and uses a pattern.
    support: a chat with a refund that waits for you; after Ctrl-C, continue with --resume.
    """
    console().print("Bottega's demo starts a database and a server …", style="dim")
    _, path = mkstemp(prefix="bottega-demo-", suffix=".log")
    log = open(path, "w")  # noqa: SIM115 (until the end)
    settings = start(log, port=port)
    from bottega.cli import demo
    from bottega.db.embedded import data_folder

    own = {"data_dir": data_folder(settings.data_dir) / "demo"}
    settings = settings.model_copy(update=own)

    if resume:
        scenario = "support"
    demo_scenario = SCENARIOS[scenario] if task is None else replace(SCENARIOS[scenario], task=task)
    if task is not None and scenario == "learning":
        raise InvalidInputError("the scenario learning has its own tasks: leave out --task")
    with database(settings) as url:
        _announce_models(settings.model_copy(update={"log_format": "text"}))
        status = demo.run(settings, url, demo_scenario, log, resume=resume, keep=keep)
    console().print(f"The log is in {path}", style="dim", highlight=False, soft_wrap=True)
    sys.exit(status)


@cli.command()
def demo_model(
    port: Annotated[int, typer.Option(help="Port of the model; 0 picks one.")] = 0,
    latency_ms: Annotated[float, typer.Option(help="Milliseconds before an answer.")] = 0,
    token_delay_ms: Annotated[float, typer.Option(help="Milliseconds between its words.")] = 0,
) -> None:
    """Serve the built-in, OpenAI-compatible demo model on loopback."""
    from bottega.llm.demo_model.server import serve

    serve(port, latency_ms=latency_ms, token_delay_ms=token_delay_ms)


_SUBJECTS = {
    "Service": "host port root_path bootstrap trusted_proxies cors user_headers keyless requests",
    "Runs": "worker_concurrency takeover drain concurrent queued tokens cost",
    "Sign-in": "oidc",
    "Database and NATS": "database listen nats data_dir",
    "Models": "openai providers model",
    "Tools and secrets": "webhook secret egress mcp",
    "Storage": "tenant_storage files objects retention",
    "Memory": "memory shared_memory embedding learning",
    "Sub-agents": "subagent",
    "Log and metrics": "log metrics",
    "Other": "",
}
"""Headings of the settings, with the first words of the settings' names; Other: all other words."""


def _subject(name: str) -> str:
    for subject, beginnings in _SUBJECTS.items():
        if name.startswith(tuple(beginnings.split())):
            return subject
    return "Other"


@cli.command("settings")
def show_settings(as_json: AsJson = False) -> None:
    """Print every setting with its value; secrets are masked. Settings that are set come first."""
    from bottega.settings import Settings, redactor

    settings = Settings()
    clean = redactor(settings).text
    rows = []
    for name, field in Settings.model_fields.items():
        value = getattr(settings, name)
        shown = "" if value is None else clean(str(value))  # a SecretStr prints as ********
        rows.append(
            {
                "variable": str(field.validation_alias or f"BOTTEGA_{name.upper()}"),
                "value": shown,
                "changed": value != field.get_default(call_default_factory=True),
                "subject": _subject(name),
                "meaning": field.description or "",
            }
        )
    if as_json:
        print_json(rows)
        return
    _print_settings("Set by you", [each for each in rows if each["changed"]])
    for subject in _SUBJECTS:
        rest = [each for each in rows if each["subject"] == subject and not each["changed"]]
        _print_settings(subject, rest)


def _print_settings(heading: str, found: Sequence[Mapping[str, Any]]) -> None:
    if not found:
        return
    from rich.console import Console

    Console().print(f"\n{heading}", style="bold")
    names = ("variable", "value", "meaning")
    rows = ([each[name] for name in names] for each in found)
    print_rows(names, rows, prose=("value", "meaning"))


def _odd_line(path: Path) -> int | None:
    """Return the number of a file's first line that is not UTF-8; ``None``: all are UTF-8."""
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError as error:
        return error.object.count(b"\n", 0, error.start) + 1
    except OSError:
        return None
    return None


def main(command: Callable[[], Any] = cli) -> None:
    """Run a command; print an error as one sentence with a remedy, not as a traceback."""
    _open_standard_streams()
    try:
        command()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if _DEBUG in takewhile(lambda argument: argument.startswith("-"), sys.argv[1:]):
            traceback.print_exc()
        sys.exit(_tell(error))


def _open_standard_streams() -> None:
    """Open missing standard streams, so that no other file gets a standard stream's number."""

    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is the stream's
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _tell(error: Exception) -> int:
    if isinstance(error, ValidationError):
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"]) or "settings"
            _print_error(f"{name}: {problem['msg']}")
        return 2
    if isinstance(error, UnicodeDecodeError) and (line := _odd_line(Path(".env"))) is not None:
        _print_error(f".env: line {line} is not UTF-8: save the file as UTF-8")
        return 2
    sentence, hint = doctor.explain(error)
    _print_error(f"{sentence}: {hint}" if hint else sentence)
    return 1


def _print_error(message: str) -> None:
    console().print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
