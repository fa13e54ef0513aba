"""``/v1/embeddings`` of the demo model, with vectors of a given embedder."""

from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Vectorise = Callable[[Sequence[str]], Awaitable["NDArray[np.float32]"]]
"""Computes the vectors of texts, a row each."""

_MOST_TEXTS = 2048
_CHARACTERS_PER_TOKEN = 4


def problem(request: Any) -> tuple[str, str | None] | None:
    """Return a problem and its parameter, or ``None`` if the request is valid."""
    if not isinstance(request, dict):
        return "The body must be a JSON object.", None
    if not isinstance(request.get("model"), str) or not request["model"]:
        return "You must provide a model parameter.", "model"
    texts = _texts(request)
    if not texts or len(texts) > _MOST_TEXTS:
        return f"'input' must be a text, or 1 to {_MOST_TEXTS} of them.", "input"
    if not all(isinstance(text, str) and text for text in texts):
        return "'input' must not hold an empty text.", "input"
    if request.get("encoding_format", "float") not in ("float", "base64"):
        return "'encoding_format' must be 'float' or 'base64'.", "encoding_format"
    return None


def answering(embed: Vectorise) -> Callable[[dict[str, Any]], Awaitable[bytes]]:
    """Make a handler of valid requests. It ignores a requested dimension."""

    async def answer(request: dict[str, Any]) -> bytes:
        texts = _texts(request)
        tokens = sum(map(len, texts)) // _CHARACTERS_PER_TOKEN + 1
        return body(await embed(texts), request, tokens)

    return answer


def body(vectors: "NDArray[Any]", request: dict[str, Any], tokens: int = 1) -> bytes:
    data = [
        {"object": "embedding", "index": index, "embedding": encoded(row, request)}
        for index, row in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return to_json({"object": "list", "data": data, "model": request["model"], "usage": usage})


def encoded(row: "NDArray[Any]", request: dict[str, Any]) -> str | list[float]:
    if request.get("encoding_format") == "base64":
        return b64encode(row.astype("<f4").tobytes()).decode()
    numbers: list[float] = row.tolist()
    return numbers


def _texts(request: dict[str, Any]) -> list[Any]:
    found = request.get("input")
    return found if isinstance(found, list) else [found]
