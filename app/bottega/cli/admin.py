"""Commands of the operator for all tenants.

Commands write only results to standard output, so scripts can read the output.

- ``bottega keys`` and ``bottega tenants``: keys and tenants.
- ``bottega prune`` and ``bottega tenants retain``: retention of finished runs.
- ``bottega secrets``: change of the key that encrypts tenants' secrets.
- ``bottega providers``: test of a model server's features by small model calls.
"""

import json
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import ValidationError

from bottega.cli.terminal import (
    AsJson,
    console,
    database,
    print_json,
    print_rows,
    run,
    start,
)
from bottega.errors import ConflictError, NotFoundError

keys = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys, of any tenant.")
tenants = typer.Typer(no_args_is_help=True, help="List and delete tenants.")

TENANT = r"(?=.{1,63}$)[a-z](?:-?[a-z0-9])*"
"""Pattern of tenant names. ``--`` is not allowed, because variables contain names."""
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}
_LONGEST = timedelta(days=36500)


class _Scope(StrEnum):
    """The scopes of keys as an enumeration, which Typer needs for an option with fixed values."""

    READ = "read"
    RUN = "run"
    DEFINE = "define"
    APPROVE = "approve"
    ADMIN = "admin"


_Role = Literal["viewer", "runner", "approver", "builder", "admin"]


def tenant_name(name: str | None) -> str | None:
    if name is not None and not re.fullmatch(TENANT, name):
        raise typer.BadParameter(
            "use at most 63 lower-case letters, digits and single '-' between them; begin with a "
            "letter"
        )
    return name


def _name(name: str) -> str:
    if not (name.isprintable() and 1 <= len(name) <= 100):
        raise typer.BadParameter("use 1 to 100 printable characters")
    return name


def duration(text: str) -> timedelta | None:
    """Parse a duration, such as ``90d``, ``12h`` or ``30m``; ``None``: the text is not valid.

    A longer duration than 100 years counts as 100 years.
    """
    if match := re.fullmatch(r"(\d{1,9})([dhm])", text):
        return min(timedelta(**{_UNITS[match[2]]: int(match[1])}), _LONGEST)
    return None


def _expires(text: str | None) -> datetime | timedelta | None:
    """Parse a duration from now (``90d``, ``12h``, ``30m``), or a date (default zone: UTC)."""
    if text is None:
        return None
    if (after := duration(text)) is not None:
        return after
    try:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            "write 90d, 12h, 30m, or a date such as 2027-01-31T12:00Z"
        ) from None


def _limits(text: str) -> "StoredLimits":
    from bottega.tenants.limits import NO_LIMITS, RequestLimits

    try:
        return NO_LIMITS.narrowed(RequestLimits.model_validate_json(text))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "limits"
        raise typer.BadParameter(f"{where}: {problem['msg']}", param_hint="--limits") from None


@keys.command("create")
def create_key(
    tenant: Annotated[
        str,
        typer.Option(
            callback=tenant_name, help="Name of the tenant; it is created if it does not exist."
        ),
    ],
    scope: Annotated[
        list[_Scope] | None,
        typer.Option(help="What the key may do; repeat the option for several scopes."),
    ] = None,
    role: Annotated[
        _Role | None, typer.Option(help="Role with a set of scopes, in place of --scope.")
    ] = None,
    limits: Annotated[
        str,
        typer.Option(
            help="Limits of the key as JSON: agents, models, addresses, requests_per_s, …"
        ),
    ] = "{}",
    name: Annotated[
        str, typer.Option(callback=_name, help="Purpose of the key, as lists show it.")
    ] = "made by the operator",
    expires: Annotated[
        str | None, typer.Option(help="Expiry of the key: 90d, 12h, 30m, or an ISO date.")
    ] = None,
    require_user: Annotated[
        bool, typer.Option("--require-user", help="Requests with the key must name an end user.")
    ] = False,
) -> None:
    """Create a key and print it once; the database stores only its hash."""
    until = _expires(expires)
    if (scope is None) == (role is None):
        raise typer.BadParameter("choose scopes or a role: use either --scope run or --role runner")
    settings = start()
    from bottega.tenants import operator
    from bottega.tenants.keys import ROLES

    with database(settings) as url:
        made = operator.create_key(
            url,
            tenant,
            name=name,
            scopes=ROLES[role] if role else [each.value for each in scope or ()],
            expires=until,
            require_user=require_user,
            limits=_limits(limits),
        )
        row, key = run(made)
    end = "until it is revoked" if row["expires_at"] is None else f"until {_at(row['expires_at'])}"
    may = ", ".join(row["scopes"])
    whose = ", for the user that a request names" if require_user else ""
    within = f", within {json.dumps(row['limits'])}" if row["limits"] else ""
    heading = f"A key of {tenant} that may {may}{whose}{within}, valid {end}:"
    console().print(heading, highlight=False)
    print(key)  # noqa: T201 (a script reads it)


