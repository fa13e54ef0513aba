"""Daily commands: run, watch, chat and interrupts, at a terminal and in pipes."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.chaos.proxy import Proxy
from tests import forks, swarm
from tests.fake_model import FakeModel, calls, chunk, gated, http_error, sse_until, text
from tests.service import Running
from tests.terminals import CTRL_D, Terminal, terminal
from tests.waiting import until

ASK = {"type": "builtin", "name": "ask_user"}
REFUND = {
    "type": "builtin",
    "name": "calculator",
    "approval": {"when": {"feature": "arguments.expression", "op": "contains", "value": "9"}},
    "approval_reason": "Much money needs a person.",
}
LOCATE = {"type": "client", "name": "locate", "description": "Says where the user is."}


@pytest.fixture
async def bottega(guest: Running) -> Running:
    agent = {"name": "clerk", "system_message": "x", "tools": [ASK, REFUND, LOCATE]}
    assert (await guest.client.post("/v1/agents", json=agent)).status_code == 201
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


def environment(bottega: Running, port: int | None = None) -> dict[str, str]:
    key = bottega.headers.get("Authorization", "").removeprefix("Bearer ")
    return {"BOTTEGA_URL": f"http://127.0.0.1:{port or bottega.port}", "BOTTEGA_KEY": key}


async def ended(
    bottega: Running, *arguments: str, **more: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command without a terminal to its end."""
    whole = {**os.environ, "COLUMNS": "300", **environment(bottega), **more}
    return await asyncio.to_thread(forks.run, arguments, whole)


async def typing(
    bottega: Running, arguments: list[str], act: Callable[[Terminal], int], **more: str
) -> int:
    """Let a person act at a terminal, beside this event loop; return the exit status."""

    def sit() -> int:
        with terminal(*arguments, **{**environment(bottega), **more}) as at:
            return act(at)

    return await asyncio.to_thread(sit)


async def run_id(bottega: Running, status: str | None = None) -> str:
    """Wait for the latest run, if wanted with a status; return its id."""

    async def latest() -> Any:
        items = (await bottega.client.get("/v1/runs?order=desc&limit=1")).json()["items"]
        return items and items[0]

    wanted = await until(latest, lambda run: run and status in (None, run["status"]))
    return str(wanted["id"])


@pytest.mark.deep
async def test_a_chat_streams_asks_cancels_and_goes_on(bottega: Running, model: FakeModel) -> None:
    model.script(
        sse_until(asyncio.Event(), chunk("Good "), chunk("morn")),
        calls(("calculator", {"expression": "9+9"})),
        text("It is 18."),
        text("I remember."),
    )

    def act(at: Terminal) -> int:
        at.says("> ")
        at.type("Hello\n")
        at.says("Good morn")  # while the model still speaks
        at.interrupt("cancelling", "cancelled", "> ")
        at.type("Sum up\n")
        at.says("clerk wants to call calculator", 'expression = "9+9"', "Much money", "Approve?")
        at.type("y fine\n")
        at.says("It is 18.", "completed", "tokens", "> ")
        at.type(CTRL_D)
        return at.ends()

    assert await typing(bottega, ["chat", "clerk", "--session", "s"], act) == 0

    def return_(at: Terminal) -> int:
        at.says("> Sum up", "It is 18.", "> ")
        at.type("Again?\n")
        at.says("I remember.", "> ")
        at.interrupt("bottega chat clerk --session s")
        return at.ends()

    assert await typing(bottega, ["chat", "clerk", "--session", "s"], return_) == 0
    assert [each["content"] for each in model.requests[-1]["messages"] if each["role"] == "user"][
        -2:
    ] == ["Sum up", "Again?"]
    resolved = (await bottega.client.get("/v1/interrupts")).json()["items"]
    assert [each["resolution"] for each in resolved] == [{"decision": "approve", "comment": "fine"}]


async def test_a_killed_chat_asks_again(bottega: Running, model: FakeModel) -> None:
    model.script(calls(("ask_user", {"question": "Which\x1b[2J one?"})), text("Blue, then."))

    def die(at: Terminal) -> int:
        at.says("> ")
        at.type("Paint it\n")
        at.says("| Which\ufffd[2J one?", "Your answer: ")
        at.kill()
        return at.ends()

    def answer(at: Terminal) -> int:
        at.says("not over", "Your answer: ")
        at.type("\n")
        at.says("Your answer: ")
        at.type("blue\n")
        at.says("Blue, then.", "> ")
        at.type(CTRL_D)
        return at.ends()

    assert await typing(bottega, ["chat", "clerk", "--session", "s"], die) == -9
    assert await typing(bottega, ["chat", "clerk", "--session", "s"], answer) == 0


