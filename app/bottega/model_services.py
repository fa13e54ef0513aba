"""The model servers that a process calls. The settings or tenants define these servers.

A probe is a small call that shows if a model server supports a feature.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

import asyncpg
import httpx2
from pydantic_core import from_json

from bottega.agents.messages import AssistantMessage, HumanMessage, StandardMessage, SystemMessage
from bottega.agents.provider import DialectName, LLMProvider, ModelOptions, ToolSchema
from bottega.background.checks import SuccessChecks
from bottega.clock import monotonic
from bottega.db.tables import DEFAULT_TENANT
from bottega.definitions.agents import DEFAULT, DEMO, listed, named_by
from bottega.definitions.pinned import PinnedModels
from bottega.engine.budget import DayBudgets
from bottega.engine.plugins import success_checks
from bottega.errors import BottegaError, InvalidInputError, UnavailableError
from bottega.llm.fallback import FallbackProvider, OpenServer, ServedModel, Servers, SpecSource
from bottega.llm.gates import Traffic
from bottega.llm.limits import ServerKey, TaskPlaces
from bottega.llm.provider import headers_of
from bottega.llm.server import ServerSpec
from bottega.llm.structured_output import JUDGEMENT, ProviderFor, RunKey
from bottega.llm.usage import PermitsOnly, TokenPrices
from bottega.llm.vendors import NO_KEY, with_openai
from bottega.network import DnsResolver
from bottega.outside import OutsideError, check_json
from bottega.redaction import Redactor
from bottega.secrets.lookup import SecretLookup
from bottega.settings import Settings
from bottega.subagents.child import PATIENCE_S
from bottega.tools.egress import Egress
from bottega.tools.guard import HostGuard, ModelHosts
from bottega.tools.secrets import DEFAULT as DEFAULT_NAME

PROBE = "provider:test"
"""Name to which calls that test a provider are charged, in place of an agent's name."""

Provider = Mapping[str, Any]
"""The definition of a provider, as :class:`ProviderContent` dumps it."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A :class:`SpecSource` for a server whose description never changes."""

    found: ServerSpec

    async def state(self, *, fresh: bool = False) -> object:
        return None

    async def spec(self) -> ServerSpec:
        return self.found


class DemoSource:
    """A :class:`SpecSource` for the demo model, which starts at its first use.

    Args:
        start: a function that starts the demo model and returns its base URL.
    """

    def __init__(self, start: Callable[[], Awaitable[str]]) -> None:
        self._start = start
        self._starting = asyncio.Lock()
        self._base_url: str | None = None

    async def state(self, *, fresh: bool = False) -> object:
        return None

    async def spec(self) -> ServerSpec:
        async with self._starting:
            if self._base_url is None:
                self._base_url = await self._start()
        return ServerSpec(name="demo", base_url=self._base_url, api_key=NO_KEY)


@dataclass(frozen=True, slots=True)
class Described:
    """A :class:`SpecSource` for a server that a provider's definition describes.

    Attributes:
        tenant_id: tenant whose secrets the server may get; ``None``: the operator's server.
        more: further fields of :class:`ServerSpec`.
        hosts: the allowed hosts of tenants' servers; ``None``: the operator's server.
    """

    name: str
    provider: Provider
    secrets: SecretLookup
    tenant_id: UUID | None
    tenant: str
    more: Mapping[str, Any]
    hosts: ModelHosts | None = None

    async def state(self, *, fresh: bool = False) -> object:
        allowed = None if self.hosts is None else await self.hosts.allowed()
        if not any(named_secrets(self.provider)):
            return allowed
        return allowed, await self.secrets.state(self.tenant_id, fresh=fresh)

    async def spec(self) -> ServerSpec:
        """Return the server's description, with the current values of its secrets.

        Raises:
            InvalidInputError: see :meth:`SecretLookup.bound`.
        """
        url = self.provider["base_url"]
        if self.tenant_id is None:
            secret = self.secrets.operators(url)
        else:
            secret = self.secrets.bound(self.tenant_id, self.tenant, url)
        values = {name: await secret(name) for name in named_secrets(self.provider)}
        more = dict(self.more)
        if self.hosts is not None:
            more["guard"] = HostGuard(httpx2.URL(url).host, await self.hosts.allowed())
        return spec_of(self.name, self.provider, values, **more)