@keys.command("list")
def list_keys(
    tenant: Annotated[
        str | None, typer.Option(callback=tenant_name, help="Only data of this tenant.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List all keys by prefix."""
    settings = start()
    from bottega.tenants import operator

    with database(settings) as url:
        rows = run(operator.list_keys(url, tenant))
    times = ("created_at", "expires_at", "last_used_at", "revoked_at")
    _show(("tenant", "prefix", "scopes", "name", *times, "id"), rows, as_json=as_json)


def _show(names: Sequence[str], found: Iterable[Any], *, as_json: bool) -> None:
    if as_json:
        print_json([{name: row[name] for name in names} for row in found])
        return
    rows = ([_cell(row[name]) for name in names] for row in found)
    print_rows(names, rows, prose=("scopes",))


@keys.command("revoke")
def revoke_key(
    key: Annotated[str, typer.Argument(metavar="PREFIX_OR_ID", help="As keys list shows it.")],
) -> None:
    """Revoke a key; within five seconds, all processes refuse the key."""
    settings = start()
    from bottega.tenants import operator

    with database(settings) as url:
        row = run(operator.revoke_key(url, key))
    from rich.text import Text

    console().print("Revoked:", row["prefix"], Text(_cell(row["name"])), highlight=False)


@tenants.command("list")
def list_tenants(as_json: AsJson = False) -> None:
    """List all tenants with their number of keys."""
    settings = start()
    from bottega.tenants import operator

    with database(settings) as url:
        rows = run(operator.list_tenants(url))
    _show(("name", "keys", "created_at", "id"), rows, as_json=as_json)


@tenants.command("delete")
def delete_tenant(
    name: Annotated[str, typer.Argument(callback=tenant_name, help="As tenants list shows it.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a tenant and all its data; the tenant default itself stays, without data.

    The command first revokes all keys of the tenant. If the command breaks off, repeat the command:
    it then continues.
    """
    settings = start()
    from bottega.tenants import operator

    if not yes:
        typer.confirm(f"Permanently delete everything of {name}?", abort=True, err=True)
    with database(settings) as url:
        removed = run(operator.delete_tenant(url, name))
    rows = ((kind, str(count)) for kind, count in sorted(removed.items()))
    print_rows(("table", "rows removed"), rows)


def _cell(value: object) -> str:
    match value:
        case None:
            text = ""
        case datetime():
            text = _at(value)
        case list():
            text = ", ".join(value)
        case _:
            text = str(value)
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def _at(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%MZ}"


_DAY = timedelta(days=1)
_Kept = Annotated[
    str | None, typer.Option(help="30d, 12h, 'forever', or 'default': the settings decide.")
]


def _days(text: str) -> float:
    time = duration(text)
    if not time:
        raise typer.BadParameter("write a time such as 30d, 12h or 30m")
    return time / _DAY


def prune(
    older_than: Annotated[
        str | None,
        typer.Option(help="Remove runs that ended before this time: 30d, 12h, 30m ago."),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(callback=tenant_name, help="Only data of this tenant.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be removed.")
    ] = False,
) -> None:
    """Remove old finished runs, audit entries and archived episodes, as workers do.

    The settings BOTTEGA_RETENTION_… and the command "tenants retain" determine the age.
    --older-than sets an age for runs in place of the settings and, if --tenant names a tenant,
    in place of this tenant's own retention times. An episode stays when its run is removed. If
    the command breaks off, run the command again.
    """
    settings = start()
    from bottega.tenants import operator
    from bottega.tenants.retention import RUNS

    days = settings.retention_days if older_than is None else {RUNS: _days(older_than)}
    own = older_than is None or tenant is None
    with database(settings) as url:
        removed = run(operator.prune(url, days, tenant=tenant, own=own, dry_run=dry_run))
    if not removed:
        console().print("There is nothing to remove.", highlight=False)
        return
    rows = (
        (name, each, str(count))
        for name, counts in removed.items()
        for each, count in sorted(counts.items())
    )
    print_rows(("tenant", "table", "rows to remove" if dry_run else "rows removed"), rows)


@tenants.command("retain")
def retain(
    name: Annotated[str, typer.Argument(callback=tenant_name, help="As tenants list shows it.")],
    runs: _Kept = None,
    audit: _Kept = None,
    episodes: _Kept = None,
) -> None:
    """Change how long a tenant keeps finished runs, its audit log and archived episodes.

    Without options, the command shows how long the tenant keeps data.
    """
    day_counts = {"runs": runs, "audit": audit, "episodes": episodes}
    wanted = {kind: each for kind, each in day_counts.items() if each is not None}
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
    rows = []
    for kind, days in settings.retention_days.items():
        kept = own.get(kind, days)
        shown = "for ever" if kept is None else f"{kept:g} days"
        rows.append((kind, shown, "the tenant" if kind in own else "the settings"))
    print_rows(("what", "kept", "by"), rows)


if TYPE_CHECKING:
    from bottega.settings import Settings
    from bottega.tenants.limits import StoredLimits

secrets = typer.Typer(no_args_is_help=True, help="Change the key of tenants' secrets.")


@secrets.callback()
def _group() -> None:
    """Do nothing. Without this function, Typer would not expect the name of the only command."""


@secrets.command("reencrypt")
def reencrypt() -> None:
    """Encrypt all secrets with the first key in BOTTEGA_SECRETS_KEY.

    If the command stops early, run the command again. The exit status is 1 if at least one secret
    cannot be decrypted with any key.
    """
    settings = start()
    with database(settings) as url:
        changed, unreadable = run(_reencrypt(settings, url))
    console().print(f"Sealed again: {changed}. Cannot be opened: {unreadable}.", highlight=False)
    raise typer.Exit(1 if unreadable else 0)


async def _reencrypt(settings: "Settings", url: str) -> tuple[int, int]:
    from bottega.db.embedded import folder_of
    from bottega.secrets import rows
    from bottega.settings import keyring
    from bottega.tenants import operator

    keys = keyring(settings, folder_of(url, settings.data_dir))
    if keys is None:
        raise ConflictError("set BOTTEGA_SECRETS_KEY to the new key, a comma and the old key")
    changed, unreadable, after = 0, 0, None
    async with operator.transactions(url) as begin:
        while True:
            async with begin() as tx:
                page = await rows.seal_again(tx, operator.ACTOR, keys, after)
            changed, unreadable, after = (
                changed + page.changed,
                unreadable + page.unreadable,
                page.last,
            )
            if after is None:
                return changed, unreadable


providers = typer.Typer(no_args_is_help=True, help="Check model servers.")


@providers.callback()
def _providers_group() -> None:
    """Do nothing. Without this function, Typer would not expect the name of the only command."""


@providers.command("test")
def test_provider(
    name: Annotated[str, typer.Argument(help="Name of the provider.")],
    tenant: Annotated[
        str, typer.Option(help="Tenant, whose providers replace the operator's providers.")
    ] = "default",
    model: Annotated[
        str | None,
        typer.Option(help="One of the provider's models; by default the provider's default model."),
    ] = None,
) -> None:
    """Make one small call of each kind: text, tool, stream, schema."""
    settings = start()
    with database(settings) as url:
        works = run(_show_probes(settings, url, tenant, name, model))
    raise typer.Exit(0 if works else 1)


async def _show_probes(
    settings: "Settings", url: str, tenant: str, name: str, model: str | None
) -> bool:
    """Print the result of each model call; return true if all calls succeeded."""
    from bottega.db.embedded import folder_of
    from bottega.db.pool import open_database
    from bottega.engine.budget import DayBudgets
    from bottega.model_services import open_models, probes
    from bottega.outgoing import secret_rules
    from bottega.secrets import rows
    from bottega.secrets.lookup import SecretLookup
    from bottega.services import Services
    from bottega.tenants import operator
    from bottega.tools.guard import ModelHosts

    async def is_open() -> bool:
        return not await operator.keys_required(url)

    tenant_id, own = await operator.provider_of(url, tenant, name)
    if own is None and name not in settings.operator_providers:
        raise NotFoundError(f"there is no provider '{name}'")
    results = []
    works = True
    async with open_database(url, limits=settings.run_limits) as db:
        hosts = ModelHosts(settings.egress_allow, folder_of(url, settings.data_dir), is_open)
        secrets = SecretLookup(secret_rules(settings, hosts), partial(rows.read, db.pool))
        async with (
            DayBudgets(db.pool, settings.run_limits).kept(Services()) as budgets,
            open_models(settings, budgets, secrets, hosts) as models,
        ):
            provider = await models.named(name, own, tenant_id, tenant, model)
            async for probed in probes(provider):
                works &= probed.problem is None
                said = "yes" if probed.problem is None else "no"
                results.append((probed.kind, said, f"{probed.seconds:.1f}", probed.problem or ""))
    print_rows(("call", "works", "seconds", "problem"), results, prose=("problem",))
    return works
