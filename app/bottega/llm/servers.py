"""Open model servers: one client for each version of a server and of its secrets."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Protocol

from bottega.agents.messages import AssistantMessage, StandardMessage
from bottega.agents.provider import ModelOptions, ModelPrices, OnDelta, ToolSchema
from bottega.errors import ModelError
from bottega.llm.client import keep
from bottega.llm.provider import ModelProvider, open_provider
from bottega.llm.server import ServerSpec

_MOST_SERVERS = 1000


class SpecSource(Protocol):
    """Source of a server's description."""

    async def state(self, *, fresh: bool = False) -> object:
        """Return a value that is another one when a secret of the server may have changed.

        Args:
            fresh: look now, even if no change is known.
        """

    async def spec(self) -> ServerSpec:
        """Return the description, with the present values of its secrets.

        Raises:
            InvalidInputError: it is invalid, or a secret is missing or must not be sent there.
        """


class _Client:
    """The clients of one description, by model; all share their connections."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self._first = open_provider(spec, "none").for_model("none", 0.0)
        self._by_model: dict[str, ModelProvider] = {}
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
        if options.model is not None:
            options = replace(options, model=None)
        client = self.of_model(model)
        self._under_way += 1
        try:
            return await client.invoke(messages, tools, options=options, on_delta=on_delta)
        finally:
            self._under_way -= 1
            if self._is_retired:
                await self.retire()

    def of_model(self, model: str) -> ModelProvider:
        client = self._by_model.get(model)
        if client is None:
            client = keep(self._by_model, model, self._first.for_model(model))
        return client

    async def retire(self) -> None:
        """Close the connections once no call is under way; later calls open new ones."""
        self._is_retired = True
        if not self._under_way:
            await self.aclose()

    async def aclose(self) -> None:
        await self._first.aclose()


class OpenServer:
    """One model server. Its client is replaced when a secret has changed."""

    def __init__(self, source: SpecSource, spec: ServerSpec, state: object) -> None:
        self._source = source
        self._state = state
        self._client = _Client(spec)

    @classmethod
    async def opened(cls, source: SpecSource) -> "OpenServer":
        """Open a server.

        Raises:
            InvalidInputError: as :meth:`SpecSource.spec`.
        """
        state = await source.state()
        return cls(source, await source.spec(), state)

    @property
    def name(self) -> str:
        return self._client.spec.name

    @property
    def is_own(self) -> bool:
        """True if it is a tenant's, not the operator's."""
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
        """Try once to get the next message; twice if the key turns out to be replaced.

        Raises:
            ModelError: the try failed.
            InvalidInputError: as :meth:`SpecSource.spec`.
        """
        client = await self._current()
        try:
            return await client.invoke(model, messages, tools, options, on_delta)
        except ModelError as error:
            if error.code != "model_unauthorized" or await self._current(fresh=True) is client:
                raise
        return await self._client.invoke(model, messages, tools, options, on_delta)

    async def prices(self, model: str) -> ModelPrices | None:
        """Return a model's prices; ``None``: none are known."""
        return await self._client.of_model(model).prices()

    async def retire(self) -> None:
        """Close the connections once no call is under way; later calls open new ones."""
        await self._client.retire()

    async def aclose(self) -> None:
        """Close the connections. Open calls fail."""
        await self._client.aclose()

    async def _current(self, *, fresh: bool = False) -> _Client:
        """Return the client of the present secrets.

        Args:
            fresh: as in :meth:`SpecSource.state`.
        """
        state = await self._source.state(fresh=fresh)
        if state != self._state:
            spec = await self._source.spec()
            self._state, older = state, self._client
            if spec != older.spec:
                self._client = _Client(spec)
                await older.retire()
        return self._client


class Servers:
    """The open servers of a process; a new version of one replaces the old."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[Hashable, int], OpenServer] = OrderedDict()

    async def get(self, key: Hashable, version: int, source: SpecSource) -> OpenServer:
        """Return a server, opened if it is not.

        Args:
            key: of the server in all its versions.
            version: a newer one replaces the older ones; runs that still use these go on.

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
        while len(self._open) > _MOST_SERVERS:
            _, oldest = self._open.popitem(last=False)
            await oldest.retire()
        return server

    async def aclose(self) -> None:
        """Close all connections."""
        for server in self._open.values():
            await server.aclose()