class ModelServices:
    """The model servers that this process calls.

    Args:
        budgets: the tenants' daily budgets, to which calls are charged.
        default: the server of the settings ``OPENAI_*``, or the demo model; ``None``: no server.
        secrets: look-up of the secrets for model servers.
        hosts: the allowed hosts of tenants' servers.
        traffic: limits and circuit breakers of providers; ``None``: no limits.
        lookups: resolver for the names of tenants' servers; ``None``: the system's resolver.
        demo: the demo model, for runs of drafts.
    """

    def __init__(
        self,
        settings: Settings,
        budgets: DayBudgets,
        default: ServerSpec | None,
        secrets: SecretLookup,
        hosts: ModelHosts,
        traffic: Traffic | None = None,
        lookups: DnsResolver | None = None,
        demo: SpecSource | None = None,
    ) -> None:
        self._demo = demo
        self._budgets = budgets
        self._traffic = traffic
        self._lookups = lookups
        self._settings = settings
        self._secrets = secrets
        self._hosts = hosts
        self._servers = Servers()
        self._default = default
        self._operators: dict[str, Provider] = {
            each.name: each.model_dump(exclude={"name"}) for each in settings.providers
        }

    async def for_agent(
        self, run: PinnedModels, definition: Mapping[str, Any], *, is_called: bool = False
    ) -> FallbackProvider:
        """Return the models of a run's agent; the run's recorder reserves tokens for their calls.

        Args:
            is_called: true if the agent is a sub-agent. A sub-agent waits less long for a model,
                because its caller can continue without an answer.

        Raises:
            InvalidInputError: ``unknown_provider``; see also :meth:`SecretLookup.bound`.
        """
        patience_s = definition.get("model_patience_s")
        if patience_s is None:
            patience_s = self._settings.model_patience_s
            patience_s = min(patience_s, PATIENCE_S) if is_called else patience_s
        models = [await self._model(each, run) for each in listed(definition["model"])]
        return FallbackProvider(models, patience_s, PermitsOnly())

    async def for_judge(
        self, run: PinnedModels, run_id: UUID, model: str | Sequence[str] | None
    ) -> FallbackProvider:
        """Return a judge's models for an ended run. They do not repeat a failed call.

        Raises:
            InvalidInputError: see :meth:`for_agent`.
        """
        models = [await self._model(each, run) for each in listed(model)]
        account = self._budgets.account_for(run.tenant_id, run_id, JUDGEMENT)
        return FallbackProvider(models, 0.0, account)

    async def of_operator(self, model: str, patience_s: float) -> ProviderFor:
        """Return a function that returns an operator's model for a run; the run's tenant pays.

        Raises:
            InvalidInputError: see :meth:`for_agent`.
        """
        served = await self._model(model, None)

        def provider_for(run: RunKey, name: str) -> FallbackProvider:
            return FallbackProvider([served], patience_s, self._budgets.account_for(*run, name))

        return provider_for

    async def named(
        self,
        name: str,
        own: Provider | None,
        tenant_id: UUID | None,
        tenant: str,
        model: str | None,
    ) -> FallbackProvider:
        """Return a model of one provider. The model does not repeat a failed call.

        Args:
            own: the tenant's definition of the provider; ``None``: the operator has defined it.
            tenant_id, tenant: id and name of the tenant that makes the request.
            model: name of the model; ``None``: the provider's default model.

        Raises:
            InvalidInputError: see :meth:`for_agent`.
        """
        if own is None or tenant_id is None:
            server = await self._of_operator(name)
        else:
            source = self._of_tenant(tenant_id, tenant, name, own)
            server = await self._servers.get((tenant_id, name), 0, source)
        first = self._first(own or self._operators.get(name, {}))
        account = self._budgets.account_for(tenant_id or DEFAULT_TENANT, None, PROBE)
        return FallbackProvider([ServedModel(server, model or first)], 0.0, account)

    def success_checks(self, pool: asyncpg.Pool) -> SuccessChecks:
        """Return the success checks. Some of them call models through these services.

        Raises:
            InvalidInputError: a plugin cannot be loaded.
        """
        return SuccessChecks(
            pool,
            self.for_judge,
            success_checks(),
            redactor_of=self._secrets.known,
        )

    def calls(self) -> Mapping[UUID, Sequence[Mapping[str, Any]]]:
        """Return the numbers of running and waiting calls by tenant; see :meth:`Traffic.load`."""
        return {} if self._traffic is None else self._traffic.load()

    def task_places(self, most: int | None) -> TaskPlaces | None:
        """Return places for tasks, ``most`` per tenant on all workers; ``None``: no limit."""
        if self._traffic is None or most is None:
            return None
        return TaskPlaces(self._traffic.shares, most)

    def open_breakers(self) -> int:
        """Return the number of models' circuit breakers that are not closed in this process."""
        return 0 if self._traffic is None else self._traffic.breakers.count()

    async def check(self) -> None:
        """Open the operator's model servers, to find wrong settings when the process starts.

        Raises:
            InvalidInputError: see :meth:`for_agent`.
        """
        for name in self._settings.operator_providers:
            await self._of_operator(name)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._servers.aclose()

    async def _model(self, reference: str | None, run: PinnedModels | None) -> ServedModel:
        own = {} if run is None else run.providers
        there = self._settings.operator_providers
        names = there.keys() if run is None else run.operators
        name, model = named_by(reference, own.keys() | names)
        # The provider must still exist. Do not use a different provider instead, for which the
        # same reference could name a different model.
        if name not in own and name not in there and name != DEMO:
            raise InvalidInputError(
                f"the operator of this server has removed the provider '{name}'",
                code="unknown_provider",
            )
        if run is not None and name in own:
            versions = {pin.name: pin.version for pin in run.pins if pin.kind == "provider"}
            provider = own[name]
            source = self._of_tenant(run.tenant_id, run.tenant, name, provider)
            server = await self._servers.get((run.tenant_id, name), versions[name], source)
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
        return await self._servers.get((None, name), 0, self._operators_source(name))

    def _operators_source(self, name: str) -> SpecSource:
        provider = self._operators.get(name)
        if name == DEMO:
            assert self._demo is not None
            return self._demo
        if provider is None:
            assert self._default is not None
            return Fixed(self._default)
        return Described(name, provider, self._secrets, None, DEFAULT_NAME, {})

    def _first(self, provider: Provider) -> str:
        models = provider.get("models")
        return models[0] if models else self._settings.default_model

    def _of_tenant(self, tenant_id: UUID, tenant: str, name: str, provider: Provider) -> Described:
        more: dict[str, Any] = {"is_own": True}
        if self._lookups is not None:
            more["look_up"] = partial(self._lookups.addresses, tenant)
        return Described(name, provider, self._secrets, tenant_id, tenant, more, self._hosts)


