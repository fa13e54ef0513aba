"""Gates before models: calls pass while the breaker is closed and the limits have room.

Circuit breakers of models: a server that keeps failing is asked by one call of all workers.

A breaker belongs to a tenant's calls of one model, so no tenant can stop the calls of another.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import structlog
from pydantic_core import from_json

from bottega.agents.messages import AssistantMessage, StandardMessage, tokens_sent
from bottega.agents.provider import ModelOptions, ToolSchema
from bottega.clock import monotonic
from bottega.db.failures import is_transient
from bottega.errors import ModelError
from bottega.events.listener import NotifyListener
from bottega.failure_rates import FailureRates
from bottega.llm.errors import BROKEN_ANSWERS, STREAM_BROKEN, delay_s
from bottega.llm.limits import Admission, ServerKey, ServerLimits, Shares

LEAST_CALLS, WINDOW_S = 5, 60.0
"""A breaker opens if half of at least so many calls within so many seconds failed."""
PROBE_S = 30.0
"""A probe without an outcome after so long makes room for another."""
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
        pause_s = min(3600.0, delay_s(number, error, self._random_unit()))
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


CHANNEL = "bottega_models"
LIMITED = "model_limited"
CIRCUIT_OPEN = "model_circuit_open"
AT_ONCE_S = 1.0
"""A call waits so long for its server's limits before this counts as a failed try."""
_LIMITED_S = 5.0


class HeldBackError(ModelError):
    """A call that was not sent: ``model_limited`` or ``model_circuit_open``.

    Args:
        pause_s: seconds after which it may be sent.
    """

    def __init__(self, detail: str, *, code: str, pause_s: float) -> None:
        super().__init__(detail, code=code, retryable=True)
        self.pause_s = pause_s


class Passage(NamedTuple):
    """A call that has passed a gate."""

    admission: Admission | None
    is_probe: bool


@dataclass(slots=True)
class _Calls:
    under_way: int = 0
    waiting: int = 0

    @property
    def counts(self) -> tuple[int, int]:
        return self.under_way, self.waiting


class ModelGate:
    """The gate before one model, for the calls of one tenant.

    Args:
        limits: of its server; ``None``: it has none.
    """

    def __init__(self, traffic: "Traffic", key: ModelKey, limits: ServerLimits | None) -> None:
        self._key = key
        self._limits = limits
        self._breakers, self._shares = traffic.breakers, traffic.shares
        self._traffic = traffic

    def tokens(
        self,
        messages: Sequence[StandardMessage],
        tools: Sequence[ToolSchema],
        options: ModelOptions,
    ) -> int:
        """Estimate the tokens of a call; 0 if they are not limited."""
        if self._limits is None or self._limits.tokens is None:
            return 0
        asked = None if options.params is None else options.params.max_output_tokens
        output = options.max_output_tokens or asked or 1000  # tokens that are expected
        return tokens_sent(messages, len(tools)) + output

    async def enter(self, tokens: int, since: float, wait_s: float) -> Passage:
        """Let a call pass, or wait for its server's limits.

        Args:
            tokens: those that it may take, estimated.
            since: when it began to wait, by the monotonic clock.
            wait_s: longest wait; 0: as long as the database needs to answer.

        Raises:
            HeldBackError: the breaker is open, or the server is over its limits.
        """
        held_s = self._breakers.held_s(self._key)
        if held_s > 0:
            raise self._open(held_s)
        admission = None
        if self._limits is not None:
            with self._traffic.waiting(self._key.server):
                admission = await self._shares.enter(
                    self._key.server, self._limits, tokens, since, wait_s
                )
            if admission is None:
                raise HeldBackError(
                    f"the provider '{self._key.server.provider}' is at its limits "
                    f"({self._limits.text}): the call waits for its turn",
                    code=LIMITED,
                    pause_s=_LIMITED_S,
                )
        is_probe = self._breakers.is_open(self._key)
        if is_probe:
            try:
                pause_s = await self._breakers.admit(self._key)
            except asyncio.CancelledError:
                self._release(admission, 0)
                raise
            if pause_s is not None:
                self._release(admission, 0)
                raise self._open(pause_s)
        self._traffic.calls_of(self._key.server).under_way += 1
        return Passage(admission, is_probe)

    async def wait(
        self, error: HeldBackError, tokens: int, since: float, wait_s: float
    ) -> Passage | None:
        """Wait until a call that was held back may pass, at most ``wait_s`` seconds.

        Returns:
            It has passed; ``None``: try again.
        """
        if error.code == CIRCUIT_OPEN:
            with self._traffic.waiting(self._key.server):
                await self._breakers.closes(self._key, wait_s)
            return None
        try:
            return await self.enter(tokens, since, wait_s)
        except HeldBackError:
            return None

    async def leave(self, entry: Passage, outcome: AssistantMessage | ModelError | None) -> None:
        """End a call that has passed.

        Args:
            outcome: ``None``: it was cancelled.
        """
        self._traffic.calls_of(self._key.server).under_way -= 1
        if isinstance(outcome, AssistantMessage):
            self._release(entry.admission, outcome.usage.total_tokens)
            await self._breakers.succeeded(self._key)
        elif outcome is None:
            self._release(entry.admission, None)
            if entry.is_probe:
                await self._breakers.abandoned(self._key)
        else:
            is_unknown = outcome.code in BROKEN_ANSWERS | {"model_timeout"}
            self._release(entry.admission, None if is_unknown else 0)
            await self._breakers.failed(self._key, outcome, was_probe=entry.is_probe)

    def _release(self, admission: Admission | None, tokens: int | None) -> None:
        if admission is not None:
            self._shares.leave(self._key.server, admission, tokens)

    def _open(self, pause_s: float) -> HeldBackError:
        return HeldBackError(
            f"the model '{self._key.model}' of the provider '{self._key.server.provider}' keeps "
            "failing: it is asked again later, by one call first",
            code=CIRCUIT_OPEN,
            pause_s=pause_s,
        )


