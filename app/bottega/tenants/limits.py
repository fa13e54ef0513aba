"""Limits of a key: agents, models, addresses, requests per second, and tokens per day."""

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Annotated, NamedTuple
from uuid import UUID

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from bottega.errors import ForbiddenError, InvalidInputError
from bottega.json_schema.values import WHOLE

_Names = Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=20)]


def _text(value: object) -> object:
    """Refuse numbers, because Python would accept a number as a network."""
    if not isinstance(value, str | IPv4Network | IPv6Network):
        raise PydanticCustomError("network", "a network must be a text, such as 10.0.0.0/8")
    return value


_Network = Annotated[IPv4Network | IPv6Network, BeforeValidator(_text)]
_Networks = Annotated[list[_Network], Field(max_length=20)]


class RequestLimits(BaseModel):
    """Limits of a key, of the key's tokens, and of the keys that the key makes; null: no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    agents: _Names | None = None
    """Names of the agents that runs of the key may use; no others are allowed."""
    models: _Names | None = None
    """Names of the models that agents in runs of the key may use; no others are allowed."""
    addresses: _Networks | None = None
    """Networks (CIDR) from which requests may come; the key refuses all other addresses."""
    requests_per_s: Annotated[float, Field(gt=0, le=100_000)] | None = None
    """Requests per second to each API process; a burst may have twice as many requests."""
    tokens_per_day: Annotated[int, Field(strict=True, gt=0, le=2**53), WHOLE] | None = None
    """Tokens of all the key's runs in a day (UTC). Tokens of the tenant's own model servers do not
    count."""

    def need_no_limit_of_runs(self) -> None:
        """Refuse a key that limits runs, because schedules and batches start runs without limits.

        Raises:
            ForbiddenError: ``beyond_limits``.
        """
        if any(name in self.limits_set for name in ("agents", "models", "tokens_per_day")):
            raise ForbiddenError(
                "a key with limits of agents, models or tokens may not make schedules or "
                "repeat batches, because the key's limits do not apply to their runs: use "
                "another key",
                code="beyond_limits",
            )

    @property
    def limits_set(self) -> dict[str, JsonValue]:
        """The limits that are not null, as JSON."""
        return self.model_dump(
            mode="json", include={*RequestLimits.model_fields}, exclude_none=True
        )

    def need_address(self, address: IPv4Address | IPv6Address | None) -> None:
        """Check that a request comes from an allowed network.

        Raises:
            ForbiddenError: ``address_not_allowed``.
        """
        if self.addresses is None:
            return
        if address is None or not any(address in network for network in self.addresses):
            raise ForbiddenError(
                f"the limits of this key do not include the address {address or 'of the client'}",
                code="address_not_allowed",
            )

    def need_names(self, agents: Iterable[str], models: Iterable[str]) -> None:
        """Check that a run has only agents and models that the limits allow.

        Raises:
            ForbiddenError: ``beyond_limits``.
        """
        named = (("agent", agents, self.agents), ("model", models, self.models))
        for what, names, allowed in named:
            if allowed is not None and (others := sorted({*names} - {*allowed})):
                raise ForbiddenError(
                    f"the limits of this key do not include the {what} '{others[0]}', which the "
                    "run would use",
                    code="beyond_limits",
                )


class Payer(NamedTuple):
    """API key that pays for a run's tokens, with the key's limit of tokens per day."""

    key: str
    tokens_per_day: int


class StoredLimits(RequestLimits):
    """Limits of a stored key.

    Attributes:
        payer: the key whose limits of rate and daily tokens the requests use up: this key, or the
            key that created this key.
    """

    payer: UUID | None = None

    def pinned(self, versions: Mapping[str, object]) -> dict[str, object]:
        """Return a run's pinned versions and, if the key limits tokens per day, the payer."""
        pinned = {name: value for name, value in versions.items() if name != "payer"}
        if self.tokens_per_day is not None:
            pinned["payer"] = Payer(str(self.payer), self.tokens_per_day)._asdict()
        return pinned

    def narrowed(self, new: RequestLimits) -> "StoredLimits":
        """Return the limits of a new key that this key creates, narrowed to this key's limits.

        Raises:
            InvalidInputError: the new key's limits are wider than this key's limits.
        """
        for name in ("agents", "models", "addresses"):
            own, new_value = getattr(self, name), getattr(new, name)
            if own is None or new_value is None:
                continue
            if wider := [each for each in new_value if not _is_in(each, own)]:
                raise InvalidInputError(
                    f"the limits of your own key do not include {wider[0]}: leave it out",
                    pointer=f"/limits/{name}",
                )
        values: dict[str, object] = {**self.limits_set, **new.limits_set}
        for name in ("requests_per_s", "tokens_per_day"):
            amounts = [getattr(self, name), getattr(new, name)]
            values[name] = min((each for each in amounts if each is not None), default=None)
        is_shared = self.requests_per_s is not None or self.tokens_per_day is not None
        return StoredLimits.model_validate(values | {"payer": self.payer if is_shared else None})


def _is_in(value: str | _Network, allowed: Iterable[str | _Network]) -> bool:
    if isinstance(value, str):
        return value in allowed
    same = [each for each in allowed if type(each) is type(value)]
    return any(value.subnet_of(each) for each in same)  # type: ignore[arg-type]


NO_LIMITS = StoredLimits()
