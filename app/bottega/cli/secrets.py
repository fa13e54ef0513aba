"""``bottega secrets``: change the key that seals tenants' secrets."""

from typing import TYPE_CHECKING

import typer

from bottega.cli.terminal import console, database, run, start
from bottega.errors import ConflictError

if TYPE_CHECKING:
    from bottega.settings import Settings

secrets = typer.Typer(no_args_is_help=True, help="Change the key of tenants' secrets.")


@secrets.callback()
def _group() -> None:
    """Keep the name of the only command."""


@secrets.command("reencrypt")
def reencrypt() -> None:
    """Seal all secrets with the first key of BOTTEGA_SECRETS_KEY. Repeat it if it breaks off.

    Its exit status is 1 if a secret was sealed by a key that is not among them.
    """
    settings = start()
    with database(settings) as url:
        changed, unreadable = run(_reencrypt(settings, url))
    console.print(f"Sealed again: {changed}. Cannot be opened: {unreadable}.", highlight=False)
    raise typer.Exit(1 if unreadable else 0)


async def _reencrypt(settings: "Settings", url: str) -> tuple[int, int]:
    """Return how many secrets were changed, and how many no key opens."""
    from bottega.secrets import rows
    from bottega.settings import keyring
    from bottega.tenants import operator

    keys = keyring(settings)
    if keys is None:
        raise ConflictError("set BOTTEGA_SECRETS_KEY to the new key, a comma and the old one")
    changed, unreadable, after = 0, 0, None
    async with operator.transactions(url) as begin:
        while True:
            async with begin() as tx:
                page = await rows.seal_again(tx, keys, after)
            changed, unreadable, after = (
                changed + page.changed,
                unreadable + page.unreadable,
                page.last,
            )
            if after is None:
                return changed, unreadable
