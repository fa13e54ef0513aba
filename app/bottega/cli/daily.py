"""Commands for daily work with the agents of a local or remote server.

- ``bottega run``, ``fork``, ``batch``, ``watch``, ``chat`` and ``cancel``: runs.
- ``bottega evals``: the same cases for several agents, whose answers are compared.
- ``bottega interrupts``: calls that wait for people, and decisions on these calls.
- ``bottega apply`` and ``bottega export``: a team's definitions as files.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import unified_diff
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from bottega.cli.terminal import (
    AsJson,
    console,
    one_line,
    print_json,
    print_rows,
    safe,
)

if TYPE_CHECKING:
    from rich.console import Console

    from bottega.cli.client import RemoteServer

_LOOK_S = 0.5
"""Seconds between two requests for a batch's progress."""
_Agent = Annotated[str, typer.Argument(metavar="AGENT", help="Name of the agent.")]
_RunId = Annotated[UUID, typer.Argument(metavar="RUN", help="Id of the run.")]
_Session = Annotated[
    str | None, typer.Option(help="Session; the server creates it if it does not exist.")
]
_User = Annotated[str | None, typer.Option(help="Your name for the end user.")]


@contextmanager
def connected(refused: int | None = None) -> "Iterator[RemoteServer]":
    """Yield a client of the server at ``BOTTEGA_URL``; end the command if a request is refused.

    Args:
        refused: exit status if the server refuses a request for good, not only for now;
            ``None``: ``REFUSED``, the exit status of all other errors.
    """
    from bottega.cli.client import ClientSettings, RemoteError, RemoteServer
    from bottega.cli.people import REFUSED

    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with RemoteServer.of(ClientSettings()) as server:
            yield server
    except RemoteError as error:
        text = f"error: {error.detail}"
        console().print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(REFUSED if error.may_pass else refused or REFUSED) from None


def start_run(
    agent: _Agent,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="The question; - reads it from standard input.")
    ],
    session: _Session = None,
    user: _User = None,
    graph: Annotated[str | None, typer.Option(help="Graph along which answers flow.")] = None,
) -> None:
    """Run an agent, and show its answer; on a terminal, show the answer live.

    After Ctrl-C the run continues. Exit status: 0 completed, 1 failed or timed out, 3 cancelled, 4
    the run waits for people and nobody at this terminal decides, 5 the server refused or did not
    answer.
    """
    text = _text_of(text)
    if not text.strip():
        raise typer.BadParameter("the text is empty: write a question")
    filters = {"session_id": session, "user": user, "graph": graph}
    with connected() as server:
        run = server.start(agent, input=text, **{k: v for k, v in filters.items() if v is not None})
        _follow_run(server, run)


def fork(
    run_id: _RunId,
    node: Annotated[
        str | None, typer.Option(help="Node of the run's graph from which the work is repeated.")
    ] = None,
    at_seq: Annotated[
        int | None, typer.Option(help="Number (seq) of the last event that the new run takes over.")
    ] = None,
    publication: Annotated[
        str | None,
        typer.Option(help="Text that the node publishes; - reads standard input."),
    ] = None,
    message: Annotated[
        str | None,
        typer.Option("--input", help="Message after the part that the new run takes over."),
    ] = None,
) -> None:
    """Repeat a run from a node or after an event, as a new run; on a terminal, show it live.

    The new run takes over all results before the node or event, at no cost. After Ctrl-C the run
    continues. The exit statuses are those of bottega run.
    """
    if (node is None) == (at_seq is None):
        raise typer.BadParameter("use either --node or --at-seq")
    wanted = {"node": node, "at_seq": at_seq, "input": message}
    if publication is not None:
        wanted["publication"] = _text_of(publication)
    body = {name: value for name, value in wanted.items() if value is not None}
    with connected() as server:
        _follow_run(server, server.create(f"/v1/runs/{run_id}/fork", body))


def _text_of(argument: str) -> str:
    return sys.stdin.read().removesuffix("\n") if argument == "-" else argument


