"""Gates before models.

A gate lets a call pass while the breaker is closed and the server's limits have room.

Each circuit breaker serves one tenant's calls of one model from this worker. While a server fails
repeatedly, the breaker admits only one call at a time, the probe. No tenant can stop another
tenant's calls.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg

from bottega.agents.messages import AssistantMessage, StandardMessage, tokens_sent
from bottega.agents.provider import ModelOptions, ToolSchema
from bottega.clock import Clock, monotonic, utcnow
from bottega.errors import ModelError
from bottega.failure_rates import FailureRates
from bottega.llm.errors import BROKEN_ANSWERS, SAID, STREAM_BROKEN, delay_s
from bottega.llm.limits import LimitPermit, ServerKey, ServerLimits, Shares

LEAST_CALLS, WINDOW_S = 5, 60.0
"""A breaker opens if at least LEAST_CALLS calls ended within WINDOW_S seconds and half failed."""
_ASK_AGAIN_S = 0.5
_MOST = 10_000
_SERVERS = frozenset({"model_unavailable", "model_timeout", STREAM_BROKEN})
"""Codes of failures that the server caused, not the request or the key."""


class ModelKey(NamedTuple):
    server: ServerKey
    model: str


@dataclass(slots=True)
class _OpenBreaker:
    """A breaker that is not closed.

    Attributes:
        cause: text of the latest failure.
        retry_at: earliest time at which the next probe may start, by the monotonic clock.
        since: time at which the breaker opened, by the wall clock.
        is_probed: true while the probe runs.
        passes: event that is set when the breaker closes, or when a waiting call may become the
            probe.
    """

    failures: int
    cause: str
    retry_at: float
    since: datetime
    is_probed: bool = False
    passes: asyncio.Event = field(default_factory=asyncio.Event)


class ModelBreakers:
    """The circuit breakers of this worker.

    Args:
        random_unit: function that returns a random number in [0, 1).
    """

    def __init__(
        self, random_unit: Callable[[], float] = random.random, wall_clock: Clock = utcnow
    ) -> None:
        self._random_unit, self._wall_clock = random_unit, wall_clock
        self._open: dict[ModelKey, _OpenBreaker] = {}
        self._rates = FailureRates(LEAST_CALLS, WINDOW_S)

    def is_open(self, key: ModelKey) -> bool:
        return key in self._open

    def count(self) -> int:
        return len(self._open)

    def states(self) -> Iterator[tuple[ModelKey, dict[str, Any]]]:
        """Yield the breakers that are not closed, as JSON. Times are by the wall clock."""
        now = monotonic()
        for key, breaker in self._open.items():
            retry_at = self.wall_time(max(now, breaker.retry_at))
            state = "half_open" if breaker.is_probed else "open"
            yield (
                key,
                {
                    "model": key.model,
                    "state": state,
                    "retry_at": retry_at,
                    "open_since": breaker.since,
                },
            )

    def wall_time(self, at: float) -> datetime:
        """Convert a time of the monotonic clock to a time of the wall clock."""
        return self._wall_clock() + timedelta(seconds=at - monotonic())

    def held_s(self, key: ModelKey) -> float:
        """Return the seconds until a call may become the probe; 0: a call may start now."""
        breaker = self._open.get(key)
        if breaker is None:
            return 0.0
        if breaker.is_probed:
            return _ASK_AGAIN_S
        return max(0.0, breaker.retry_at - monotonic())

    def cause(self, key: ModelKey) -> str:
        """Return the text of the last failure of a model whose breaker is not closed.

        The text omits the server's own words, because the server may quote a different user's
        request.
        """
        return self._open[key].cause

    def begin_call(self, key: ModelKey) -> bool:
        """Begin a call. Return true if the call is the probe, whose success closes the breaker."""
        breaker = self._open.get(key)
        if breaker is not None:
            breaker.is_probed = True
        return breaker is not None

    async def wait_closed(self, key: ModelKey, seconds: float) -> None:
        """Wait at most ``seconds`` until the breaker closes or a probe is cancelled."""
        breaker = self._open.get(key)
        if breaker is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await breaker.passes.wait()

    def succeeded(self, key: ModelKey) -> None:
        """Record that the server answered a call."""
        breaker = self._open.pop(key, None)
        if breaker is None:
            self._rates.succeeded(key, monotonic())
        else:
            self._rates.forget(key)
            breaker.passes.set()

    def failed(self, key: ModelKey, error: ModelError, *, was_probe: bool) -> None:
        """Record a failed call. Ignore an error that the request or the key caused."""
        asks_to_wait = error.code == "model_rate_limited" and bool(error.retry_after_s)
        if not (asks_to_wait or error.code in _SERVERS):
            if was_probe:  # the request or the key caused the error, so the server works
                self.succeeded(key)
            return
        breaker = self._open.get(key)
        if breaker is not None and not was_probe:
            return  # ignore the failure: the call began before the breaker opened
        if breaker is not None:
            failures = breaker.failures + 1
        elif asks_to_wait or self._rates.failed(key, monotonic()):
            failures = max(1, self._rates.failures(key))
        else:
            return
        pause_s = min(3600.0, delay_s(failures, error, self._random_unit()))
        self._set_open(key, failures, error.detail.partition(SAID)[0], pause_s)

    def abandoned(self, key: ModelKey) -> None:
        """Record that a probe was cancelled. The next call may become the probe at once."""
        if (breaker := self._open.get(key)) is not None:
            self._set_open(key, breaker.failures, breaker.cause, 0.0)

    def _set_open(self, key: ModelKey, failures: int, cause: str, pause_s: float) -> None:
        earlier = self._open.get(key)
        if earlier is None and len(self._open) >= _MOST:
            return
        since = self._wall_clock() if earlier is None else earlier.since
        passes = asyncio.Event() if earlier is None else earlier.passes
        if pause_s == 0:
            passes.set()
            passes = asyncio.Event()
        retry_at = monotonic() + pause_s
        self._open[key] = _OpenBreaker(failures, cause, retry_at, since, passes=passes)


LIMITED = "model_limited"
CIRCUIT_OPEN = "model_circuit_open"
AT_ONCE_S = 1.0
"""Seconds that a call waits for its server's limits before the wait counts as a failed try."""
_LIMITED_S = 5.0


