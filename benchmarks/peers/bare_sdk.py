"""The floor: OpenAI's SDK, whose calls do not stream, and a loop by hand."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai

from benchmarks.peers.work import MODEL, Ask, calculate, described

PACKAGES = ("openai",)


@dataclass(frozen=True, slots=True)
class _Tool:
    name: str
    call: Ask

    def function(self) -> Any:
        """Return it as a request has it."""
        properties = {"text": {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": ["text"]}
        function = {"name": self.name, "description": described(self.name)}
        return {"type": "function", "function": {**function, "parameters": parameters}}


@dataclass(frozen=True, slots=True)
class _Maker:
    client: openai.AsyncOpenAI

    def calculator(self) -> _Tool:
        return _Tool("calculator", calculate)

    def subagent(self, name: str, prompt: str) -> _Tool:
        return _Tool(name, self.agent(prompt, []))

    def agent(self, prompt: str, tools: Sequence[_Tool]) -> Ask:
        calls = {tool.name: tool.call for tool in tools}
        functions = [tool.function() for tool in tools] or openai.omit

        async def ask(query: str) -> str:
            history: list[Any] = [{"role": "system", "content": prompt}]
            history.append({"role": "user", "content": query})
            while True:
                answer = await self.client.chat.completions.create(
                    model=MODEL, messages=history, tools=functions
                )
                message: Any = answer.choices[0].message
                if not message.tool_calls:
                    return message.content or ""
                history.append(message)
                asked = [(call.function, call.id) for call in message.tool_calls]
                texts = await asyncio.gather(
                    *(calls[each.name](json.loads(each.arguments)["text"]) for each, _ in asked)
                )
                for (_, call_id), text in zip(asked, texts, strict=True):
                    history.append({"role": "tool", "tool_call_id": call_id, "content": text})

        return ask


@asynccontextmanager
async def maker(base_url: str, database_url: None) -> AsyncIterator[_Maker]:
    async with openai.AsyncOpenAI(api_key="none", base_url=base_url, max_retries=0) as client:
        yield _Maker(client)
