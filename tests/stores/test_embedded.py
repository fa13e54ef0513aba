"""The embedded PostgreSQL with real processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import psutil
import pytest

from bottega.db import embedded, migrate
from bottega.db.connect import connect
from bottega.db.embedded import DataFolderError
from tests import forks
from tests.waiting import until_now

ROOT = Path(__file__).parents[2]

HOLD = """
import pathlib, sys
from bottega.db import embedded, migrate
from bottega.db.connect import connect
with embedded.running(pathlib.Path(sys.argv[1])) as url:
    print(url, flush=True)
    sys.stdin.read()
print("left", flush=True)
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that keeps the server running until its stdin ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("postgresql://")
        yield process


def leave(process: subprocess.Popen[str]) -> None:
    out, _ = process.communicate(timeout=30)
    assert out.strip() == "left"


def postmaster(folder: Path) -> psutil.Process | None:
    pid_file = folder / "postgres" / "postmaster.pid"
    if not pid_file.exists():
        return None
    try:
        return psutil.Process(int(pid_file.read_text().splitlines()[0]))
    except psutil.NoSuchProcess:
        return None


@pytest.mark.deep
def test_processes_share_one_server_and_the_last_one_stops_it(folder: Path) -> None:
    with holder(folder) as first, holder(folder) as second:
        server = postmaster(folder)
        assert server is not None
        leave(first)
        assert postmaster(folder) == server
        leave(second)
        assert postmaster(folder) is None
        psutil.wait_procs([server], timeout=10)
        assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


@pytest.mark.deep
def test_a_killed_process_neither_stops_the_server_nor_keeps_it_running(folder: Path) -> None:
    with holder(folder) as first, holder(folder) as second:
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert postmaster(folder) is not None
        leave(second)
        assert postmaster(folder) is None


@pytest.mark.deep
def test_a_server_whose_users_were_all_killed_is_used_again(folder: Path) -> None:
    with holder(folder) as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
    server = postmaster(folder)
    assert server is not None
    with holder(folder) as second:
        assert postmaster(folder) == server
        leave(second)
    assert postmaster(folder) is None


@pytest.mark.deep
def test_a_server_that_was_killed_with_its_users_is_started_again(folder: Path) -> None:
    with holder(folder) as first:
        server = postmaster(folder)
        assert server is not None
        for process in (server, *server.children()):
            process.kill()
        first.kill()
        first.wait()
        psutil.wait_procs([server], timeout=30)
    assert (folder / "postgres" / "postmaster.pid").exists()
    with holder(folder) as second:
        assert postmaster(folder) not in (None, server)
        leave(second)
    assert postmaster(folder) is None


@pytest.mark.deep
@pytest.mark.parametrize(
    "text",
    [
        "{pid}\n/elsewhere\n1700000000\n5432\n/elsewhere\n\n  1234567   32769\nready   \n",
        pytest.param("{pid}\n", marks=pytest.mark.deep),
        pytest.param("-1\n", marks=pytest.mark.deep),
        pytest.param("99999999999999999999\n", marks=pytest.mark.deep),
        "",
        pytest.param("\x00\x00\x00\x00", marks=pytest.mark.deep),
        pytest.param("\xff words\n\n\n\n\n\n\nready\n", marks=pytest.mark.deep),
    ],
    ids=["whole", "number", "negative", "huge", "empty", "zeros", "words"],
)
def test_process_that_has_the_number_of_a_dead_server_is_left_alone(
    folder: Path, text: str
) -> None:
    with holder(folder) as first:
        leave(first)
    with subprocess.Popen(["sleep", "600"]) as bystander:
        try:
            for name in ("postmaster.pid", ".s.PGSQL.5432.lock"):
                (folder / "postgres" / name).write_text(text.format(pid=bystander.pid))
            with holder(folder) as second:
                server = postmaster(folder)
                assert server is not None
                assert server.pid != bystander.pid
                (folder / "postgres" / "postmaster.pid").write_text(f"{bystander.pid}\n")
                leave(second)
            assert bystander.poll() is None
            psutil.wait_procs([server], timeout=30)
            assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
        finally:
            bystander.kill()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("sign", "whole"),
    [
        pytest.param("", False, marks=pytest.mark.deep),
        pytest.param("PG_VERSION", False, marks=pytest.mark.deep),
        pytest.param("global/pg_control", False, marks=pytest.mark.deep),
        pytest.param("base/4", False, marks=pytest.mark.deep),
        ("base/4", True),
    ],
)
def test_first_start_that_is_killed_leaves_nothing_that_holds_the_next(
    folder: Path, sign: str, whole: bool
) -> None:
    """Kill it when a file is there: the process alone, or its children too."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    with process:
        until_now(lambda: any(folder.glob(f"postgres*/{sign}")))
        if whole:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    with holder(folder) as second:
        leave(second)
    if whole:  # else children that live on may write for a moment: the next start cleans up
        assert [each.name for each in folder.glob("postgres*")] == ["postgres"]


def folder_size(folder: Path) -> int:
    """Return the bytes in a folder, without PostgreSQL's log of writes: that has a fixed length."""
    found = 0
    for path, _, names in os.walk(folder):
        for name in names if "pg_wal" not in path else ():
            with contextlib.suppress(OSError):  # it was removed at this moment
                found += os.stat(os.path.join(path, name)).st_size
    return found