async def test_a_run_at_a_terminal_is_decided_on_and_left(
    bottega: Running, model: FakeModel
) -> None:
    gate = asyncio.Event()
    model.script(
        calls(("calculator", {"expression": "9"}), ("locate", {})),
        gated(gate, text("\x1b]0;hacked\x07 done")),
    )

    def act(at: Terminal) -> int:
        at.says("run ", "Approve?")
        at.type("e\n")
        at.says("as JSON: ")
        at.type('\x15{"x": 1}\n')  # Ctrl-U: instead of the arguments that stand there
        at.says("error: ", "Approve?")
        at.type("perhaps\n")
        at.says("Approve?")
        at.type("no\n")
        at.says("locate is refused", "denied by a person")
        at.interrupt("The run goes on", "bottega watch ", "bottega cancel ")
        return at.ends()

    assert await typing(bottega, ["run", "clerk", "Do it"], act) == 130
    gate.set()
    run = await run_id(bottega, "completed")
    watched = await ended(bottega, "watch", run)
    assert (watched.returncode, watched.stdout) == (0, "\ufffd]0;hacked\ufffd done\n")
    assert "completed, " in watched.stderr
    told = [each["content"] for each in model.requests[-1]["messages"] if each["role"] == "tool"]
    assert "denied" in told[0]
    assert "a terminal" in told[1]


async def test_a_pipe_gets_the_answer_and_nothing_else(bottega: Running, model: FakeModel) -> None:
    model.script(text("plain\n\x1b[31mred\u202e"))
    piped = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "bottega.cli.commands", "run", "clerk", "-"],
        input="from a pipe\n",
        text=True,
        capture_output=True,
        env={**os.environ, **environment(bottega)},
        timeout=60,
    )
    assert (piped.returncode, piped.stdout) == (0, "plain\n\ufffd[31mred\ufffd\n")
    assert "completed" in piped.stderr
    assert "\x1b" not in piped.stderr
    assert model.requests[-1]["messages"][-1]["content"] == "from a pipe"


@pytest.mark.deep
async def test_exit_status_and_interrupts_of_a_script(bottega: Running, model: FakeModel) -> None:
    model.script(
        calls(("calculator", {"expression": "9"}), ("ask_user", {"question": "Which\tone?"})),
        text("done"),
    )
    waits = await ended(bottega, "run", "clerk", "x")
    assert (waits.returncode, waits.stdout) == (4, "")
    assert "bottega interrupts resolve" in waits.stderr
    listed = await ended(bottega, "interrupts")
    rows = {line.split("\t")[1]: line.split("\t") for line in listed.stdout.splitlines()}
    assert rows["approval"][2:5] == ["pending", "clerk", "calculator"]
    assert rows["question"][-1] == "Which one?"
    approval, question = rows["approval"][0], rows["question"][0]
    for arguments in (
        ["resolve", approval],
        ["resolve", approval, "--approve", "--deny"],
        ["resolve", approval, "--deny", "--arguments", "{}"],
        ["resolve", approval, "--approve", "--arguments", "[]"],
    ):
        assert (await ended(bottega, "interrupts", *arguments)).returncode == 2, arguments
    denied = await ended(bottega, "interrupts", "resolve", approval, "--deny", "--comment", "no")
    assert (denied.returncode, "resolved by a test's" in denied.stdout) == (0, True)
    again = await ended(bottega, "interrupts", "resolve", approval, "--approve")
    assert (again.returncode, "resolved" in again.stderr) == (5, True)
    answered = await ended(bottega, "interrupts", "resolve", question, "--answer", "7")
    assert '"answer": "7"' in answered.stdout
    watched = await ended(bottega, "watch", await run_id(bottega))
    assert (watched.returncode, watched.stdout) == (0, "done\n")
    assert "Which" in (await ended(bottega, "interrupts", "show", question)).stdout
    assert (await ended(bottega, "interrupts", "list")).stdout == ""
    everything = await ended(bottega, "interrupts", "list", "--all", "--run", await run_id(bottega))
    assert len(everything.stdout.splitlines()) == 2


async def test_cancelled_runs_have_their_own_exit_status(
    bottega: Running, model: FakeModel
) -> None:
    model.script(calls(("ask_user", {"question": "Sure?"})))
    assert (await ended(bottega, "run", "clerk", "x")).returncode == 4
    run = await run_id(bottega)
    assert (await ended(bottega, "cancel", run)).returncode == 0
    assert (await ended(bottega, "watch", run)).returncode == 3
    assert "over: cancelled" in (await ended(bottega, "cancel", run)).stderr


