"""Values of secrets in a worker: of tenants' stored ones first, then of the environment."""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from uuid import UUID
from weakref import WeakValueDictionary

import structlog
from cachetools import LRUCache
from pydantic_core import from_json

from bottega.clock import monotonic
from bottega.db.failures import is_transient
from bottega.errors import InvalidInputError
from bottega.events.listener import NotifyListener
from bottega.redaction import Redactor
from bottega.sealing import CannotOpenError, Keyring, Place
from bottega.secrets.hosts import refuse_environment, refuse_stored
from bottega.secrets.rows import CHANNEL
from bottega.tools.guard import AllowList
from bottega.tools.http import Secrets
from bottega.tools.secrets import DEFAULT, TenantSecrets

BELIEVED_S = 4.0
"""Seconds for which what was read is valid, if no notification says otherwise."""
_MOST_TENANTS = 500
"""Tenants whose secrets stay known although no run holds them: those used last."""
_LOOK_S = 10.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StoredSecret:
    """A stored secret.

    Attributes:
        value: ``None``: no key of this process opens it.
    """

    version: int
    hosts: Sequence[str]
    value: str | None = field(repr=False)


Stored = Mapping[str, StoredSecret]
"""A tenant's stored secrets by name; the same object as long as none has changed."""


class _Known(Redactor):
    """Redactor of a tenant's secrets, with what is known of them.

    Attributes:
        until: the values that it removes, with the time of each until which it does.
        tenant: its name, once a use has told it.
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
        keyring: returns the keys that open stored secrets; ``None``: there are none.
        environment: reads the operator's secrets.
        hosts: returns the hosts of an operator's secret, by tenant and name; ``None``: it has none.
        allowed: returns hosts and networks that may be reached although they are not public.
        is_open: whether the server has no keys, so that an operator's secret without hosts may go
            anywhere.
    """

    keyring: Callable[[], Keyring | None]
    environment: Callable[[], TenantSecrets]
    hosts: Callable[[str, str], Sequence[str] | None]
    allowed: Callable[[], Awaitable[AllowList]]
    is_open: Callable[[], Awaitable[bool]]


class SecretLookup:
    """The secrets of all tenants, read when one is needed, and again after a change.

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
        # A run may hold a redactor for hours: as long as one does, no other may take its place.
        self._known: WeakValueDictionary[UUID, _Known] = WeakValueDictionary()
        self._of_names: WeakValueDictionary[str, _Known] = WeakValueDictionary()
        self._lately: LRUCache[UUID, _Known] = LRUCache(_MOST_TENANTS)
        self._notified = asyncio.Event()
        self._from_environment: TenantSecrets | None = None
        self._environment_read_at = -math.inf

    def watch(self, listener: NotifyListener) -> None:
        """Have what changes be read again by :meth:`run`, as soon as the database says so."""
        listener.subscribe(CHANNEL, self._forget)

    async def run(self) -> None:
        """Read what has changed, until cancelled: what others send must be redacted here, too.

        Forget the values that were replaced or deleted.
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
                    except Exception:  # the next use reads again, and reports it
                        log.exception("secrets.read_failed")

    def redactor(self, tenant_id: UUID) -> Redactor:
        """Return what removes the secrets of a tenant, as far as this process has read them.

        It learns of changes as long as somebody holds it, and knows no secret of others.
        """
        return self._of(tenant_id)

    async def known(self, tenant_id: UUID, tenant: str) -> Redactor:
        """Return :meth:`redactor`, once it knows all secrets of the tenant.

        Args:
            tenant: its name.
        """
        await self.stored(tenant_id)
        return self._named(tenant_id, tenant)

    def of_name(self, tenant: str) -> Redactor | None:
        """Return the redactor of the tenant of a name, if there is one."""
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
        """Tell a redactor which values to remove: the present ones, and those of lately."""
        now = self._ticks()
        present = set() if known.stored is None else set(_values(known.stored))
        if known.tenant is not None:
            present |= set(self._environment().values(known.tenant))
        until = {each: at for each, at in known.until.items() if at > now or each in present}
        # A replaced or deleted value is still removed from texts: servers repeat it.
        until |= dict.fromkeys(present, now + 30.0)
        if until.keys() != known.until.keys():
            known.keep(until)
        known.until = until

    async def state(self, tenant_id: UUID | None, *, fresh: bool = False) -> object:
        """Return a value that is another one when a secret of a tenant, or of all, has changed.

        Args:
            tenant_id: ``None``: only the environment's secrets count.
            fresh: as in :meth:`stored`.
        """
        if fresh:
            self._environment_read_at = -math.inf
        stored = None if tenant_id is None else await self.stored(tenant_id, fresh=fresh)
        return stored, self._environment()

    async def stored(self, tenant_id: UUID, *, fresh: bool = False) -> Stored:
        """Return a tenant's stored secrets.

        Without the database, values that were read before stay valid; if there are none, this
        waits.

        Args:
            fresh: read them now, even if no change is known.
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
        """Return the look-up of a tenant's secrets that are to be sent to a URL.

        It raises InvalidInputError: ``unknown_secret``, ``secret_unreadable``,
        ``secret_not_for_host``, ``secret_needs_https``, ``secret_host_unset``.
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
        """Return the look-up of the operator's own secrets, for servers of the settings."""

        async def secret(name: str) -> str:
            value = self._of_operator(DEFAULT, name)
            hosts = self._rules.hosts(DEFAULT, name)
            refuse_environment(name, hosts, url, may_be_unset=True)
            return value

        return secret

    def operator_has(self, tenant: str, name: str) -> bool:
        """Return whether the operator has set a tenant's secret of this name."""
        try:
            self._of_operator(tenant, name)
        except InvalidInputError:
            return False
        return True

    def _of_operator(self, tenant: str, name: str) -> str:
        try:
            return self._environment().of(tenant)(name)
        except InvalidInputError:
            self._environment_read_at = -math.inf  # it may be new
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
            # What was notified meanwhile is read at the next use.
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
        """Have one tenant's secrets read again at the next use; ``None``: those of all."""
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
        f"the secret '{name}' cannot be opened: the operator of this server has to set the key "
        "that sealed it in BOTTEGA_SECRETS_KEY, or store it again with "
        f"PUT /v1/secrets/{name}",
        code="secret_unreadable",
    )
