"""Routes of providers: model servers that a tenant or the operator defines."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from functools import partial
from ipaddress import ip_address
from typing import Annotated, Any, Literal
from uuid import UUID

import httpx2
from fastapi import APIRouter, Response
from pydantic import ConfigDict, StringConstraints
from sqlalchemy import Text, Uuid, and_, bindparam, select, text
from sqlalchemy.dialects.postgresql import ARRAY

from bottega.agents.provider import DialectName, StructuredOutput, TokensField
from bottega.api.errors import problems
from bottega.api.schemas.base import Answer, Body, Name, named_examples
from bottega.api.shared.definitions import (
    Caller,
    DefinitionRoutes,
    Sending,
    Shown,
    answer,
    refuse_foreign,
    tenant_name,
)
from bottega.api.shared.deps import (
    Actor,
    DefineTenant,
    PrincipalDep,
    ServiceDep,
    Tenant,
    Transaction,
)
from bottega.clock import monotonic
from bottega.container import Service
from bottega.db.pool import AsyncConnection
from bottega.db.tables import provider_versions, providers
from bottega.definitions import store
from bottega.definitions.agents import DEFAULT, KnownProvider, checked, listed
from bottega.definitions.store import PROVIDERS
from bottega.engine import workers
from bottega.errors import InvalidInputError, NotFoundError, UnavailableError
from bottega.llm.gates import CIRCUIT_OPEN, LIMITED
from bottega.settings.providers import ModelPrice, ProviderContent
from bottega.tenants import audit
from bottega.tools.egress import Egress, refuse_inside
from bottega.tools.guard import EgressRefusedError, check_address
from bottega.tools.http import SecretHeader


def possible_names(model: str | Sequence[str] | None) -> Iterable[str]:
    """Return the names of the providers to which an agent's models may refer."""
    yield DEFAULT
    for reference in listed(model):
        yield (reference or "").partition("/")[0].partition(":")[0]


_MOST = 200
"""Maximum number of a tenant's own providers whose state one request reads."""


async def known_providers(
    connection: AsyncConnection, tenant_id: UUID, names: Iterable[str] | None
) -> dict[str, KnownProvider]:
    """Return a tenant's own providers with these names; ``names`` of ``None``: the first 200."""
    now, all_ = providers.c, provider_versions.c
    current = and_(
        all_.tenant_id == now.tenant_id, all_.name == now.name, all_.version == now.version
    )
    query = (
        select(now.name, now.version, all_.definition)
        .join_from(providers, provider_versions, current)
        .where(now.tenant_id == tenant_id, now.deleted_at.is_(None))
        .order_by(now.name)
    )
    query = query.limit(_MOST) if names is None else query.where(now.name.in_(set(names)))
    return {
        row.name: KnownProvider(
            row.version,
            row.definition["dialect"],
            row.definition["models"],
            row.definition["headers"],
            row.definition["base_url"],
            row.definition["prices"],
        )
        for row in await connection.execute(query)
    }


class ProviderBody(ProviderContent, Body):
    """A provider's definition, which may repeat the name in the path."""

    name: Name | None = None
    """Null, or the same name as in the path."""


class NewProvider(ProviderBody):
    """A provider to create."""

    model_config = ConfigDict(json_schema_extra=named_examples(ProviderContent, "claude"))

    name: Name


class ProviderSummary(Answer):
    """One version of a provider, without its headers, models and prices."""

    shows = ProviderContent

    name: str
    """Name of the provider. It is the text before the slash in an agent's `model`."""
    version: int
    """Number of this version, from 1; 0: the provider belongs to the operator."""
    owner: Literal["tenant", "operator"] = "tenant"
    """Owner of the provider. All tenants can use the operator's providers, but responses do not
    show their settings."""
    dialect: DialectName
    base_url: str | None
    key: SecretHeader | None
    max_concurrent: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    timeout_s: float | None
    structured_output: StructuredOutput | None
    max_tokens_field: TokensField | None
    created_at: datetime | None
    """Time at which this version was stored."""


class Provider(ProviderSummary):
    """One version of a provider."""

    headers: dict[str, str | SecretHeader]
    models: list[str] | None
    prices: dict[str, ModelPrice] | None


class ModelBreaker(Answer):
    """The circuit breaker of a model, for this tenant's calls from all workers."""

    state: Literal["closed", "open", "half_open"]
    """`open`: workers send no calls. `half_open`: workers send one call as a test."""
    retry_at: datetime | None = None
    """Time of the next test call; null: the breaker is closed."""
    open_since: datetime | None = None
    """Time since which the model keeps failing; null: the breaker is closed."""