async def test_watching_survives_lost_connections(bottega: Running, model: FakeModel) -> None:
    gate = asyncio.Event()
    model.script(calls(("calculator", {"expression": "1+1"})), gated(gate, text("late")))
    body = {"agent": "clerk", "input": "x"}
    run = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
    async with Proxy(lambda: asyncio.open_connection("127.0.0.1", bottega.port)) as proxy:
        address = environment(bottega, proxy.port)

        def cut() -> int:
            proxy.cut()
            return proxy.cuts

        watching = asyncio.ensure_future(ended(bottega, "watch", run, **address))
        await until(cut, lambda seen: seen >= 3)
        await until(proxy.links)
        gate.set()
        watched = await watching
    assert (watched.returncode, watched.stdout) == (0, "late\n")
    assert watched.stderr.count("clerk calls calculator") == 1
    assert watched.stderr.count("completed, ") == 1


@pytest.mark.deep
async def test_errors_say_what_to_change(bottega: Running) -> None:
    for arguments, more, said, status in (
        (["run", "clark", "x"], {}, "did you mean clerk?", 5),
        (["chat", "clark"], {}, "did you mean clerk?", 5),
        (["run", "zzzzzz", "x"], {}, "There are: clerk", 5),
        (["run", "clerk", " "], {}, "the text is empty", 2),
        (["run", "clerk", "x"], {"BOTTEGA_KEY": "wrong"}, "BOTTEGA_KEY", 5),
        (["run", "clerk", "x"], {"BOTTEGA_KEY": "two words"}, "is not a key", 2),
        (["run", "clerk", "x"], {"BOTTEGA_URL": "http://127.0.0.1:1"}, "bottega serve", 5),
        (["run", "clerk", "x"], {"BOTTEGA_URL": "127.0.0.1:1"}, "http://", 2),
        (["watch", "7"], {}, "UUID", 2),
        (["watch", "01a206b7-7339-78dd-ae08-7d986f4ad017"], {}, "there is no run", 5),
    ):
        found = await ended(bottega, *arguments, **more)
        assert (found.returncode, said in found.stderr) == (status, True), found.stderr
        assert "Traceback" not in found.stderr


async def test_a_fork_repeats_a_part_of_a_run(bottega: Running, model: FakeModel) -> None:
    for name in ("a", "b"):
        await bottega.client.post("/v1/agents", json={"name": name, "system_message": name})
    graph = {"name": "g", "edges": [{"source": "a", "target": "b"}]}
    assert (await bottega.client.post("/v1/graphs", json=graph)).status_code == 201
    model.script(text("first"), text("second"), text("from mine"))
    body = {"mode": "dag", "graph": "g", "input": "x"}
    run = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
    done = await ended(bottega, "fork", run["id"], "--node", "a", "--publication", "my own words")
    assert (done.returncode, done.stdout) == (0, "from mine\n"), done.stderr
    assert "my own words" in str(model.requests[-1]["messages"])
    wrong = await ended(bottega, "fork", run["id"])
    assert (wrong.returncode, "--at-seq" in wrong.stderr) == (2, True)
    unknown = await ended(bottega, "fork", run["id"], "--node", "c")
    assert (unknown.returncode, "'c'" in unknown.stderr) == (5, True)


async def test_many_tasks_have_one_line_of_progress(bottega: Running, model: FakeModel) -> None:
    names = [f"part {number}" for number in range(30)]
    tasks = [{"prompt": name} for name in names]
    model.decide = swarm.plays(
        {
            "root": [
                calls(("dispatch_subagents", {"tasks": tasks})),
                lambda request: calls(("await_subagent", {"task_ids": started(request)})),
                text("All is done."),
            ],
            names[7]: [lambda request: http_error(400)],
        }
    )
    await swarm.coordinator(bottega.client)
    done = await ended(bottega, "run", "boss", "root")
    assert (done.returncode, done.stdout) == (0, "All is done.\n")
    lines = [line.strip() for line in done.stderr.splitlines()]
    progress = [line for line in lines if "tasks are over" in line]
    assert len(progress) == 10
    assert progress[-1] == "30 of 30 tasks are over: 29 done, 1 failed"
    assert [line.split(" failed: ")[0] for line in lines if " failed: " in line] == [names[7]]
    assert sum("dispatches part" in line for line in lines) == 9

    def act(at: Terminal) -> int:
        at.says("part 7 failed: ", "\r\x1b[2K", progress[-1], "All is done.")
        return at.ends()

    arguments = ["watch", await run_id(bottega)]
    assert await typing(bottega, arguments, act, TERM="xterm") == 0


def started(request: dict[str, Any]) -> list[str]:
    return [task["task_id"] for task in swarm.results_in(request)[0]["tasks"]]
