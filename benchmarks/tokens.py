"""Cost of verifying a bearer token, in a process that knows the signing keys.

    python -m benchmarks.tokens [--turns 5] [--calls 2000]

Prints milliseconds of CPU per verification, the median of the turns: of an end user's token, of one
with the most limits, and of a person's RS256 and ES256 tokens. There is no database: a query fails.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast
from uuid import uuid4

import asyncpg
import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from bottega.tenants.claims import ClaimMapping
from bottega.tenants.limits import StoredLimits
from bottega.tenants.oidc import SignIn
from bottega.tenants.tokens import ACTIONS, Token, TokenSigner

ISSUER, AUDIENCE = "https://login.example.com", "bottega"


class Issued(SignIn):
    """Sign-in whose issuer has been read, and whose tenant is known."""

    def knowing(self, name: str, key: Any, algorithm: str) -> "Issued":
        kind = jwt.algorithms.get_default_algorithms()[algorithm]
        public = kind.to_jwk(key.public_key(), as_dict=True)
        self._keys = {name: jwt.PyJWK(public | {"kid": name, "alg": algorithm})}
        self._tenants["acme"] = uuid4()
        return self


def signer() -> TokenSigner:
    """Return a signer with a key of its own."""
    made = TokenSigner()
    made._learn("key", b"x" * 32)
    return made


def token(**more: object) -> Token:
    """Return a token of an end user for an hour."""
    about = Token(uuid4(), uuid4(), "btg_4fqx0a1b", time.time() + 3600, user="ada", actions=ACTIONS)
    return about if not more else Token(**{**_fields(about), **more})  # type: ignore[arg-type]


def _fields(about: Token) -> dict[str, object]:
    return {name: getattr(about, name) for name in Token.__slots__}


def of_person(algorithm: str) -> Callable[[], Awaitable[object]]:
    """Return the verification of a person's token."""
    is_rsa = algorithm.startswith("RS")
    key = (
        rsa.generate_private_key(65537, 2048) if is_rsa else ec.generate_private_key(ec.SECP256R1())
    )
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ada", "exp": time.time() + 3600}
    text = jwt.encode(claims | {"tenant": "acme"}, key, algorithm=algorithm, headers={"kid": "one"})
    sign_in = Issued(ISSUER, AUDIENCE, ClaimMapping(), cast("asyncpg.Pool", None))
    sign_in.knowing("one", key, algorithm)
    return lambda: sign_in.person(text)


def of_user(**more: object) -> Callable[[], Awaitable[object]]:
    """Return the verification of an end user's token."""
    keys = signer()
    text, _ = keys.sign(token(**more))

    async def verify() -> object:
        return keys.verify(text)

    return verify


async def measured(verify: Callable[[], Awaitable[object]], turns: int, calls: int) -> float:
    """Return the median of milliseconds per verification."""
    found = []
    for _ in range(turns):
        began = time.process_time()
        for _ in range(calls):
            await verify()
        found.append((time.process_time() - began) / calls * 1000)
    return statistics.median(found)


async def main(turns: int, calls: int) -> None:
    names = [f"agent-{number}" for number in range(20)]
    limits = StoredLimits(
        agents=names, models=names, addresses=["10.0.0.0/8"] * 20, requests_per_s=5, payer=uuid4()
    )
    cases = {
        "end user": of_user(),
        "end user, with limits": of_user(agents=tuple(names), limits=limits),
        "person, RS256": of_person("RS256"),
        "person, ES256": of_person("ES256"),
    }
    for name, verify in cases.items():
        print(f"{name:24}{await measured(verify, turns, calls):8.3f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    asyncio.run(main(options.turns, options.calls))
