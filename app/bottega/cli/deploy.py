"""``bottega apply`` and ``bottega export``: a team's definitions as files."""

import json
import sys
from collections.abc import Iterator, Mapping
from difflib import unified_diff
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from bottega.cli.daily import connected
from bottega.cli.texts import safe

_COLOURS = {"+": "green", "-": "red", "@": "cyan"}
_SIGNS = {"created": "+", "replaced": "~", "deleted": "-", "unchanged": "="}
_PAGE = 100
SECTIONS = ("providers", "mcp_servers", "agents", "graphs", "schedules")
"""Of a file; see :class:`bottega.api.routes.deploy.bodies.Resources`."""


def apply(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE…", help="YAML or JSON; - reads standard input."),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would change; store nothing.")
    ] = False,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Delete what an earlier apply with this --source had more."),
    ] = False,
    source: Annotated[
        str | None, typer.Option(help="Name of what the files are from, such as a repository.")
    ] = None,
    allow_missing: Annotated[
        bool,
        typer.Option("--allow-missing", help="Store names of what does not exist, with warnings."),
    ] = False,
) -> None:
    """Store the definitions of files, all or none, and show what changed.

    A file has lists of providers, mcp_servers, agents, graphs and schedules. Exit status: 0 done,
    5 the server refused or is away.
    """
    from bottega.cli.remote.server import placed

    if prune and source is None:
        raise typer.BadParameter("--prune needs --source, the name that it compares")
    sections: dict[str, list[Any]] = {}
    origins: dict[str, str] = {}
    for path in files:
        for section, number, definition in _definitions(path):
            listed = sections.setdefault(section, [])
            origins[f"/{section}/{len(listed)}"] = f"{path}, {section}[{number}]"
            listed.append(definition)
    body = {**sections, "dry_run": dry_run, "prune": prune, "source": source}
    body |= {"allow_missing": True} if allow_missing else {}
    with connected() as server:
        result = server.apply(body, origins)
    console, counts = Console(highlight=False, soft_wrap=True), dict.fromkeys(_SIGNS, 0)
    for item in result["items"]:
        counts[item["action"]] += 1
        if item["action"] != "unchanged":
            _show(console, item)
    for warning in result["warnings"]:
        (said,) = placed({"errors": [warning]}, origins)
        text = safe(f"warning: {said}")
        Console(stderr=True, soft_wrap=True).print(Text(text, style="yellow"))
    said = ", ".join(f"{number} {action}" for action, number in counts.items() if number)
    console.print(f"{said or 'nothing to do'}{' (dry run: nothing was stored)' * dry_run}")


def export(
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of YAML.")] = False,
) -> None:
    """Print all definitions of the tenant as a file for ``bottega apply``."""
    import yaml

    from bottega.api.routes.deploy.bodies import Resources

    found: dict[str, list[Any]] = {}
    with connected() as server:
        for section, field in Resources.model_fields.items():
            (model,) = field.annotation.__args__  # type: ignore[union-attr]
            path = f"/v1/{section.replace('_', '-')}"
            items = [_as_defined(each, model) for each in server.all(path, _PAGE) if _is_own(each)]
            if items:
                found[section] = items
    escaped = sys.stdout.isatty()  # stored text could steer a terminal
    if as_json:
        text = json.dumps(found, ensure_ascii=escaped, indent=2) + "\n"
    else:
        text = yaml.safe_dump(found, allow_unicode=not escaped, sort_keys=False) if found else ""
    sys.stdout.write(text)
    if any("webhook_url" in each["run"] for each in found.get("schedules", ())):
        typer.echo("note: webhook URLs are without their query, which is never shown", err=True)


def _definitions(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Yield the definitions of a file: section, number in it, and definition."""
    import yaml

    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
        documents = list(yaml.safe_load_all(text))  # JSON is YAML, too
        json.dumps(documents, allow_nan=False)
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"{path} is no YAML: {error}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise typer.BadParameter(
            f"{path} has a value that is no JSON, such as a date without quotes: {error}"
        ) from None
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, dict) or not all(
            isinstance(listed, list) for listed in document.values()
        ):
            raise typer.BadParameter(
                f"{path} has no lists of definitions: write 'agents:' with one item for each"
            )
        if unknown := [str(section) for section in document if section not in SECTIONS]:
            raise typer.BadParameter(
                f"{path} has a section '{unknown[0]}': there are {', '.join(SECTIONS)}"
            )
        for section, listed in document.items():
            for number, definition in enumerate(listed):
                yield str(section), number, definition


def _show(console: Console, item: Mapping[str, Any]) -> None:
    """Print what became of a definition, and the lines that changed."""
    head = safe(f"{_SIGNS[item['action']]} {item['kind']} {item['name']}")
    console.print(Text(head, style="bold"))
    if item["action"] == "replaced":
        before, after = _lines(item["before"]), _lines(item["after"])
        for line in list(unified_diff(before, after, lineterm=""))[2:]:
            text = safe(f"  {line.rstrip()}")
            console.print(Text(text, style=_COLOURS.get(line[0], "")))


def _lines(body: Mapping[str, Any] | None) -> list[str]:
    import yaml

    if body is None:
        return []
    return yaml.safe_dump(dict(body), allow_unicode=True, width=1000).split("\n")


def _is_own(item: Mapping[str, Any]) -> bool:
    return item.get("owner") != "operator"


def _as_defined(item: Mapping[str, Any], model: Any) -> Any:
    """Return what a listed definition was made of, without what is as by default."""
    known = {key: item[key] for key in model.model_fields if key in item}
    body = model.model_validate_json(json.dumps(known))
    whole = body.model_dump(mode="json", by_alias=True)
    short = _tagged(body.model_dump(mode="json", by_alias=True, exclude_defaults=True), whole)
    return {"name": short.pop("name"), **short}


def _tagged(short: Any, whole: Any) -> Any:
    """Return a value without defaults but for the `type` of objects, which tells them apart."""
    if isinstance(short, list):
        return [_tagged(*each) for each in zip(short, whole, strict=True)]
    if not isinstance(short, dict):
        return short
    tag = {"type": whole["type"]} if "type" in whole and "type" not in short else {}
    return tag | {key: _tagged(value, whole[key]) for key, value in short.items()}
