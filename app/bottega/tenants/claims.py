"""Mapping from the claims of a sign-in token to a person's tenant, user, name and roles."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bottega.tenants.limits import RequestLimits


class Source(BaseModel):
    """The source of one field of a person: a claim of the token, or a fixed value.

    Attributes:
        claim: name of the claim, or a path with dots if no claim has this name.
        values: replacement of each value of the claim; values without a replacement are ignored.
        value: the fixed value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    claim: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    values: dict[str, str] | None = None
    value: Annotated[str, Field(min_length=1, max_length=200)] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "Source":
        if (self.claim is None) == (self.value is None):
            raise ValueError("a source needs either 'claim' or 'value'")
        if self.values is not None and self.claim is None:
            raise ValueError("'values' needs a 'claim'")
        return self

    def read(self, claims: Mapping[str, Any]) -> list[str]:
        """Return the field's values; empty: no claim, or ``values`` has no replacement."""
        if self.claim is None:
            return [self.value or ""]
        found = _claim(claims, self.claim)
        listed = found if isinstance(found, list) else [found]
        texts = [each for each in listed if isinstance(each, str) and each]
        if self.values is None:
            return texts
        return [self.values[each] for each in texts if each in self.values]


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


class ClaimMapping(BaseModel):
    """The sources of all fields of a person."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant: Source = Source(claim="tenant")
    user: Source = Source(claim="sub")
    name: Source = Source(claim="name")
    roles: Source = Source(claim="roles")
    limits: RequestLimits = RequestLimits()
    """Limits of each person, in the form of a key's limits."""