@contextmanager
def migrating(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``bottega migrate``, which makes, starts and migrates an embedded database."""
    environment = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    with subprocess.Popen(
        [sys.executable, "-m", "bottega.cli.commands", "migrate"],
        env=environment | {"BOTTEGA_DATA_DIR": str(folder)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        yield process


def runs_until(process: subprocess.Popen[bytes], folder: Path, size: int) -> bool:
    """Wait until a folder has so many bytes; return false if the process ended before."""
    until_now(lambda: folder_size(folder) >= size or process.poll() is not None)
    return process.poll() is None


@pytest.mark.deep
def test_a_start_that_is_killed_at_any_moment_is_made_up_for_by_the_next(folder: Path) -> None:
    """Kill it at moments from the first file to the last table; later ones find what was left."""
    with migrating(folder / "whole") as process:
        assert process.wait(60) == 0
    whole, cut = folder_size(folder / "whole"), folder / "cut"
    cut.mkdir()
    reached = []
    for moment in range(1, 20):
        with migrating(cut) as process:
            reached.append(runs_until(process, cut, whole * moment // 20))
            if moment % 4:  # with initdb, or whatever it started that is not a server yet
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
    assert all(reached[:15]), reached
    with migrating(cut) as process:
        assert process.wait(60) == 0
    assert [each.name for each in cut.glob("postgres*")] == ["postgres"]
    with embedded.running(cut) as url:
        assert asyncio.run(migrate.is_current(url))


@pytest.mark.deep
def test_a_database_of_another_version_is_named_by_its_folder(folder: Path) -> None:
    environment = {**os.environ, "BOTTEGA_DATA_DIR": str(folder), "COLUMNS": "1000"}
    assert forks.run(["migrate"], environment).returncode == 0
    with embedded.running(folder) as url:
        asyncio.run(_execute(url, "UPDATE alembic_version SET version_num = 'ffffffffffff'"))
        for options in ((), ("--check",)):
            ended = forks.run(["migrate", *options], environment)
            assert (ended.returncode, f"in the folder {folder})" in ended.stderr) == (1, True)


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def test_an_impossible_folder_is_an_error_with_advice() -> None:
    with (
        pytest.raises(DataFolderError, match="BOTTEGA_DATA_DIR"),
        embedded.running(Path("/dev/null/bottega")),
    ):
        pass


def test_a_folder_with_other_files_is_an_error_with_a_reason(folder: Path) -> None:
    data = folder / "postgres"
    data.mkdir()
    (data / "PG_VERSION").write_text("9.1\n")
    with pytest.raises(DataFolderError, match="does not start"), embedded.running(folder):
        pass


ODD = ('it\'s $HOME `id` "x" é 漢', "a\\b %41 #?&=+", "-o x;y|z", " blanks ", "{}[]*~!")


@pytest.mark.parametrize(
    "name", [ODD[0], *(pytest.param(each, marks=pytest.mark.deep) for each in ODD[1:])]
)
async def test_a_folder_with_odd_characters_works(folder: Path, name: str) -> None:
    odd = folder / name
    with embedded.running(odd) as url:
        assert postmaster(odd) is not None
        session = await connect(url, role=None)
        data = await session.fetchval("SELECT current_setting('data_directory')")
        await session.close()
        assert data == str(odd / "postgres")
    assert postmaster(odd) is None


@pytest.mark.parametrize("name", ["a,b", "a\nb"])
def test_a_path_that_no_address_can_hold_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(DataFolderError, match="comma"), embedded.running(folder / name):
        pass


def test_a_path_too_long_for_its_socket_is_refused(folder: Path) -> None:
    long = folder / ("long" * 30)
    with pytest.raises(DataFolderError, match="shorter"), embedded.running(long):
        pass


@pytest.mark.deep
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_it_works_for_a_user_other_than_root() -> None:
    """Start a process of the user ``nobody``, with an interpreter readable by this user."""
    import pwd

    nobody = pwd.getpwnam("nobody")
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "app"), *sys.path])}
    try:
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            process = subprocess.run(
                ["/usr/bin/python3", "-c", HOLD, folder],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=environment,
                cwd="/",
                user=nobody.pw_uid,
                group=nobody.pw_gid,
                extra_groups=[],
                timeout=60,
                check=False,
            )
    except OSError as error:
        pytest.skip(f"no interpreter for another user: {error}")
    if "ModuleNotFoundError" in process.stderr or "Permission denied" in process.stderr:
        pytest.skip("the packages are in a place that only root may read")
    assert process.stdout.splitlines()[-1:] == ["left"], process.stderr