class ModelCalls(Answer):
    """Numbers of this tenant's model calls in all workers, from the workers' last reports."""

    under_way: int = 0
    """Number of calls that workers have sent and that have not ended."""
    oldest_at: datetime | None = None
    """Time at which the oldest of these calls was sent; null: there is no such call."""
    waiting: int = 0
    """Number of calls that wait for a limit of the provider, or for the provider's breaker."""


class FailedCalls(Answer):
    """Number of failed tries with the same agent, model, error code and HTTP status."""

    agent: str
    """Name of the agent."""
    model: str
    """Name of the model."""
    code: str
    """Error code of the tries."""
    http_status: int | None
    """HTTP status of the server's answers; null: the server sent no answer."""
    calls: int
    """Number of tries."""
    first_at: datetime
    """Time when the first of these tries failed."""
    last_at: datetime
    """Time when the last of these tries failed."""


class RecentCalls(Answer):
    """The last 100 tries of this tenant's model calls, in the tenant's newest 200 runs.

    A try does not count if a limit or a breaker held the try back before the server got it.
    """

    calls: int
    """Number of tries."""
    failed: int
    """Number of tries that failed."""
    errors: dict[str, int]
    """Number of failed tries by error code."""
    failures: list[FailedCalls]
    """Failed tries by agent, model, error code and HTTP status, most tries first."""
    duration_p50_ms: int | None
    """Median duration of the answered tries, in milliseconds; null: no try was answered."""
    duration_p95_ms: int | None
    """Milliseconds in which 95 % of the answered tries ended; null: no try was answered."""


class ServerHealth(Answer):
    """The state of a provider's server."""

    breaker: dict[str, ModelBreaker]
    """Breakers by model: of the models that the provider lists, and all that are not closed."""
    calls: ModelCalls
    """Model calls to the provider that have not ended."""
    recent: RecentCalls
    """Outcomes of the last model calls to the provider."""


class ProviderHealth(ServerHealth, Provider):
    """A provider, and the state of its server."""


class NamedHealth(ServerHealth):
    """The state of one provider's server."""

    name: str
    """Name of the provider."""


class ProvidersHealth(Answer):
    """The state of the servers of all providers."""

    items: list[NamedHealth]
    """Providers and the state of their servers, in the order of names."""


def sent_secrets(body: ProviderBody) -> list[Sending]:
    """Return the secrets that the definition sends to a provider."""
    secrets = {"/key": body.key} | {
        f"/headers/{header}": value for header, value in body.headers.items()
    }
    return [
        Sending(place, value.secret, body.base_url)
        for place, value in secrets.items()
        if isinstance(value, SecretHeader)
    ]


async def prepare(caller: Caller, name: str, body: ProviderBody) -> dict[str, Any]:
    if body.name not in (None, name):
        raise InvalidInputError(
            f"the name in the body differs from '{name}' in the path: send the same name, or none",
            pointer="/name",
        )
    await refuse_foreign(caller, sent_secrets(body))
    return body.model_dump(exclude={"name"})


async def check_address_of(service: Service, tenant: UUID, body: ProviderBody) -> None:
    """Check a provider's address by DNS.

    The check may take seconds, so the caller must have no open transaction.

    Raises:
        InvalidInputError: ``egress_forbidden``.
    """
    url, allowed = httpx2.URL(body.base_url), await service.outgoing.model_hosts.allowed()
    look_up = service.outgoing.egress.lookups.addresses
    try:
        refuse_inside(body.base_url, allowed)
        if allowed.has_name(url.host):
            return
        try:
            async with asyncio.timeout(3.0):
                addresses = await look_up(str(tenant), url.host, url.port or 443)
        except (OSError, UnicodeError, TimeoutError):
            return  # DNS failed; each later connection also checks its address
        for address in addresses:
            check_address(url.host, ip_address(address), allowed)
    except EgressRefusedError as error:
        raise InvalidInputError(
            error.detail, code="egress_forbidden", pointer="/base_url"
        ) from None


async def _show(caller: Caller, name: str, response: Response) -> dict[str, Any]:
    try:
        own = await store.get(caller.tx, PROVIDERS, caller.tenant, name)
    except NotFoundError:
        provider = caller.service.settings.operator_providers.get(name)
        if provider is None:
            raise
        # The response has no ETag, because the tenant cannot replace an operator's provider.
        body = _operators(name, provider)
    else:
        body = answer(own, response) | {"owner": "tenant"}
    return body | (await _health(caller, {name: body}))[name]


def _operators(name: str, provider: KnownProvider) -> dict[str, Any]:
    return dict.fromkeys(Provider.model_fields) | {
        "name": name,
        "version": 0,
        "owner": "operator",
        "dialect": provider.dialect,
        "models": provider.models,
        "headers": {},
    }


