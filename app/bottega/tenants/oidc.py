"""Sign-in of people by OpenID Connect, with tokens of the operator's identity provider.

A token is a JSON Web Token that the issuer signed with an asymmetric key. A mapping of the token's
claims (``BOTTEGA_OIDC_CLAIMS``) determines tenant, user and roles; the mapping is data, never code.
The issuer's discovery document contains the URL of the issuer's keys (OpenID Connect Discovery
1.0). When a token names an unknown key, the process reads the issuer's keys again, but at most
every ten seconds, because forged tokens must not cause load for the issuer.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID, uuid5

import asyncpg
import httpx2
from cachetools import TTLCache
from pydantic_core import from_json

from bottega.clock import monotonic
from bottega.errors import UnauthenticatedError, UnavailableError
from bottega.tenants.claims import ClaimMapping
from bottega.tenants.keys import ROLES, SCOPES, Role, Scope
from bottega.tenants.limits import NO_LIMITS, StoredLimits
from bottega.tenants.tokens import TokenIdentity, head_of, is_token

if TYPE_CHECKING:
    import jwt  # loaded with the first token; see bottega.tenants.tokens

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512")
"""Accepted algorithms. All are asymmetric, because a public key must not be able to sign tokens."""
SKEW_S = 60.0
"""Allowed difference of clocks in seconds, in checks of ``exp`` and ``nbf``."""
_LOOK_AGAIN_S = 10.0
"""Minimum time in seconds between two readings of the issuer's keys."""
_PATIENCE_S = 5.0
_MOST_BYTES = 256 * 1024
_MOST_KEYS = 50
_TENANTS = 10_000
_TENANT_S = 60.0
_FIND_TENANT = "SELECT find_tenant($1)"
_NO_ANSWER = (httpx2.HTTPError, ValueError, LookupError, TypeError)


class Endpoints(NamedTuple):
    """URLs of an issuer, from its discovery document."""

    authorization: str | None
    token: str | None
    end_session: str | None


@dataclass(frozen=True, slots=True)
class Person:
    """A signed-in person.

    Attributes:
        user: the mapped user, which is also the person's name in the audit log.
        name: name that the console shows; ``user`` if the token has no name.
        scopes: scopes of all roles; ``()``: the person has no role and may only ``GET /v1/me``.
        expires_at: end of the token, in seconds of Unix time.
        limits: limits that the mapping sets. Requests and daily tokens are counted per person.
    """

    tenant_id: UUID
    user: str
    name: str
    scopes: Sequence[Scope]
    expires_at: float
    limits: StoredLimits = NO_LIMITS

    @property
    def identity(self) -> TokenIdentity:
        """Identity of the person. Nobody can revoke the identity. When it expires, streams end."""
        return TokenIdentity(self.tenant_id, None, "", self.expires_at + SKEW_S)


