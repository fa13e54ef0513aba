"""Cost of a model call in each dialect; `python -m benchmarks.agents` reports it.

    python -m benchmarks.dialects

A process of its own sends the same answer of 16 pieces in the words of each API. The history has 41
messages, three tools go along, and all is streamed, parsed and assembled. CPU is the client's.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

from bottega.agents.messages import AssistantMessage, HumanMessage, StandardMessage
from bottega.agents.provider import ToolSchema
from bottega.llm.provider import ModelProvider, open_provider
from bottega.llm.server import DialectName, ServerSpec

PREFIXES: Mapping[DialectName, str] = {
    "chat": "/v1",
    "responses": "/v1",
    "anthropic": "",
    "gemini": "/v1beta",
}
_WORDS = [f"word{number} " for number in range(16)]
_CALLS = 300
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%b"


async def costs_ms() -> dict[DialectName, float]:
    """Return the client's CPU per call in milliseconds: the lowest of three rounds, in turns."""
    found: dict[DialectName, float] = {}
    async with _server() as url:
        providers = {
            dialect: open_provider(
                ServerSpec(dialect=dialect, base_url=url + prefix, api_key="none"), "some-model"
            )
            for dialect, prefix in PREFIXES.items()
        }
        for _ in range(4):  # the first round warms up
            for dialect, provider in providers.items():
                cost = await _cost_ms(provider)
                found[dialect] = min(cost, found.get(dialect, cost))
        for provider in providers.values():
            await provider.aclose()
    return found


async def _cost_ms(provider: ModelProvider) -> float:
    history, tools = list(_history()), [_tool(name) for name in ("look", "add", "send")]
    began = time.process_time()
    for _ in range(_CALLS):
        answer = await provider.invoke(history, tools)
        assert answer.content == "".join(_WORDS), answer
    return (time.process_time() - began) / _CALLS * 1e3


def _history() -> Iterator[StandardMessage]:
    said = "some words of ordinary length, a sentence or two of them. " * 3
    for number in range(41):
        yield AssistantMessage(content=said) if number % 2 else HumanMessage(content=said)


def _tool(name: str) -> ToolSchema:
    schema = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    return ToolSchema(name, "Does something that is said here in a few words.", schema)


def _events(path: bytes) -> list[dict[str, Any]]:
    """Return the events of the answer in the form of the API that has this path."""
    if path.endswith(b"/chat/completions"):
        pieces = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in _WORDS]
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        used = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 20}}
        return [*pieces, end, used]
    if path.endswith(b"/responses"):
        kind = "response.output_text.delta"
        said = [{"type": kind, "output_index": 0, "delta": word} for word in _WORDS]
        whole = {"status": "completed", "usage": {"input_tokens": 10, "output_tokens": 20}}
        return [*said, {"type": "response.completed", "response": whole}]
    if path.endswith(b"/messages"):
        kind = "content_block_delta"
        texts = [{"type": "text_delta", "text": word} for word in _WORDS]
        return [
            {"type": "message_start", "message": {"usage": {"input_tokens": 10}}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
            *({"type": kind, "index": 0, "delta": text} for text in texts),
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn"},
                "usage": {"output_tokens": 20},
            },
            {"type": "message_stop"},
        ]
    counts = {"promptTokenCount": 10, "candidatesTokenCount": 20}
    contents = [{"parts": [{"text": word}], "role": "model"} for word in _WORDS]
    candidates: list[dict[str, Any]] = [{"content": content, "index": 0} for content in contents]
    candidates[-1]["finishReason"] = "STOP"
    return [{"candidates": [each], "usageMetadata": counts} for each in candidates]


@asynccontextmanager
async def _server() -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.dialects", "serve"), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.kill()
        await process.wait()


async def _serve() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError), closing(writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                events = _events(head.split(b" ")[1].partition(b"?")[0])
                body = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
                writer.write(_HEAD % (len(body), body))

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        asyncio.run(_serve())
    else:
        for name, cost in asyncio.run(costs_ms()).items():
            print(f"{name:12} {cost:.2f} ms")
