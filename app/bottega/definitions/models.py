"""References of agents to models: ``MODEL``, ``provider/MODEL``, ``provider:MODEL``. Pure."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from bottega.errors import InvalidInputError

DEFAULT = "default"
"""Name of the provider of models that name none."""
MOST_MODELS = 10
"""Most models of one agent."""


class ModelName(NamedTuple):
    """A model of a provider; ``model`` is ``None`` for the provider's default model."""

    provider: str
    model: str | None


class KnownProvider(NamedTuple):
    """The part of a provider that references depend on.

    Attributes:
        version: of a tenant's provider; ``None``: the operator's.
        models: its only models; ``None``: any.
        headers, base_url, prices: as its definition has them.
    """

    version: int | None
    dialect: Literal["chat", "responses", "anthropic", "gemini"]
    models: Sequence[str] | None = None
    headers: Mapping[str, Any] = MappingProxyType({})
    base_url: str | None = None
    prices: Mapping[str, Any] | None = None


def listed(model: str | Sequence[str] | None) -> Sequence[str | None]:
    """Return an agent's models in order; ``None`` stands for the default one."""
    return (model,) if model is None or isinstance(model, str) else tuple(model)


def named_by(reference: str | None, providers: Collection[str]) -> ModelName:
    """Return the provider and the model of a reference.

    The part before the first slash is a provider only if there is one of this name: names of models
    have slashes too. The part before a colon must be a provider.

    Raises:
        InvalidInputError: ``unknown_provider``.
    """
    if reference is None:
        return _of_default(None, providers)
    before, slash, rest = reference.partition("/")
    if slash and rest and before in providers:
        return ModelName(before, rest)
    before, colon, rest = before.partition(":")
    if not colon:
        return _of_default(reference, providers)
    if before not in providers or not rest + slash:
        raise InvalidInputError(
            f"the model '{reference}' names the provider '{before}', which does not exist: create "
            f"it, or write {DEFAULT}/{reference} for a model of the provider '{DEFAULT}'",
            code="unknown_provider",
        )
    return ModelName(before, reference[len(before) + 1 :])


def _of_default(model: str | None, providers: Collection[str]) -> ModelName:
    if DEFAULT not in providers:
        about = "an agent without a model" if model is None else f"the model '{model}'"
        raise InvalidInputError(
            f"{about} needs a provider: write provider/MODEL, or create one named '{DEFAULT}'",
            code="unknown_provider",
        )
    return ModelName(DEFAULT, model)


def checked(reference: str | None, providers: Mapping[str, KnownProvider]) -> ModelName:
    """Return what :func:`named_by` does, if the provider has the model.

    Raises:
        InvalidInputError: ``unknown_provider``, ``unknown_model``.
    """
    name = named_by(reference, providers)
    models = providers[name.provider].models
    if models is not None and name.model is not None and name.model not in models:
        raise InvalidInputError(
            f"the provider '{name.provider}' does not list the model '{name.model}': its models "
            f"are {', '.join(models) or 'none'}",
            code="unknown_model",
        )
    return name
