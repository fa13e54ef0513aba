"""Model calls with several servers: if one server fails, the call tries the next server at once.

A call passes these methods, from the outermost to the innermost:

- :meth:`FallbackProvider.invoke` reserves tokens, pays for the call, and tries the models in order.
- ``FallbackProvider._try`` makes one try with one model, when the model's gate permits the try.
- ``_try_server`` makes the same try without the gate, and returns a model's error as a value.
- :meth:`OpenServer.invoke` uses the current secrets, and makes a second try if the server refuses a
  key that was replaced.
- ``_Client.invoke`` counts the running calls. Each client uses one version of the secrets.
- :meth:`ModelProvider.invoke` sends the request.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import NamedTuple, Protocol

from bottega.agents.messages import AssistantMessage, StandardMessage, Usage, tokens_sent
from bottega.agents.provider import (
    FailedTry,
    ModelOptions,
    ModelPrices,
    ModelTarget,
    OnDelta,
    ToolSchema,
)
from bottega.clock import monotonic
from bottega.errors import BottegaError, ErrorKind, ModelError
from bottega.llm.errors import BROKEN_ANSWERS, MOST_BROKEN, next_delay_s, out_of_patience
from bottega.llm.gates import AT_ONCE_S, LIMITED, GatePermit, HeldBackError, ModelGate
from bottega.llm.provider import open_provider
from bottega.llm.server import ServerSpec
from bottega.llm.usage import Charge, ModelAccount


class SpecSource(Protocol):
    """Source of a model server's description, such as a stored provider definition."""

    async def state(self, *, fresh: bool = False) -> object:
        """Return a value that changes when a secret of the server may have changed.

        Args:
            fresh: true: read the stored secrets now, even if nobody has reported a change.
        """

    async def spec(self) -> ServerSpec:
        """Return the server's description with the current values of the secrets.

        Raises:
            InvalidInputError: the description is invalid, or a secret is missing or must not be
                sent to this server.
        """


class _Client:
    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        # The model "none" is a placeholder, because each call sets its own model. A patience of 0 s
        # switches off the client's own retries, because FallbackProvider retries.
        self._provider = open_provider(spec, "none").for_model("none", 0.0)
        self._under_way = 0
        self._is_retired = False

    async def invoke(
        self,
        model: str,
        messages: Sequence[StandardMessage],
        tools: Sequence[ToolSchema],
        options: ModelOptions,
        on_delta: OnDelta | None,
    ) -> AssistantMessage:
        """Make one try, and count it as running. :meth:`retire` waits until no try runs."""
        options = replace(options, model=model)
        self._under_way += 1
        try:
            return await self._provider.invoke(messages, tools, options=options, on_delta=on_delta)
        finally:
            self._under_way -= 1
            if self._is_retired:
                await self.retire()

    async def prices(self, model: str) -> ModelPrices | None:
        return await self._provider.prices(model)

    async def retire(self) -> None:
        """Close the connections as soon as no call runs. A later call opens new connections."""
        self._is_retired = True
        if not self._under_way:
            await self.aclose()

    async def aclose(self) -> None:
        await self._provider.aclose()


class OpenServer:
    """One model server. After a change of a secret, the next call opens a new client."""

    def __init__(self, source: SpecSource, spec: ServerSpec, state: object) -> None:
        self._source = source
        self._state = state
        self._client = _Client(spec)

    @classmethod
    async def opened(cls, source: SpecSource) -> "OpenServer":
        """Open a server.

        Raises:
            InvalidInputError: see :meth:`SpecSource.spec`.
        """
        state = await source.state()
        return cls(source, await source.spec(), state)

    @property
    def name(self) -> str:
        return self._client.spec.name

    @property
    def is_own(self) -> bool:
        """True if a tenant owns the server; false if the operator owns the server."""
        return self._client.spec.is_own

    async def invoke(
        self,
        model: str,
        messages: Sequence[StandardMessage],
        tools: Sequence[ToolSchema],
        *,
        options: ModelOptions,
        on_delta: OnDelta | None,
    ) -> AssistantMessage:
        """Make one try, and a second try if the server refuses the key and the key was replaced.

        Raises:
            ModelError: the try failed.
            InvalidInputError: see :meth:`SpecSource.spec`.
        """
        client = await self._current()
        try:
            return await client.invoke(model, messages, tools, options, on_delta)
        except ModelError as error:
            if error.code != "model_unauthorized" or await self._current(fresh=True) is client:
                raise
        return await self._client.invoke(model, messages, tools, options, on_delta)

    async def prices(self, model: str) -> ModelPrices | None:
        return await self._client.prices(model)

    async def retire(self) -> None:
        """Close the connections as soon as no call runs; see :meth:`_Client.retire`."""
        await self._client.retire()

    async def aclose(self) -> None:
        """Close the connections. Open calls fail."""
        await self._client.aclose()

    async def _current(self, *, fresh: bool = False) -> _Client:
        state = await self._source.state(fresh=fresh)
        if state != self._state:
            spec = await self._source.spec()
            self._state, older = state, self._client
            if spec != older.spec:
                self._client = _Client(spec)
                await older.retire()
        return self._client


