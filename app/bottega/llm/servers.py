"""Open model servers: one client for each version of a server and of its secrets."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from bottega.agents.messages import AssistantMessage, StandardMessage
from bottega.agents.provider import ModelOptions, ModelPrices, OnDelta, ToolSchema
from bottega.errors import ModelError
from bottega.llm.provider import ModelProvider, open_provider
from bottega.llm.server import ServerSpec

ReadSpec = Callable[[], ServerSpec]
"""Returns a server's description with the present values of its secrets."""

_MOST_SERVERS = 1000


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
            client = self._by_model[model] = self._first.for_model(model)
        return client

    async def retire(self) -> None:
        """Close the connections once no call is under way; later calls open new ones."""
        self._is_retired = True
        if not self._under_way:
            await self.aclose()

    async def aclose(self) -> None:
        await self._first.aclose()


class OpenServer:
    """One model server. Its client is replaced when a secret has changed.

    Args:
        read: called now, and again when the server refuses the key.

    Raises:
        InvalidInputError: the description is invalid, or a secret is missing.
    """

    def __init__(self, read: ReadSpec) -> None:
        self._read = read
        self._client = _Client(read())

    @property
    def name(self) -> str:
        return self._client.spec.name

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
        """
        client = self._client
        try:
            return await client.invoke(model, messages, tools, options, on_delta)
        except ModelError as error:
            if error.code != "model_unauthorized" or not await self._renewed(client):
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

    async def _renewed(self, refused: _Client) -> bool:
        """Read the secrets again; return true if the refused client's are out of date."""
        if self._client is refused:
            spec = self._read()
            if spec == refused.spec:
                return False
            self._client = _Client(spec)
            await refused.retire()
        return True


class Servers:
    """The open servers of a process; a new version of one replaces the old."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[Hashable, int], OpenServer] = OrderedDict()

    async def get(self, key: Hashable, version: int, read: ReadSpec) -> OpenServer:
        """Return a server, opened if it is not.

        Args:
            key: of the server in all its versions.
            version: a newer one replaces the older ones; runs that still use these go on.

        Raises:
            InvalidInputError: see :class:`OpenServer`.
        """
        server = self._open.get((key, version))
        if server is None:
            server = self._open[key, version] = OpenServer(read)
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
