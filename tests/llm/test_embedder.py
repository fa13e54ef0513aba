"""Vectors from an OpenAI-compatible server: requests, answers and errors."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import pytest
from pydantic_core import to_json

from bottega.errors import InvalidInputError, ModelError
from bottega.llm.builtin_embedder import BuiltinEmbedder
from bottega.llm.openai_embedder import OpenAIEmbedder
from bottega.memory.text.embeddings import Embedder
from tests.accounts import Purse
from tests.fake_model import (
    FakeModel,
    Reply,
    free_port,
    gated,
    hang_up,
    http_error,
    http_reply,
    vectors_body,
)
from tests.llm.conftest import KEY
from tests.waiting import until


@pytest.fixture
async def embedder(model: FakeModel) -> AsyncIterator[OpenAIEmbedder]:
    embedder = OpenAIEmbedder(
        "vectors-1", Purse(), api_key=KEY, base_url=model.base_url, sleep=_no_sleep
    )
    yield embedder
    await embedder.aclose()


async def _no_sleep(seconds: float) -> None:
    pass


def vectors(*rows: Any, encoding: str = "float", indices: Any = None) -> Reply:
    """Reply with these vectors to any request."""
    request = {"model": "any", "encoding_format": encoding}
    body = vectors_body(np.array(rows, np.float64), {"input": "x", **request})
    return http_reply(body, media_type="application/json")


def items(*data: Any) -> Reply:
    """Reply with these objects in place of vectors."""
    return http_reply(to_json({"data": data}), media_type="application/json")


async def test_vectors_are_in_the_order_of_the_texts(
    model: FakeModel, embedder: OpenAIEmbedder
) -> None:
    texts = ["reset the router", "", "pay the invoice", "reset the router"]

    found = await embedder.embed(texts)

    expected = await BuiltinEmbedder().embed([texts[0], "(nothing)", texts[2], texts[0]])
    assert np.allclose(found, expected, atol=1e-6)
    (request,) = model.embedded
    assert request["input"] == ["reset the router", "(nothing)", "pay the invoice"]
    assert request["dimensions"] == 768
    assert found.dtype == np.float32
    kept: Embedder = embedder
    assert (kept.name, kept.dimension) == ("openai:vectors-1:768", 768)


async def test_no_texts_send_no_request(model: FakeModel, embedder: OpenAIEmbedder) -> None:
    assert (await embedder.embed([])).shape == (0, 768)
    assert not model.embedded


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_vectors_get_length_1_and_their_places(
    model: FakeModel, embedder: OpenAIEmbedder, encoding: str
) -> None:
    model.script_vectors(vectors([3.0, 4.0], [0.0, 0.5], encoding=encoding))

    found = await embedder.embed(["a", "b"])

    assert np.allclose(found, [[0.6, 0.8], [0.0, 1.0]])
    assert (embedder.dimension, embedder.name) == (2, "openai:vectors-1:2")


async def test_unordered_answer_is_sorted(model: FakeModel, embedder: OpenAIEmbedder) -> None:
    model.script_vectors(
        items({"index": 1, "embedding": [0, 2]}, {"index": 0, "embedding": [1, 0]})
    )

    assert (await embedder.embed(["a", "b"])).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    "reply",
    [
        items(),
        items({"index": 0, "embedding": [1.0]}),
        items({"index": 0, "embedding": [1.0]}, {"index": 0, "embedding": [1.0]}),
        items({"index": 0, "embedding": [1.0]}, {"index": 2, "embedding": [1.0]}),
        items({"index": 0, "embedding": [1.0]}, {"index": True, "embedding": [1.0]}),
        items({"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0, 2.0]}),
        items({"index": 0, "embedding": []}, {"index": 1, "embedding": []}),
        items({"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [0.0]}),
        items({"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [None]}),
        items({"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": ["1.0"]}),
        items({"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [10**400]}),
        items({"index": 0, "embedding": [1.0]}, {"index": 1}),
        items({"index": 0, "embedding": "AACAPw=="}, {"index": 1, "embedding": "AAA="}),
        items({"index": 0, "embedding": "AACAPw=="}, {"index": 1, "embedding": "AADAfw=="}),
        items({"index": 0, "embedding": "AACAPw=="}, {"index": 1, "embedding": "?"}),
        items(1, 2),
        http_reply(b'{"data": [{"embedding": [NaN]}, {"embedding": [1.0]}]}'),
        http_reply(b'{"data": {}}'),
        http_reply(b"[]"),
        http_reply(b"<html>hello</html>", media_type="text/html"),
        http_reply(b""),
    ],
)
async def test_invalid_answer_is_an_error_and_not_cached(
    model: FakeModel, embedder: OpenAIEmbedder, reply: Reply
) -> None:
    model.script_vectors(reply)

    with pytest.raises(ModelError) as caught:
        await embedder.embed(["a", "b"])

    assert caught.value.code == "model_bad_response"
    assert not caught.value.retryable
    assert (await embedder.embed(["a", "b"])).shape == (2, 768)


@pytest.mark.parametrize(
    ("reply", "paid"),
    [
        (http_reply(b"[" * 10_000), [250]),  # nested too deeply to be read
        (http_reply(b"<html>", media_type="text/html"), [250]),
        (hang_up(), [250]),
        (gated(asyncio.Event(), items()), [250]),
        (http_error(500), []),
    ],
    ids=["unreadable", "no JSON", "hung up", "timeout", "refused"],
)
async def test_a_request_that_was_sent_and_not_refused_is_paid(
    model: FakeModel, reply: Reply, paid: list[int]
) -> None:
    model.script_vectors(reply)
    assert await paid_by(model.base_url) == paid


async def test_a_request_that_was_not_sent_costs_nothing() -> None:
    assert await paid_by(f"http://127.0.0.1:{free_port()}/v1") == []


async def paid_by(base_url: str) -> list[int]:
    """Return the input tokens of each payment of a call that fails, all of them estimates."""
    purse = Purse()
    embedder = OpenAIEmbedder(
        "m", purse, api_key=KEY, base_url=base_url, timeout_s=0.5, max_tries=1
    )
    with pytest.raises(ModelError):
        await embedder.embed(["x" * 1000])
    await embedder.aclose()
    assert all(usage.estimated for _, usage in purse.paid)
    return [usage.input for _, usage in purse.paid]


class Spent(Purse):
    """The accounts of tenants of whom one waits for its budget for ever."""

    def __init__(self, tenant_id: UUID) -> None:
        super().__init__()
        self.tenant_id = tenant_id
        self.waiting = 0

    def of(self, tenant_id: UUID) -> Purse:
        return self if tenant_id == self.tenant_id else Purse()

    @asynccontextmanager
    async def call(
        self, sent: int, provider: object | None, longest: int | None
    ) -> AsyncIterator["Spent"]:
        self.waiting += 1
        await asyncio.Event().wait()
        yield self


async def test_a_tenant_that_waits_for_its_budget_holds_up_nobody(model: FakeModel) -> None:
    spent = Spent(uuid4())
    embedder = OpenAIEmbedder("m", spent, api_key=KEY, base_url=model.base_url)
    poor = embedder.paid_by(spent.tenant_id)
    waiting = [asyncio.ensure_future(poor.embed([f"text {n}"])) for n in range(4)]
    await until(lambda: spent.waiting == 4)

    async with asyncio.timeout(10):
        assert (await embedder.paid_by(uuid4()).embed(["a"])).shape == (1, 768)

    for each in waiting:
        each.cancel()
    await embedder.aclose()


async def test_too_many_dimensions_error_says_how_to_mend_it(
    model: FakeModel, embedder: OpenAIEmbedder
) -> None:
    model.script_vectors(vectors([1.0] * 4001), vectors([1.0] * 4000))

    with pytest.raises(ModelError, match=r"4001 numbers.*BOTTEGA_EMBEDDING_MODEL"):
        await embedder.embed(["a"])

    assert (await embedder.embed(["a"])).shape == (1, 4000)


async def test_dimension_must_not_change(model: FakeModel, embedder: OpenAIEmbedder) -> None:
    model.script_vectors(vectors([1.0, 0.0]), vectors([1.0, 0.0, 0.0]))
    await embedder.embed(["a"])

    with pytest.raises(ModelError, match="of 3 numbers, after vectors of 2"):
        await embedder.embed(["b"])


async def test_model_with_a_fixed_dimension_is_not_asked_for_another(
    model: FakeModel, embedder: OpenAIEmbedder
) -> None:
    refusal = http_error(400, message="This model does not support specifying dimensions.")
    model.script_vectors(refusal, vectors([0.0, 2.0]), vectors([2.0, 0.0]))

    await embedder.embed(["a"])
    await embedder.embed(["b"])

    assert ["dimensions" in request for request in model.embedded] == [True, False, False]


async def test_too_long_texts_are_sent_alone_then_shorter(
    model: FakeModel, embedder: OpenAIEmbedder
) -> None:
    refusal = http_error(400, message="This model's maximum context length is 8192 tokens.")
    model.script_vectors(refusal, refusal, refusal)

    found = await embedder.embed(["x" * 40_000, "short"])

    lengths = [[len(text) for text in request["input"]] for request in model.embedded]
    assert lengths == [[32_768, 5], [32_768], [16_384], [8192], [5]]
    assert found.shape == (2, 768)


async def test_text_that_is_never_short_enough_is_an_error(
    model: FakeModel, embedder: OpenAIEmbedder
) -> None:
    refusal = http_error(400, message="The input is too long.")
    model.script_vectors(*[refusal] * 7)

    with pytest.raises(ModelError, match="too long"):
        await embedder.embed(["x" * 40_000])

    assert len(model.embedded[-1]["input"][0]) <= 1024


async def test_many_texts_go_in_bounded_calls(model: FakeModel, embedder: OpenAIEmbedder) -> None:
    small = [f"task {number}" for number in range(70)]
    large = [f"{number} " + "€" * 30_000 for number in range(6)]

    found = await embedder.embed([*small, *large])

    assert found.shape == (76, 768)
    counts = [len(request["input"]) for request in model.embedded]
    assert sum(counts) == 76
    assert max(counts) <= 32
    sizes = [sum(len(text.encode()) for text in request["input"]) for request in model.embedded]
    assert max(sizes) <= 262_144


async def test_same_text_is_requested_once(model: FakeModel, embedder: OpenAIEmbedder) -> None:
    gate = asyncio.Event()
    model.script_vectors(gated(gate, vectors([1.0, 0.0], [0.0, 1.0])))
    first = asyncio.ensure_future(embedder.embed(["a", "b"]))
    await model.asked_for_vectors()
    second = asyncio.ensure_future(embedder.embed(["b"]))
    gate.set()

    assert (await first).tolist() == [[1, 0], [0, 1]]
    assert (await second).tolist() == [[0, 1]]
    assert (await embedder.embed(["b", "a"])).tolist() == [[0, 1], [1, 0]]
    assert len(model.embedded) == 1


async def test_cancelled_caller_does_not_cancel_the_vectors_of_others(
    model: FakeModel, embedder: OpenAIEmbedder
) -> None:
    gate = asyncio.Event()
    model.script_vectors(gated(gate, vectors([1.0, 0.0])))
    impatient = asyncio.ensure_future(embedder.embed(["a"]))
    await model.asked_for_vectors()
    patient = asyncio.ensure_future(embedder.embed(["a"]))
    impatient.cancel()
    await asyncio.gather(impatient, return_exceptions=True)
    gate.set()

    assert (await patient).tolist() == [[1, 0]]


async def test_number_of_texts_that_wait_for_a_hanging_server_is_bounded(
    model: FakeModel, embedder: OpenAIEmbedder
) -> None:
    gate = asyncio.Event()
    model.script_vectors(*[gated(gate, vectors(*[[1.0]] * 32))] * 32)
    asked = asyncio.ensure_future(embedder.embed([f"text {n}" for n in range(1024)]))
    await model.asked_for_vectors()
    asked.cancel()  # the request is cancelled, but its texts still wait
    with pytest.raises(ModelError, match="1024 texts wait") as caught:
        await embedder.embed(["one more"])
    assert caught.value.retryable
    gate.set()
    assert (await embedder.embed(["text 7"])).shape == (1, 1)


async def test_number_of_cached_vectors_is_bounded(model: FakeModel) -> None:
    embedder = OpenAIEmbedder("m", Purse(), api_key=KEY, base_url=model.base_url, cached=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        await embedder.embed([text])
    await embedder.aclose()

    assert [request["input"] for request in model.embedded] == [["a"], ["b"], ["c"], ["b"]]


async def test_temporary_failure_is_retried(model: FakeModel) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    model.script_vectors(http_error(429, {"retry-after": "7"}), hang_up(), None)
    embedder = OpenAIEmbedder(
        "m", Purse(), api_key=KEY, base_url=model.base_url, sleep=sleep, random_unit=lambda: 0.5
    )

    assert (await embedder.embed(["a"])).shape == (1, 768)
    assert slept == [7.25, 0.75]
    await embedder.aclose()


async def test_failures_say_how_to_mend_them_and_never_show_the_key(
    model: FakeModel, embedder: OpenAIEmbedder
) -> None:
    model.script_vectors(http_error(401, message=f"bad key {KEY}"), *[http_error(503)] * 3)

    with pytest.raises(ModelError) as refused:
        await embedder.embed(["a"])
    with pytest.raises(ModelError) as down:
        await embedder.embed(["a"])

    assert refused.value.code == "model_unauthorized"
    assert KEY not in str(refused.value)
    assert refused.value.__context__ is None
    assert (down.value.code, down.value.retryable) == ("model_unavailable", True)
    assert len(model.embedded) == 4


def test_invalid_arguments_are_refused() -> None:
    for options in ({"dimensions": 4001}, {"timeout_s": 0.0}, {"max_tries": 0}):
        with pytest.raises(InvalidInputError):
            OpenAIEmbedder("m", Purse(), api_key=KEY, base_url="http://127.0.0.1:1/v1", **options)
