"""The floor: OpenAI's SDK, whose calls do not stream, and a loop by hand."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai

from benchmarks.peers.work import (
    ASSISTANT,
    BUILD,
    COORDINATOR,
    FAN_OUT,
    FIND_OUT,
    GO,
    HELPER,
    LOOP,
    MODEL,
    SPECIALISTS,
    TEAM,
    Run,
    calculate,
    check,
    described,
    prompt_of,
)

PACKAGES = ("openai",)
Tools = dict[str, Callable[[str], Awaitable[str]]]


def _function(name: str, description: str) -> Any:
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


async def _answer(client: openai.AsyncOpenAI, system: str, query: str, tools: Tools) -> str:
    """Call the model, and the tools that it asks for side by side, until it answers."""
    history: list[Any] = [
        {"role": "system", "content": system},
        {"role": "user", "content": query},
    ]
    functions = [_function(name, described(name)) for name in tools] or openai.omit
    while True:
        answer = await client.chat.completions.create(
            model=MODEL, messages=history, tools=functions
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        history.append(message)
        asked: Any = message.tool_calls
        arguments = [json.loads(call.function.arguments)["text"] for call in asked]
        pairs = zip(asked, arguments, strict=True)
        texts = await asyncio.gather(*(tools[call.function.name](text) for call, text in pairs))
        for call, text in zip(asked, texts, strict=True):
            history.append({"role": "tool", "tool_call_id": call.id, "content": text})


@asynccontextmanager
async def works(base_url: str) -> AsyncIterator[dict[str, Run]]:
    async with openai.AsyncOpenAI(api_key="none", base_url=base_url, max_retries=0) as client:

        def asks(system: str) -> Callable[[str], Awaitable[str]]:
            return lambda text: _answer(client, system, text, {})

        async def loop() -> None:
            check(await _answer(client, ASSISTANT, FIND_OUT, {"calculator": calculate}))

        async def team() -> None:
            tools = {name: asks(prompt_of(name)) for name in SPECIALISTS}
            check(await _answer(client, COORDINATOR, BUILD, tools))

        async def fan_out() -> None:
            check(await _answer(client, COORDINATOR, GO, {"helper": asks(HELPER)}))

        yield {LOOP: loop, TEAM: team, FAN_OUT: fan_out}