def named_secrets(provider: Provider) -> Iterator[str]:
    """Yield the names of all secrets that requests to a provider contain."""
    for value in (provider.get("key"), *provider["headers"].values()):
        if isinstance(value, Mapping):
            yield value["secret"]


def spec_of(name: str, provider: Provider, secrets: Mapping[str, str], **more: Any) -> ServerSpec:
    """Return the description of a provider's model server, from the provider's definition. Pure.

    Args:
        secrets: values of the secrets by name.
        more: further fields of :class:`ServerSpec`. Fields of the definition replace these.
    """

    def value(header: str | Mapping[str, str]) -> str:
        return header if isinstance(header, str) else secrets[header["secret"]]

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
        hidden=frozenset(secrets.values()),
        prices={
            model: TokenPrices.from_dict(each)
            for model, each in (provider.get("prices") or {}).items()
        },
        **(more | given),
    )


@asynccontextmanager
async def open_models(
    settings: Settings,
    budgets: DayBudgets,
    secrets: SecretLookup,
    hosts: ModelHosts,
    traffic: Traffic | None = None,
    lookups: DnsResolver | None = None,
) -> AsyncIterator[ModelServices]:
    """Open a worker's model servers, including the demo model if no other model is configured."""
    async with contextlib.AsyncExitStack() as stack:

        async def start_demo() -> str:
            from bottega.llm.demo_process import demo_model

            live = demo_model(latency_ms=250, token_delay_ms=10)
            return await stack.enter_async_context(live)

        base_url, demo = settings.openai_base_url, DemoSource(start_demo)
        if settings.uses_demo_model:
            base_url = (await demo.spec()).base_url
        default = None
        if not any(each.name == DEFAULT for each in settings.providers):
            given = settings.openai_api_key
            key = NO_KEY if given is None else given.get_secret_value()
            default = with_openai(ServerSpec(base_url=base_url, api_key=key))
        services = ModelServices(settings, budgets, default, secrets, hosts, traffic, lookups, demo)
        stack.push_async_callback(services.aclose)
        await services.check()
        yield services


_LISTS: Mapping[DialectName, str] = {
    "chat": "/models",
    "responses": "/models",
    "anthropic": "/v1/models?limit=1000",
    "gemini": "/models?pageSize=1000",
}
"""Paths of the lists of models, relative to the base URL."""
_LIST_BYTES = 4_000_000
_LIST_S = 10.0
_MOST_IDS, _LONGEST_ID = 1000, 200


