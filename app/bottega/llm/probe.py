"""Small calls that show what a model server can do."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from pydantic_core import from_json

from bottega.agents.messages import AssistantMessage, HumanMessage, StandardMessage, SystemMessage
from bottega.agents.provider import LLMProvider, ModelOptions, ToolSchema
from bottega.clock import monotonic
from bottega.errors import BottegaError

_MOST_TOKENS = 2000  # reasoning counts too
_TOOL = ToolSchema(
    "add",
    "Add two numbers.",
    {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
)
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Probed:
    """The outcome of one kind of call; ``problem`` is ``None`` if it works."""

    kind: str
    problem: str | None
    seconds: float


async def probes(provider: LLMProvider) -> AsyncIterator[Probed]:
    """Make one small call of each kind: text, tool, stream, schema."""
    kinds: dict[str, Callable[[LLMProvider], Awaitable[str | None]]] = {
        "text": _text,
        "tool": _tool,
        "stream": _stream,
        "schema": _schema,
    }
    for kind, check in kinds.items():
        began = monotonic()
        try:
            problem = await check(provider)
        except BottegaError as error:
            problem = f"{error.code}: {error.detail}"
        yield Probed(kind, problem, monotonic() - began)


async def _ask(
    provider: LLMProvider,
    question: str,
    *tools: ToolSchema,
    pieces: list[str] | None = None,
    options: ModelOptions = ModelOptions(max_output_tokens=_MOST_TOKENS),
) -> AssistantMessage:
    messages: list[StandardMessage] = [
        SystemMessage(content="Be brief."),
        HumanMessage(content=question),
    ]
    on_delta = None if pieces is None else pieces.append
    return await provider.invoke(messages, tools, options=options, on_delta=on_delta)


async def _text(provider: LLMProvider) -> str | None:
    answer = await _ask(provider, "Say hello.")
    return None if answer.content.strip() else "the answer has no text"


async def _tool(provider: LLMProvider) -> str | None:
    answer = await _ask(provider, "What is 17 plus 25? Use the tool add.", _TOOL)
    if not answer.tool_calls:
        return "the model called no tool"
    call = answer.tool_calls[0]
    if call.name != _TOOL.name or call.malformed is not None:
        return f"the model's call cannot be read: {call.name[:100]}"
    return None


async def _stream(provider: LLMProvider) -> str | None:
    pieces: list[str] = []
    await _ask(provider, "Count from one to twenty in words.", pieces=pieces)
    return None if len(pieces) > 1 else "the text came in one piece"


async def _schema(provider: LLMProvider) -> str | None:
    options = ModelOptions(max_output_tokens=_MOST_TOKENS, output_schema=_SCHEMA)
    answer = await _ask(provider, "Name the capital of France as JSON.", options=options)
    try:
        value = from_json(answer.content)
    except ValueError:
        return "the answer is not JSON"
    fits = isinstance(value, dict) and isinstance(value.get("city"), str)
    return None if fits else "the answer does not fit the schema"
