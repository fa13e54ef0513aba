"""The working memory in the prompts of a root agent."""

import copy
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.agents import (
    AssistantMessage,
    BaseAgent,
    HumanMessage,
    Query,
    Recorder,
    StandardMessage,
    SystemMessage,
    ToolMessage,
    ToolResult,
    ToolStatus,
    tool,
)
from bottega.agents.messages import check_history
from bottega.agents.parts import estimated_tokens
from bottega.memory.prompts import RECALL, RunMemory, schema_tokens, tokens_of
from bottega.memory.working_memory import Budgets, Retrieved, WorkingMemory
from tests.domain.scripted import (
    Notes,
    ScriptedModel,
    agent,
    answers_in,
    ask,
    call,
    model_of,
    texts,
)
from tests.examples import examples


def output(number: int, size: int = 2_000) -> str:
    return f"row {number} begins. ".ljust(size - 8, "x") + f" end {number}"


@tool("read_row", "Reads a row.")
def read_row(number: int) -> str:
    return output(number)


def calls(count: int, first: int = 0) -> list[Any]:
    return [call("read_row", f"id{i}", number=i) for i in range(first, first + count)]


def with_memory(*answers: Any, memory: RunMemory | None = None, **config: Any) -> BaseAgent:
    made = agent(*answers, **{"tools": [read_row], "max_iterations": 500, **config})
    made.memory = memory or RunMemory()
    return made


def memory_of(agent: BaseAgent) -> RunMemory:
    assert isinstance(agent.memory, RunMemory)
    return agent.memory


def size(messages: Sequence[StandardMessage]) -> int:
    return sum(tokens_of(message, estimated_tokens) for message in messages)


def notes_in(messages: Sequence[StandardMessage]) -> list[SystemMessage]:
    return [
        each
        for each in messages
        if isinstance(each, SystemMessage) and each.metadata.get("working_memory")
    ]


async def test_run_of_200_calls_stays_within_the_limit_and_can_recall_the_first() -> None:
    recall = call(RECALL, reference="m1")
    lead = with_memory(*calls(200), recall, recall, "done")
    notes = Notes()
    response = await lead.execute_query_async("read all", recorder=notes)
    assert response.content == "done"
    model = model_of(lead)
    assert len(model.requests) == 203
    for request in model.requests:
        check_history(request)
        assert size(request) < 20_000
        assert request[0].content == "system"
        assert "read all" in texts(request)
    assert len(answers_in(lead)) == 202  # the history itself is never cut
    assert answers_in(lead)[-2:] == [output(0), output(0)]
    assert output(199) in texts(model.requests[200])
    assert output(0) in texts(model.requests[201])
    assert notes.about("warning") == []
    assert memory_of(lead).working.recall("m201") is None


async def test_short_run_has_the_same_prompts_as_without_memory() -> None:
    plain = agent(*calls(5), "done", tools=[read_row])
    lead = with_memory(*calls(5), "done")
    for each in (plain, lead):
        await each.execute_query_async("go")
    assert [texts(r) for r in model_of(lead).requests] == [
        texts(r) for r in model_of(plain).requests
    ]
    assert model_of(lead).tools == model_of(plain).tools
    assert model_of(lead).requests[-1] == lead.conversation_history[:-1]


async def test_old_answers_shrink_first_and_then_blocks_are_removed() -> None:
    lead = with_memory(*calls(90), "done", memory=RunMemory(limit=8_000))
    told: list[Any] = []

    class Watch(Recorder):
        async def model_call(self, query: Query, invoke: Any) -> AssistantMessage:
            told.append(query.composed)
            return await super().model_call(query, invoke)

    await lead.execute_query_async("go", recorder=Watch())
    first = next(i for i, each in enumerate(told) if each)
    assert told[first]["left"] == 0 < told[first]["shrunk"]
    requests = model_of(lead).requests
    shrunk = next(m for m in requests[first] if isinstance(m, ToolMessage))
    assert 'recall_memory("m1")' in shrunk.content
    assert "row 0 begins." in shrunk.content
    assert shrunk.tool_results[0].tool_call_id == "id0"
    assert RECALL not in model_of(lead).tools[first - 1]
    assert RECALL in model_of(lead).tools[first]
    last = requests[-1]
    assert told[-1]["left"] > 0
    [note] = notes_in(last)
    assert last.index(note) == 1
    assert "m1 to m" in note.content
    assert told[-1]["tokens"] <= 8_000
    # The five newest are there, the newest two whole.
    assert [output(i) for i in (88, 89)] == [m.content for m in last if isinstance(m, ToolMessage)][
        -2:
    ]


