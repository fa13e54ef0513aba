"""Vectors from an OpenAI-compatible ``/embeddings`` endpoint."""

import asyncio
import random
import re
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from uuid import UUID

import aiohttp
import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json, to_json

from bottega.agents.messages import Usage
from bottega.agents.parts import size_of, tokens_in
from bottega.clock import Clock, utcnow
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import InvalidInputError, ModelError
from bottega.http_sessions import NETWORK_ERRORS, body_of, reader_of
from bottega.llm.builtin_embedder import MAX_CHARACTERS
from bottega.llm.errors import delay_s
from bottega.llm.provider import ModelClient, Request, is_success
from bottega.llm.server import ServerSpec
from bottega.llm.usage import Charge, Counts, ModelAccount, Reported, TenantAccounts
from bottega.llm.vendors import with_openai
from bottega.outside import OutsideError, check_json

Vectors = NDArray[np.float32]

LARGEST_DIMENSION = 4000
"""Maximum number of dimensions of an index over ``halfvec`` (pgvector)."""

_TEXTS_PER_CALL = 32
_BYTES_PER_CALL = 262_144
_NOTHING = "(nothing)"  # servers refuse an empty text
_TOO_LONG = re.compile(r"context.length|too (?:long|large|many)|maximum|exceed", re.IGNORECASE)
_DIMENSIONS = re.compile(r"dimension|matryoshka", re.IGNORECASE)
_REFUSED = ("model_bad_request", "model_context_too_long")


