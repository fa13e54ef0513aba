"""Model services of a process: open model servers, from the settings and tenants' definitions."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import ip_address
from typing import Any
from uuid import UUID

import httpx2

from bottega.db.base import DEFAULT_TENANT
from bottega.definitions.models import DEFAULT, listed, named_by
from bottega.errors import InvalidInputError
from bottega.execution.claim import ClaimedRun
from bottega.llm.environment import NO_KEY, with_openai
from bottega.llm.fallback import FallbackProvider, ServedModel
from bottega.llm.prices import TokenPrices
from bottega.llm.server import ServerSpec
from bottega.llm.servers import OpenServer, Servers
from bottega.llm.traffic.gates import Traffic
from bottega.llm.traffic.limits import ServerKey
from bottega.settings import Settings, secrets
from bottega.tools.addresses import AllowList
from bottega.tools.guard import check_address
from bottega.tools.http import Secrets
from bottega.tools.secrets import DEFAULT as DEFAULT_NAME

Provider = Mapping[str, Any]
"""The definition of a provider, as :class:`ProviderContent` dumps it."""


class ModelServices:
    """The model servers that this process calls.

    Args:
        default: the server of the settings ``OPENAI_*`` or the demo model; ``None``: there is none.
        traffic: limits of providers, and breakers; ``None``: all calls pass.
    """

    def __init__(
        self, settings: Settings, default: ServerSpec | None, traffic: Traffic | None = None
    ) -> None:
        self._traffic = traffic
        self._settings = settings
        self._allowed = AllowList.parse(settings.egress_allow)
        self._servers = Servers()
        self._default = default
        self._operators: dict[str, Provider] = {
            each.name: each.model_dump(exclude={"name"}) for each in settings.providers
        }

    async def for_agent(self, run: ClaimedRun, definition: Mapping[str, Any]) -> FallbackProvider:
        """Return the models of an agent of a run.

        Raises:
            InvalidInputError: ``unknown_provider``, ``unknown_secret``, ``secret_not_for_host``.
        """
        patience_s = definition.get("model_patience_s")
        if patience_s is None:
            patience_s = self._settings.model_patience_s
        models = [await self._model(each, run) for each in listed(definition["model"])]
        return FallbackProvider(models, patience_s)

    async def of_operator(self, model: str, patience_s: float) -> FallbackProvider:
        """Return a model of one of the operator's providers.

        Raises:
            InvalidInputError: as :meth:`for_agent`.
        """
        return FallbackProvider([await self._model(model, None)], patience_s)

    async def named(
        self, name: str, own: Provider | None, tenant: str, model: str | None
    ) -> FallbackProvider:
        """Return a model of one provider, without patience.

        Args:
            own: the tenant's definition; ``None``: it is the operator's provider.
            model: ``None``: the provider's default.

        Raises:
            InvalidInputError: as :meth:`for_agent`.
        """
        if own is None:
            server = await self._of_operator(name)
        else:
            read = partial(self._read, tenant, name, own, is_guarded=True)
            server = await self._servers.get((tenant, name), 0, read)
        first = self._first(own or self._operators.get(name, {}))
        return FallbackProvider([ServedModel(server, model or first)], 0.0)

    def calls(self) -> Mapping[UUID, Sequence[Mapping[str, Any]]]:
        """Return the calls under way and waiting, by tenant; see :meth:`Traffic.load`."""
        return {} if self._traffic is None else self._traffic.load()

    async def check(self) -> None:
        """Open the operator's servers: wrong settings fail at the start.

        Raises:
            InvalidInputError: as :meth:`for_agent`.
        """
        for name in self._settings.operator_providers:
            await self._of_operator(name)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._servers.aclose()

    async def _model(self, reference: str | None, run: ClaimedRun | None) -> ServedModel:
        own = {} if run is None else run.providers
        operators = self._settings.operator_providers
        name, model = named_by(reference, own.keys() | operators.keys())
        if run is not None and name in own:
            versions = {pin.name: pin.version for pin in run.pins if pin.kind == "provider"}
            provider = own[name]
            read = partial(self._read, run.tenant, name, provider, is_guarded=True)
            server = await self._servers.get((run.tenant_id, name), versions[name], read)
        else:
            provider = self._operators.get(name, {})
            server = await self._of_operator(name)
        model = model or self._first(provider)
        if self._traffic is None:
            return ServedModel(server, model)
        tenant_id = DEFAULT_TENANT if run is None else run.tenant_id
        key = ServerKey(tenant_id, name not in own, name)
        return ServedModel(server, model, self._traffic.gate(key, model, provider))

    async def _of_operator(self, name: str) -> OpenServer:
        read = partial(self._read, DEFAULT_NAME, name, self._operators.get(name))
        return await self._servers.get((None, name), 0, read)

    def _first(self, provider: Provider) -> str:
        models = provider.get("models")
        return models[0] if models else self._settings.default_model

    def _read(
        self, tenant: str, name: str, provider: Provider | None, *, is_guarded: bool = False
    ) -> ServerSpec:
        """Describe a server, with the present values of its secrets."""
        if provider is None:
            assert self._default is not None
            return self._default
        host = httpx2.URL(provider["base_url"]).host
        allowed = self._allowed

        def guard(address: str) -> None:
            if not allowed.has_name(host):
                check_address(host, ip_address(address), allowed)

        return spec_of(
            name,
            provider,
            self._bound(tenant, host),
            timeout_s=self._settings.model_timeout_s,
            guard=guard if is_guarded else None,
        )

    def _bound(self, tenant: str, host: str) -> Secrets:
        """Return the look-up of a tenant's secrets that may be sent to a host."""
        found = secrets().of(tenant)

        def secret(name: str) -> str:
            if self._settings.may_send(tenant, name, host) is False:
                raise InvalidInputError(
                    f"the secret '{name}' must not be sent to {host}", code="secret_not_for_host"
                )
            return found(name)

        return secret