_ALIKE = ("agent", "model", "code", "http_status")
_OWNERS = {True: "operator", False: "tenant"}
# This query selects the last 100 tries sent to each provider, in the newest 200 runs and child
# runs. The query reads only the last 50 rows of each log.
_RECENT = text("""
    WITH tries AS MATERIALIZED (
        SELECT l.data ->> 'provider' AS provider, l.data ->> 'model' AS model, l.agent, l.code,
               s.at,
               substring(l.data #>> '{error,message}' FROM 'HTTP ([0-9]{3})')::integer AS status,
               (l.data ->> 'duration_ms')::bigint AS ms,
               row_number() OVER (PARTITION BY l.data ->> 'provider' ORDER BY s.at DESC) AS place
        FROM (SELECT id FROM runs WHERE tenant_id = :tenant ORDER BY id DESC LIMIT 200) AS r
        CROSS JOIN LATERAL (
            SELECT at, events FROM run_steps
            WHERE tenant_id = :tenant AND run_id = r.id ORDER BY last_seq DESC LIMIT 50) AS s
        CROSS JOIN LATERAL (
            SELECT data, data #>> '{error,code}' AS code,
                   (split_part(line, ',"data":', 1) || '}')::jsonb ->> 'agent' AS agent
            FROM string_to_table(s.events, E'\\n') AS line
            CROSS JOIN LATERAL (
                SELECT left(substr(line, strpos(line, ',"data":') + 8), -1)::jsonb AS data) AS d
            WHERE line LIKE '{"type":"llm.completed"%' OR line LIKE '{"type":"llm.failed"%') AS l
        WHERE l.code IS NULL OR l.code <> ALL(:held_back)
    )
    SELECT n.name, count(t.place) AS calls, count(t.code) AS failed,
        percentile_disc(0.5) WITHIN GROUP (ORDER BY t.ms) AS duration_p50_ms,
        percentile_disc(0.95) WITHIN GROUP (ORDER BY t.ms) AS duration_p95_ms,
        coalesce(jsonb_agg(jsonb_build_array(t.agent, t.model, t.code, t.status, t.at)) FILTER (
            WHERE t.code IS NOT NULL), '[]') AS failures
    FROM unnest(:names) AS n(name)
    LEFT JOIN tries t ON t.provider = n.name AND t.place <= 100 GROUP BY n.name
""").bindparams(
    bindparam("tenant", type_=Uuid),
    bindparam("names", type_=ARRAY(Text)),
    bindparam("held_back", [CIRCUIT_OPEN, LIMITED], type_=ARRAY(Text)),
)


