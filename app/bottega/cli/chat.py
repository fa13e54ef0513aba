"""A conversation with an agent at the terminal: a session in which each message is a run."""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from rich.console import Console

from bottega.cli.client import RemoteError, RemoteServer, RunEvents
from bottega.cli.people import STATUSES, People, Undecided, follow, read_line
from bottega.cli.terminal import one_line
from bottega.cli.transcript import Transcript, text_of

PROMPT = "> "
_UNDER_WAY = ("queued", "running", "waiting")


class _Left(Exception):  # noqa: N818 (no error)
    """Signal that the person leaves the chat."""


@dataclass(slots=True)
class Chat:
    """A session with one agent.

    Attributes:
        user: the session's end user; ``None``: the session has no end user.
        again: the shell command that continues this chat.
        read: reads the next message; raises ``EOFError`` at the end of the input.
    """

    server: RemoteServer
    console: Console
    approvals: People
    agent: str
    session: str
    user: str | None
    again: str
    read: Callable[[str], str] = read_line
    _status: int = field(default=0)

    def talk(self, first: Iterable[str] = ()) -> int:
        """Follow unfinished runs; send ``first``, then typed messages; return the exit status."""
        try:
            for run in self._under_way():
                self._note("This conversation has a run that is not over.")
                self._answer(run["id"], ours=False)
            for text in first:
                self._note(f"{PROMPT}{text}")
                self._send(text)
            while True:
                if text := self._typed():
                    self._send(text)
        except (_Left, KeyboardInterrupt):
            self._note(f"Left. Go on with: {self.again}")
        return self._status

    def show_history(self) -> None:
        """Show the last turns of the conversation."""
        path = f"/v1/sessions/{quote(self.session, safe='')}/messages"
        items = self.server.get(path, agent=self.agent, order="desc", limit=6)["items"]
        for message in reversed(items):
            if message["role"] != "tool" and (text := text_of(message["content"])):
                self._note(f"{PROMPT if message['role'] == 'user' else ''}{one_line(text)}")

    def _under_way(self) -> list[Any]:
        filters = {"session_id": self.session, "agent": self.agent}
        found = self.server.get("/v1/runs", **filters, order="desc", limit=20)["items"]
        return [run for run in reversed(found) if run["status"] in _UNDER_WAY]

    def _typed(self) -> str:
        try:
            return self.read(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            raise _Left from None

    def _send(self, text: str) -> None:
        whose = {} if self.user is None else {"user": self.user}
        run = self.server.start(self.agent, input=text, session_id=self.session, **whose)
        self._answer(run["id"], ours=True)

    def _answer(self, run_id: str, *, ours: bool) -> None:
        transcript = Transcript(self.console)
        events = RunEvents(self.server, run_id, transcript.note)
        try:
            try:
                follow(events, transcript.show, self.approvals, ours=ours)
            except KeyboardInterrupt:
                transcript.note("cancelling …")
                self.server.post(f"/v1/runs/{run_id}/cancel")
                follow(events, transcript.show, self.approvals, ours=ours)
        except Undecided as undecided:
            transcript.note("The run waits for a decision.")
            if not self.approvals.asks:
                transcript.note(f"Decide with: {undecided}")
            self._status = STATUSES["waiting"]
            raise _Left from None
        except KeyboardInterrupt:
            raise _Left from None
        run = self.server.get(f"/v1/runs/{run_id}")
        transcript.end(run)
        self._status = STATUSES.get(run["status"], 1)

    def _note(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def open_session(
    server: RemoteServer, session: str | None, user: str | None
) -> tuple[str, str | None]:
    """Return a session's id and user; create the session if it does not exist.

    Args:
        session: name of the session; ``None``: create a new session.
        user: end user of the new or continued session.
    """
    if session is not None:
        try:
            session_row = server.get(f"/v1/sessions/{quote(session, safe='')}")
            return str(session_row["id"]), user or session_row["user"]
        except RemoteError as error:
            if error.status != 404:
                raise
    fields = {"id": session, "user": user}
    body = {name: value for name, value in fields.items() if value is not None}
    return str(server.create("/v1/sessions", body)["id"]), user


def command_of(agent: str, session: str) -> str:
    """Return the shell command that continues a chat."""
    return shlex.join(["bottega", "chat", agent, "--session", session])
