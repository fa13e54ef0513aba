"""A FastAPI application that embeds an agent and streams its answers.

Run it with ``uvicorn --app-dir examples web_application:app``, then

    curl -N 'http://127.0.0.1:8000/ask?question=What+is+17*23%3F' -H 'X-User: ada'

The application needs a model: set ``OPENAI_API_KEY``, or ``OPENAI_BASE_URL`` for any
OpenAI-compatible server. A real application gets the user from its own login, never from a header.
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Header, Query
from fastapi.responses import StreamingResponse

from bottega.agents import (
    BaseAgent,
    Caller,
    QueryAnswered,
    TextDelta,
    ToolCalled,
    ToolContext,
    tool,
)
from bottega.llm.vendors import OpenAIProvider


@tool(name="calculator", description="Multiplies two numbers.", idempotent=True)
def multiply(left: float, right: float, context: ToolContext) -> str:
    return f"{left * right:g}, for {context.user}"


provider = OpenAIProvider(os.environ.get("MODEL", "gpt-5-mini"))
assistant = BaseAgent(
    "You are a brief assistant. Calculate with the tool.", provider=provider, tools=[multiply]
)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with aclosing(provider):
        yield


app = FastAPI(title="An agent in an application", lifespan=lifespan)


@app.get("/ask")
async def ask(
    question: Annotated[str, Query(min_length=1, max_length=2000)],
    x_user: Annotated[str, Header(max_length=100)],
) -> StreamingResponse:
    """Answer a question with server-sent events: ``text``, ``tool`` and ``answer``."""
    return StreamingResponse(events(question, Caller(user=x_user)), media_type="text/event-stream")


async def events(question: str, caller: Caller) -> AsyncIterator[str]:
    """Yield a query's events; a client that leaves cancels the query.

    Each request has a copy of the agent: its own history, and no wait for other requests.
    """
    async with aclosing(assistant.fresh_copy().stream(question, caller=caller)) as stream:
        async for event in stream:
            match event:
                case TextDelta(text):
                    yield sent("text", text)
                case ToolCalled(call):
                    yield sent("tool", call.name)
                case QueryAnswered(response):
                    yield sent("answer", {"text": response.content, "error": response.error})


def sent(event: str, data: object) -> str:
    """Return a server-sent event."""
    return f"event: {event}\ndata: {json.dumps(data)}\n\n"