class HeldBackError(ModelError):
    """Error: a gate did not let a call pass. Codes: ``model_limited``, ``model_circuit_open``.

    Args:
        pause_s: seconds after which the caller may try the gate again.
    """

    def __init__(self, detail: str, *, code: str, pause_s: float) -> None:
        super().__init__(detail, code=code, retryable=True)
        self.pause_s = pause_s


class GatePermit(NamedTuple):
    """Permission of a call that has passed a gate.

    Attributes:
        limits: the amounts of the server's limits that the call uses; ``None``: no limits.
        since: time at which the call passed, by the monotonic clock.
    """

    limits: LimitPermit | None
    is_probe: bool
    since: float


@dataclass(slots=True)
class _Calls:
    """The calls to a server that have not ended.

    Attributes:
        under_way: times at which the running calls were sent, by the monotonic clock, oldest first.
    """

    under_way: list[float] = field(default_factory=list)
    waiting: int = 0


class ModelGate:
    """The gate before one model, for the calls of one tenant.

    Args:
        limits: limits of the model's server; ``None``: the server has no limits.
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
        """Estimate the tokens of a call; 0: the server has no limit of tokens."""
        if self._limits is None or self._limits.tokens is None:
            return 0
        asked = None if options.params is None else options.params.max_output_tokens
        output = options.max_output_tokens or asked or 1000  # a guess for unlimited answers
        return tokens_sent(messages, len(tools)) + output

    async def enter(self, tokens: int, since: float, wait_s: float) -> GatePermit:
        """Admit a call, if necessary after a wait until the server's limits have room.

        Args:
            tokens: estimated number of the call's tokens.
            since: time when the call began to wait, by the monotonic clock.
            wait_s: maximum wait in seconds; 0: the call waits only for the database's answer.

        Raises:
            HeldBackError: the breaker is open, or the server's limits have no room.
        """
        self._check_breaker()
        permit = None
        if self._limits is not None:
            with self._traffic.waiting(self._key.server):
                permit = await self._shares.enter(
                    self._key.server, self._limits, tokens, since, wait_s
                )
            if permit is None:
                raise HeldBackError(
                    f"the provider '{self._key.server.provider}' is at its limits "
                    f"({self._limits.text}): the call must wait",
                    code=LIMITED,
                    pause_s=_LIMITED_S,
                )
            try:
                self._check_breaker()  # the breaker may have opened during the wait
            except HeldBackError:
                self._release(permit, 0)
                raise
        is_probe = self._breakers.begin_call(self._key)
        since = monotonic()
        self._traffic.calls_of(self._key.server).under_way.append(since)
        return GatePermit(permit, is_probe, since)

    async def wait(
        self, error: HeldBackError, tokens: int, since: float, wait_s: float
    ) -> GatePermit | None:
        """Wait at most ``wait_s`` seconds until the gate may admit a call that it refused.

        Returns:
            The permit, if the gate has admitted the call; ``None``: the caller must try the gate
            again.
        """
        if error.code == CIRCUIT_OPEN:
            with self._traffic.waiting(self._key.server):
                await self._breakers.wait_closed(self._key, wait_s)
            return None
        try:
            return await self.enter(tokens, since, wait_s)
        except HeldBackError:
            return None

    def leave(self, permit: GatePermit, outcome: AssistantMessage | ModelError | None) -> None:
        """End a call that the gate admitted.

        Args:
            outcome: the call's error or answer; ``None``: the call was cancelled.
        """
        self._traffic.calls_of(self._key.server).under_way.remove(permit.since)
        if isinstance(outcome, AssistantMessage):
            self._release(permit.limits, outcome.usage.total_tokens)
            self._breakers.succeeded(self._key)
        elif outcome is None:
            self._release(permit.limits, None)
            if permit.is_probe:
                self._breakers.abandoned(self._key)
        else:
            is_unknown = outcome.code in BROKEN_ANSWERS | {"model_timeout"}
            self._release(permit.limits, None if is_unknown else 0)
            self._breakers.failed(self._key, outcome, was_probe=permit.is_probe)

    def _release(self, permit: LimitPermit | None, tokens: int | None) -> None:
        if permit is not None:
            self._shares.leave(self._key.server, permit, tokens)

    def _check_breaker(self) -> None:
        if (pause_s := self._breakers.held_s(self._key)) > 0:
            raise HeldBackError(
                f"the model '{self._key.model}' of the provider '{self._key.server.provider}' "
                "keeps failing: calls are held back until one trial call succeeds. The last "
                f"failure: {self._breakers.cause(self._key)}",
                code=CIRCUIT_OPEN,
                pause_s=pause_s,
            )


class Traffic:
    """All gates of a worker, including the breakers, limits and counts that the gates use."""

    def __init__(self, pool: asyncpg.Pool, worker_id: UUID) -> None:
        self.shares = Shares(pool, worker_id)
        self.breakers = ModelBreakers()
        self._calls: dict[ServerKey, _Calls] = {}

    def gate(self, server: ServerKey, model: str, provider: Mapping[str, Any]) -> ModelGate:
        return ModelGate(self, ModelKey(server, model), ServerLimits.of(provider))

    def calls_of(self, server: ServerKey) -> _Calls:
        """Return the counts of a server's calls. The caller may change the counts."""
        calls = self._calls.get(server)
        if calls is None:
            calls = self._calls[server] = _Calls()
        return calls

    @contextlib.contextmanager
    def waiting(self, server: ServerKey) -> Iterator[None]:
        """Count a call as waiting while the ``with`` block runs."""
        self.calls_of(server).waiting += 1
        try:
            yield
        finally:
            self.calls_of(server).waiting -= 1

    def load(self) -> Mapping[UUID, Sequence[Mapping[str, Any]]]:
        """Return each tenant's servers with running or waiting calls or open breakers, as JSON.

        The method also removes the counts of servers without calls.
        """
        self._calls = {
            key: calls for key, calls in self._calls.items() if calls.under_way or calls.waiting
        }
        breakers: dict[ServerKey, list[dict[str, Any]]] = {}
        for model, state in self.breakers.states():
            breakers.setdefault(model.server, []).append(state)
        servers: dict[UUID, list[Mapping[str, Any]]] = {}
        for key in {**self._calls, **breakers}:
            calls = self._calls.get(key, _Calls())
            oldest_at = self.breakers.wall_time(calls.under_way[0]) if calls.under_way else None
            servers.setdefault(key.tenant_id, []).append(
                {
                    "provider": key.provider,
                    "is_operators": key.is_operators,
                    "under_way": len(calls.under_way),
                    "oldest_at": oldest_at,
                    "waiting": calls.waiting,
                    "breakers": breakers.get(key, []),
                }
            )
        return servers