class Servers:
    """The open servers of a process. A newer version of a server replaces older versions."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[Hashable, int], OpenServer] = OrderedDict()

    async def get(self, key: Hashable, version: int, source: SpecSource) -> OpenServer:
        """Return a server, and open the server if necessary.

        Args:
            key: id of the server, which is the same for all versions of the server's definition.
            version: version of the definition. Older versions of the server are retired, but runs
                that use an older version can still call it.

        Raises:
            InvalidInputError: see :meth:`SpecSource.spec`.
        """
        server = self._open.get((key, version))
        if server is None:
            opened = await OpenServer.opened(source)
            server = self._open.setdefault((key, version), opened)
            for (other, number), older in list(self._open.items()):
                if other == key and number < version:
                    await older.retire()
        self._open.move_to_end((key, version))
        while len(self._open) > 1000:
            _, oldest = self._open.popitem(last=False)
            await oldest.retire()
        return server

    async def aclose(self) -> None:
        for server in self._open.values():
            await server.aclose()


_CONTENT = frozenset({"model_filtered", "model_refused"})
"""Codes of failures after which no other model is tried, because it would probably refuse, too."""
_DEFAULTS = ModelOptions()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of one server.

    Attributes:
        gate: delays or refuses calls of this model; ``None``: the model has no gate.
    """

    server: OpenServer
    model: str
    gate: ModelGate | None = None

    @property
    def target(self) -> ModelTarget:
        return ModelTarget(self.server.name, self.model)


@dataclass(frozen=True, slots=True)
class _Dearest:
    """Prices of several models. The cost of a usage is its highest cost for any of the models."""

    all: Sequence[ModelPrices]

    def cost(self, usage: Usage) -> Decimal:
        return max(prices.cost(usage) for prices in self.all)


class _Call(NamedTuple):
    messages: Sequence[StandardMessage]
    tools: Sequence[ToolSchema]
    options: ModelOptions
    on_delta: OnDelta | None


class _Ready(NamedTuple):
    """A model whose gate has already accepted the next try."""

    served: ServedModel
    entry: GatePermit


class _Failed(NamedTuple):
    served: ServedModel
    error: ModelError


