"""Decisions of the person at the terminal on calls that wait for people.

:func:`follow` shows a run to its end, and asks the person at the terminal for decisions.
"""

import contextlib
import json
import sys
import termios
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from bottega.cli.client import Event, RemoteError, RemoteServer, RunEvents
from bottega.cli.terminal import one_line

Tool = Callable[[Mapping[str, Any]], Any]
Reader = Callable[..., str]

_LONGEST_VALUE = 2000
_APPROVE = "Approve? y or n (a comment may follow), e to edit the arguments: "


class Undecided(Exception):  # noqa: N818 (not an error: the person leaves)
    """Signal that nobody here decides on a call; the text is the shell command for a decision."""

    def __init__(self, interrupt: Mapping[str, Any]) -> None:
        how = {
            "approval": "--approve (or --deny)",
            "question": "--answer TEXT",
            "client_tool": "--result JSON",
        }
        decision = how[interrupt["kind"]]
        super().__init__(f"bottega interrupts resolve {interrupt['id']} {decision}")


@dataclass(slots=True)
class People:
    """The person at the terminal.

    Attributes:
        console: output for all texts except the answer.
        asks: false if there is no person at the terminal, as in a script.
        tools: functions that execute calls of client tools, by name; other calls are refused.
        read: function that reads a line after a prompt, see :func:`ask`.
    """

    server: RemoteServer
    console: Console
    asks: bool
    tools: Mapping[str, Tool] = field(default_factory=dict)
    read: Reader = field(default_factory=lambda: ask)

    def decide(self, interrupt_id: str, *, ours: bool) -> None:
        """Let the person at the terminal decide on a call, unless somebody has decided already.

        Args:
            ours: true: this process started the run, so it must execute or refuse client tools.

        Raises:
            Undecided: nobody is at the terminal, or the person left; the call still waits.
            RemoteError: the server was not reached, or failed.
        """
        interrupt = self.server.get(f"/v1/interrupts/{interrupt_id}")
        while interrupt["status"] == "pending":
            decision = self._decision(interrupt, ours=ours)
            try:
                interrupt = resolve(self.server, interrupt_id, decision)
            except RemoteError as error:
                if error.status not in (403, 422):
                    raise
                self._say(f"error: {error.detail}")
                if error.status == 403 or interrupt["kind"] == "client_tool":
                    raise Undecided(interrupt) from None

    def _decision(self, interrupt: Mapping[str, Any], *, ours: bool) -> dict[str, Any]:
        if interrupt["kind"] == "client_tool" and (ours or interrupt["tool"] in self.tools):
            return self._executed(interrupt)
        self._say(shown(interrupt))
        if not self.asks or interrupt["kind"] == "client_tool":
            raise Undecided(interrupt)
        is_question = interrupt["kind"] == "question"
        answer = None
        try:
            while answer is None:
                answer = self._answer(interrupt) if is_question else self._approval(interrupt)
        except (EOFError, KeyboardInterrupt):
            raise Undecided(interrupt) from None
        return answer

    def _answer(self, interrupt: Mapping[str, Any]) -> dict[str, Any] | None:
        """Ask for an answer; ``None``: the answer is empty."""
        text = self.read("Your answer: ")
        return {"answer": value_for(interrupt["schema"], text)} if text.strip() else None

    def _approval(self, interrupt: Mapping[str, Any]) -> dict[str, Any] | None:
        word, _, comment = self.read(_APPROVE).strip().partition(" ")
        about = {"comment": comment.strip()} if comment.strip() else {}
        match word.lower():
            case "y" | "yes":
                return {"decision": "approve", **about}
            case "n" | "no":
                return {"decision": "deny", **about}
            case "e" | "edit":
                with contextlib.suppress(ValueError):
                    text = _written(interrupt["arguments"])
                    value = json.loads(self.read("Arguments, as JSON: ", text))
                    if isinstance(value, dict):
                        return {"decision": "approve", "arguments": value, **about}
                self._say("This is not a JSON object.")
        return None

    def _executed(self, interrupt: Mapping[str, Any]) -> dict[str, Any]:
        name = interrupt["tool"]
        if tool := self.tools.get(name):
            return {"result": tool(interrupt["arguments"])}
        self._say(
            f"{name} is refused: it is a tool of the client, which a terminal cannot execute."
        )
        return {"error": f"the client is a terminal, which cannot execute '{name}'"}

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True, emoji=False)