class Traffic:
    """All gates of a worker, and the state behind them.

    Args:
        worker_id: whose lease the shares of limits belong to.
    """

    def __init__(self, pool: asyncpg.Pool, worker_id: UUID, listener: NotifyListener) -> None:
        self.shares = Shares(pool, worker_id)
        self.breakers = ModelBreakers(pool)
        self.worker_id = worker_id
        self._calls: dict[ServerKey, _Calls] = {}
        self._missed = asyncio.Event()
        listener.subscribe(CHANNEL, self._heard)

    def gate(self, server: ServerKey, model: str, provider: Mapping[str, Any]) -> ModelGate:
        """Return the gate before a model of a provider."""
        return ModelGate(self, ModelKey(server, model), ServerLimits.of(provider))

    async def run(self) -> None:
        """Keep the breakers in step with the database until cancelled; ``shares`` has its own."""
        self._missed.set()
        while True:
            await self._missed.wait()
            self._missed.clear()
            await self.breakers.read()

    def calls_of(self, server: ServerKey) -> _Calls:
        """Return the counts of a server's calls, to change them."""
        found = self._calls.get(server)
        if found is None:
            found = self._calls[server] = _Calls()
        return found

    @contextlib.contextmanager
    def waiting(self, server: ServerKey) -> Iterator[None]:
        """Count a call as waiting during the block."""
        self.calls_of(server).waiting += 1
        try:
            yield
        finally:
            self.calls_of(server).waiting -= 1

    def load(self) -> Mapping[UUID, Sequence[Mapping[str, Any]]]:
        """Return the calls under way and waiting, by tenant; forget servers without any."""
        self._calls = {key: calls for key, calls in self._calls.items() if any(calls.counts)}
        found: dict[UUID, list[Mapping[str, Any]]] = {}
        for key, calls in self._calls.items():
            under_way, waiting = calls.counts
            about = {"provider": key.provider, "is_operators": key.is_operators}
            found.setdefault(key.tenant_id, []).append(
                about | {"under_way": under_way, "waiting": waiting}
            )
        return found

    def _heard(self, payload: str | None) -> None:
        if payload is None:
            self._missed.set()
            self.shares.wake()
            return
        news = from_json(payload)
        if "workers" not in news:
            self.breakers.heard(news)
        elif str(self.worker_id) in news["workers"]:
            self.shares.wake()
