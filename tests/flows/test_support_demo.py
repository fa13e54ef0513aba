"""The demo of a support desk at a terminal: its refund waits for a person over any end of it."""

import asyncio
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest

from bottega.cli import demo
from bottega.cli.client import RemoteServer
from bottega.cli.scenarios import SUPPORT
from tests.fake_model import FakeModel
from tests.log_entries import capture_logs
from tests.service import Running
from tests.terminals import CTRL_D, Terminal, terminal

BEGIN = ("demo", "--scenario", "support")
RESUME = ("demo", "--resume")


@pytest.fixture
def environment(database_url: str, model: FakeModel, tmp_path: Path) -> dict[str, str]:
    return {
        "DATABASE_URL": database_url,
        "OPENAI_API_KEY": "k",
        "OPENAI_BASE_URL": model.base_url,
        "BOTTEGA_DATA_DIR": str(tmp_path),
        "BOTTEGA_DRAIN_GRACE_S": "0",
    }


async def play(
    arguments: tuple[str, ...], environment: dict[str, str], act: Callable[[Terminal], int]
) -> int:
    def sit() -> int:
        with terminal(*arguments, **environment) as at:
            return act(at)

    return await asyncio.to_thread(sit)


def approve(at: Terminal) -> int:
    at.says("amount = 240", "Refunds above 100 need a person.", "Approve?", within=60)
    at.type("y\n")
    at.says("240.0 were paid back", "completed", "> ")
    at.type(CTRL_D)
    at.says("bottega demo --resume")
    return at.ends()


async def test_a_refund_is_paid_when_a_pipe_says_yes(
    guest: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def piped(*lines: str) -> int:
        monkeypatch.setattr("sys.stdin", StringIO("\n".join(lines)))
        key = guest.headers["Authorization"].removeprefix("Bearer ")
        with RemoteServer(f"http://127.0.0.1:{guest.port}", key) as server:
            return demo.talk(server, SUPPORT, "demo-1")

    with capture_logs():  # the service is in this process: its log would be in the chat's output
        assert await asyncio.to_thread(piped) == 4  # at its end the refund waits
        assert await asyncio.to_thread(piped, "perhaps", "y") == 0
        said = capsys.readouterr()
    assert said.out.endswith("refund says: 240.0 were paid back to the customer's card\n")
    assert said.err.count("Approve?") == 3
    assert await asyncio.to_thread(piped, "Thank you!") == 0
    assert "Thank you" in capsys.readouterr().out


@pytest.mark.deep
async def test_a_refund_waits_over_ctrl_c_and_kill(environment: dict[str, str]) -> None:
    def leave(at: Terminal) -> int:
        at.says("Approve?", within=60)
        at.interrupt("The run waits", "bottega demo --resume")
        return at.ends()

    def die(at: Terminal) -> int:
        at.says("not over", "Approve?", within=60)
        at.kill()
        return at.ends()

    assert await play(BEGIN, environment, leave) == 4
    assert await play(RESUME, environment, die) == -9
    assert await play(RESUME, environment, approve) == 0