def spec_of(name: str, provider: Provider, secret: Secrets, **more: Any) -> ServerSpec:
    """Return a server's description from a provider's definition.

    Args:
        more: ``timeout_s``, which the definition may replace, and ``guard``.
    """

    def value(header: str | Mapping[str, str]) -> str:
        return header if isinstance(header, str) else secret(header["secret"])

    key = provider.get("key")
    given = {
        field: provider[field]
        for field in ("timeout_s", "structured_output", "max_tokens_field")
        if provider.get(field) is not None
    }
    return ServerSpec(
        name=name,
        dialect=provider["dialect"],
        base_url=provider["base_url"],
        api_key=None if key is None else value(key),
        headers={header: value(each) for header, each in provider["headers"].items()},
        prices={
            model: TokenPrices.from_dict(each)
            for model, each in (provider.get("prices") or {}).items()
        },
        **(more | given),
    )


@asynccontextmanager
async def open_models(
    settings: Settings, traffic: Traffic | None = None
) -> AsyncIterator[ModelServices]:
    """Open the model servers of a worker, and the demo model if no other is configured."""
    async with contextlib.AsyncExitStack() as stack:
        base_url = settings.openai_base_url
        if settings.uses_demo_model:
            from bottega.llm.demo_process import demo_model

            latency_ms = settings.demo_latency_ms
            base_url = await stack.enter_async_context(
                demo_model(latency_ms=latency_ms, token_delay_ms=latency_ms / 25)
            )
        default = None
        if not any(each.name == DEFAULT for each in settings.providers):
            given = settings.openai_api_key
            key = NO_KEY if given is None else given.get_secret_value()
            default = with_openai(
                ServerSpec(base_url=base_url, api_key=key, timeout_s=settings.model_timeout_s)
            )
        services = ModelServices(settings, default, traffic)
        stack.push_async_callback(services.aclose)
        await services.check()
        yield services
