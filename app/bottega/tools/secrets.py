"""Tenants' secrets in the operator's environment variables, and rules for tools' header fields.

Definitions of agents contain only the names of secrets, not the values.
"""

import re
from collections.abc import Callable, Mapping

from bottega.errors import InvalidInputError
from bottega.redaction import SHORTEST, is_vocabulary

PREFIX = "BOTTEGA_SECRET_"
_HOSTS = f"{PREFIX}HOSTS"
"""Name of a variable that is a setting, not a secret."""
DEFAULT = "default"
"""The only tenant whose variables do not contain the tenant's name."""

# ``__`` separates the tenant's name from the secret's name, so neither may contain ``__``.
_WORDS = "[A-Z](?:_?[A-Z0-9])*"
_NAMED = re.compile(f"(?:(?P<tenant>{_WORDS})__)?(?P<name>{_WORDS})", re.ASCII)


def variable(tenant: str, name: str) -> str:
    """Return the name of the environment variable that has a tenant's secret."""
    return PREFIX + of_tenant(tenant, name)


def of_tenant(tenant: str, name: str) -> str:
    """Return ``NAME`` for the default tenant, ``TENANT__NAME`` for any other tenant."""
    return name if tenant == DEFAULT else f"{_spelled(tenant)}__{name}"


def _spelled(tenant: str) -> str:
    return tenant.upper().replace("-", "_")


class TenantSecrets:
    """Secrets in ``BOTTEGA_SECRET_NAME`` (tenant ``default``) and ``BOTTEGA_SECRET_TENANT__NAME``.

    Raises:
        InvalidInputError: a variable has an invalid name, or a value that cannot be redacted: it is
            too short, or is a word that Bottega's texts use (``secret_is_vocabulary``).
    """

    def __init__(self, environment: Mapping[str, str | None]) -> None:
        self._values: dict[tuple[str, str], str] = {}
        for key, value in environment.items():
            if key.startswith(PREFIX) and key != _HOSTS and value:
                self._values[_owner(key)] = _fit_to_be_removed(key, value.strip())

    def of(self, tenant: str) -> Callable[[str], str]:
        """Return a function that returns the value of a tenant's secret, by the secret's name.

        The function raises InvalidInputError (``unknown_secret``) for an unknown name.
        """

        def secret(name: str) -> str:
            value = self._values.get((_spelled(tenant), name))
            if value is None:
                raise InvalidInputError(
                    f"the secret '{name}' is not configured for the tenant '{tenant}': store it by "
                    f"PUT /v1/secrets/{name}, or the operator of this server has to set "
                    f"{variable(tenant, name)}",
                    code="unknown_secret",
                )
            return value

        return secret

    def values(self, tenant: str | None = None) -> list[str]:
        """Return the values to redact: the secrets of a tenant, or of all tenants."""
        owner = None if tenant is None else _spelled(tenant)
        return [value for (of, _), value in self._values.items() if owner in (None, of)]


def _owner(key: str) -> tuple[str, str]:
    match = _NAMED.fullmatch(key.removeprefix(PREFIX))
    if match is None:
        raise InvalidInputError(
            f"{key} is neither {PREFIX}NAME nor {PREFIX}TENANT__NAME: use capital letters and "
            "digits, with single _ between them"
        )
    return match["tenant"] or _spelled(DEFAULT), match["name"]


def _fit_to_be_removed(key: str, value: str) -> str:
    scheme, _, credential = value.rpartition(" ")
    if len(credential if len(scheme.split()) < 2 else value) < SHORTEST:  # Bearer …
        raise InvalidInputError(
            f"{key} is shorter than {SHORTEST} characters, too short to be redacted from logs and "
            "answers: use a longer secret"
        )
    refuse_vocabulary(key, value)
    return value


def refuse_vocabulary(name: str, value: str) -> None:
    """Refuse a secret that Bottega's texts use as a word: its redaction would change many texts.

    Raises:
        InvalidInputError: ``secret_is_vocabulary``: the secret is such a word, a date or a time.
    """
    if is_vocabulary(value):
        raise InvalidInputError(
            f"the value of {name} is a date, a time, or a word of Bottega's answers, events or log "
            "lines, so it cannot be removed from texts: use a random secret",
            code="secret_is_vocabulary",
        )


_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VALUE = re.compile(r"(?:[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)?")
_LONGEST_VALUE = 8192

# Only the HTTP client sets these headers: they define a message's target, length and encoding.
_OURS = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "expect",
        "host",
        "http2-settings",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_CREDENTIALS = frozenset(
    {"api-key", "authorization", "cookie", "x-access-token", "x-api-key", "x-auth-token"}
)
_IN_QUERIES = frozenset(
    {
        "access-token",
        "api-key",
        "apikey",
        "auth-token",
        "client-secret",
        "password",
        "secret",
        "token",
    }
)


def check_header(name: str, value: str) -> None:
    """Refuse a header field that is malformed, or that only the HTTP client may set.

    Raises:
        InvalidInputError: the field is refused. The error's text does not contain its value.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInputError(f"{name[:100]!r} is not a valid header name")
    if name.lower() in _OURS or name.lower().startswith("proxy-"):
        raise InvalidInputError(f"the header {name} cannot be set: only the HTTP client sets it")
    if len(value) > _LONGEST_VALUE or not _VALUE.fullmatch(value):
        raise InvalidInputError(
            f"the value of the header {name} must be printable ASCII without "
            f"blanks at its ends, and have at most {_LONGEST_VALUE} characters"
        )


def carries_credentials(name: str) -> bool:
    """Return true if a header's value is always a credential."""
    return name.lower() in _CREDENTIALS


def is_credential_in_query(key: str) -> bool:
    """Return true if the value of this key in a URL's query is always a credential."""
    return key.lower().replace("_", "-") in _IN_QUERIES