class SignIn:
    """Verifier of tokens of one issuer.

    Args:
        issuer: URL of the issuer, as in the claim ``iss``.
        audience: value that the claim ``aud`` of a token must contain.
    """

    def __init__(
        self,
        issuer: str,
        audience: str,
        mapping: ClaimMapping,
        pool: asyncpg.Pool,
        ticks: Callable[[], float] = monotonic,
    ) -> None:
        self._issuer = issuer
        self._audience = audience
        self._mapping = mapping
        self._pool = pool
        self._ticks = ticks
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._endpoints: Endpoints | None = None
        self._looked_at = -math.inf
        self._looking = asyncio.Lock()
        self._tenants: TTLCache[str, UUID | None] = TTLCache(_TENANTS, _TENANT_S, timer=ticks)

    async def endpoints(self) -> Endpoints:
        """Return the issuer's endpoints.

        Raises:
            UnavailableError: ``issuer_unavailable``.
        """
        if self._endpoints is None:
            await self._look()
        if self._endpoints is None:
            raise _unavailable("it did not answer a moment ago")
        return self._endpoints

    async def redeemed(self, grant: Mapping[str, str], origin: str) -> tuple[str, Person]:
        """Exchange an authorization code at the issuer for a token.

        Return the token and the person. The token is the access token or, if this server does not
        accept the access token, the id token.

        Args:
            grant: fields of the request to the issuer: code, verifier, URL of the page, client.
            origin: origin of the page, because some issuers answer only requests with an origin.

        Raises:
            UnauthenticatedError: ``bad_token``: the issuer refused the code; see :meth:`person`.
            UnavailableError: ``issuer_unavailable``.
        """
        url = (await self.endpoints()).token or ""
        form = {"grant_type": "authorization_code", **grant}
        try:
            answer = await _json("POST", url, form, {"Origin": origin})
        except httpx2.HTTPStatusError as error:
            if error.response.is_server_error:
                raise _unavailable(error) from None
            raise _bad("the issuer refused the code: sign in again") from None
        except _NO_ANSWER as error:
            raise _unavailable(error) from None
        refusal = _bad("the issuer sent no token")
        for name in ("access_token", "id_token"):
            if isinstance(text := answer.get(name), str) and is_token(text):
                try:
                    return text, await self.person(text)
                except UnauthenticatedError as error:
                    refusal = error
        raise refusal

    async def person(self, text: str) -> Person:
        """Verify a token, and return its person.

        Raises:
            UnauthenticatedError: ``token_expired``, or ``bad_token``: the issuer did not sign the
                token, or it is for a different audience, or it names no user or no existing tenant.
            UnavailableError, OSError, ...: the database is not available.
        """
        import jwt

        try:
            head = head_of(text)
            key = await self._key(head)
            claims = jwt.decode(
                text,
                key,
                algorithms=[head["alg"]],
                audience=self._audience,
                issuer=self._issuer,
                leeway=SKEW_S,
                options={"require": ["exp", "aud", "iss"]},
            )
        except jwt.ExpiredSignatureError:
            raise UnauthenticatedError("this token expired: sign in again", code="token_expired")  # noqa: B904
        except (jwt.PyJWTError, LookupError, TypeError, ValueError) as error:
            raise _bad(f"this server does not accept this token ({error})") from None
        return await self._named(claims)

    async def _named(self, claims: Mapping[str, Any]) -> Person:
        user, tenant = self._mapping.user.read(claims), self._mapping.tenant.read(claims)
        if not user or len(user[0]) > 128:
            raise _bad("this token names no user: see BOTTEGA_OIDC_CLAIMS")
        tenant_id = await self._tenant(tenant[0]) if tenant else None
        if tenant_id is None:
            raise _bad("this token names no existing tenant: see BOTTEGA_OIDC_CLAIMS")
        roles = [_role(each) for each in self._mapping.roles.read(claims)]
        scopes = {scope for role in roles if role is not None for scope in ROLES[role]}
        return Person(
            tenant_id,
            user[0],
            next(iter(self._mapping.name.read(claims)), user[0]),
            tuple(scope for scope in SCOPES if scope in scopes),
            float(claims["exp"]),
            self._limits_of(tenant_id, user[0]),
        )

    def _limits_of(self, tenant_id: UUID, user: str) -> StoredLimits:
        limits = self._mapping.limits.limits_set
        return StoredLimits(payer=uuid5(tenant_id, user), **limits) if limits else NO_LIMITS

    async def _tenant(self, name: str) -> UUID | None:
        if name not in self._tenants:
            self._tenants[name] = await self._pool.fetchval(_FIND_TENANT, name)
        return self._tenants[name]

    async def _key(self, head: Mapping[str, Any]) -> "jwt.PyJWK":
        """Return the issuer's key whose id the token's header contains."""
        if head.get("alg") not in ALGORITHMS:
            raise ValueError("its algorithm is not accepted")
        if "crit" in head:
            raise ValueError("it has a critical extension")
        name = head.get("kid")
        if name not in self._keys:
            await self._look()
        if name is None and len(self._keys) == 1:
            (key,) = self._keys.values()
        else:
            key = self._keys[name or ""]
        if key.algorithm_name != head["alg"]:
            raise ValueError("its key is for another algorithm")
        return key

    async def _look(self) -> None:
        """Read the issuer's keys, at most every ten seconds. If that fails, keep the old keys."""
        async with self._looking:
            if self._ticks() - self._looked_at < _LOOK_AGAIN_S:
                return
            self._looked_at = self._ticks()
            try:
                self._endpoints, keys = await read_issuer(self._issuer)
                self._keys = keys or self._keys
            except _NO_ANSWER as error:
                if not self._keys:
                    raise _unavailable(error) from None


async def read_issuer(issuer: str) -> tuple[Endpoints, "Mapping[str, jwt.PyJWK]"]:
    """Read an issuer's endpoints, and the public keys that verify its signatures, by id.

    Raises:
        httpx2.HTTPError, ValueError, LookupError, TypeError: the issuer gives no valid answer.
    """
    import jwt

    metadata = await _json("GET", f"{issuer.rstrip('/')}/.well-known/openid-configuration")
    if metadata["issuer"] != issuer:
        raise ValueError(f"its document names the issuer {metadata['issuer']!r}")
    endpoints = Endpoints(*(metadata.get(f"{name}_endpoint") for name in Endpoints._fields))
    listed = (await _json("GET", metadata["jwks_uri"]))["keys"]
    keys = {}
    for each in listed[:_MOST_KEYS]:
        if each.get("use", "sig") != "sig" or each.get("kty") not in ("RSA", "EC"):
            continue
        try:
            key = jwt.PyJWK(each)
        except jwt.PyJWTError:
            continue  # an unknown kind of key
        if key.algorithm_name in ALGORITHMS:
            keys[each.get("kid", "")] = key
    return endpoints, keys


async def _json(
    method: str,
    url: str,
    form: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Return a JSON response of the issuer. Use https, or http if the issuer is on this machine."""
    address = httpx2.URL(url)
    if address.scheme != "https" and address.host not in ("127.0.0.1", "localhost", "::1"):
        raise ValueError(f"{url} is not https")
    data = b""
    async with (
        httpx2.AsyncClient(timeout=_PATIENCE_S) as client,
        client.stream(method, url, data=form, headers=headers) as answer,
    ):
        answer.raise_for_status()
        async for part in answer.aiter_bytes():
            data += part
            if len(data) > _MOST_BYTES:
                raise ValueError(f"{url} is longer than {_MOST_BYTES} bytes")
    return from_json(data)


def _role(name: str) -> Role | None:
    return next((role for role in ROLES if role == name), None)


def _unavailable(why: object) -> UnavailableError:
    return UnavailableError(f"the issuer does not answer: {why}", code="issuer_unavailable")


def _bad(detail: str) -> UnauthenticatedError:
    return UnauthenticatedError(detail, code="bad_token")
