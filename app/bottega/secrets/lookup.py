"""Look-up of secret values: first among the tenant's stored secrets, then in the environment."""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from uuid import UUID
from weakref import WeakValueDictionary

from cachetools import LRUCache
from pydantic_core import from_json

from bottega.clock import monotonic
from bottega.db.failures import is_transient
from bottega.errors import InvalidInputError
from bottega.events.listener import NotifyListener
from bottega.logger import Logger
from bottega.redaction import Redactor
from bottega.sealing import CannotOpenError, Keyring, Place
from bottega.secrets.rows import CHANNEL, refuse_environment, refuse_stored
from bottega.tenants.keys import BELIEVED_S
from bottega.tools.guard import AllowList
from bottega.tools.http import Secrets
from bottega.tools.secrets import DEFAULT, TenantSecrets

_MOST_TENANTS = 500
"""Number of tenants whose secrets stay in memory after their last run, most recently used first."""
_LOOK_S = 10.0

log = Logger(__name__)


@dataclass(frozen=True, slots=True)
class StoredSecret:
    """A stored secret.

    Attributes:
        value: the decrypted value; ``None``: this process has no key to decrypt it.
    """

    version: int
    hosts: Sequence[str]
    value: str | None = field(repr=False)


Stored = Mapping[str, StoredSecret]
"""A tenant's stored secrets by name; the mapping stays the same object until a secret changes."""