async def listed_models(spec: ServerSpec, egress: Egress, tenant: str) -> Sequence[str]:
    """Request the list of a server's models, which costs nothing, and return their names.

    Raises:
        UnavailableError: the server did not send the list; the error's text has the reason.
        EgressRefusedError: requests to this address are not allowed.
    """
    url = f"{spec.base_url}{_LISTS[spec.dialect]}"
    headers = {name: value for name, value in headers_of(spec).items() if name != "Accept-Encoding"}
    reply = await egress.request(
        "GET", url, headers=headers, timeout_s=_LIST_S, max_bytes=_LIST_BYTES, tenant=tenant
    )
    host = httpx2.URL(url).host
    if reply.status != 200:
        raise UnavailableError(_refusal(host, reply.status, has_key=spec.api_key is not None))
    try:
        check_json(reply.body)
        found = from_json(reply.body)
        names = (
            [each["id"] for each in found["data"]]
            if "data" in found
            else [each["name"].removeprefix("models/") for each in found["models"]]
        )
    except (OutsideError, ValueError, LookupError, TypeError, AttributeError):
        raise UnavailableError(f"{host} answers, but {_NO_LIST}") from None
    sent = Redactor({*spec.hidden, spec.api_key or ""})  # an answer may contain the sent secrets
    fit = (each for each in names if isinstance(each, str) and 0 < len(each) <= _LONGEST_ID)
    return [each for each in dict.fromkeys(fit) if sent.text(each) == each][:_MOST_IDS]


_NO_LIST = (
    "there is no list of models at this address: give the base URL from the vendor's "
    "documentation; it often ends in /v1"
)


def _refusal(host: str, status: int, *, has_key: bool) -> str:
    match status:
        case 401 | 403:
            why = "refuses the key: check it" if has_key else "needs a key"
        case 404 | 405:
            why = f"answers, but {_NO_LIST}"
        case 429:
            why = "refuses requests for now, or the account has no credit"
        case _ if 300 <= status < 400:
            why = "redirects to another address: give that address"
        case _:
            why = "does not work at the moment" if status >= 500 else "refuses the request"
    return f"{host} {why} (HTTP {status})"


_MOST_TOKENS = 2000  # reasoning tokens count, too
_TOOL = ToolSchema(
    "add",
    "Add two numbers.",
    {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
)
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of a probe. ``problem``: ``None`` if the probe succeeded."""

    kind: str
    problem: str | None
    seconds: float


async def probes(provider: LLMProvider) -> AsyncIterator[Probed]:
    """Make one small model call of each kind (text, tool, stream, schema); yield the results."""
    kinds: dict[str, Callable[[LLMProvider], Awaitable[str | None]]] = {
        "text": _text,
        "tool": _tool,
        "stream": _stream,
        "schema": _schema,
    }
    for kind, check in kinds.items():
        began = monotonic()
        try:
            problem = await check(provider)
        except BottegaError as error:
            problem = f"{error.code}: {error.detail}"
        yield Probed(kind, problem, monotonic() - began)


async def _call_model(
    provider: LLMProvider,
    question: str,
    *tools: ToolSchema,
    pieces: list[str] | None = None,
    options: ModelOptions = ModelOptions(max_output_tokens=_MOST_TOKENS),
) -> AssistantMessage:
    messages: list[StandardMessage] = [
        SystemMessage(content="Be brief."),
        HumanMessage(content=question),
    ]
    on_delta = None if pieces is None else pieces.append
    return await provider.invoke(messages, tools, options=options, on_delta=on_delta)


async def _text(provider: LLMProvider) -> str | None:
    answer = await _call_model(provider, "Say hello.")
    return None if answer.content.strip() else "the answer has no text"


async def _tool(provider: LLMProvider) -> str | None:
    answer = await _call_model(provider, "What is 17 plus 25? Use the tool add.", _TOOL)
    if not answer.tool_calls:
        return "the model called no tool"
    call = answer.tool_calls[0]
    if call.name != _TOOL.name or call.malformed is not None:
        return f"the model's call cannot be read: {call.name[:100]}"
    return None


async def _stream(provider: LLMProvider) -> str | None:
    pieces: list[str] = []
    await _call_model(provider, "Count from one to twenty in words.", pieces=pieces)
    return None if len(pieces) > 1 else "the text came in one piece"


async def _schema(provider: LLMProvider) -> str | None:
    options = ModelOptions(max_output_tokens=_MOST_TOKENS, output_schema=_SCHEMA)
    answer = await _call_model(provider, "Name the capital of France as JSON.", options=options)
    try:
        value = from_json(answer.content)
    except ValueError:
        return "the answer is not JSON"
    fits = isinstance(value, dict) and isinstance(value.get("city"), str)
    return None if fits else "the answer does not fit the schema"
