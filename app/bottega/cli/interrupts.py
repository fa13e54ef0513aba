"""``bottega interrupts``: calls that wait for people, and decisions on them."""

import json
import sys
from typing import Annotated, Any
from uuid import UUID

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bottega.cli.daily import connected
from bottega.cli.texts import one_line

interrupts = typer.Typer(help="List calls that wait for people, and decide on them.")

_Id = Annotated[UUID, typer.Argument(metavar="ID", help="As the list shows it.")]
_Run = Annotated[UUID | None, typer.Option("--run", help="Only this run's.")]
_Session = Annotated[str | None, typer.Option(help="Only this session's.")]
_All = Annotated[bool, typer.Option("--all", help="Those decided on, too.")]
_PAGE = 100


@interrupts.callback(invoke_without_command=True)
def _group(context: typer.Context) -> None:
    """List calls that wait for people, and decide on them."""
    if context.invoked_subcommand is None:
        _list({"status": "pending"})


@interrupts.command("list")
def list_interrupts(run: _Run = None, session: _Session = None, all_: _All = False) -> None:
    """List the calls that wait, the oldest first; to a pipe, with a tab between the columns."""
    wanted = {"run_id": run and str(run), "session_id": session}
    _list({**wanted, "status": None if all_ else "pending"})


@interrupts.command("show")
def show(interrupt_id: _Id) -> None:
    """Show a call: its arguments, the reason, and the decision."""
    with connected() as server:
        _show(server.get(f"/v1/interrupts/{interrupt_id}"))


@interrupts.command("resolve")
def resolve(
    interrupt_id: _Id,
    approve: Annotated[bool, typer.Option("--approve", help="Let the tool be called.")] = False,
    deny: Annotated[bool, typer.Option("--deny", help="Do not let it be called.")] = False,
    arguments: Annotated[
        str | None, typer.Option(help="With --approve: other arguments, as JSON.")
    ] = None,
    comment: Annotated[str | None, typer.Option(help="On an approval.")] = None,
    answer: Annotated[
        str | None, typer.Option(help="To a question: text, or JSON if its schema wants it.")
    ] = None,
    result: Annotated[str | None, typer.Option(help="Of a client's tool: text or JSON.")] = None,
    error: Annotated[str | None, typer.Option(help="Of a client's tool that failed.")] = None,
) -> None:
    """Decide on a call; the run goes on once all calls of one message are decided on."""
    from bottega.cli.remote.people import json_or_text, value_for

    if sum([approve, deny, *(said is not None for said in (answer, result, error))]) != 1:
        raise typer.BadParameter("give one of --approve, --deny, --answer, --result and --error")
    if (comment is not None and not (approve or deny)) or (arguments is not None and not approve):
        raise typer.BadParameter("--arguments go with --approve, --comment also with --deny")
    decision: dict[str, Any] = {}
    with connected() as server:
        path = f"/v1/interrupts/{interrupt_id}"
        if approve or deny:
            decision = {"decision": "approve" if approve else "deny"}
        if comment is not None:
            decision["comment"] = comment
        if arguments is not None:
            decision["arguments"] = _object(arguments)
        if answer is not None:
            decision["answer"] = value_for(server.get(path)["schema"], answer)
        if result is not None:
            decision["result"] = json_or_text(result)
        if error is not None:
            decision["error"] = error
        _show(server.post(f"{path}/resolve", decision))


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter("--arguments must be a JSON object")
    return found


def _list(wanted: dict[str, Any]) -> None:
    found: list[dict[str, Any]] = []
    cursor = None
    with connected() as server:
        while cursor is not None or not found:
            page = server.get("/v1/interrupts", **wanted, limit=_PAGE, cursor=cursor)
            found += page["items"]
            cursor = page.get("next_cursor")
            if cursor is None:
                break
    columns = ("id", "kind", "status", "agent", "tool", "created_at", "about")
    rows = [[str(each[name] or "") for name in columns[:-1]] + [_about(each)] for each in found]
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(row))  # noqa: T201 (a script reads it)
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table if rows else "Nothing waits for people.")


def _about(interrupt: dict[str, Any]) -> str:
    said = interrupt["question"] or json.dumps(interrupt["arguments"], ensure_ascii=False)
    return one_line(said)


def _show(interrupt: dict[str, Any]) -> None:
    """Print a call, then who decided."""
    from bottega.cli.remote.people import shown

    print(shown(interrupt))  # noqa: T201 (a script reads it)
    print(f"run {interrupt['run_id']}, {interrupt['status']}", end="")  # noqa: T201
    if interrupt["status"] == "pending":
        print(f" until {interrupt['expires_at']}")  # noqa: T201
        return
    by = (interrupt["resolved_by"] or {}).get("name")
    resolution = json.dumps(interrupt["resolution"], ensure_ascii=False)
    print(f"{f' by {by}' if by else ''}: {resolution}")  # noqa: T201