class _Known(Redactor):
    """A tenant's secrets in this process, and the redactor that removes these secrets from texts.

    Attributes:
        until: values that the redactor removes from texts, with the time until which it removes
            each value.
        tenant: the tenant's name; ``None``: not read yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.until: dict[str, float] = {}
        self.tenant: str | None = None
        self.stored: Stored | None = None
        self.read_at = -math.inf
        self.changes = 0
        self.reading = asyncio.Lock()


@dataclass(frozen=True, slots=True)
class SecretRules:
    """Rules of the operator about secrets.

    Attributes:
        keyring: returns the keys that decrypt stored secrets; ``None``: there are no keys.
        environment: reads the operator's secrets from the environment.
        hosts: returns the hosts that may get a secret of this tenant and name; ``None``: not set.
        allowed: returns the private hosts and networks that requests may reach.
        is_open: returns true if the server has no API keys; then any host may get an operator's
            secret for which no hosts are set.
    """

    keyring: Callable[[], Keyring | None]
    environment: Callable[[], TenantSecrets]
    hosts: Callable[[str, str], Sequence[str] | None]
    allowed: Callable[[], Awaitable[AllowList]]
    is_open: Callable[[], Awaitable[bool]]


class SecretLookup:
    """The secrets of all tenants; a tenant's secrets are read at first use and after each change.

    Args:
        read: returns the rows of a tenant's stored secrets.
    """

    def __init__(
        self,
        rules: SecretRules,
        read: Callable[[UUID], Awaitable[Sequence[Mapping[str, Any]]]],
        ticks: Callable[[], float] = monotonic,
    ) -> None:
        self._rules = rules
        self._read = read
        self._ticks = ticks
        # Weak references find a redactor as long as a run uses it, perhaps for hours. If there were
        # a second redactor of the tenant, the run's redactor would miss changed secrets.
        self._known: WeakValueDictionary[UUID, _Known] = WeakValueDictionary()
        self._of_names: WeakValueDictionary[str, _Known] = WeakValueDictionary()
        self._lately: LRUCache[UUID, _Known] = LRUCache(_MOST_TENANTS)
        self._notified = asyncio.Event()
        self._from_environment: TenantSecrets | None = None
        self._environment_read_at = -math.inf

    def watch(self, listener: NotifyListener) -> None:
        """Subscribe to changes of secrets; then :meth:`run` reads changed secrets at once."""
        listener.subscribe(CHANNEL, self._forget)

    async def run(self) -> None:
        """Read changed secrets until cancelled, so that this process redacts them at once.

        The method also drops values of secrets that were replaced or deleted some time ago.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._notified.wait()
            self._notified.clear()
            for tenant_id, known in list(self._known.items()):
                self._tell(known)
                if known.read_at == -math.inf:
                    try:
                        await self.stored(tenant_id)
                    except Exception:  # the next use reads the secrets again, and raises the error
                        log.exception("secrets.read_failed")

    def redactor(self, tenant_id: UUID) -> Redactor:
        """Return the redactor of the tenant's secrets that this process has read.

        While a redactor is in use, it gets all changes of the tenant's secrets. A redactor has no
        secrets of other tenants.
        """
        return self._of(tenant_id)

    async def known(self, tenant_id: UUID, tenant: str) -> Redactor:
        """Read all secrets of a tenant; return the tenant's redactor, see :meth:`redactor`.

        Args:
            tenant: name of the tenant.
        """
        await self.stored(tenant_id)
        return self._named(tenant_id, tenant)

    def of_name(self, tenant: str) -> Redactor | None:
        """Return the redactor of the tenant with this name; ``None``: no redactor is in use."""
        return self._of_names.get(tenant)

    def _named(self, tenant_id: UUID, tenant: str) -> _Known:
        known = self._of(tenant_id)
        if known.tenant is None:
            known.tenant = tenant
            self._of_names[tenant] = known
        self._tell(known)
        return known

    def _of(self, tenant_id: UUID) -> _Known:
        known = self._known.get(tenant_id)
        if known is None:
            known = self._known[tenant_id] = _Known()
        self._lately[tenant_id] = known
        return known

    def _tell(self, known: _Known) -> None:
        now = self._ticks()
        present = set() if known.stored is None else set(_values(known.stored))
        if known.tenant is not None:
            present |= set(self._environment().values(known.tenant))
        until = {each: at for each, at in known.until.items() if at > now or each in present}
        # Values that were replaced or deleted are removed from texts for some more time, because
        # servers may repeat these values.
        until |= dict.fromkeys(present, now + 30.0)
        if until.keys() != known.until.keys():
            known.keep(until)
        known.until = until

    async def state(self, tenant_id: UUID | None, *, fresh: bool = False) -> object:
        """Return an object that differs after each change of the tenant's or environment's secrets.

        Args:
            tenant_id: ``None``: consider only the environment's secrets.
            fresh: as in :meth:`stored`.
        """
        if fresh:
            self._environment_read_at = -math.inf
        stored = None if tenant_id is None else await self.stored(tenant_id, fresh=fresh)
        return stored, self._environment()

    async def stored(self, tenant_id: UUID, *, fresh: bool = False) -> Stored:
        """Return a tenant's stored secrets.

        While the database is unavailable, the values from the last read stay valid. If there was no
        read yet, this method waits for the database.

        Args:
            fresh: read the secrets from the database, even if no change was reported.
        """
        known = self._of(tenant_id)
        asked_at = self._ticks()
        if fresh or self._is_old(known):
            async with known.reading:
                if self._is_old(known) or (fresh and known.read_at < asked_at):
                    await self._refresh(tenant_id, known)
        assert known.stored is not None
        return known.stored

    def bound(self, tenant_id: UUID, tenant: str, url: str) -> Secrets:
        """Return a function that looks up a tenant's secrets by name, to send them to a URL.

        The function raises ``InvalidInputError`` with a code: ``unknown_secret``,
        ``secret_unreadable``, ``secret_not_for_host``, ``secret_needs_https``,
        ``secret_host_unset``.
        """

        async def secret(name: str) -> str:
            stored = (await self.stored(tenant_id)).get(name)
            if stored is not None:
                refuse_stored(name, stored.hosts, url, await self._rules.allowed())
                if stored.value is None:
                    raise _unreadable(name)
                value = stored.value
            else:
                value = self._of_operator(tenant, name)
                hosts = self._rules.hosts(tenant, name)
                is_open = hosts is None and await self._rules.is_open()
                refuse_environment(name, hosts, url, may_be_unset=is_open)
            self._named(tenant_id, tenant)
            return value

        return secret

    def operators(self, url: str) -> Secrets:
        """Return a function that looks up the operator's secrets, for servers in the settings."""

        async def secret(name: str) -> str:
            value = self._of_operator(DEFAULT, name)
            hosts = self._rules.hosts(DEFAULT, name)
            refuse_environment(name, hosts, url, may_be_unset=True)
            return value

        return secret

    def operator_has(self, tenant: str, name: str) -> bool:
        """Return true if the operator has set a secret with this name for the tenant."""
        try:
            self._of_operator(tenant, name)
        except InvalidInputError:
            return False
        return True

    def _of_operator(self, tenant: str, name: str) -> str:
        try:
            return self._environment().of(tenant)(name)
        except InvalidInputError:
            self._environment_read_at = -math.inf  # the secret may be new
            return self._environment().of(tenant)(name)

    def _environment(self) -> TenantSecrets:
        now = self._ticks()
        if self._from_environment is None or now - self._environment_read_at > BELIEVED_S:
            self._from_environment, self._environment_read_at = self._rules.environment(), now
        return self._from_environment

    def _is_old(self, known: _Known) -> bool:
        return known.stored is None or self._ticks() - known.read_at > BELIEVED_S

    async def _refresh(self, tenant_id: UUID, known: _Known) -> None:
        while True:
            asked_at, changes = self._ticks(), known.changes
            try:
                rows = await self._read(tenant_id)
            except Exception as error:
                if not is_transient(error):
                    raise
                log.warning("secrets.read_failed", error=str(error) or repr(error))
                if known.stored is not None:
                    known.read_at = self._ticks()
                    return
                await asyncio.sleep(0.2)
                continue
            self._keep(tenant_id, known, rows)
            # If a notification arrived during the query, the next use reads the secrets again.
            known.read_at = asked_at if changes == known.changes else -math.inf
            return

    def _keep(self, tenant_id: UUID, known: _Known, rows: Sequence[Mapping[str, Any]]) -> None:
        versions = {row["name"]: row["version"] for row in rows}
        if known.stored is None or _versions(known.stored) != versions:
            keys = self._rules.keyring()
            opened = {row["name"]: self._opened(tenant_id, row, keys) for row in rows}
            known.stored = MappingProxyType(opened)
            self._tell(known)

    def _opened(
        self, tenant_id: UUID, row: Mapping[str, Any], keys: Keyring | None
    ) -> StoredSecret:
        value = None
        if keys is not None:
            place = Place(tenant_id, row["name"], row["version"])
            try:
                value = keys.open(row["value"], place)
            except CannotOpenError:
                log.warning("secrets.unreadable", name=row["name"], tenant_id=str(tenant_id))
        return StoredSecret(row["version"], tuple(from_json(row["hosts"])), value)

    def _forget(self, tenant: str | None) -> None:
        changed = [*self._known.values()] if tenant is None else [self._known.get(UUID(tenant))]
        for known in changed:
            if known is not None:
                known.changes += 1
                known.read_at = -math.inf
        self._notified.set()


def _versions(stored: Stored) -> Mapping[str, int]:
    return {name: secret.version for name, secret in stored.items()}


def _values(stored: Stored) -> list[str]:
    return [secret.value for secret in stored.values() if secret.value is not None]


def _unreadable(name: str) -> InvalidInputError:
    return InvalidInputError(
        f"the secret '{name}' cannot be opened: ask the operator of this server to add the key "
        "that sealed it to BOTTEGA_SECRETS_KEY, or store the secret again with "
        f"PUT /v1/secrets/{name}",
        code="secret_unreadable",
    )
