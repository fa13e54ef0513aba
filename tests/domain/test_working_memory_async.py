"""Answers of asynchronous sub-agents in the working memory of their parent."""

from typing import Any

from bottega.agents import BaseAgent, ToolMessage
from bottega.agents.messages import check_history
from bottega.memory.prompts import RECALL, RunMemory
from tests.domain.scripted import call
from tests.domain.subagents import Model, coordinator, dispatch, registry, results
from tests.domain.virtual import run_virtual


def wait_for_last(messages: Any) -> Any:
    newest = [r for r in results(messages) if isinstance(r, dict) and "queue_position" in r][-1]
    return call("await_subagent", f"await{newest['task_id']}", task_ids=[newest["task_id"]])


def test_task_answers_shrink_and_can_be_recalled_and_tasks_have_no_memory() -> None:
    names = [f"task{number}" for number in range(12)]

    async def run() -> None:
        script: list[Any] = []
        for name in names:
            script += [dispatch(name, agent="helper"), wait_for_last]
        texts = {name: [f"{name} found " + "x" * 1_500] for name in names}
        model = Model(go=[*script, call(RECALL, reference="m2"), "done"], **texts)
        async with registry() as where:
            helper = BaseAgent(
                "You help.", provider=model, agent_name="helper", description="helps"
            )
            lead = coordinator(model, where, helper, max_iterations=60)
            memory = lead.memory = RunMemory(limit=5_000)
            response = await lead.execute_query_async("go")
        assert response.content == "done", response
        answers = [m.content for m in lead.conversation_history if isinstance(m, ToolMessage)]
        assert len(answers) == 25
        assert [memory.recall(f"m{n}") for n in range(1, 25)] == answers[:24]
        assert answers[24] == answers[1]
        assert "task0 found xxx" in answers[24]
        asked = zip(model.asked, model.requests, model.tools, strict=True)
        for question, request, tools in asked:
            check_history(request)
            if question != "go":
                assert RECALL not in tools
                assert [m.role for m in request] == ["system", "user"]
        assert RECALL in model.tools[-1]
        assert answers[1] not in [m.content for m in model.requests[-3]]

    run_virtual(run())