async def test_prompts_keep_their_prefix_between_prunings() -> None:
    lead = with_memory(*calls(100), "done")
    await lead.execute_query_async("go")
    requests = [texts(request) for request in model_of(lead).requests]
    broken = sum(now[: len(before)] != before for before, now in pairwise(requests))
    assert broken <= 16


async def test_replayed_run_has_the_same_prompts() -> None:
    class Taped(Recorder):
        def __init__(self) -> None:
            self.answers: list[AssistantMessage] = []
            self.results: dict[str, ToolResult] = {}
            self.prompts: list[Any] = []
            self.replaying = False

        async def model_call(self, query: Query, invoke: Any) -> AssistantMessage:
            self.prompts.append(query.composed)
            if self.replaying and query.model_calls <= 40:
                return self.answers[query.model_calls - 1]
            self.answers.append(await super().model_call(query, invoke))
            return self.answers[-1]

        async def tool_call(
            self, query: Query, tool_call: Any, tool: Any, execute: Any
        ) -> ToolResult:
            key = f"{query.model_calls}/{tool_call.id}"
            if key not in self.results:
                self.results[key] = await execute()
            return self.results[key]

    def script() -> list[Any]:
        return [*calls(30), call(RECALL, reference="m3"), *calls(29, 30), "done"]

    recorder = Taped()
    first = with_memory(*script(), memory=RunMemory(limit=9_000))
    await first.execute_query_async("go", recorder=recorder)
    before, recorder.prompts, recorder.replaying = recorder.prompts, [], True
    again = with_memory(*script()[40:], memory=RunMemory(limit=9_000))
    await again.execute_query_async("go", recorder=recorder)
    assert recorder.prompts == before
    assert [texts(r) for r in model_of(again).requests] == [
        texts(r) for r in model_of(first).requests[40:]
    ]


async def test_repeated_recall_shrinks_to_the_same_reference() -> None:
    recalls = [call(RECALL, f"r{i}", reference="m1") for i in range(3)]
    lead = with_memory(*calls(20), *recalls, *calls(20, 20), "done", memory=RunMemory(limit=8_000))
    await lead.execute_query_async("go")
    assert "m41" not in memory_of(lead).references
    assert memory_of(lead).recall("m40") == output(39)
    shortened = [
        sum('recall_memory("m1")' in text for text in texts(request))
        for request in model_of(lead).requests
    ]
    assert max(shortened) >= 3


async def test_task_and_earlier_runs_are_rendered_inside_fences() -> None:
    memory = RunMemory()
    memory.working.load_task_context(
        "long description", goals=["win"], constraints=["no cheating"], plan=["play"]
    )
    memory.working.set("field", "green")
    memory.working.retrieve_from_episodic([Retrieved("run 7", "was lost in the rain")])
    lead = with_memory(*calls(2), "done", memory=memory)
    await lead.execute_query_async("go")
    requests = model_of(lead).requests
    for request in requests:
        [note] = notes_in(request)
        assert request.index(note) == 1
    content = notes_in(requests[0])[0].content
    for text in (
        "- win",
        "- no cheating",
        "- play",
        "field = green",
        "run 7: was lost in the rain",
    ):
        assert text in content
    assert "long description" not in content
    mark = content.rstrip(">").rsplit("-", 1)[-1]
    assert content.count(mark) == 2
    assert len({notes_in(request)[0].content for request in requests}) == 1
    assert notes_in(lead.conversation_history) == []


