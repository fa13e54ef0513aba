"""Providers (model servers) on the wire."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from bottega.api.schemas.base import Answer, Body, Name
from bottega.settings.providers import Dialect, ModelPrice, ProviderContent
from bottega.tools.http import SecretHeader


class ProviderBody(ProviderContent, Body):
    """A provider's definition; its name may be repeated."""

    name: Annotated[Name | None, Field(description="Null, or the name in the path.")] = None


class NewProvider(ProviderBody):
    """A provider to create."""

    name: Name


class ProviderSummary(Answer):
    """One version of a provider, without its headers, models and prices."""

    name: str
    version: Annotated[int, Field(description="0: it is the operator's.")]
    owner: Annotated[
        Literal["tenant", "operator"],
        Field(description="The operator's are for all tenants; their settings are not shown."),
    ] = "tenant"
    dialect: Dialect
    base_url: str | None
    key: SecretHeader | None
    max_concurrent: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    timeout_s: float | None
    structured_output: Literal["native", "tool", "prompt"] | None
    max_tokens_field: Literal["max_completion_tokens", "max_tokens"] | None
    created_at: Annotated[
        datetime | None, Field(description="Time at which this version was stored.")
    ]


class Provider(ProviderSummary):
    """One version of a provider."""

    headers: dict[str, str | SecretHeader]
    models: list[str] | None
    prices: dict[str, ModelPrice] | None


class ModelBreaker(Answer):
    """The circuit breaker of a model, for the calls of this tenant by all workers."""

    state: Annotated[
        Literal["closed", "open", "half_open"],
        Field(description="`open`: no call is sent. `half_open`: one call is tried."),
    ]
    retry_at: Annotated[
        datetime | None, Field(description="When the next call is tried; null: it is closed.")
    ] = None


class ModelCalls(Answer):
    """Model calls of this tenant in all workers, as of their last reports."""

    under_way: int = 0
    waiting: Annotated[
        int, Field(description="Calls that wait for a limit of the provider, or for its breaker.")
    ] = 0


class ProviderHealth(Provider):
    """A provider, and how its server does."""

    breaker: Annotated[
        dict[str, ModelBreaker],
        Field(description="By model: those that the provider lists, and all that are not closed."),
    ]
    calls: ModelCalls
