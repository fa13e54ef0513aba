"""Hooks: places where they may inject messages, and values that they may return."""

from typing import Any

import pytest

from bottega.agents import (
    AgentEvent,
    AgentStatus,
    AssistantMessage,
    AssistantResponse,
    BaseAgent,
    HookContractError,
    HookDecision,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolResult,
)
from bottega.agents.hooks import CONTRACTS
from tests.domain.hooked import broken, full, said
from tests.domain.scripted import agent, call, human, model_of, shape

CONTINUE, RETRY, FAIL, STOP = HookDecision
E = AgentEvent


class TestInjection:
    async def test_message_between_calls_and_answers_waits_in_call_order(self) -> None:
        it = full()
        for event in (E.AFTER_LLM_CALL, E.BEFORE_TOOL_EXECUTION, E.BEFORE_HISTORY_UPDATE):
            it.on(event).when(lambda status: status.iteration == 1).inject(
                lambda status: HumanMessage(
                    content=f"{status.event} {getattr(status.tool_call, 'name', '')}".strip()
                )
            )
        it.on(E.ON_TOOL_ERROR).inject_at(len_of_history, human("at the end"))
        await it.execute_query_async("go")
        assert shape(it) == [
            "user: go",
            "assistant: ->add->broken",
            "tool: 3",
            "tool: Error: ValueError: error 1",
            "user: after_llm_call",
            "user: before_tool_execution add",
            "user: before_history_update",
            "user: before_tool_execution broken",
            "user: at the end",
            "user: before_history_update",
            "assistant: done",
        ]

    @pytest.mark.parametrize(
        ("position", "lands"),
        [(0, 0), (1, 1), (2, 2), (3, 5), (4, 5), (5, 5), (99, 6), (-1, 5), (-99, 0)],
    )
    async def test_place_among_answers_means_after_them(self, position: int, lands: int) -> None:
        # 0 system, 1 go, 2 calls, 3 answer, 4 answer, 5 note
        it = full()
        it.on(E.BEFORE_LLM_CALL).when(lambda s: s.iteration == 2).inject(human("note"))
        it.on(E.BEFORE_LLM_CALL).when(lambda s: s.iteration == 2).inject_at(position, human("here"))
        await it.execute_query_async("go")
        assert model_of(it).last.index("here") == lands

    async def test_place_before_the_open_block_is_used_at_once(self) -> None:
        it = agent(call("broken"), "done", tools=[broken])
        it.on(E.ON_TOOL_ERROR).inject_at(1, lambda s: SystemMessage(content="schema"))
        await it.execute_query_async("go")
        assert model_of(it).last[:3] == ["system", "schema", "go"]

    async def test_injecting_a_non_message_fails_the_query(self) -> None:
        it = agent("never")
        it.on(E.QUERY_START).inject(lambda status: "text")  # type: ignore[arg-type, return-value]
        response = await it.execute_query_async("go")
        assert response.error is not None
        assert "not str" in response.error
        assert shape(it) == ["user: go"]

    async def test_message_injected_before_a_hook_fails_stays(self) -> None:
        it = agent("draft")
        it.on(E.BEFORE_FINAL_RESPONSE).inject(human("why")).handle(FAIL)
        await it.execute_query_async("go")
        assert shape(it) == ["user: go", "user: why"]


def len_of_history(status: AgentStatus) -> int:
    return len(status.conversation_history)


GOOD: dict[type | None, Any] = {
    AssistantMessage: said("x"),
    ToolCall: call("add", a=1, b=1),
    ToolResult: ToolResult(tool_call_id="x", tool_name="x"),
    AssistantResponse: AssistantResponse(content="x"),
    None: None,
}


def query_for(event: AgentEvent) -> BaseAgent:
    return agent(call("x"), max_iterations=1) if event is E.ON_MAX_ITERATIONS else full()


class TestContracts:
    @pytest.mark.parametrize("event", AgentEvent)
    @pytest.mark.parametrize("decision", [CONTINUE, RETRY, STOP])
    @pytest.mark.parametrize("kind", GOOD)
    async def test_hooks_may_return_exactly_what_the_table_allows(
        self, event: AgentEvent, decision: HookDecision, kind: type | None
    ) -> None:
        contract = CONTRACTS[event]
        wanted = contract.stop_type if decision is STOP else contract.output_type
        allowed = {CONTINUE: True, RETRY: contract.retry, STOP: contract.stop_type is not None}
        fits = kind is wanted or (kind is None and contract.optional)
        it = query_for(event)
        it.on(event).handle(decision, lambda value, status: GOOD[kind])
        if allowed[decision] and fits:
            await it.execute_query_async("go")
            return
        with pytest.raises(HookContractError) as caught:
            await it.execute_query_async("go")
        for word in (str(event), decision.name, type(GOOD[kind]).__name__):
            assert word in caught.value.detail

    def test_table_of_contracts(self) -> None:
        retry = {event for event, contract in CONTRACTS.items() if contract.retry}
        assert retry == {E.AFTER_LLM_CALL, E.BEFORE_FINAL_RESPONSE}
        stops = {event: contract.stop_type for event, contract in CONTRACTS.items()}
        assert stops == {
            E.QUERY_START: AssistantMessage,
            E.BEFORE_LLM_CALL: AssistantMessage,
            E.AFTER_LLM_CALL: AssistantMessage,
            E.BEFORE_TOOL_EXECUTION: ToolResult,
            E.AFTER_TOOL_EXECUTION: None,
            E.ON_TOOL_ERROR: None,
            E.BEFORE_HISTORY_UPDATE: None,
            E.BEFORE_FINAL_RESPONSE: AssistantMessage,
            E.ON_MAX_ITERATIONS: AssistantMessage,
            E.QUERY_END: None,
        }

    async def test_broken_contract_still_runs_query_end_and_leaves_a_valid_history(self) -> None:
        it = full()
        ends: list[str | None] = []
        hook = it.on(E.AFTER_TOOL_EXECUTION).transform(lambda value, status: "text")
        it.on(E.QUERY_END).do(lambda status: ends.append(status.error))
        with pytest.raises(HookContractError):
            await it.execute_query_async("go")
        assert len(ends) == 1
        assert ends[0] is not None
        assert "after_tool_execution" in ends[0]
        it.off(hook)
        model_of(it).answers[:] = ["fine"]
        assert (await it.execute_query_async("again")).content == "fine"

    async def test_query_end_hook_that_breaks_the_contract_runs_once(self) -> None:
        it, ends = agent("a"), []
        it.on(E.QUERY_END).do(lambda status: ends.append(1)).handle(STOP)
        with pytest.raises(HookContractError):
            await it.execute_query_async("go")
        assert ends == [1]

    async def test_unfit_constant_breaks_the_contract_like_a_function(self) -> None:
        it = agent("a")
        it.on(E.AFTER_LLM_CALL).handle(CONTINUE, "text")
        with pytest.raises(HookContractError, match="str"):
            await it.execute_query_async("go")
