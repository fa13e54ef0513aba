"""Circuit breakers of models: a server that keeps failing is asked by one call of all workers.

A breaker belongs to a tenant's calls of one model, so no tenant can stop the calls of another.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import structlog

from bottega.clock import monotonic
from bottega.db.failures import is_transient
from bottega.errors import ModelError
from bottega.failure_rates import FailureRates
from bottega.llm.backoff import delay_s
from bottega.llm.errors import STREAM_BROKEN
from bottega.llm.traffic.limits import ServerKey

LEAST_CALLS, WINDOW_S = 5, 60.0
"""A breaker opens if half of at least so many calls within so many seconds failed."""
PROBE_S = 30.0
"""A probe without an outcome after so long makes room for another."""
_LONGEST_S = 3600.0
_ASK_AGAIN_S = 0.5
_MOST = 10_000
_PATIENCE_S = 3.0
_SERVERS = frozenset({"model_unavailable", "model_timeout", STREAM_BROKEN})
"""Codes of failures that are the server's."""

_READ = "SELECT * FROM open_breakers($1)"
_PROBE = "SELECT state, wait_s, failures FROM begin_probe($1, $2, $3, $4, $5)"
_OPEN = "SELECT open_breaker($1, $2, $3, $4, $5, $6)"
_CLOSE = "SELECT close_breaker($1, $2, $3, $4)"

log = structlog.get_logger(__name__)


class ModelKey(NamedTuple):
    """A model of a server, for the calls of a tenant."""

    server: ServerKey
    model: str


@dataclass(slots=True)
class _Open:
    """A breaker that is not closed, as far as this worker knows.

    Attributes:
        until: when a call may try to become the probe, by the monotonic clock.
        asks: this worker asks the database for that.
    """

    failures: int
    until: float
    asks: bool = False
    passes: asyncio.Event = field(default_factory=asyncio.Event)


class ModelBreakers:
    """The breakers of this worker's calls. Only their changes reach the database.

    Args:
        random_unit: randomness in [0, 1).
    """

    def __init__(
        self, pool: asyncpg.Pool, random_unit: Callable[[], float] = random.random
    ) -> None:
        self._pool = pool
        self._random_unit = random_unit
        self._open: dict[ModelKey, _Open] = {}
        self._rates = FailureRates(LEAST_CALLS, WINDOW_S)

    def is_open(self, key: ModelKey) -> bool:
        return key in self._open

    def count(self) -> int:
        """Return the number of breakers that are not closed."""
        return len(self._open)

    def held_s(self, key: ModelKey) -> float:
        """Return the seconds until a call may ask to be the probe; 0: now."""
        known = self._open.get(key)
        return 0.0 if known is None else max(0.0, known.until - monotonic())

    async def admit(self, key: ModelKey) -> float | None:
        """Return the seconds after which a call may ask again; ``None``: it may go on now.

        The call that goes on while the breaker is open is the probe: its outcome decides.
        """
        known = self._open.get(key)
        if known is None:
            return None
        now = monotonic()
        if now < known.until:
            return known.until - now
        if known.asks:
            return _ASK_AGAIN_S
        known.asks = True
        try:
            async with asyncio.timeout(_PATIENCE_S):
                row = await self._pool.fetchrow(_PROBE, *key.server, key.model, PROBE_S)
        except Exception as error:
            if not is_transient(error):
                log.exception("breaker.not_asked")
            return _ASK_AGAIN_S
        finally:
            known.asks = False
        assert row is not None
        if row["state"] == "closed":
            self._close(key)
            return None
        known.failures = row["failures"]
        known.until = monotonic() + row["wait_s"]
        return None if row["state"] == "probe" else max(0.05, row["wait_s"])

    async def closes(self, key: ModelKey, seconds: float) -> None:
        """Wait until the breaker closes, at most so long, or until a probe was cancelled."""
        known = self._open.get(key)
        if known is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await known.passes.wait()

    async def succeeded(self, key: ModelKey) -> None:
        """Note that the server answered a call."""
        if key in self._open:
            self._close(key)
            await self._store(_CLOSE, *key.server, key.model)
        else:
            self._rates.succeeded(key, monotonic())

    async def failed(self, key: ModelKey, error: ModelError, *, was_probe: bool) -> None:
        """Note a failed call: errors of the request and of the key do not count."""
        asked_s = error.retry_after_s
        is_told = error.code == "model_rate_limited" and bool(asked_s)
        if not (is_told or error.code in _SERVERS):
            if was_probe:  # the server works
                await self.succeeded(key)
            return
        known = self._open.get(key)
        if known is not None and not was_probe:
            return  # it began before the breaker opened
        if known is not None:
            number = known.failures + 1
        elif is_told or self._rates.failed(key, monotonic()):
            number = max(1, self._rates.failures(key))
        else:
            return
        pause_s = min(_LONGEST_S, delay_s(number, error, self._random_unit()))
        self._note(key, number, pause_s)
        await self._store(_OPEN, *key.server, key.model, number, pause_s)

    async def abandoned(self, key: ModelKey) -> None:
        """Note that a probe was cancelled: another call may be the next one."""
        if (known := self._open.get(key)) is not None:
            self._note(key, known.failures, 0.0)
            await self._store(_OPEN, *key.server, key.model, known.failures, 0.0)

    def heard(self, news: Mapping[str, Any]) -> None:
        """Take a notice about one breaker."""
        server = ServerKey(UUID(news["tenant"]), news["is_operators"], news["provider"])
        key = ModelKey(server, news["model"])
        if news["wait_s"] is None:
            self._close(key)
        else:
            self._note(key, news["failures"], news["wait_s"])

    async def read(self) -> None:
        """Read all breakers: notices may have been missed."""
        rows = await self._pool.fetch(_READ, _MOST)
        found = {
            ModelKey(ServerKey(row["tenant"], row["is_operators"], row["provider"]), row["model"])
            for row in rows
        }
        for key in self._open.keys() - found:
            self._close(key)
        for row in rows:
            server = ServerKey(row["tenant"], row["is_operators"], row["provider"])
            self._note(ModelKey(server, row["model"]), row["failures"], row["wait_s"])

    def _note(self, key: ModelKey, failures: int, wait_s: float) -> None:
        known = self._open.get(key)
        if known is None:
            if len(self._open) >= _MOST:
                return
            known = self._open[key] = _Open(failures, 0.0)
        known.failures, known.until = failures, monotonic() + wait_s
        if wait_s == 0:
            known.passes.set()
            known.passes = asyncio.Event()

    def _close(self, key: ModelKey) -> None:
        self._rates.forget(key)
        if (known := self._open.pop(key, None)) is not None:
            known.passes.set()

    async def _store(self, statement: str, *values: Any) -> None:
        """Tell the other workers. Without the database they find out by themselves."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._pool.execute(statement, *values)
        except Exception as error:
            if not is_transient(error):
                log.exception("breaker.not_stored")
