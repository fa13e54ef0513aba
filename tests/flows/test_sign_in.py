"""Tokens of an identity provider: who gets in, as whom, and which forgeries do not."""

import asyncio
import hmac
import json
import time
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import httpx2
import jwt
import pytest
import websockets
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from bottega.settings import Settings
from tests.service import Running, client_of, running, without_database
from tests.tenants import holder
from tests.waiting import until

AUDIENCE = "bottega"
CLAIMS = {
    "tenant": {"claim": "org.slug", "values": {"acme-inc": "acme"}},
    "roles": {"claim": "https://acme.example/groups", "values": {"ops": "approver"}},
}


@dataclass(slots=True)
class Issuer:
    """An identity provider on loopback.

    Attributes:
        keys: private keys by id.
        looks: requests for the keys.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    looks: int = 0
    url: str = ""
    is_away: bool = False

    def add(self, name: str, algorithm: str = "RS256") -> None:
        if algorithm.startswith("ES"):
            self.keys[name] = (algorithm, ec.generate_private_key(ec.SECP256R1()))
        else:
            self.keys[name] = (algorithm, rsa.generate_private_key(65537, 2048))

    def jwks(self) -> dict[str, Any]:
        listed = []
        for name, (algorithm, key) in self.keys.items():
            kind = jwt.algorithms.get_default_algorithms()[algorithm]
            listed.append(kind.to_jwk(key.public_key(), as_dict=True) | _of(name, algorithm))
        return {"keys": listed}

    def sign(self, name: str = "one", head: Any = (), **changed: Any) -> str:
        claims = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "ada",
            "name": "Ada L.",
            "exp": time.time() + 300,
            "org": {"slug": "acme-inc"},
            "https://acme.example/groups": ["ops", "others"],
        } | changed
        claims = {key: value for key, value in claims.items() if value is not None}
        algorithm, key = self.keys[name]
        return jwt.encode(claims, key, algorithm=algorithm, headers={"kid": name} | dict(head))

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        found: Any = {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        if path == b"/keys":
            self.looks += 1
            found = self.jwks()
        body = json.dumps(found).encode()
        status = "503 Away" if self.is_away else "200 OK"
        head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        writer.close()


def _of(name: str, algorithm: str) -> dict[str, str]:
    return {"kid": name, "alg": algorithm, "use": "sig"}


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    issuer = Issuer()
    issuer.add("one")
    async with await asyncio.start_server(issuer.answer, "127.0.0.1", 0) as server:
        issuer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield issuer


@asynccontextmanager
async def signing_in(
    settings: Settings, url: str, issuer: Issuer, **claims: Any
) -> AsyncIterator[Running]:
    """Serve people who sign in at the issuer, with a tenant acme."""
    await holder(url, "acme")
    more = {
        "oidc_issuer": issuer.url,
        "oidc_audience": AUDIENCE,
        "oidc_claims": CLAIMS | claims,
    }
    configured = Settings.model_validate(settings.model_dump() | more)
    async with running(configured, url) as server:
        yield server


async def get(server: Running, token: str, path: str = "/v1/me") -> httpx2.Response:
    async with client_of(server.port, headers={"Authorization": f"Bearer {token}"}) as client:
        return await client.get(path)


async def test_a_person_gets_in_with_the_scopes_of_the_mapped_roles(
    settings: Settings, database_url: str, issuer: Issuer
) -> None:
    async with signing_in(settings, database_url, issuer) as server:
        assert (await get(server, issuer.sign())).json() == {
            "tenant": "acme",
            "name": "Ada L.",
            "user": "ada",
            "scopes": ["approve"],
            "limits": {},
        }
        assert (await get(server, issuer.sign(), "/v1/interrupts")).status_code == 200
        assert (await get(server, issuer.sign(), "/v1/agents")).status_code == 403
        nobody = issuer.sign(**{"https://acme.example/groups": "others"})
        assert (await get(server, nobody)).json()["scopes"] == []
        assert (await get(server, nobody, "/v1/runs")).status_code == 403
        path = f"ws://127.0.0.1:{server.port}/v1/runs/{UUID(int=0)}/ws"
        for token, status in ((nobody, 403), (issuer.sign(), 404)):
            with pytest.raises(websockets.InvalidStatus) as refused:
                await websockets.connect(
                    path, additional_headers={"Authorization": f"Bearer {token}"}
                )
            assert refused.value.response.status_code == status
        async with without_database(server):  # nobody else gets as far as to an unknown path
            assert (await get(server, nobody, "/v1/nothing")).status_code == 404
        one = issuer.sign(**{"https://acme.example/groups": "ops"}, aud=["other", AUDIENCE])
        assert (await get(server, one)).json()["scopes"] == ["approve"]
        made = {"user": "bob", "actions": ["run"], "expires_in": 60}
        async with client_of(server.port, headers={"Authorization": f"Bearer {one}"}) as client:
            assert (await client.post("/v1/tokens", json=made)).status_code == 403


async def test_the_limits_of_the_mapping_are_each_person_s_own(
    settings: Settings, database_url: str, issuer: Issuer
) -> None:
    limits = {"agents": ["helper"], "requests_per_s": 0.01}  # one request at once
    roles = {"roles": {"value": "builder"}}
    async with signing_in(settings, database_url, issuer, limits=limits, **roles) as server:
        for sub in ("ada", "bob"):
            assert (await get(server, issuer.sign(sub=sub))).json()["limits"] == limits
            assert (await get(server, issuer.sign(sub=sub))).status_code == 429
        said: list[tuple[int, str]] = []
        for sub, path, body in (
            ("ann", "/v1/agents", {"name": "clerk", "system_message": "x"}),
            ("eve", "/v1/runs", {"agent": "clerk", "input": "x"}),
        ):
            headers = {"Authorization": f"Bearer {issuer.sign(sub=sub)}"}
            async with client_of(server.port, headers=headers) as client:
                answer = await client.post(path, json=body)
                said.append((answer.status_code, answer.json().get("code", "")))
        assert said == [(201, ""), (403, "beyond_limits")]


async def test_what_a_person_changes_names_the_person(
    settings: Settings, database_url: str, issuer: Issuer
) -> None:
    admin = {"roles": {"value": "admin"}, "user": {"claim": "email"}}
    async with signing_in(settings, database_url, issuer, **admin) as server:
        token = issuer.sign(email="ada@acme.example")
        async with client_of(server.port, headers={"Authorization": f"Bearer {token}"}) as client:
            made = await client.post("/v1/keys", json={"name": "x", "role": "viewer"})
            assert made.status_code == 201
            noted = (await client.get("/v1/audit?action=key.create&order=desc")).json()["items"]
            assert noted[0]["actor"] == "user:ada@acme.example"
            ticket = await client.post("/v1/ws-tickets", json={})
            assert ticket.status_code == 201, "a person watches runs in a browser"


async def test_forged_tokens_are_refused(
    settings: Settings, database_url: str, issuer: Issuer
) -> None:
    other = Issuer(url=issuer.url)
    other.add("one")
    public = issuer.keys["one"][1].public_key().public_numbers()
    issuer.add("of-ec", "ES256")
    async with signing_in(settings, database_url, issuer) as server:
        now = time.time()
        good = jwt.decode(issuer.sign(), options={"verify_signature": False})
        forged = [
            issuer.sign(iss="https://other.example"),
            issuer.sign(iss=f"{issuer.url}/"),
            issuer.sign(iss=None),
            issuer.sign(aud="other"),
            issuer.sign(aud=None),
            issuer.sign(exp=now - 70),
            issuer.sign(exp=None),
            issuer.sign(nbf=now + 90),
            issuer.sign(sub=None),
            issuer.sign(sub=7),
            issuer.sign(org={"slug": "unknown"}),
            issuer.sign(org=None),
            issuer.sign(head={"kid": "unknown"}),
            issuer.sign(head={"crit": ["exp"]}),
            other.sign(),
            other.sign(head={"jku": f"{issuer.url}/keys", "jwk": other.jwks()["keys"][0]}),
            jwt.encode(good, None, algorithm="none", headers={"kid": "one"}),  # type: ignore[arg-type]
            jwt.encode(good, str(public.n).encode() * 2, algorithm="HS256", headers={"kid": "one"}),
            jwt.encode(good, issuer.keys["one"][1], algorithm="PS256", headers={"kid": "one"}),
            with_public_key(issuer, good),
            issuer.sign(exp="tomorrow"),
            issuer.sign(exp=float("inf")),
            issuer.sign(exp=[now + 300]),
            issuer.sign(aud={"one": AUDIENCE}),
            issuer.sign(aud=[[AUDIENCE]]),
            issuer.sign(sub=["ada", "bob"] * 100 + ["x" * 129]),
            issuer.sign(sub="x" * 129),
            issuer.sign(sub=""),
            issuer.sign(org={"slug": {"slug": "acme-inc"}}),
            issuer.sign(org="acme-inc"),
            issuer.sign(head={"crit": [], "b64": False}),
            *(issuer.sign(head={"kid": kid}) for kid in ("", "ONE", "one ", "../one")),
            issuer.sign(head={"jwk": issuer.jwks()["keys"][0], "kid": "mine"}),
            f"{issuer.sign()}x",
            f"{issuer.sign().rpartition('.')[0]}.",
            f"{issuer.sign()}.{issuer.sign()}",
        ]
        for token in forged:
            answer = await get(server, token)
            assert answer.status_code == 401, (token[:80], answer.text)
            assert answer.headers["www-authenticate"].startswith("Bearer")
        huge = await get(server, issuer.sign(padding="x" * 9000))
        assert (huge.status_code, huge.json()["code"]) == (431, "headers_too_large")
        for accepted in (
            issuer.sign(exp=now - 30),
            issuer.sign(nbf=now + 30),
            issuer.sign("of-ec"),
            issuer.sign(head={"jku": "https://evil.example", "x5u": "https://evil.example"}),
        ):
            assert (await get(server, accepted)).status_code == 200


def with_public_key(issuer: Issuer, claims: dict[str, Any]) -> str:
    """Return a token signed by HS256 with the issuer's public key, as everybody can read it."""
    key = issuer.keys["one"][1].public_key()
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    head = {"alg": "HS256", "typ": "JWT", "kid": "one"}
    signed = ".".join(encoded(json.dumps(part).encode()) for part in (head, claims))
    return f"{signed}.{encoded(hmac.digest(pem, signed.encode(), 'sha256'))}"


