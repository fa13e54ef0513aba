"""Tenants' secrets in environment variables."""

import pytest

from bottega.errors import InvalidInputError
from bottega.tools.secrets import TenantSecrets, variable

ENVIRONMENT = {
    "BOTTEGA_SECRET_KEY": "of-default",
    "BOTTEGA_SECRET_ACME__KEY": "of-acme-1",
    "BOTTEGA_SECRET_ACME_2__OTHER_KEY": "of-acme-2",
    "BOTTEGA_SECRET_EMPTY": "",
    "OTHER": "x",
}


@pytest.mark.parametrize(
    ("tenant", "name", "value"),
    [
        ("default", "KEY", "of-default"),
        ("acme", "KEY", "of-acme-1"),
        ("acme-2", "OTHER_KEY", "of-acme-2"),
        ("acme-2", "KEY", None),
        ("acme", "OTHER_KEY", None),
        ("default", "ACME__KEY", None),
        ("default", "OTHER_KEY", None),
        ("acme-2-other", "KEY", None),
        ("default", "EMPTY", None),
        ("", "KEY", None),
    ],
)
def test_each_tenant_has_its_own_secret(tenant: str, name: str, value: str | None) -> None:
    assert found(TenantSecrets(ENVIRONMENT), tenant, name) == value


def found(secrets: TenantSecrets, tenant: str, name: str) -> str | None:
    try:
        return secrets.of(tenant)(name)
    except InvalidInputError:
        return None


@pytest.mark.parametrize(
    ("tenant", "variable_"),
    [("default", "BOTTEGA_SECRET_MISSING"), ("acme-2", "BOTTEGA_SECRET_ACME_2__MISSING")],
)
def test_error_names_the_variable_of_the_tenant(tenant: str, variable_: str) -> None:
    with pytest.raises(InvalidInputError, match=f"has to set {variable_}$") as raised:
        TenantSecrets(ENVIRONMENT).of(tenant)("MISSING")
    assert raised.value.code == "unknown_secret"


def test_secrets_of_two_tenants_never_share_a_variable() -> None:
    tenants = ["default", "a", "a-b", "a--b", "a-", "b", "a-b-c", "default-a", "ab", "a0"]
    names = ["A", "B", "A_B", "B_C", "A_B_C", "C", "AB", "A0"]
    owners: dict[str, set[tuple[str, str]]] = {}
    for tenant in tenants:
        for name in names:
            key = variable(tenant, name)
            try:
                secrets = TenantSecrets({key: f"{tenant}/{name}/value"})
            except InvalidInputError:
                continue  # an ambiguous name is refused
            read = {(t, n) for t in tenants for n in names if found(secrets, t, n)}
            assert read == {(tenant, name)}
            owners.setdefault(key, set()).add((tenant, name))
    assert all(len(found) == 1 for found in owners.values())
    assert len(owners) >= (len(tenants) - 2) * len(names)


@pytest.mark.parametrize(
    "key",
    ["BOTTEGA_SECRET_", "BOTTEGA_SECRET_lower", "BOTTEGA_SECRET_A__B__C", "BOTTEGA_SECRET__A"],
)
def test_variable_of_no_tenant_is_refused(key: str) -> None:
    with pytest.raises(InvalidInputError, match="neither"):
        TenantSecrets({key: "long-enough"})


@pytest.mark.parametrize("value", ["1234567", "Bearer 1234567", " 1234567 "])
def test_short_secret_is_refused_without_being_shown(value: str) -> None:
    with pytest.raises(InvalidInputError, match="shorter than 8") as refused:
        TenantSecrets({"BOTTEGA_SECRET_KEY": value})
    assert "1234567" not in refused.value.detail


@pytest.mark.parametrize("value", ["12345678", "Bearer 12345678", "a bit of a sentence"])
def test_secret_of_eight_characters_is_accepted(value: str) -> None:
    assert TenantSecrets({"BOTTEGA_SECRET_KEY": value}).of("default")("KEY") == value