def _follow_run(server: "RemoteServer", run: Any) -> None:
    from bottega.cli.client import RunEvents
    from bottega.cli.people import INTERRUPTED, STATUSES, People, Undecided, follow
    from bottega.cli.transcript import Transcript

    approvals = People(server, console(), asks=sys.stdin.isatty())
    transcript = Transcript(console())
    transcript.note(f"run {run['id']}")
    try:
        events = RunEvents(server, run["id"], transcript.note)
        follow(events, transcript.show, approvals)
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


def batch(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.jsonl", help="An item in each line, as JSON.")
    ],
    agent: Annotated[str | None, typer.Option(help="Agent that runs each item.")] = None,
    graph: Annotated[str | None, typer.Option(help="Graph that runs each item.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Number of items that run at the same time.")
    ] = None,
) -> None:
    """Run many items, and write a line of JSON for each result, in the order of the items.

    After Ctrl-C the batch continues. The same command with the same file follows the same batch
    again, or shows the same results. Exit status: 0 all items completed, 1 some items did not
    complete, 5 the server refused or did not answer.
    """
    from bottega.cli.people import INTERRUPTED

    try:
        data = file.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be read: {error.strerror}") from None
    with connected() as server:
        found = server.create_batch(data, agent=agent, graph=graph, concurrency=concurrency)
        path = f"/v1/batches/{found['id']}"
        try:
            found = _follow_batch(server, path, found)
            for chunk in server.lines(f"{path}/results"):
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        except KeyboardInterrupt:
            console().print("The batch goes on. Repeat the command to see its results.")
            raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(0 if found["counts"]["completed"] == found["total"] else 1)


def _follow_batch(server: "RemoteServer", path: str, batch: Any) -> Any:
    from rich.progress import Progress

    with Progress(console=console(), transient=True) as progress:
        task = progress.add_task(f"batch {batch['id']}", total=batch["total"])
        while batch["ended_at"] is None:
            time.sleep(_LOOK_S)
            batch = server.get(path)
            open_ones = sum(batch["counts"][name] for name in ("queued", "running", "waiting"))
            progress.update(task, completed=batch["total"] - open_ones)
    return batch


def watch(run_id: _RunId) -> None:
    """Watch a run from its beginning to its end: the work of its agents, then its answer.

    After Ctrl-C the run continues. The exit statuses are those of bottega run.
    """
    from bottega.cli.client import RunEvents
    from bottega.cli.people import STATUSES
    from bottega.cli.transcript import Transcript

    with connected() as server:
        run = server.get(f"/v1/runs/{run_id}")
        transcript = Transcript(console())
        events = RunEvents(server, run["id"], transcript.note)
        for event in events:
            transcript.show(event)
        run = server.get(f"/v1/runs/{run_id}")
        transcript.end(run)
    raise typer.Exit(STATUSES.get(run["status"], 1))


def chat(agent: _Agent, session: _Session = None, user: _User = None) -> None:
    """Talk with an agent, in a session that the server stores.

    During an answer, Ctrl-C cancels the answer. At the prompt, Ctrl-C and Ctrl-D end the chat. A
    call that waits for your decision still waits when you continue with --session.
    """
    from bottega.cli.chat import Chat, command_of, open_session
    from bottega.cli.people import People

    with connected() as server:
        server.agent(agent)
        opened, whose = open_session(server, session, user)
        approvals = People(server, console(), asks=sys.stdin.isatty())
        again = command_of(agent, opened)
        talk = Chat(server, console(), approvals, agent, opened, whose, again)
        if session is None:
            console().print(f"Session {opened}. Ctrl-D leaves.", style="dim", highlight=False)
        else:
            talk.show_history()
        status = talk.talk()
    raise typer.Exit(status)


def cancel(run_id: _RunId) -> None:
    """Cancel a run: its model calls are aborted, and the run makes no further calls."""
    with connected() as server:
        run = server.post(f"/v1/runs/{run_id}/cancel")
    over = run["status"] in ("completed", "failed", "timeout", "cancelled")
    message = f"The run is over: {run['status']}." if over else "The run is being cancelled."
    console().print(message, highlight=False)


evals = typer.Typer(
    no_args_is_help=True, help="Run the same cases with several agents, and compare the answers."
)