async def _health(
    caller: Caller, providers: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    about = {"tenant": caller.tenant, "names": [*providers]}
    for row in (await caller.tx.execute(_RECENT, about)).mappings():
        alike: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        for *failure, at in row["failures"]:
            alike[tuple(failure)].append(at)
        failures = [
            dict(zip(_ALIKE, of, strict=True), calls=len(at), first_at=min(at), last_at=max(at))
            for of, at in sorted(alike.items(), key=lambda each: -len(each[1]))
        ]
        errors = Counter(code for _, _, code, *_ in row["failures"])
        recent = {**row, "errors": errors, "failures": failures}
        models = providers[recent.pop("name")]["models"] or ()
        breakers = {model: {"state": "closed", "retry_at": None} for model in models}
        calls = {"under_way": 0, "oldest_at": None, "waiting": 0}
        found[row["name"]] = {"breaker": breakers, "calls": calls, "recent": recent}
    for worker in await workers.alive(caller.tx):
        for server in (worker["state"] or {}).get("models", ()):
            name, owner = server["provider"], _OWNERS[server["is_operators"]]
            if name in found and providers[name]["owner"] == owner:
                calls = found[name]["calls"]
                for key in ("under_way", "waiting"):
                    calls[key] += server[key]
                times = [each for each in (calls["oldest_at"], server.get("oldest_at")) if each]
                calls["oldest_at"] = min(times, default=None)
                for breaker in server["breakers"]:
                    found[name]["breaker"][breaker.pop("model")] = breaker
    return found


class ProviderTest(Answer):
    """The result of requesting the list of models from a model server."""

    ok: bool
    """True: the server accepted the key, and listed its models."""
    models: list[str]
    """Names of the server's models, at most 1,000."""
    error: str | None = None
    """Reason why the test failed; null: the test succeeded."""
    latency_ms: int
    """Response time of the server, in milliseconds."""


class DefaultModel(Body):
    """The model of agents that name no model."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "claude/claude-opus-5"}]})

    model: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,63}/.{1,200}$")]
    """The model as `provider/MODEL`, the form of an agent's `model`."""


class ChosenModel(Answer):
    """The model of agents that name no model."""

    model: str
    """The model as `provider/MODEL`."""


async def default_model(
    service: Service, connection: AsyncConnection, tenant_id: UUID
) -> tuple[str, bool]:
    """Return the model of agents that name no model, and true if this model is the demo model."""
    settings, chosen = service.settings, await store.default_model(connection, tenant_id)
    name = DEFAULT if chosen is None else chosen.partition(":")[0]
    own = (await known_providers(connection, tenant_id, [name])).get(name)
    is_demo = settings.uses_demo_model and name == DEFAULT and own is None
    if chosen is not None:
        return chosen.replace(":", "/", 1), is_demo
    models = own.models if own is not None else None
    return models[0] if models else settings.default_model, is_demo


def _listed(service: Service) -> Sequence[dict[str, Any]]:
    return [_operators(name, each) for name, each in service.settings.operator_providers.items()]


router = DefinitionRoutes(
    kind=PROVIDERS,
    new=NewProvider,
    content=ProviderBody,
    output=Provider,
    summary=ProviderSummary,
    prepare=prepare,
    check=check_address_of,
    shown=Shown(ProviderHealth, _show, _listed),
).router()


@router.post(
    "/test",
    operation_id="test_provider",
    summary="Try a provider that is not stored",
    description=(
        "Asks the server for its list of models, for at most 10 seconds; this costs nothing. If "
        "the key or the address is wrong, `error` has the reason. An address that is neither "
        "public nor allowed is refused: 422 `egress_forbidden`. Nothing is stored."
    ),
    response_model=ProviderTest,
    responses=problems(400, 413, 415),
)
async def test(
    service: ServiceDep, tenant: DefineTenant, principal: PrincipalDep, body: ProviderBody
) -> ProviderTest:
    from bottega.model_services import Described, listed_models

    await check_address_of(service, tenant, body)
    async with service.database.begin(tenant) as tx:
        caller = Caller(service, tx, tenant, principal)
        definition = await prepare(caller, body.name or "test", body)
        tenant_label = await tenant_name(caller)
    outgoing = service.outgoing
    hosts = outgoing.model_hosts
    described = Described("test", definition, outgoing.secrets, tenant, tenant_label, {}, hosts)
    look_up = partial(outgoing.egress.lookups.addresses, str(tenant))
    # Use a separate client, so that no tool can reuse a connection of this test to loopback.
    egress = Egress(await hosts.allowed(), resolve=look_up)
    began = monotonic()
    models: Sequence[str] = ()
    error = None
    try:
        async with outgoing.egress.turn(str(tenant)), aclosing(egress):
            models = await listed_models(await described.spec(), egress, str(tenant))
    except EgressRefusedError as refused:
        raise InvalidInputError(
            refused.detail, code="egress_forbidden", pointer="/base_url"
        ) from None
    except (InvalidInputError, UnavailableError) as failed:
        error = failed.detail
    took_ms = round(1000 * (monotonic() - began))
    return ProviderTest(ok=error is None, models=list(models), error=error, latency_ms=took_ms)


health_router = APIRouter(prefix="/v1/provider-health", tags=["providers"])


@health_router.get(
    "",
    operation_id="get_provider_health",
    summary="Read the state of all model servers",
    description=(
        "Shows breakers, model calls and last tries, as `GET /v1/providers/{name}` does, for the "
        f"operator's providers and the tenant's first {_MOST} providers."
    ),
    response_model=ProvidersHealth,
    responses=problems(),
)
async def get_provider_health(
    service: ServiceDep, tx: Transaction, tenant: Tenant, principal: PrincipalDep
) -> dict[str, Any]:
    own = await known_providers(tx, tenant, None)
    shown = {each["name"]: each for each in _listed(service)}
    shown |= {name: {"owner": "tenant", "models": each.models} for name, each in own.items()}
    found = await _health(Caller(service, tx, tenant, principal), shown)
    return {"items": [{"name": name, **found[name]} for name in sorted(found)]}


default_router = APIRouter(prefix="/v1/default-model", tags=["providers"])


@default_router.put(
    "",
    operation_id="set_default_model",
    summary="Choose the model of agents that name no model",
    description=(
        "Applies to runs that are accepted from now on. Earlier runs and their retries keep their "
        "model. `GET /v1/info` shows the choice."
    ),
    response_model=ChosenModel,
    responses=problems(400, 413, 415),
)
async def set_default_model(
    service: ServiceDep, tx: Transaction, tenant: DefineTenant, actor: Actor, body: DefaultModel
) -> ChosenModel:
    name, _, model = body.model.partition("/")
    known = {**service.settings.operator_providers, **await known_providers(tx, tenant, [name])}
    reference = f"{name}:{model}"
    try:
        checked(reference, known)
    except InvalidInputError as error:
        raise InvalidInputError(error.detail, code=error.code, pointer="/model") from None
    await store.set_default_model(tx, tenant, reference)
    await audit.note(tx, tenant, actor, "default_model.set", body.model)
    return ChosenModel(model=body.model)