class OpenAIEmbedder:
    """Embedder that requests vectors from a server, several texts per call, and caches the vectors.

    An embedder belongs to one event loop at a time. It stays usable after :meth:`aclose`.

    Args:
        model: name of the model, which is a part of the embedder's name.
        accounts: accounts that pay for the calls. The default tenant pays, unless the caller sets
            another tenant by :meth:`paid_by`.
        api_key: by default the value of ``OPENAI_API_KEY``.
        base_url: by default the value of ``OPENAI_BASE_URL``, or OpenAI's URL.
        dimensions: requested dimension. A model with a fixed dimension ignores this number.
        timeout_s: time limit of one try, in seconds.
        max_tries: maximum number of tries of one call.
        cached: maximum number of cached vectors. The cache drops the least recently used vectors.
        clock, sleep, random_unit: time and randomness. ``random_unit`` is in [0, 1).

    Raises:
        InvalidInputError: there is no key, or an argument is invalid.
    """

    def __init__(
        self,
        model: str,
        accounts: TenantAccounts,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        dimensions: int = 768,
        timeout_s: float = 30.0,
        max_tries: int = 3,
        cached: int = 2048,
        clock: Clock = utcnow,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        random_unit: Callable[[], float] = random.random,
    ) -> None:
        if timeout_s <= 0 or max_tries < 1 or cached < 0:
            raise InvalidInputError("timeout_s and max_tries must be positive, cached at least 0")
        if not 1 <= dimensions <= LARGEST_DIMENSION:
            raise InvalidInputError(f"dimensions must be between 1 and {LARGEST_DIMENSION}")
        self.model = model
        self._accounts = accounts
        self._asked_dimensions: int | None = dimensions
        self._dimension = dimensions
        self._learned = False
        self._timeout_s = timeout_s
        self._max_tries = max_tries
        self._cached = cached
        self._clock = clock
        self._sleep = sleep
        self._random_unit = random_unit
        self._known: OrderedDict[bytes, Vectors] = OrderedDict()
        # The key contains the account: if one account cannot pay, other accounts' requests go on.
        self._under_way: dict[
            tuple[ModelAccount, bytes], asyncio.Task[Mapping[bytes, Vectors]]
        ] = {}
        self._slots = asyncio.Semaphore(4)
        self._client = ModelClient(
            with_openai(ServerSpec(api_key=api_key, base_url=base_url, timeout_s=timeout_s))
        )
        self._report = self._client.report

    def __repr__(self) -> str:
        return f"OpenAIEmbedder({self.model!r}, base_url={self._client.address!r})"

    @property
    def name(self) -> str:
        """Name ``openai:<model>:<dimension>``. The dimension is final after the first answer."""
        return f"openai:{self.model}:{self._dimension}"

    @property
    def dimension(self) -> int:
        """The actual dimension; before the first answer, the requested dimension."""
        return self._dimension

    async def aclose(self) -> None:
        """Close the connections. Open calls fail."""
        calls = set(self._under_way.values())
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._client.aclose()

    def paid_by(self, tenant_id: UUID) -> "PaidEmbedder":
        """Return an embedder with the same server and cache, for whose calls this tenant pays."""
        return PaidEmbedder(self, self._accounts.of(tenant_id))

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of ``texts``; see :meth:`embed_for`."""
        return await self.embed_for(self._accounts.of(DEFAULT_TENANT), texts)

    async def embed_for(self, account: ModelAccount, texts: Sequence[str]) -> Vectors:
        """Return the vectors of ``texts``, each of length 1; shape (n, d).

        The vector depends only on the first 32,768 characters of a text, or on the characters that
        the model accepts, if these are fewer. Concurrent requests of an account for the same text
        share one call.

        Raises:
            ModelError: the last try failed; then no text gets a vector.
            BudgetExhaustedError: the account has too little money or too few tokens left.
        """
        asked = {_digest(text): text for text in map(_prepared, texts)}
        found: dict[bytes, Vectors] = {}
        unknown: dict[bytes, str] = {}
        calls = set()
        for key, text in asked.items():
            if (vector := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                found[key] = vector
            elif call := self._under_way.get((account, key)):
                calls.add(call)
            else:
                unknown[key] = text
        if unknown and len(self._under_way) >= 1024:  # texts
            # A call continues after its caller was cancelled, so calls to a hung server could
            # accumulate.
            raise ModelError(
                f"{len(self._under_way)} texts wait for the model '{self.model}': try again later",
                code="model_unavailable",
                retryable=True,
            )
        calls |= {self._begin(account, batch) for batch in _batches(unknown)}
        for call in calls:
            # The call continues after a cancellation: other callers or the cache need its vectors.
            found |= await asyncio.shield(call)
        if not texts:
            return np.empty((0, self._dimension), np.float32)
        return np.stack([found[_digest(_prepared(text))] for text in texts])

    def _begin(
        self, account: ModelAccount, batch: Mapping[bytes, str]
    ) -> "asyncio.Task[Mapping[bytes, Vectors]]":
        call = asyncio.ensure_future(self._call(account, batch))
        keys = [(account, key) for key in batch]
        self._under_way |= dict.fromkeys(keys, call)

        def end(done: "asyncio.Task[Mapping[bytes, Vectors]]") -> None:
            for key in keys:
                del self._under_way[key]
            if not done.cancelled() and done.exception() is None:
                self._keep(done.result())

        call.add_done_callback(end)
        return call

    def _keep(self, vectors: Mapping[bytes, Vectors]) -> None:
        self._known.update(vectors)
        while len(self._known) > self._cached:
            self._known.popitem(last=False)

    async def _call(
        self, account: ModelAccount, batch: Mapping[bytes, str]
    ) -> Mapping[bytes, Vectors]:
        vectors = await self._vectors(account, list(batch.values()), MAX_CHARACTERS)
        # The rows are copies, so that a cached row does not keep the whole batch in memory.
        return {key: row.copy() for key, row in zip(batch, vectors, strict=True)}

    async def _vectors(
        self, account: ModelAccount, texts: Sequence[str], characters: int
    ) -> Vectors:
        cut = [text[:characters] for text in texts]
        # Reserve tokens before taking a slot: this may take long, and all accounts share the slots.
        async with account.call(_tokens_in(cut), None, 0) as charge, self._slots:
            answer = await self._tried(charge, cut)
        if not isinstance(answer, ModelError):
            return answer
        if answer.code not in _REFUSED:
            raise answer
        if self._asked_dimensions is not None and _DIMENSIONS.search(answer.detail):
            self._asked_dimensions = None  # the model's dimension is fixed
            return await self._vectors(account, texts, characters)
        if not _TOO_LONG.search(answer.detail):
            raise answer
        if len(texts) > 1:
            alone = [await self._vectors(account, [text], characters) for text in texts]
            return np.concatenate(alone)
        if characters <= 1024:
            raise answer
        return await self._vectors(account, texts, min(characters, len(texts[0])) // 2)

    async def _tried(self, charge: Charge, texts: Sequence[str]) -> Vectors | ModelError:
        body: dict[str, Any] = {"model": self.model, "input": texts, "encoding_format": "base64"}
        if self._asked_dimensions is not None:
            body["dimensions"] = self._asked_dimensions
        sent = to_json(body)
        number = 1
        while True:
            answer = await self._try(sent, texts, charge)
            if not isinstance(answer, ModelError):
                return answer
            if not answer.retryable or number >= self._max_tries:
                return answer
            await self._sleep(min(60.0, delay_s(number, answer, self._random_unit())))
            number += 1

    async def _try(self, body: bytes, texts: Sequence[str], charge: Charge) -> Vectors | ModelError:
        """Make one try and pay for the try. Return an error instead of raising it."""
        response, answer, request = None, None, Request()
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.post("/embeddings", body, request)
                if not is_success(response):
                    request.is_owed = False
                    return await self._client.refusal(response, self._clock)
                whole = await _whole(response)
            with suppress(ValueError):
                answer = from_json(whole)
        except OutsideError as error:
            return self._report.no_completion(error.detail)
        except NETWORK_ERRORS as error:
            if response is None:
                return self._report.unreachable(error)
            return self._report.interrupted(error)
        finally:
            if response is not None:
                response.close()
            if request.is_owed:
                charge.pay(self.model, _usage_of(answer, texts))
        try:
            vectors = read_vectors(answer, len(texts))
        except ValueError as error:
            return self._report.no_completion(str(error))
        return self._checked(vectors)

    def _checked(self, vectors: Vectors) -> Vectors | ModelError:
        dimension = vectors.shape[1]
        if dimension > LARGEST_DIMENSION:
            return ModelError(
                f"the model '{self.model}' makes vectors of {dimension} numbers, but an index can "
                f"have at most {LARGEST_DIMENSION}: set BOTTEGA_EMBEDDING_MODEL to another model, "
                "or to a model that accepts `dimensions`",
                code="model_bad_response",
            )
        if self._learned and dimension != self._dimension:
            return self._report.no_completion(
                f"vectors of {dimension} numbers, after vectors of {self._dimension}"
            )
        self._dimension, self._learned = dimension, True
        return vectors


@dataclass(frozen=True, slots=True)
class PaidEmbedder:
    """View of an :class:`OpenAIEmbedder`. One account pays for the view's calls."""

    shared: OpenAIEmbedder
    account: ModelAccount

    @property
    def name(self) -> str:
        return self.shared.name

    @property
    def dimension(self) -> int:
        return self.shared.dimension

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of ``texts``; see :meth:`OpenAIEmbedder.embed_for`."""
        return await self.shared.embed_for(self.account, texts)


def _tokens_in(texts: Sequence[str]) -> int:
    return tokens_in(sum(map(size_of, texts)))


def _usage_of(answer: Any, texts: Sequence[str]) -> Usage:
    counts = Counts(answer.get("usage") if isinstance(answer, dict) else None)
    report = Reported(counts.total("prompt_tokens"), 0, is_odd=counts.is_odd)
    return report.usage(lambda: sum(map(size_of, texts)), 0, 0)


def read_vectors(answer: Any, count: int) -> Vectors:
    """Read vectors from an answer, in the order of the texts, scaled to length 1. Pure.

    Args:
        answer: the decoded answer; ``None``: the answer was not JSON.

    Raises:
        ValueError: the answer does not have one valid vector for each of ``count`` texts.
    """
    if answer is None:
        raise ValueError("no JSON")
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        raise ValueError("no list of vectors")
    if len(data) != count:
        raise ValueError(f"{len(data)} vectors for {count} texts")
    places = [item.get("index", place) for place, item in enumerate(data)]
    if any(type(place) is not int for place in places) or sorted(places) != list(range(count)):
        raise ValueError("vectors with wrong indices")
    rows = [np.empty(0, np.float64)] * count
    for place, item in zip(places, data, strict=True):
        rows[place] = _numbers(item.get("embedding"))
    if len({len(row) for row in rows}) != 1:
        raise ValueError("vectors of different dimensions")
    vectors = np.stack(rows)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not vectors.size or not np.isfinite(lengths).all() or not (lengths > 0).all():
        raise ValueError("a vector that is empty, zero or not of finite numbers")
    scaled: Vectors = (vectors / lengths).astype(np.float32)
    return scaled


def _numbers(embedding: Any) -> NDArray[np.float64]:
    if isinstance(embedding, str):
        data = b64decode(embedding, validate=True)
        return np.frombuffer(data, np.dtype("<f4")).astype(np.float64)
    if not isinstance(embedding, list) or any(type(n) not in (int, float) for n in embedding):
        raise ValueError("a vector that is not a list of numbers")
    try:
        return np.array(embedding, np.float64)
    except OverflowError:
        raise ValueError("a vector with a number that is too large") from None


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async with aclosing(body_of(response, reader_of(response, 32 * 1024 * 1024))) as pieces:
        async for piece in pieces:
            body += piece
    check_json(body)
    return bytes(body)


def _prepared(text: str) -> str:
    """Shorten a text, replace a blank text, and replace characters that JSON cannot encode."""
    cut = text[:MAX_CHARACTERS]
    return cut.encode("utf-8", "replace").decode() if cut.strip() else _NOTHING


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def _batches(texts: Mapping[bytes, str]) -> Iterator[dict[bytes, str]]:
    batch: dict[bytes, str] = {}
    size = 0
    for key, text in texts.items():
        length = len(text.encode())
        if batch and (len(batch) == _TEXTS_PER_CALL or size + length > _BYTES_PER_CALL):
            yield batch
            batch, size = {}, 0
        batch[key] = text
        size += length
    if batch:
        yield batch