def resolve(server: RemoteServer, interrupt_id: str, decision: Mapping[str, Any]) -> Any:
    """Send a decision; return the interrupt, which may have somebody else's earlier decision.

    Raises:
        RemoteError: the decision does not fit the interrupt, or the server was not reached.
    """
    path = f"/v1/interrupts/{interrupt_id}"
    try:
        return server.post(f"{path}/resolve", decision)
    except RemoteError as error:
        if error.code not in ("resolved", "expired", "cancelled"):
            raise
        return server.get(path)  # an earlier try of our request may have stored the decision


def value_for(schema: Mapping[str, Any] | None, text: str) -> Any:
    """Return a person's answer as text, or parsed as JSON if the schema allows no text."""
    object_schema = schema or {}
    choices = object_schema.get("enum", ())
    kinds = object_schema.get("type", None if choices else "string")
    is_text = "string" in (kinds if isinstance(kinds, list) else [kinds]) or text in choices
    return text if is_text else json_or_text(text)


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def shown(interrupt: Mapping[str, Any]) -> str:
    """Describe a call in lines; lines from the model begin with ``|``."""
    who, tool = interrupt["agent"] or "the run", interrupt["tool"]
    lines = {
        "approval": [f"{who} wants to call {tool}:"],
        "question": [f"{_asking(interrupt)} asks:"],
        "client_tool": [f"{who} wants its client to execute {tool}:"],
    }[interrupt["kind"]]
    if interrupt["question"] is not None:
        lines += _quoted(interrupt["question"])
        if choices := (interrupt["schema"] or {}).get("enum"):
            lines.append(f"  one of: {', '.join(map(_written, choices))}")
        elif interrupt["schema"]:
            lines.append(f"  as JSON that fits {_written(interrupt['schema'])}")
    else:
        for name, value in interrupt["arguments"].items():
            lines += _quoted(f"{name} = {_written(value)}")
    if interrupt["reason"]:
        lines.append(f"  because: {one_line(interrupt['reason'])}")
    return "\n".join(lines)


def _asking(interrupt: Mapping[str, Any]) -> str:
    if (server := interrupt["server"]) is not None:
        return f"the MCP server {server}"
    return interrupt["agent"] or "the run"


def _quoted(text: str) -> list[str]:
    more = len(text) - _LONGEST_VALUE
    lines = [f"  | {line}" for line in text[:_LONGEST_VALUE].split("\n")]
    return [*lines, f"  | … and {more:,} more characters"] if more > 0 else lines


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def ask(prompt: str, text: str = "") -> str:
    """Read a line like :func:`read_line`, but discard input that was typed before the prompt.

    A line that was typed for another purpose must not approve a call.
    """
    if sys.stdin.isatty():
        termios.tcflush(sys.stdin, termios.TCIFLUSH)
    return read_line(prompt, text)


def read_line(prompt: str, text: str = "") -> str:
    """Read a line from standard input after a prompt; do not write the prompt to a pipe.

    Args:
        text: first part of the line, which the person can edit on a terminal.

    Raises:
        EOFError: the input has ended.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        return _edited_line(prompt, text)
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    if not sys.stdin.isatty():
        sys.stderr.write(line.removesuffix("\n") + "\n")
    return line.removesuffix("\n")


def _edited_line(prompt: str, text: str) -> str:
    with contextlib.suppress(ImportError):  # some platforms have no readline
        import readline  # makes input() edit lines

        readline.set_startup_hook(lambda: readline.insert_text(text))
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        print()  # noqa: T201 (the cursor is still after the prompt)
        raise


STATUSES = {"completed": 0, "failed": 1, "timeout": 1, "cancelled": 3, "waiting": 4}
"""Exit statuses of commands, by the run's status."""
REFUSED = 5
"""Exit status: the server refused the request, or cannot be reached."""
INTERRUPTED = 130


def follow(
    events: RunEvents, show: Callable[[Event], None], approvals: People, *, ours: bool = True
) -> None:
    """Show the run's events until the run is over.

    Args:
        ours: true: this process started the run.

    Raises:
        Undecided: the run waits for people, and nobody at this terminal decides.
        RemoteError: the server no longer lets this process follow the run.
    """
    for event in events:
        show(event)
        if event["type"] == "interrupt.created":
            approvals.decide(event["data"]["interrupt_id"], ours=ours)
