"""Five examples of hooks."""

from typing import Any

from bottega.agents import (
    AgentEvent,
    AgentStatus,
    AssistantMessage,
    BaseAgent,
    HumanMessage,
    ToolResult,
    ToolStatus,
    tool,
)
from tests.domain.scripted import ScriptedModel, agent, answers_in, call, model_of


@tool("sql", "Runs a query.")
async def sql(text: str) -> str:
    if "ghost" in text:
        raise LookupError("invalid identifier 'ghost', see https://docs.example/E904")
    return f"rows of {text}"


async def test_plan_stands_in_the_conversation_from_the_start() -> None:
    it = agent("sold 5")
    it.on(AgentEvent.QUERY_START).inject_at(
        2, lambda status: AssistantMessage(content="first look, then count")
    )
    await it.execute_query_async("how many were sold?")
    assert model_of(it).last == ["system", "how many were sold?", "first look, then count"]


class SchemaAgent(BaseAgent):
    """Agent that shows the schema the first time that a query names an unknown column."""

    def __init__(self, schema: str, **config: Any) -> None:
        super().__init__("write SQL", tools=[sql], **config)
        self.schema = schema
        self.shown = False
        self.on(AgentEvent.ON_TOOL_ERROR).when(self.is_needed).inject(self.show)

    @staticmethod
    def is_needed(status: AgentStatus) -> bool:
        assert isinstance(status.agent, SchemaAgent)
        return not status.agent.shown and "invalid identifier" in (status.error or "")

    @staticmethod
    def show(status: AgentStatus) -> HumanMessage:
        assert isinstance(status.agent, SchemaAgent)
        status.agent.shown = True
        return HumanMessage(content=f"The schema: {status.agent.schema}")


async def test_error_brings_the_schema_once() -> None:
    wrong = call("sql", text="select ghost")
    model = ScriptedModel(wrong, wrong, call("sql", text="select sold"), "5")
    it = SchemaAgent("sales(sold int)", provider=model)
    response = await it.execute_query_async("how many?")
    assert response.content == "5"
    assert model.last.count("The schema: sales(sold int)") == 1
    assert model.last[4] == "The schema: sales(sold int)"


async def test_error_is_enriched_from_the_documentation() -> None:
    async def explained(value: ToolResult, status: AgentStatus) -> ToolResult:
        return value.model_copy(update={"error": f"{value.error}: the column does not exist"})

    it = agent(call("sql", text="select ghost"), "ok", tools=[sql])
    it.on(AgentEvent.AFTER_TOOL_EXECUTION).when(
        lambda status: (
            status.tool_result is not None
            and status.tool_result.status is ToolStatus.ERROR
            and "docs.example" in (status.tool_result.error or "")
        )
    ).transform(explained)
    await it.execute_query_async("how many?")
    assert answers_in(it)[0].endswith("E904: the column does not exist")


async def test_every_iteration_is_logged() -> None:
    log: list[str] = []
    rows = call("sql", text="x")
    it = agent(rows, rows, tools=[sql], max_iterations=2)
    it.on(AgentEvent.BEFORE_LLM_CALL).do(lambda status: log.append(f"asking {status.iteration}"))
    it.on(AgentEvent.AFTER_LLM_CALL).do(lambda status: log.append(f"told {status.iteration}"))
    it.on(AgentEvent.ON_MAX_ITERATIONS).do(lambda status: log.append(f"stopped {status.iteration}"))
    it.on(AgentEvent.QUERY_END).do(lambda status: log.append(f"over {status.iteration}"))
    await it.execute_query_async("go")
    assert log == ["asking 1", "told 1", "asking 2", "told 2", "stopped 2", "over 2"]


async def test_slow_agent_is_asked_to_hurry() -> None:
    rows = call("sql", text="x")
    it = agent(rows, rows, rows, "done", tools=[sql])
    it.on(AgentEvent.BEFORE_LLM_CALL).when(lambda status: status.iteration >= 3).inject(
        lambda status: HumanMessage(content="Make it short.")
    )
    await it.execute_query_async("go")
    hurried = [request.count("Make it short.") for request in map(as_texts, model_of(it).requests)]
    assert hurried == [0, 0, 1, 2]


def as_texts(messages: Any) -> list[str]:
    return [message.content for message in messages]
