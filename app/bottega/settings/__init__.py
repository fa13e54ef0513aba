"""Settings: read once, at the three entry points, and passed as arguments from there."""

import ipaddress
import os
import re
from base64 import b64decode
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Self
from urllib.parse import unquote

from dotenv import dotenv_values
from pydantic import Field, SecretStr, StringConstraints, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from bottega.errors import InvalidInputError
from bottega.redaction import Redactor
from bottega.settings.clients import RateSettings
from bottega.settings.database import DatabaseSettings
from bottega.settings.episodes import EpisodeSettings
from bottega.settings.files import FileSettings
from bottega.settings.learning import LearningSettings
from bottega.settings.mcp import McpSettings
from bottega.settings.memory import BUILTIN, MemorySettings
from bottega.settings.models import ModelSettings
from bottega.settings.observing import ObservingSettings
from bottega.settings.retention import RetentionSettings
from bottega.settings.subagents import SubagentSettings
from bottega.tools.secrets import TenantSecrets

if TYPE_CHECKING:
    from bottega.secrets.sealing import Keyring

_LOGIN = re.compile(r"//([^/:?#\s]*):([^?\s]*)@")
"""User and password of a URL."""
_OPTION = re.compile(r"\b(user|\w*password)\s*=\s*(?:'((?:[^'\\]|\\.)*)|([^&'\s]+))")
"""User and password among a URL's options, or among libpq's pairs."""
_ESCAPED = re.compile(r"\\(.)")
_OF_OBJECT_STORES = (
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_STORAGE_SAS_TOKEN"),
)
"""Variables with secrets that the object store's library reads itself."""
_ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")


class Settings(
    DatabaseSettings,
    ModelSettings,
    FileSettings,
    McpSettings,
    MemorySettings,
    LearningSettings,
    EpisodeSettings,
    SubagentSettings,
    RetentionSettings,
    ObservingSettings,
    RateSettings,
):
    """Environment variables with the prefix ``BOTTEGA_`` (and a ``.env`` file).

    Without the prefix are names shared with other tools: ``DATABASE_URL``, ``OPENAI_API_KEY``,
    ``OPENAI_BASE_URL``. ``bottega settings`` prints all, with secrets masked.
    """

    model_config = SettingsConfigDict(
        env_prefix="BOTTEGA_",
        env_file=".env",
        extra="ignore",
        frozen=True,
        populate_by_name=True,
        env_ignore_empty=True,
        hide_input_in_errors=True,
    )

    host: Annotated[str, Field(description="Address that the API listens on.")] = "127.0.0.1"
    port: Annotated[
        int, Field(ge=0, le=65535, description="Port of the API; 0 picks a free one.")
    ] = 8400
    bootstrap_key: Annotated[
        SecretStr | None,
        Field(description="Admin key of the tenant default; `bottega migrate` stores it."),
    ] = None
    worker_concurrency: Annotated[
        int,
        Field(
            ge=2,
            le=1000,
            description=(
                "Concurrent runs of one worker process. The last fifth of these places is for "
                "tenants without a run in it, unless there is only one tenant."
            ),
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
        Field(ge=0, le=600, description="Seconds for runs to end when their worker stops."),
    ] = 5.0
    max_crashes: Annotated[
        int, Field(ge=1, le=100, description="Crashes of its workers after which a run fails.")
    ] = 5
    run_timeout_s: Annotated[
        float, Field(gt=0, le=604800, description="Default time limit of a run, in seconds.")
    ] = 3600.0
    queue_timeout_s: Annotated[
        float,
        Field(
            gt=0, le=604800, description="Longest time that a run waits for a worker, in seconds."
        ),
    ] = 86_400.0
    webhook_secret: Annotated[
        SecretStr | None,
        Field(
            description=(
                "Signs the default tenant's webhooks until it creates its own secret: "
                "whsec_ and base64 of 24 to 64 bytes."
            )
        ),
    ] = None
    secrets_key: Annotated[
        SecretStr | None,
        Field(
            description=(
                "Seals tenants' secrets (/v1/secrets): 32 random bytes in base64. Several, "
                "separated by commas: the first seals, all open."
            )
        ),
    ] = None
    heartbeat_s: Annotated[
        float,
        Field(gt=0, le=300, description="Longest silence on an event stream, in seconds."),
    ] = 15.0
    slow_reader_s: Annotated[
        float,
        Field(
            gt=0,
            le=300,
            description="Seconds after which a client that reads nothing is disconnected.",
        ),
    ] = 10.0
    concurrent_runs: Annotated[
        int,
        Field(ge=1, le=1_000_000, description="Concurrent runs of a tenant; others wait."),
    ] = 100
    queued_runs: Annotated[
        int,
        Field(ge=1, le=1_000_000, description="Waiting runs of a tenant."),
    ] = 10_000
    tokens_per_day: Annotated[
        int | None,
        Field(
            ge=1,
            description="Tokens per day (UTC) of a tenant's runs. Unset: no limit.",
        ),
    ] = None
    cost_per_day: Annotated[
        Decimal | None,
        Field(
            gt=0,
            le=1_000_000,
            description="US dollars per day (UTC) of a tenant's runs. Calls of models without a "
            "known price count as free. Unset: no limit.",
        ),
    ] = None
    max_body_bytes: Annotated[
        int, Field(ge=1024, description="Largest request body, in bytes.")
    ] = 1_048_576
    request_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            le=3600,
            description="Seconds for a request's head to arrive, and again for its body.",
        ),
    ] = 20.0
    max_connections: Annotated[
        int,
        Field(
            ge=1,
            description="Concurrent connections of all clients; at most half of the file "
            "descriptors (ulimit -Hn). Each address may have a quarter of them.",
        ),
    ] = 10_000
    trusted_proxies: Annotated[
        list[str],
        NoDecode,
        Field(
            default_factory=list,
            description="Addresses and CIDRs of proxies: they may have more than a quarter of the "
            "connections, and name their clients' addresses in X-Forwarded-For.",
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
            description="Headers by which chat products name the end user to OpenAI's API, the "
            "first that is there counts. Empty: only a request's body names a user.",
        ),
    ]
    egress_allow: Annotated[
        list[str],
        NoDecode,
        Field(
            default_factory=list,
            description="Hosts, addresses and CIDRs that tools may reach although they are not "
            "public.",
        ),
    ]

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
                    "echo whsec_$(openssl rand -base64 32)"
                )
        return secret

    @field_validator("secrets_key")
    @classmethod
    def _keys_of_secrets(cls, keys: SecretStr | None) -> SecretStr | None:
        if keys is not None:
            from bottega.secrets.sealing import Keyring

            try:
                Keyring.parse(keys.get_secret_value())
            except ValueError:
                raise ValueError(
                    "BOTTEGA_SECRETS_KEY must be 32 random bytes in base64, or several such keys "
                    "separated by commas: openssl rand -base64 32"
                ) from None
        return keys

    @field_validator("bootstrap_key")
    @classmethod
    def _a_good_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not re.fullmatch(r"[!-~]{32,256}", key.get_secret_value()):
            raise ValueError(
                "BOTTEGA_BOOTSTRAP_KEY must be 32 to 256 visible ASCII characters without spaces: "
                "openssl rand -hex 32"
            )
        return key

    @field_validator("host")
    @classmethod
    def _known_host(cls, host: str) -> str:
        try:
            return str(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host))
        except ValueError:
            raise ValueError("must be an address: 127.0.0.1, or 0.0.0.0 for all") from None

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
    def on_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def lease_s(self) -> float:
        """Seconds that a worker's lease lasts after a report; the sweep needs the rest."""
        return self.takeover_s / 1.5

    @property
    def run_limits(self) -> dict[str, int | None]:
        """Limits of a tenant's runs, which the database enforces."""
        return {
            "concurrent_runs": self.concurrent_runs,
            "queued_runs": self.queued_runs,
            "tokens_per_day": self.tokens_per_day,
            "cost_per_day": int(self.cost_per_day * 10**9) if self.cost_per_day else None,
            "memory_inline_bytes": self.memory_inline_bytes,
            "storage_bytes": self.tenant_storage_bytes,
        }


