"""``bottega providers``: small calls that show what a model server can do."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from bottega.cli.terminal import database, run, start
from bottega.errors import NotFoundError

if TYPE_CHECKING:
    from bottega.settings import Settings

providers = typer.Typer(no_args_is_help=True, help="Check model servers.")


@providers.callback()
def _group() -> None:
    """Keep the name of the only command."""


@providers.command("test")
def test_provider(
    name: Annotated[str, typer.Argument(help="Of the provider.")],
    tenant: Annotated[
        str, typer.Option(help="Its own providers come before the operator's.")
    ] = "default",
    model: Annotated[
        str | None, typer.Option(help="One of the provider's models. Unset: its default.")
    ] = None,
) -> None:
    """Make one small call of each kind: text, tool, stream, schema."""
    settings = start()
    with database(settings) as url:
        works = run(_show(settings, url, tenant, name, model))
    raise typer.Exit(0 if works else 1)


async def _show(settings: "Settings", url: str, tenant: str, name: str, model: str | None) -> bool:
    """Print what works; return true if all does."""
    from bottega.db.engine import open_database
    from bottega.engine.budget import DayBudgets
    from bottega.llm.probe import probes
    from bottega.model_services import open_models
    from bottega.outgoing import secret_rules
    from bottega.secrets import rows
    from bottega.secrets.lookup import SecretLookup
    from bottega.services import Services
    from bottega.tenants import operator

    async def is_open() -> bool:
        return not await operator.keys_required(url)

    tenant_id, own = await operator.provider_of(url, tenant, name)
    if own is None and name not in settings.operator_providers:
        raise NotFoundError(f"there is no provider '{name}'")
    table = Table("call", "works", "seconds", "problem")
    works = True
    async with open_database(url, limits=settings.run_limits) as db:
        secrets = SecretLookup(secret_rules(settings, is_open), partial(rows.read, db.pool))
        async with (
            DayBudgets(db.pool, settings.run_limits).kept(Services()) as budgets,
            open_models(settings, budgets, secrets) as models,
        ):
            provider = await models.named(name, own, tenant_id, tenant, model)
            async for probed in probes(provider):
                works &= probed.problem is None
                said = "yes" if probed.problem is None else "no"
                table.add_row(probed.kind, said, f"{probed.seconds:.1f}", probed.problem or "")
    Console().print(table)
    return works