@evals.command("start")
def start_eval(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML or JSON; - reads standard input.")
    ],
    as_json: AsJson = False,
) -> None:
    """Run the eval in a file with name, cases and targets, and show the report.

    After Ctrl-C the eval continues. Exit status: 0 all runs are over, 5 the server refused or did
    not answer.
    """
    from bottega.cli.people import INTERRUPTED

    bodies = _documents(file)
    if len(bodies) != 1 or not isinstance(bodies[0], dict):
        raise typer.BadParameter(f"{file} is no eval: write name, cases and targets")
    with connected() as server:
        result = server.create("/v1/evals", bodies[0])
        name, batch_path = result["name"], f"/v1/batches/{result['batch_id']}"
        try:
            _follow_batch(server, batch_path, server.get(batch_path))
            while (result := server.get(f"/v1/evals/{name}"))["status"] != "done":
                time.sleep(_LOOK_S)  # checks are not over
        except KeyboardInterrupt:
            console().print(f"The eval goes on. Show it with: bottega evals show {name}")
            raise typer.Exit(INTERRUPTED) from None
    _show_eval(result, as_json=as_json)


@evals.command("show")
def show_eval(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the eval.")],
    as_json: AsJson = False,
) -> None:
    """Show the results of each target, then the comparison of each pair of targets."""
    from urllib.parse import quote

    with connected() as server:
        _show_eval(server.get(f"/v1/evals/{quote(name, safe='')}"), as_json=as_json)


@evals.command("list")
def list_evals(as_json: AsJson = False) -> None:
    """List evals by name. In a pipe, tabs separate the columns."""
    with connected() as server:
        _show_items(server.all("/v1/evals"), "name total created_at ended_at targets", as_json)


