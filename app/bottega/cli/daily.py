"""``bottega run``, ``watch``, ``chat`` and ``cancel``: work with agents of any server."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer
from rich.console import Console

from bottega.cli.terminal import console

if TYPE_CHECKING:
    from bottega.cli.remote.server import RemoteServer

_Agent = Annotated[str, typer.Argument(metavar="AGENT", help="Its name.")]
_RunId = Annotated[UUID, typer.Argument(metavar="RUN", help="Its id.")]
_Session = Annotated[
    str | None, typer.Option(help="Session that it belongs to; begun if it is new.")
]
_User = Annotated[str | None, typer.Option(help="Whose it is, among your own users.")]


@contextmanager
def connected() -> "Iterator[RemoteServer]":
    """Yield the server of ``BOTTEGA_URL``; end the command if it refuses a request."""
    from bottega.cli.remote.client_settings import ClientSettings
    from bottega.cli.remote.following import REFUSED
    from bottega.cli.remote.server import RemoteError, RemoteServer

    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with RemoteServer.of(ClientSettings()) as server:
            yield server
    except RemoteError as error:
        text = f"error: {error.detail}"
        console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(REFUSED) from None


def start_run(
    agent: _Agent,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="The question; - reads it from standard input.")
    ],
    session: _Session = None,
    user: _User = None,
    graph: Annotated[str | None, typer.Option(help="Along which answers flow.")] = None,
) -> None:
    """Run an agent and show its answer, live on a terminal.

    Ctrl-C leaves the run going. Exit status: 0 completed, 1 failed or out of time, 3 cancelled,
    4 it waits for people and nobody here decides, 5 the server refused or is away.
    """
    from bottega.cli.remote.events import RunEvents
    from bottega.cli.remote.following import INTERRUPTED, STATUSES, follow
    from bottega.cli.remote.people import People, Undecided
    from bottega.cli.remote.transcript import Transcript

    if text == "-":
        text = sys.stdin.read().removesuffix("\n")
    if not text.strip():
        raise typer.BadParameter("there is nothing to ask: the text is empty")
    wanted = {"session_id": session, "user": user, "graph": graph}
    with connected() as server:
        people = People(server, console, asks=sys.stdin.isatty())
        run = server.start(agent, input=text, **{k: v for k, v in wanted.items() if v is not None})
        transcript = Transcript(console)
        transcript.note(f"run {run['id']}")
        try:
            events = RunEvents(server, run["id"], transcript.note)
            follow(events, transcript.show, people)
            run = server.get(f"/v1/runs/{run['id']}")
        except Undecided as undecided:
            transcript.note(f"The run waits. Decide with: {undecided}")
            transcript.note(f"Watch it with: bottega watch {run['id']}")
            raise typer.Exit(STATUSES["waiting"]) from None
        except KeyboardInterrupt:
            transcript.note(f"The run goes on. Watch it with: bottega watch {run['id']}")
            transcript.note(f"End it with: bottega cancel {run['id']}")
            raise typer.Exit(INTERRUPTED) from None
        transcript.end(run)
    raise typer.Exit(STATUSES.get(run["status"], 1))


def watch(run_id: _RunId) -> None:
    """Watch a run from its beginning to its end: its tree of agents, then its answer.

    Ctrl-C leaves the run going. The exit status is as of `bottega run`.
    """
    from bottega.cli.remote.events import RunEvents
    from bottega.cli.remote.following import STATUSES
    from bottega.cli.remote.screen import drawing
    from bottega.cli.remote.transcript import Transcript

    with connected() as server:
        run = server.get(f"/v1/runs/{run_id}")
        transcript = Transcript(console)
        events = RunEvents(server, run["id"], transcript.note)
        with drawing(console) as show:
            for event in events:
                show(event)
        run = server.get(f"/v1/runs/{run_id}")
        transcript.end(run)
    raise typer.Exit(STATUSES.get(run["status"], 1))


def chat(agent: _Agent, session: _Session = None, user: _User = None) -> None:
    """Talk with an agent, in a session that the server keeps.

    Ctrl-C cancels the answer under way; where you type, it leaves, as Ctrl-D does. A call that
    waits for your decision still waits when you come back with --session.
    """
    from bottega.cli.remote.chat import Chat, command_of, open_session
    from bottega.cli.remote.people import People

    with connected() as server:
        server.agent(agent)
        opened, whose = open_session(server, session, user)
        people = People(server, console, asks=sys.stdin.isatty())
        again = command_of(agent, opened)
        talk = Chat(server, console, people, agent, opened, whose, again)
        if session is None:
            console.print(f"Session {opened}. Ctrl-D leaves.", style="dim", highlight=False)
        else:
            talk.show_history()
        status = talk.talk()
    raise typer.Exit(status)


def cancel(run_id: _RunId) -> None:
    """End a run: its model calls are cut off, and no further ones are made."""
    with connected() as server:
        run = server.post(f"/v1/runs/{run_id}/cancel")
    over = run["status"] in ("completed", "failed", "timeout", "cancelled")
    said = f"The run is over: {run['status']}." if over else "The run is being cancelled."
    Console(stderr=True).print(said, highlight=False)
