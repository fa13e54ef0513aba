"""Settings of model servers."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings

from bottega.definitions.models import DEFAULT, KnownProvider
from bottega.settings.providers import OperatorProvider
from bottega.settings.texts import ApiKey, BaseUrl
from bottega.tools.secrets import of_tenant

DEMO_MODEL_NAME = "demo"
OPENAI_URL = "https://api.openai.com/v1"
_DEMO_URL = "http://127.0.0.1/v1"


class ModelSettings(BaseSettings):
    """A group of :class:`bottega.settings.Settings`."""

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
            "key: {secret: NAME}, …} as in POST /v1/providers. A tenant's own of the same name "
            "wins. The one named default replaces OPENAI_BASE_URL and OPENAI_API_KEY.",
        ),
    ]
    secret_hosts: Annotated[
        dict[str, list[str]],
        Field(
            default_factory=dict,
            description="Hosts that secrets of the environment may be sent to, as JSON: "
            '{"NAME": ["api.example.com"]}; TENANT__NAME for other tenants than default.',
        ),
    ]
    model: Annotated[str, Field(description="Default model of agents.")] = "gpt-5-mini"
    model_timeout_s: Annotated[
        float, Field(gt=0, description="Longest silence of a model's stream, in seconds.")
    ] = 120.0
    model_patience_s: Annotated[
        float,
        Field(
            ge=0,
            le=604800,
            description="Seconds from a call's first failure for which a run waits for a model "
            "that is down; 0: no wait. Agents may set their own.",
        ),
    ] = 600.0
    demo_latency_ms: Annotated[
        float, Field(ge=0, le=60_000, description="Milliseconds before the demo model answers.")
    ] = 250.0

    @field_validator("providers")
    @classmethod
    def _once(cls, providers: list[OperatorProvider]) -> list[OperatorProvider]:
        names = [each.name for each in providers]
        if len(set(names)) < len(names):
            raise ValueError("two providers have the same name")
        return providers

    @property
    def uses_demo_model(self) -> bool:
        """True if no model server is set: neither a key, a base URL nor a provider."""
        return not (self.openai_api_key or self.openai_base_url or self.providers)

    @property
    def default_model(self) -> str:
        return DEMO_MODEL_NAME if self.uses_demo_model else self.model

    @property
    def operator_providers(self) -> Mapping[str, KnownProvider]:
        """The operator's providers by name, as references of agents see them."""
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
        """Return the hosts that a tenant's secret may be sent to; ``None``: none are set."""
        return self.secret_hosts.get(of_tenant(tenant, name))