def _show_eval(result: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    if result["status"] == "running":
        console().print(f"{result['over']} of {result['total']} runs are over.", highlight=False)
    for target in result["targets"]:
        target["target"] = f"{target['agent']}@{target['version']}"
    _show_items(result["targets"], "target passed judged pass_rate interval cost latency_ms")
    if result["comparisons"]:
        _show_items(result["comparisons"], "a b wins losses ties p")


def _show_items(items: Iterable[Any], columns: str, as_json: bool = False) -> None:
    names = columns.split()
    if as_json:
        print_json(list(items))
        return
    print_rows(names, [[_cell(each[name]) for name in names] for each in items])


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case float():
            return str(round(value, 3))
        case {"amount": amount}:
            return str(amount)
        case list():
            return " ".join(map(_cell, value))
    return str(value)


interrupts = typer.Typer(help="List calls that wait for people, and decide on these calls.")

_Id = Annotated[UUID, typer.Argument(metavar="ID", help="Id of the call, as in the list.")]
_Run = Annotated[UUID | None, typer.Option("--run", help="Only calls of this run.")]
_OfSession = Annotated[str | None, typer.Option(help="Only calls of this session.")]
_All = Annotated[bool, typer.Option("--all", help="Also list calls with a decision.")]


@interrupts.callback(invoke_without_command=True)
def _group(context: typer.Context) -> None:
    """List calls that wait for people, and decide on these calls."""
    if context.invoked_subcommand is None:
        _list({"status": "pending"}, as_json=False)


@interrupts.command("list")
def list_interrupts(
    run: _Run = None, session: _OfSession = None, all_: _All = False, as_json: AsJson = False
) -> None:
    """List waiting calls, the oldest first. In a pipe, tabs separate the columns."""
    filters = {"run_id": run and str(run), "session_id": session}
    _list({**filters, "status": None if all_ else "pending"}, as_json=as_json)


@interrupts.command("show")
def show(interrupt_id: _Id) -> None:
    """Show a call with the arguments, the reason for the wait, and the decision."""
    with connected() as server:
        _show_interrupts(server.get(f"/v1/interrupts/{interrupt_id}"))


@interrupts.command("resolve")
def resolve_command(
    interrupt_id: _Id,
    approve: Annotated[bool, typer.Option("--approve", help="Allow the tool call.")] = False,
    deny: Annotated[bool, typer.Option("--deny", help="Refuse the tool call.")] = False,
    arguments: Annotated[
        str | None, typer.Option(help="With --approve: new arguments for the call, as JSON.")
    ] = None,
    comment: Annotated[str | None, typer.Option(help="Comment on an approval.")] = None,
    answer: Annotated[
        str | None,
        typer.Option(help="Answer to a question: text, or JSON if its schema needs JSON."),
    ] = None,
    result: Annotated[
        str | None, typer.Option(help="Result of a client tool: text or JSON.")
    ] = None,
    error: Annotated[str | None, typer.Option(help="Error of a client tool that failed.")] = None,
) -> None:
    """Decide on a call. The run continues when each call of the model's message has a decision."""
    from bottega.cli.people import json_or_text, value_for

    if sum([approve, deny, *(said is not None for said in (answer, result, error))]) != 1:
        raise typer.BadParameter("use one of --approve, --deny, --answer, --result and --error")
    if (comment is not None and not (approve or deny)) or (arguments is not None and not approve):
        raise typer.BadParameter(
            "use --arguments only with --approve, and --comment only with --approve or --deny"
        )
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
        _show_interrupts(server.post(f"{path}/resolve", decision))


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter("--arguments must be a JSON object")
    return value


def _list(filters: dict[str, Any], *, as_json: bool) -> None:
    with connected() as server:
        items = list(server.all("/v1/interrupts", **filters))
    if as_json:
        print_json(items)
        return
    columns = ("id", "kind", "status", "agent", "tool", "created_at", "about")
    rows = [[str(each[name] or "") for name in columns[:-1]] + [_about(each)] for each in items]
    if not rows and sys.stdout.isatty():
        print("Nothing waits for people.")  # noqa: T201
        return
    print_rows(columns, rows, prose=("about",))


def _about(interrupt: dict[str, Any]) -> str:
    text = interrupt["question"] or json.dumps(interrupt["arguments"], ensure_ascii=False)
    return one_line(text)


def _show_interrupts(interrupt: dict[str, Any]) -> None:
    from bottega.cli.people import shown

    print(shown(interrupt))  # noqa: T201 (a script reads it)
    print(f"run {interrupt['run_id']}, {interrupt['status']}", end="")  # noqa: T201
    if interrupt["status"] == "pending":
        print(f" until {interrupt['expires_at']}")  # noqa: T201
        return
    by = (interrupt["resolved_by"] or {}).get("name")
    resolution = json.dumps(interrupt["resolution"], ensure_ascii=False)
    print(f"{f' by {by}' if by else ''}: {resolution}")  # noqa: T201


_COLOURS = {"+": "green", "-": "red", "@": "cyan"}
_SIGNS = {"created": "+", "replaced": "~", "deleted": "-", "unchanged": "="}
SECTIONS = ("providers", "mcp_servers", "agents", "graphs", "schedules")
"""Sections of a file; see :class:`bottega.api.routes.deploy.Resources`."""


def apply(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE…", help="YAML or JSON; - reads standard input."),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change; store nothing.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Store nothing; exit with 1 if anything differs."),
    ] = False,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Delete definitions of this --source that the files lack."),
    ] = False,
    source: Annotated[str | None, typer.Option(help="Name for the source of the files.")] = None,
    allow_missing: Annotated[
        bool,
        typer.Option("--allow-missing", help="Allow references to missing definitions."),
    ] = False,
) -> None:
    """Store all definitions in the files, or none if one is refused, and show the changes.

    A file has the lists providers, mcp_servers, agents, graphs and schedules. Exit status: 1 if the
    server refuses the definitions or --check finds a difference; 5 if the server did not answer.
    """
    from rich.console import Console

    from bottega.cli.client import placed

    if prune and source is None:
        raise typer.BadParameter("--prune needs --source")
    sections: dict[str, list[Any]] = {}
    origins: dict[str, str] = {}
    for path in files:
        for section, number, definition in _definitions(path):
            listed = sections.setdefault(section, [])
            origins[f"/{section}/{len(listed)}"] = f"{path}, {section}[{number}]"
            listed.append(definition)
    dry_run |= check
    body = {**sections, "dry_run": dry_run, "prune": prune, "source": source}
    body |= {"allow_missing": True} if allow_missing else {}
    with connected(refused=1) as server:
        result = server.apply(body, origins)
    counts = dict.fromkeys(_SIGNS, 0)
    out = Console(highlight=False, soft_wrap=True)
    for item in result["items"]:
        counts[item["action"]] += 1
        if item["action"] != "unchanged":
            _show(out, item)
    for warning in result["warnings"]:
        (said,) = placed({"errors": [warning]}, origins)
        text = safe(f"warning: {said}")
        console().print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
    said = ", ".join(f"{number} {action}" for action, number in counts.items() if number)
    out.print(f"{said or 'nothing to do'}{' (dry run: nothing was stored)' * dry_run}")
    if check and len(result["items"]) > counts["unchanged"]:
        raise typer.Exit(1)