async def test_required_content_over_the_limit_causes_one_warning_and_no_note() -> None:
    @tool("dump", "Dumps.")
    def dump() -> str:
        return "d" * 20_000

    memory = RunMemory(limit=3_000)
    memory.working.load_task_context(goals=["win"])
    lead = with_memory(
        *[call("dump", f"d{i}") for i in range(4)], "done", memory=memory, tools=[dump]
    )
    notes = Notes()
    await lead.execute_query_async("go", recorder=notes)
    assert [line[1] for line in notes.about("warning")] == ["memory_limit"]
    last = model_of(lead).requests[-1]
    check_history(last)
    assert notes_in(last) == []
    assert [m.role for m in last] == ["system", "user", "assistant", "tool"]
    assert last[-1].content == "d" * 20_000


async def test_recall_tool_counts_from_the_first_prompt_that_has_it() -> None:
    for length in range(10_000, 12_000, 40):

        @tool("dump", "Dumps.")
        def dump(length: int) -> str:
            return "d" * length

        asked = [call("dump", f"d{i}", length=n) for i, n in enumerate((2_000, length))]
        lead = with_memory(*asked, "done", memory=RunMemory(limit=3_000), tools=[dump])
        notes = Notes()
        await lead.execute_query_async("go", recorder=notes)
        model, tools = model_of(lead), [dump, *memory_of(lead).tools]
        used = schema_tokens(
            [t.schema for t in tools if t.name in model.tools[-1]], estimated_tokens
        )
        assert notes.about("warning") or size(model.requests[-1]) + used <= 3_000


async def test_copies_have_no_memory() -> None:
    lead = with_memory(*calls(30), "done", memory=RunMemory(limit=4_000))
    await lead.execute_query_async("go")
    assert memory_of(lead).tools
    for made in (lead.copy_for_call(), lead.fresh_copy()):
        assert made.memory is None
        assert RECALL not in [each.name for each in made.registered_tools]
        made.provider = model = ScriptedModel("hello")
        await made.execute_query_async("again")
        assert model.tools == [["read_row"]]


async def test_answers_of_sub_agents_enter_the_memory_and_sub_agents_have_none() -> None:
    helper = agent(*[output(i) for i in range(20)])
    lead = with_memory(*[ask("helper") for _ in range(20)], "done", memory=RunMemory(limit=4_000))
    lead.register_agent(helper, name="helper", description="helps")
    await lead.execute_query_async("go")
    assert memory_of(lead).recall("m1") == output(0)
    assert memory_of(lead).recall("m20") == output(19)
    assert all(notes_in(request) == [] for request in model_of(helper).requests)
    assert not any(RECALL in names for names in model_of(helper).tools)


async def test_unknown_reference_is_answered_with_the_known_ones() -> None:
    wrong = call(RECALL, reference="m99")
    lead = with_memory(*calls(10), wrong, "done", memory=RunMemory(limit=4_000))
    await lead.execute_query_async("go")
    assert answers_in(lead)[-1].startswith(
        "Error: NotFoundError: nothing is called 'm99'; references are m1 to m10"
    )


async def test_text_beside_tool_calls_can_be_recalled_too() -> None:
    said = AssistantMessage(content="my plan is 42", tool_calls=(calls(1)[0],))
    lead = with_memory(said, *calls(30, 1), "done", memory=RunMemory(limit=4_000))
    await lead.execute_query_async("go")
    assert "my plan is 42" not in texts(model_of(lead).requests[-1])
    memory = memory_of(lead)
    found = [memory.recall(f"c{i}") or "" for i in range(1, 4)]
    assert any("my plan is 42" in text and "read_row" in text for text in found)


async def test_conversation_of_many_queries_stays_within_the_limit() -> None:
    lead = with_memory(*["answer " + "y" * 1_000] * 40, memory=RunMemory(limit=4_000))
    for index in range(40):
        await lead.execute_query_async(f"question {index} " + "q" * 500)
        request = model_of(lead).requests[-1]
        assert size(request) <= 4_000
        assert request[-1].content.startswith(f"question {index} ")


bodies = st.sampled_from(["", "short", "x" * 900, "é 12 Error\n" * 300, "y" * 9_000])