def encoded(data: bytes) -> str:
    return urlsafe_b64encode(data).decode().rstrip("=")


@pytest.mark.deep
async def test_unknown_keys_cost_the_issuer_few_looks_and_new_ones_work_soon(
    settings: Settings, database_url: str, issuer: Issuer
) -> None:
    async with signing_in(settings, database_url, issuer) as server:
        assert (await get(server, issuer.sign())).status_code == 200
        for number in range(40):
            token = issuer.sign(head={"kid": f"unknown-{number}"})
            assert (await get(server, token)).status_code in (401, 429)
        assert issuer.looks <= 2
        issuer.add("two")

        async def works() -> bool:
            return (await get(server, issuer.sign("two"))).status_code == 200

        await until(works, within=12)
        issuer.is_away = True
        assert (await get(server, issuer.sign("two"))).status_code == 200
        assert issuer.looks <= 5


async def test_without_a_key_a_server_with_an_issuer_is_closed(
    settings: Settings, database_url: str, issuer: Issuer
) -> None:
    more = {"oidc_issuer": issuer.url, "oidc_audience": AUDIENCE}
    configured = Settings.model_validate(settings.model_dump() | more)
    async with running(configured, database_url) as server:
        assert (await server.client.get("/v1/runs")).status_code == 401
        assert (await server.client.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [
        {"oidc_issuer": "http://issuer.example", "oidc_audience": "x"},
        {"oidc_issuer": "https://issuer.example"},
        {"oidc_audience": "x"},
        {"oidc_claims": {"tenant": {"claim": "a", "value": "b"}}},
        {"oidc_claims": {"tenant": {"value": "b", "values": {}}}},
        {"oidc_claims": {"scope": {"value": "b"}}},
    ],
)
def test_settings_that_let_in_the_wrong_people_are_refused(
    settings: Settings, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"oidc|OIDC|source|claim"):
        Settings.model_validate(settings.model_dump() | wrong)