def export(
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of YAML.")] = False,
) -> None:
    """Print all definitions of the tenant as a file for the command: bottega apply."""
    import yaml

    from bottega.api.routes.deploy import Resources

    found: dict[str, list[Any]] = {}
    with connected() as server:
        for section, field in Resources.model_fields.items():
            (model,) = field.annotation.__args__  # type: ignore[union-attr]
            path = f"/v1/{section.replace('_', '-')}"
            listed = server.all(path, as_stored=True, view="full")
            if items := [_as_defined(each, model) for each in listed if _is_own(each)]:
                found[section] = items
    escaped = sys.stdout.isatty()  # escape the text, because stored text may control a terminal
    if as_json:
        text = json.dumps(found, ensure_ascii=escaped, indent=2) + "\n"
    else:
        text = yaml.safe_dump(found, allow_unicode=not escaped, sort_keys=False) if found else ""
    sys.stdout.write(text)
    if any("webhook_url" in each["run"] for each in found.get("schedules", ())):
        typer.echo("note: webhook URLs have no query, because the server never shows it", err=True)


def _documents(path: Path) -> list[Any]:
    """Read the documents of a file in YAML or JSON, whose values are all JSON."""
    import yaml

    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
        documents = list(yaml.safe_load_all(text))  # JSON is YAML, too
        json.dumps(documents, allow_nan=False)
        return documents
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"{path} is not valid YAML: {error}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise typer.BadParameter(
            f"{path} has a value that is not JSON, such as a date without quotes: {error}"
        ) from None


def _definitions(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Yield a file's definitions as (section, index in the section, definition)."""
    for document in _documents(path):
        if document is None:
            continue
        if not isinstance(document, dict) or not all(
            isinstance(listed, list) for listed in document.values()
        ):
            raise typer.BadParameter(
                f"{path} has no lists of definitions: write 'agents:' with an item for each agent"
            )
        if unknown := [str(section) for section in document if section not in SECTIONS]:
            raise typer.BadParameter(
                f"{path} has an unknown section '{unknown[0]}': use {', '.join(SECTIONS)}"
            )
        for section, listed in document.items():
            for number, definition in enumerate(listed):
                yield str(section), number, definition


def _show(out: "Console", item: Mapping[str, Any]) -> None:
    from rich.text import Text

    head = safe(f"{_SIGNS[item['action']]} {item['kind']} {item['name']}")
    out.print(Text(head, style="bold"))
    if item["action"] == "replaced":
        before, after = _lines(item["before"]), _lines(item["after"])
        for line in list(unified_diff(before, after, lineterm=""))[2:]:
            text = safe(f"  {line.rstrip()}")
            out.print(Text(text, style=_COLOURS.get(line[0], "")))


def _lines(body: Mapping[str, Any] | None) -> list[str]:
    import yaml

    if body is None:
        return []
    return yaml.safe_dump(dict(body), allow_unicode=True, width=1000).split("\n")


def _is_own(item: Mapping[str, Any]) -> bool:
    return item.get("owner") != "operator"


def _as_defined(item: Mapping[str, Any], model: Any) -> Any:
    """Convert a listed definition to a request body without default values."""
    fields = {key: item[key] for key in model.model_fields if key in item}
    body = model.model_validate_json(json.dumps(fields))
    whole = body.model_dump(mode="json", by_alias=True)
    short = _tagged(body.model_dump(mode="json", by_alias=True, exclude_defaults=True), whole)
    return {"name": short.pop("name"), **short}


def _tagged(short: Any, whole: Any) -> Any:
    """Restore the required field `type`, which was removed together with the default values."""
    if isinstance(short, list):
        return [_tagged(*each) for each in zip(short, whole, strict=True)]
    if not isinstance(short, dict):
        return short
    tag = {"type": whole["type"]} if "type" in whole and "type" not in short else {}
    return tag | {key: _tagged(value, whole[key]) for key, value in short.items()}