class FallbackProvider:
    """Provider that calls an agent's models in order until a model answers.

    If a model's server is down, over its limit or refuses the request, the call tries the next
    model at once. When all models have failed, the call waits and begins again with the first
    model. It fails when the patience is over, or when no later try can succeed. If gates refuse
    the call, the call waits at one of these gates.

    Args:
        models: the models in order, at least one.
        patience_s: seconds for which the call is repeated after all models have failed once; 0: no
            repetition.
        account: account that pays for a call, unless the caller has reserved tokens for the call.
        now, sleep, random_unit: time and randomness; see :class:`ModelProvider`.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        patience_s: float,
        account: ModelAccount,
        *,
        now: Callable[[], float] = monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        random_unit: Callable[[], float] = random.random,
    ) -> None:
        self.models = tuple(models)
        self.patience_s = patience_s
        self._account = account
        self._now = now
        self._sleep = sleep
        self._random_unit = random_unit

    def with_patience(self, most_s: float) -> "FallbackProvider":
        """Return a provider with the same models and a patience of at most ``most_s`` seconds."""
        if self.patience_s <= most_s:
            return self
        provider = copy(self)
        provider.patience_s = most_s
        return provider

    @property
    def target(self) -> ModelTarget:
        """The model that the next call tries first."""
        return self.models[0].target

    @property
    def is_own(self) -> bool:
        """True if all models are on servers that a tenant owns and pays for."""
        return all(each.server.is_own for each in self.models)

    async def prices(self) -> ModelPrices | None:
        """Return the prices of the most expensive model; ``None``: a model's prices are unknown."""
        found = [await each.server.prices(each.model) for each in self.models]
        known = [prices for prices in found if prices is not None]
        return _Dearest(known) if len(known) == len(found) else None

    async def invoke(
        self,
        messages: Sequence[StandardMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        options: ModelOptions = _DEFAULTS,
        on_delta: OnDelta | None = None,
    ) -> AssistantMessage:
        """Request the next message; see :meth:`ModelProvider.invoke`.

        The answer's metadata also has ``provider``.

        Raises:
            ModelError: no model answered.
            HistoryError: a message cannot be sent.
            BudgetExhaustedError: the account has too little money or too few tokens left.
        """
        if options.permit is not None and options.permit.is_open:
            return await self._answer(_Call(messages, tools, options, on_delta))
        longest = options.max_output_tokens
        if longest is None and options.params is not None:
            longest = options.params.max_output_tokens
        sent = tokens_sent(messages, len(tools))
        async with self._account.call(sent, self, longest) as charge:
            paid = _paid_options(options, charge, self.target)
            answer = await self._answer(_Call(messages, tools, paid, on_delta))
            charge.pay(answer.metadata["model"], answer.usage)
            return answer

    async def _answer(self, call: _Call) -> AssistantMessage:
        left, options = list(self.models), call.options
        number, broken, failed_at = 0, 0, None
        if options.failing is not None:
            number, failed_at = options.failing.tries, self._now() - options.failing.since_s
        began, ready = self._now() if failed_at is None else failed_at, None
        while True:
            failed: list[_Failed] = []
            for served, entry in _in_order(left, ready):
                if failed:
                    self._failed(options, number, failed[-1].error, 0.0)
                number += 1
                if options.on_try is not None:
                    options.on_try(served.target)
                answer = await self._try(served, call, entry, began, is_last=served is left[-1])
                if isinstance(answer, AssistantMessage):
                    return answer
                failed.append(_Failed(served, answer))
                broken += answer.code in BROKEN_ANSWERS
                if answer.code in _CONTENT or broken == MOST_BROKEN:
                    raise answer
                if not answer.retryable:
                    left.remove(served)
            error = failed[-1].error
            if not left or self.patience_s == 0:
                raise error
            now = self._now()
            failed_at = now if failed_at is None else failed_at
            left_s = failed_at + self.patience_s - now
            pause_s = next_delay_s(number, error, self._random_unit(), left_s)
            if pause_s is None:
                raise out_of_patience(number, error, self.patience_s)
            if isinstance(error, HeldBackError):
                pause_s = min(left_s, error.pause_s)
            self._failed(options, number, error, pause_s)
            ready = await self._pause(failed, call, began, pause_s)

    async def _pause(
        self, failed: Sequence[_Failed], call: _Call, began: float, pause_s: float
    ) -> _Ready | None:
        """Wait before the next round. End the wait early if a gate accepts the call.

        The call waits at the gate of a server that is over its limits. If there is no such server,
        the call waits at the gate of an open breaker.
        """
        held = [each for each in failed if isinstance(each.error, HeldBackError)]
        if not held:
            await self._sleep(pause_s)
            return None
        served, error = next((each for each in held if each.error.code == LIMITED), held[0])
        assert served.gate is not None
        assert isinstance(error, HeldBackError)
        tokens = served.gate.tokens(call.messages, call.tools, call.options)
        entry = await served.gate.wait(error, tokens, began, pause_s)
        return None if entry is None else _Ready(served, entry)

    def _failed(
        self, options: ModelOptions, number: int, error: ModelError, pause_s: float
    ) -> None:
        if options.on_failed_try is not None:
            options.on_failed_try(FailedTry(number, error, pause_s))

    async def _try(
        self,
        served: ServedModel,
        call: _Call,
        entry: GatePermit | None,
        began: float,
        *,
        is_last: bool,
    ) -> AssistantMessage | ModelError:
        """Make one try after the model's gate. Return the error of the try instead of raising it.

        Args:
            entry: permit of a call that has already passed the gate.
            is_last: true if this round tries no further model.
        """
        gate = served.gate
        if gate is None:
            return await _try_server(served, call)
        if entry is None:
            tokens = gate.tokens(call.messages, call.tools, call.options)
            wait_s = min(AT_ONCE_S, self.patience_s) if is_last else 0.0
            try:
                entry = await gate.enter(tokens, began, wait_s)
            except HeldBackError as error:
                return error
        answer: AssistantMessage | ModelError | None = None
        try:
            answer = await _try_server(served, call)
        finally:
            gate.leave(entry, answer)
        return answer


def _paid_options(options: ModelOptions, charge: Charge, first: ModelTarget) -> ModelOptions:
    """Add callbacks to a call's options, so that ``charge`` pays for each incomplete answer."""
    target = first

    def tries(now: ModelTarget) -> None:
        nonlocal target
        target = now
        if options.on_try is not None:
            options.on_try(now)

    def lost(usage: Usage) -> None:
        charge.pay(target.model, usage)
        if options.on_lost is not None:
            options.on_lost(usage)

    most = charge.permit.most
    return replace(
        options,
        permit=charge.permit,
        max_output_tokens=options.max_output_tokens if most is None else most,
        on_try=tries,
        on_lost=lost,
    )


def _in_order(
    left: Sequence[ServedModel], ready: _Ready | None
) -> Sequence[tuple[ServedModel, GatePermit | None]]:
    """Return the models to try, in order. A model whose gate has accepted the call is first."""
    if ready is None:
        return [(each, None) for each in left]
    return [ready, *((each, None) for each in left if each is not ready.served)]


async def _try_server(served: ServedModel, call: _Call) -> AssistantMessage | ModelError:
    """Make one try without a gate. Return a model's error, or the error of an invalid input."""
    try:
        answer = await served.server.invoke(
            served.model, call.messages, call.tools, options=call.options, on_delta=call.on_delta
        )
    except ModelError as error:
        return error
    except BottegaError as error:
        if error.kind is not ErrorKind.INVALID:
            raise
        # Do not raise the error: another model may accept the input, such as a PDF.
        return ModelError(error.detail, code=error.code)
    answer.metadata["provider"] = served.server.name
    return answer