@st.composite
def histories(draw: st.DrawFn) -> list[list[StandardMessage]]:
    """Draw steps, each of messages that are added before the next model call."""
    steps: list[list[StandardMessage]] = []
    for step in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["calls", "calls", "calls", "human", "system", "said"]))
        if kind == "calls":
            ids = [f"{step}-{n}" for n in range(draw(st.integers(1, 3)))]
            asked = tuple(call("read_row", each, number=1) for each in ids)
            added: list[StandardMessage] = [
                AssistantMessage(content=draw(bodies), tool_calls=asked)
            ]
            for each in ids:
                body = draw(bodies)
                failed = draw(st.booleans())
                result = ToolResult(
                    tool_call_id=each,
                    tool_name="read_row",
                    status=ToolStatus.ERROR if failed else ToolStatus.SUCCESS,
                    result=None if failed else body,
                    error=body if failed else None,
                )
                added.append(ToolMessage(content=result.text, tool_results=(result,)))
            steps.append(added)
        elif kind == "human":
            steps.append([HumanMessage(content=draw(bodies))])
        elif kind == "system":
            steps.append([SystemMessage(content=draw(bodies))])
        else:
            steps.append([AssistantMessage(content=draw(bodies))])
    return steps


@settings(max_examples=examples(150), deadline=None)
@given(histories(), st.sampled_from([600, 2_000, 5_000]), st.booleans(), st.integers(0, 13))
def test_composed_prompt_is_a_valid_history_with_the_hot_block(
    steps: list[list[StandardMessage]], limit: int, known: bool, replaced: int
) -> None:
    memory = RunMemory(WorkingMemory(Budgets(task=200, retrieved=100)), limit=limit)
    if known:
        memory.working.load_task_context(goals=["g" * 100])
        memory.working.retrieve_from_episodic([Retrieved("e", "found " * 30)])
    lead = BaseAgent("system", tools=[read_row])
    question = HumanMessage(content="the question")
    query = Query(lead, (question,), Recorder())
    lead.conversation_history.append(question)
    schemas = [read_row.schema]
    recalled: dict[str, str | None] = {}
    for index, added in enumerate(steps):
        lead.conversation_history += added
        if index == replaced:  # a hook may do this
            old = lead.conversation_history[2]
            lead.conversation_history[2] = copy.copy(old)
        before = list(lead.conversation_history)
        prompt = list(memory.compose(query, schemas))
        assert lead.conversation_history == before
        check_history(prompt)
        assert prompt[0] is lead.conversation_history[0]
        assert question in prompt
        assert prompt[-len(added) :] == added
        again = list(memory.compose(query, schemas))
        assert [id(m) for m in again] == [id(m) for m in prompt]
        movable = before[2 : -len(added)]
        if size(prompt) + 120 > limit:
            # All removable blocks are gone: at most the messages after the newest calls remain.
            newest = max(
                (
                    i
                    for i, m in enumerate(before)
                    if isinstance(m, AssistantMessage) and m.tool_calls
                ),
                default=2,
            )
            stays = before[:2] + before[newest:]
            assert notes_in(prompt) == [] or size(prompt) <= limit
            if size(prompt) > limit:
                assert [id(m) for m in prompt] == [id(m) for m in stays]
        for each in movable:
            if isinstance(each, ToolMessage):
                recalled.setdefault(each.content, None)
    held = {memory.recall(f"m{n}") for n in range(1, 60)}
    assert set(recalled) <= held
    json.dumps(memory.working.snapshot())


async def test_early_recall_leaves_no_gap_in_the_references() -> None:
    lead = with_memory(call(RECALL, "r", reference="m1"), *calls(1), "done")
    await lead.execute_query_async("go")
    assert memory_of(lead).references.startswith("m1, ")
    assert memory_of(lead).recall("m1") == output(0)


async def test_agents_own_tool_of_that_name_has_precedence() -> None:
    @tool(RECALL, "Something else.")
    def own(reference: str) -> str:
        return f"own {reference} " * 300

    mine = [call(RECALL, f"o{i}", reference="m1") for i in range(30)]
    lead = with_memory(*mine, "done", memory=RunMemory(limit=4_000), tools=[own])
    await lead.execute_query_async("go")
    assert model_of(lead).tools[-1] == [RECALL]
    assert answers_in(lead) == ["own m1 " * 300] * 30
    assert memory_of(lead).recall("m30") == "own m1 " * 300