def keyring(settings: Settings) -> "Keyring | None":
    """Return the keys that seal tenants' secrets; ``None``: none are set."""
    if settings.secrets_key is None:
        return None
    from bottega.secrets.sealing import Keyring

    return Keyring.parse(settings.secrets_key.get_secret_value())


def secrets() -> TenantSecrets:
    """Read tenants' secrets from the environment and a ``.env`` file."""
    return TenantSecrets({**dotenv_values(".env"), **os.environ})


def redactor(settings: Settings) -> Redactor:
    """Make a redactor of all secrets of this process, for its own log.

    Raises:
        InvalidInputError: as :class:`TenantSecrets`.
    """
    addresses = ("database_url", "listen_url")  # only partly secret
    values = [getattr(settings, name) for name in Settings.model_fields if name not in addresses]
    hidden = [value.get_secret_value() for value in values if isinstance(value, SecretStr)]
    hidden += [value.removeprefix("whsec_") for value in hidden]
    hidden += [secret for each in settings.mcp_stdio.values() for secret in each.secrets]
    hidden += (settings.secrets_key.get_secret_value() if settings.secrets_key else "").split(",")
    hidden += [os.environ.get(name, "") for name in _OF_OBJECT_STORES]
    urls = [getattr(settings, name) for name in addresses]
    known = [url.get_secret_value() for url in urls if url is not None]
    known += [settings.openai_base_url or "", settings.embedding_base_url or ""]
    passwords = {password for address in known for password in _passwords(address)}
    return Redactor([*secrets().values(), *hidden, *passwords])


def _passwords(address: str) -> set[str]:
    """Return the passwords in an address, as written and decoded. The rest is not secret."""
    options = [(name, quoted or plain) for name, quoted, plain in _OPTION.findall(address)]
    users = {user for user, _ in _LOGIN.findall(address)}
    users |= {value for name, value in options if name == "user"}
    found = {password for _, password in _LOGIN.findall(address)}
    found |= {value for name, value in options if name != "user"}
    found -= users  # such as postgres:postgres
    return found | {unquote(each) for each in found} | {_ESCAPED.sub(r"\1", each) for each in found}
