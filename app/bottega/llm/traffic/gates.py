"""Gates before models: calls pass while the breaker is closed and the limits have room."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import structlog
from pydantic_core import from_json

from bottega.agents.messages import AssistantMessage, StandardMessage
from bottega.agents.provider import ModelOptions, ToolSchema
from bottega.agents.sent_tokens import tokens_sent
from bottega.errors import ModelError
from bottega.events.listener import NotifyListener
from bottega.llm.errors import BROKEN_ANSWERS
from bottega.llm.traffic.breakers import ModelBreakers, ModelKey
from bottega.llm.traffic.limits import Admission, ServerKey, ServerLimits
from bottega.llm.traffic.shares import Shares

CHANNEL = "bottega_models"
LIMITED = "model_limited"
CIRCUIT_OPEN = "model_circuit_open"
AT_ONCE_S = 1.0
"""A call waits so long for its server's limits before this counts as a failed try."""
_LIMITED_S = 5.0
_EXPECTED_OUTPUT = 1000

log = structlog.get_logger(__name__)


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
        output = options.max_output_tokens or asked or _EXPECTED_OUTPUT
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
