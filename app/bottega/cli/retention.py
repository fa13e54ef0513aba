"""``bottega prune`` and ``bottega tenants retain``: how long finished runs are kept."""

from datetime import timedelta
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bottega.cli.admin import duration, tenant_name, tenants
from bottega.cli.terminal import console, database, run, start

_DAY = timedelta(days=1)
_Kept = Annotated[
    str | None, typer.Option(help="30d, 12h, 'forever', or 'default': as the settings say.")
]


def _days(text: str) -> float:
    time = duration(text)
    if not time:
        raise typer.BadParameter("write a time such as 30d, 12h or 30m")
    return time / _DAY


def prune(
    older_than: Annotated[
        str | None,
        typer.Option(help="Finished runs whose end is longer ago: 30d, 12h, 30m."),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(callback=tenant_name, help="Only this tenant's.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove finished runs that are old, with all that belongs to them.

    Without --older-than: what the settings BOTTEGA_RETENTION_… and `tenants retain` no longer keep,
    as workers do all the time. With it, a tenant's own time for runs still counts, unless --tenant
    names it. Episodes stay. If the command breaks off, repeat it.
    """
    settings = start()
    from bottega.tenants import operator
    from bottega.tenants.retention import RUNS

    days = settings.retention_days if older_than is None else {RUNS: _days(older_than)}
    own = older_than is None or tenant is None
    with database(settings) as url:
        removed = run(operator.prune(url, days, tenant=tenant, own=own, dry_run=dry_run))
    if not removed:
        console.print("There is nothing to remove.", highlight=False)
        return
    table = Table("tenant", "table", "rows to remove" if dry_run else "rows removed")
    for name, counts in removed.items():
        for each, count in sorted(counts.items()):
            table.add_row(name, each, str(count))
    Console().print(table)


@tenants.command("retain")
def retain(
    name: Annotated[str, typer.Argument(callback=tenant_name, help="As `tenants list` shows it.")],
    runs: _Kept = None,
    audit: _Kept = None,
    episodes: _Kept = None,
) -> None:
    """Change how long a tenant keeps finished runs, its audit log and archived episodes.

    Without options: show it.
    """
    given = {"runs": runs, "audit": audit, "episodes": episodes}
    wanted = {kind: each for kind, each in given.items() if each is not None}
    reset = [kind for kind, each in wanted.items() if each == "default"]
    changes = {
        kind: None if each == "forever" else _days(each)
        for kind, each in wanted.items()
        if kind not in reset
    }
    settings = start()
    from bottega.tenants import operator

    with database(settings) as url:
        own = run(operator.retain(url, name, changes, reset))
    table = Table("what", "kept", "by")
    for kind, days in settings.retention_days.items():
        kept = own.get(kind, days)
        shown = "for ever" if kept is None else f"{kept:g} days"
        table.add_row(kind, shown, "the tenant" if kind in own else "the settings")
    Console().print(table)
