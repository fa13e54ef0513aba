"""Tasks as the work of agents: configuration, order and endings."""

import asyncio
from typing import Any

import pytest

from bottega.agents import (
    AgentEvent,
    AssistantMessage,
    BaseAgent,
    HookContractError,
    HookDecision,
    ModelError,
    SharedMemoryGraph,
    ToolCall,
    ToolStatus,
)
from bottega.errors import CycleError, InvalidInputError
from bottega.subagents.child import DEFAULT_INSTRUCTIONS, EMPTY
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.plugins import Skip
from bottega.subagents.prompt_guard import PromptGuard
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.swarm import Swarm, SwarmOptions
from bottega.subagents.tools import use_async_subagents
from tests.domain.scripted import Notes, agent, call, tokens
from tests.domain.subagents import (
    Heard,
    Model,
    after,
    await_all,
    coordinator,
    dispatch,
    ids,
    is_empty,
    passed,
    registry,
    results,
)
from tests.domain.virtual import run_virtual


def child(model: Any, name: str = "helper", **config: Any) -> BaseAgent:
    made = BaseAgent("You help.", provider=model, agent_name=name, description="helps", **config)
    made.agent_id = name
    return made


async def asked(model: Model, *agents: BaseAgent, **about: Any) -> tuple[list[Any], Heard]:
    """Return the answers of a coordinator's tools over these agents, and the events heard."""
    async with registry(min_workers=5, max_workers=5) as where:
        recorder, heard = Notes(), Heard()
        recorder.swarm = swarm = Swarm(where, SwarmOptions(listener=heard, **about))
        lead = coordinator(model, where, *agents)
        lead.agent_id = "lead"
        response = await lead.execute_query_async("go", recorder=recorder)
        assert response.error is None, response
        assert not swarm._parents  # a query leaves these behind
        assert not [each for each in swarm.context.folders() if each[0] != "/"]
        assert where.active_count == where.queued_count == 0
        await swarm.close()
        return results(lead.conversation_history), heard


class TestConfiguration:
    def test_anonymous_task_is_like_its_parent_with_its_own_instructions(self) -> None:
        async def run() -> None:
            model = Model(
                go=[
                    [dispatch("plain"), dispatch("told", instructions="Be brief.")],
                    await_all,
                    "end",
                ],
                plain=["p"],
                told=["t"],
            )
            found, _ = await asked(model)
            plain, told = (model.requests[model.asked.index(name)] for name in ("plain", "told"))
            assert [message.role for message in plain] == ["system", "user"]
            assert plain[0].content == DEFAULT_INSTRUCTIONS
            assert told[0].content == "Be brief."
            task_id = found[0]["task_id"]
            assert plain[1].content == (
                f"plain\n\nYour own folder is /subagent/{task_id}/ (input, output, scratch); "
                "/global/ is for reading."
            )
            tools = model.tools[model.asked.index("plain")]
            assert tools[:3] == ["read_file", "write_file", "list_files"]
            assert "dispatch_subagent" in tools

        run_virtual(run())

    def test_named_task_runs_its_agent_with_added_instructions(self) -> None:
        async def run() -> None:
            own = Model(told=["t"])
            model = Model(
                go=[dispatch("told", agent="helper", instructions="Be brief."), await_all, "end"]
            )
            helper = child(own)
            found, _ = await asked(model, helper)
            assert found[-1]["tasks"][0]["final_output"] == "t"
            assert own.requests[0][0].content == "You help.\n\nBe brief."
            assert own.tools[0] == ["read_file", "write_file", "list_files"]
            assert helper.conversation_history == [helper.system_message]
            assert helper.registered_tools == []

        run_virtual(run())

    def test_hooks_of_the_agent_fire(self) -> None:
        async def run() -> None:
            seen = []
            model = Model(go=[dispatch("a", agent="helper"), await_all, "end"], a=["A"])
            helper = child(model)
            helper.on(AgentEvent.QUERY_START).do(lambda status: seen.append("start"))
            helper.on(AgentEvent.BEFORE_FINAL_RESPONSE).transform(
                lambda message, status: message.model_copy(update={"content": "changed"})
            )
            found, _ = await asked(model, helper)
            assert seen == ["start"]
            assert found[-1]["tasks"][0]["final_output"] == "changed"

        run_virtual(run())

    def test_files_flow_between_parent_and_child(self) -> None:
        async def run() -> None:
            def give(messages: Any) -> Any:
                path = f"/subagent/{ids(messages)[0]}/input/brief"
                return call("write_file", path=path, content="the brief")

            def take(messages: Any) -> Any:
                folder = messages[1].content.partition("folder is ")[2].partition("/ (")[0]
                return [
                    call("read_file", "r1", path=f"{folder}/input/brief"),
                    call("read_file", "r2", path="/global/plan"),
                    call("write_file", "w", path=f"{folder}/output", content="found"),
                    call("write_file", "g", path="/global/plan", content="mine"),
                ]

            def look(messages: Any) -> Any:
                return call("read_file", path=f"/subagent/{ids(messages)[0]}/output")

            read: list[Any] = []

            def said(messages: Any) -> str:
                read.extend(results(messages))
                return "done"

            model = Model(
                go=[
                    call("write_file", "first", path="/global/plan", content="the plan"),
                    dispatch("a"), give, await_all, look, "end",
                ],
                a=[after(1, take), said],
            )  # fmt: skip
            found, _ = await asked(model)
            assert [each["content"] for each in read[:2]] == ["the brief", "the plan"]
            assert "only the root agent writes" in read[3]
            assert found[0] == {"written_chars": 8}  # before anything was dispatched
            assert found[-1]["content"] == "found"

        run_virtual(run())

    def test_sibling_does_not_read_its_folder(self) -> None:
        async def run() -> None:
            folders: list[str] = []
            read: list[Any] = []

            def write(messages: Any) -> Any:
                folders.append(messages[1].content.partition("folder is ")[2].partition("/ (")[0])
                return call("write_file", path=f"{folders[0]}/output", content="mine")

            def peek(messages: Any) -> Any:
                return call("read_file", path=f"{folders[0]}/output")

            def said(messages: Any) -> str:
                read.extend(results(messages))
                return "done"

            model = Model(
                go=[[dispatch("a"), dispatch("b")], await_all, "end"],
                a=[write, "A"],
                b=[after(1, peek), said],
            )
            await asked(model)
            assert read[0].startswith(f"there is no file '{folders[0]}/output'")

        run_virtual(run())


class TestEnds:
    def task(self, model: Model, *agents: BaseAgent, **about: Any) -> tuple[Any, Heard]:
        found, heard = run_virtual(asked(model, *agents, **about))
        return found[-1]["tasks"][0], heard

    def test_task_out_of_steps_with_a_text_is_completed(self) -> None:
        looking = call("list_files")
        model = Model(go=[dispatch("a", agent="helper"), await_all, "end"])
        model.scripts["a"] = [
            agent_message("so far", looking),
            agent_message("further", looking),
        ]
        task, heard = self.task(model, child(model, max_iterations=2))
        assert (task["status"], task["final_output"]) == ("completed", "further")
        assert task["stop_reason"] == heard.data("completed")[0]["stop_reason"] == "max_iterations"

    def test_task_out_of_steps_without_a_text_is_failed(self) -> None:
        model = Model(go=[dispatch("a", agent="helper"), await_all, "end"])
        model.scripts["a"] = [call("list_files"), call("list_files")]
        task, heard = self.task(model, child(model, max_iterations=2))
        assert task["status"] == "failed"
        assert heard.data("failed")[0]["error"]["code"] == "max_iterations"

    def test_steps_of_a_task_are_bounded_by_the_limits(self) -> None:
        async def run() -> None:
            model = Model(go=[dispatch("a"), await_all, "end"], a=[call("list_files")] * 9)
            async with registry(SubagentLimits(max_steps_per_subagent=3)) as where:
                lead = coordinator(model, where)
                await lead.execute_query_async("go")
                (task,) = results(lead.conversation_history)[-1]["tasks"]
                assert task["status"] == "failed"
                assert "3 iteration" in task["error"]
                assert len(model.scripts["a"]) == 6

        run_virtual(run())

    def test_empty_answer_is_failed(self) -> None:
        model = Model(go=[dispatch("a"), await_all, "end"], a=["", ""])
        task, heard = self.task(model)
        assert task["status"] == "failed"
        assert heard.data("failed")[0]["error"]["code"] == "model_empty"

    def test_task_that_a_hook_ends_without_a_text_says_so(self) -> None:
        model = Model(go=[dispatch("a", agent="helper"), await_all, "end"])
        helper = child(model)
        helper.on(AgentEvent.BEFORE_LLM_CALL).handle(HookDecision.STOP, AssistantMessage())
        task, _ = self.task(model, helper)
        assert (task["status"], task["final_output"]) == ("completed", EMPTY)

    def test_failed_task_fails_no_other_and_keeps_its_tokens(self) -> None:
        model = Model(
            go=[[dispatch("a"), dispatch("b")], await_all, "end"],
            a=[call("list_files"), ModelError("the model is gone")],
            b=[after(2, "B")],
        )
        task, heard = self.task(model)
        assert (task["status"], task["error"]) == ("failed", "the model is gone")
        assert task["token_usage"] == {"input": 10, "output": 5}
        assert heard.data("failed")[0]["token_usage"] == tokens(10, 5)
        assert heard.of("completed") == ["b"]

    @pytest.mark.parametrize("deep", [False, True])
    def test_bug_in_a_hook_ends_the_run(self, deep: bool) -> None:
        async def run() -> None:
            model = Model(
                go=[dispatch("mid", agent="mid"), await_all, "end"],
                mid=[dispatch("a", agent="helper"), await_all, "end"],
                a=["A"],
            )
            async with registry() as where:
                helper = child(model)
                hook = helper.on(AgentEvent.BEFORE_FINAL_RESPONSE)
                hook.transform(lambda message, status: "no message")
                lead = helper
                for name in ("mid", "lead") if deep else ("lead",):
                    lead = coordinator(model, where, lead, description=name)
                    lead.agent_name = lead.agent_id = name
                question = "go" if deep else "mid"
                broke: list[Exception] = []
                recorder = Notes()
                recorder.swarm = Swarm(where, SwarmOptions(broke=broke.append))
                with pytest.raises(HookContractError) as raised:
                    await lead.execute_query_async(question, recorder=recorder)
                assert broke == [raised.value]
                await passed(100)
                assert is_empty(where)

        run_virtual(run())


def agent_message(text: str, *calls: ToolCall) -> AssistantMessage:
    return AssistantMessage(content=text, tool_calls=calls)


class TestOrder:
    """Siblings that a path of the graph links."""

    def graph(self, *edges: str) -> SharedMemoryGraph:
        graph = SharedMemoryGraph()
        for edge in edges:
            graph.add_edge(*edge.split(">"))
        return graph

    async def play(
        self, model: Model, graph: SharedMemoryGraph, names: dict[str, str], **about: Any
    ) -> tuple[list[Any], Heard, BaseAgent]:
        """Run a coordinator over these agents; ``names``: agent by tool name."""
        async with registry(**{"min_workers": 1, "max_workers": 1, **about}) as where:
            recorder, heard = Notes(), Heard()
            recorder.swarm = Swarm(where, SwarmOptions(listener=heard))
            agents = {called: child(model, name) for called, name in names.items()}
            for each in agents.values():
                each.memory_graph = graph
            lead = agent(agent_name="lead")
            lead.provider, lead.memory_graph = model, graph
            use_async_subagents(lead, where, agents)
            await lead.execute_query_async("go", recorder=recorder)
            return results(lead.conversation_history), heard, lead

    @pytest.mark.parametrize("called", [("requirements", "designer"), ("ask_first", "draw")])
    def test_task_waits_for_the_answer_it_reads(self, called: tuple[str, str]) -> None:
        async def run() -> None:
            first, second = called
            model = Model(
                go=[
                    [
                        dispatch("design", agent=second, timeout_ms=5_000),
                        dispatch("other"),
                        dispatch("require", agent=first),
                    ],
                    await_all,
                    "end",
                ],
                design=[after(4, "D")],
                other=["O"],
                require=[after(30, "the requirements")],
            )
            graph = self.graph("requirements>designer")
            names = {first: "requirements", second: "designer"}
            found, heard, _ = await self.play(model, graph, names)
            assert heard.of("dequeued") == ["other", "require", "design"]
            assert heard.data("dequeued")[2] == {
                "attempt": 1, "waited_ms": 30_000, "timeout_ms": 5_000,
            }  # fmt: skip
            assert [task["status"] for task in found[-1]["tasks"]] == ["completed"] * 3
            asked = model.requests[model.asked.index("design")]
            assert any("the requirements" in message.content for message in asked)
            assert "warning" not in [event for _, event, _ in heard.events]

        run_virtual(run())

    def test_failed_predecessor_releases_the_task_with_a_warning(self) -> None:
        async def run() -> None:
            model = Model(
                go=[
                    [dispatch("design", agent="c"), dispatch("a", agent="a")],
                    await_all,
                    "end",
                ],
                design=["D"],
                a=[after(3, ModelError("no"))],
            )
            found, heard, _ = await self.play(
                model, self.graph("a>b", "b>c"), {"a": "a", "b": "b", "c": "c"}
            )
            assert [task["status"] for task in found[-1]["tasks"]] == ["completed", "failed"]
            (warning,) = heard.data("warning")
            assert warning["code"] == "upstream_failed"
            assert heard.of("warning") == ["design"]

        run_virtual(run())

    def test_held_task_can_be_cancelled(self) -> None:
        async def run() -> None:
            model = Model(
                go=[[dispatch("c", agent="c"), dispatch("a", agent="a")], after(2, "end")],
                a=[after(9, "A")],
            )
            _, heard, _ = await self.play(model, self.graph("a>c"), {"a": "a", "c": "c"})
            assert heard.moves("c") == ["cancelled"]
            assert heard.moves("a") == ["running", "cancelled"]

        run_virtual(run())

    def test_coordinator_reads_the_order_in_its_prompt(self) -> None:
        async def run() -> None:
            model = Model(go=["end"])
            graph = self.graph("requirements>designer")
            names = {"ask_first": "requirements", "draw": "designer"}
            _, _, lead = await self.play(model, graph, names)
            told = lead.conversation_history[1]
            assert told.role == "system"
            assert "ask_first -> draw" in told.content
            enum = lead.registered_tools[0].schema.parameters["properties"]["agent"]["enum"]
            assert enum == ["ask_first", "draw"]

        run_virtual(run())


class TestPlugins:
    class Counts:
        def __init__(self) -> None:
            self.before: list[str] = []
            self.after: list[tuple[Any, ...]] = []

        async def before_dispatch(self, ctx: Any, params: Any) -> Any:
            self.before.append(params.prompt)
            if params.prompt == "skip":
                return Skip("known already")
            return {"prompt": f"{params.prompt}!", "priority": 1, "metadata": {"seen": True}}

        async def after_subagent_complete(self, ctx: Any, outcome: Any) -> None:
            self.after.append((outcome.status, outcome.output, outcome.error, outcome.duration_ms))

    def test_plugins_change_skip_refuse_and_observe(self) -> None:
        async def run() -> None:
            plugin = self.Counts()
            model = Model(
                go=[
                    [dispatch("a"), dispatch("skip"), dispatch("b"), dispatch("secret plan")],
                    await_all,
                    dispatch("late"),
                    after(1, "end"),
                ],
                late=[after(50, "never")],
            )
            model.scripts |= {"a!": [after(2, "A")], "b!": [ModelError("no")]}
            model.scripts["late!"] = [after(50, "never")]
            guard = PromptGuard(deny=["secret"])
            found, heard = await asked(model, plugins=(guard, plugin))
            assert found[1] == {"status": "skipped", "result": "known already"}
            assert "are not allowed" in found[3]
            assert plugin.before == ["a", "skip", "b", "secret plan", "late"]
            assert heard.of("dispatched") == ["a!", "b!", "late!"]
            assert sorted(plugin.after, key=str) == sorted(
                [
                    ("completed", "A", None, 2000),
                    ("failed", None, "no", 0),
                    ("cancelled", None, "parent-ended", 1000),
                ],
                key=str,
            )

        run_virtual(run())


class TestSettingUp:
    def test_invalid_setups_are_refused(self) -> None:
        async def run() -> None:
            where = registry()
            lead = agent("end")
            with pytest.raises(InvalidInputError, match="needs a description") as refused:
                use_async_subagents(lead, where, [agent(agent_name="nobody")])
            assert refused.value.code == "missing_description"
            twins = [agent(agent_name="twin", description="one of two") for _ in range(2)]
            with pytest.raises(InvalidInputError, match="'twin'"):
                use_async_subagents(lead, where, twins)
            use_async_subagents(lead, where)
            with pytest.raises(InvalidInputError) as refused:
                use_async_subagents(lead, where)
            assert refused.value.code == "duplicate_tool"
            waits = agent("end")
            waits.register_agent(agent("x"), name="x", description="x")
            with pytest.raises(InvalidInputError) as refused:
                use_async_subagents(waits, where)
            assert refused.value.code == "duplicate_tool"
            top = agent("end", description="top")
            below = agent("end", description="below")
            use_async_subagents(below, where, {"top": top})
            with pytest.raises(CycleError):
                use_async_subagents(top, where, {"below": below})
            with pytest.raises(CycleError):
                use_async_subagents(top, where, {"top": top})

        run_virtual(run())

    def test_without_agents_none_can_be_named(self) -> None:
        async def run() -> None:
            lead = coordinator(Model(), registry())
            names = [tool.name for tool in lead.registered_tools]
            assert names == [
                "dispatch_subagent", "dispatch_subagents", "poll_subagent", "await_subagent",
                "cancel_subagent", "send_to_subagent", "read_file", "write_file", "list_files",
            ]  # fmt: skip
            schema = lead.registered_tools[0].schema.parameters
            assert "agent" not in schema["properties"]
            assert schema["required"] == ["prompt"]

        run_virtual(run())

    def test_tools_work_only_within_a_query(self) -> None:
        async def run() -> None:
            lead = coordinator(Model(), registry())
            with pytest.raises(InvalidInputError, match="only within"):
                await lead.registered_tools[0].execute(dispatch("a"))

        run_virtual(run())


def test_blocking_sub_agent_may_dispatch_too() -> None:
    """Check that its tasks end with it, not with the root."""

    async def run() -> None:
        model = Model(
            go=[call("waits", query="mid"), after(5, "end")],
            mid=[[dispatch("a"), dispatch("b")], after(1, "mid done")],
            a=[after(1, "A")],
            b=[after(90, "B")],
        )
        async with registry() as where:
            recorder, heard = Notes(), Heard()
            recorder.swarm = Swarm(where, SwarmOptions(listener=heard))
            mid = coordinator(model, where)
            lead = BaseAgent("You lead.", provider=model)
            lead.register_agent(mid, name="waits", description="waits")
            response = await lead.execute_query_async("go", recorder=recorder)
            assert response.content == "end"
            assert response.tool_results[0].status is ToolStatus.SUCCESS
            assert heard.moves("b") == ["running", "cancelled"]
            assert where.active_count == 0
            assert response.usage.model_calls == 5

    run_virtual(run())


def test_two_queries_of_one_agent_share_no_tasks() -> None:
    async def run() -> None:
        model = Model(go=[dispatch("a"), "end", dispatch("a"), await_all, "end"], a=["A", "A"])
        async with registry() as where:
            lead = coordinator(model, where)
            await lead.execute_query_async("go")
            model.scripts["go"].insert(1, lambda m: call("poll_subagent", task_ids=ids(m)[:1]))
            model.scripts["a"] = [after(1, "A")]
            await asyncio.wait_for(lead.execute_query_async("go"), 50)
            found = results(lead.conversation_history)
            assert found[0]["task_id"] != found[1]["task_id"]
            assert found[2]["tasks"][0]["status"] == "not_found"

    run_virtual(run())


def test_hook_that_stops_ends_the_tasks() -> None:
    async def run() -> None:
        model = Model(go=[dispatch("a"), "never"], a=[after(50, "A")])
        async with registry() as where:
            lead = coordinator(model, where)
            answer = agent_message("stopped")
            lead.on(AgentEvent.BEFORE_LLM_CALL).when(lambda s: s.iteration == 2).handle(
                HookDecision.STOP, answer
            )
            response = await lead.execute_query_async("go")
            assert response.content == "stopped"
            assert where.active_count == 0

    run_virtual(run())


def test_code_without_an_event_loop_can_reuse_one_registry() -> None:
    """Give each query its own loop; it must not wait for anything of the last one's."""
    where = SubagentRegistry()
    for _ in range(3):
        names = [f"t{n}" for n in range(12)]
        model = Model(go=[[dispatch(name) for name in names], await_all, "end"])
        model.scripts |= {name: [name] for name in names}
        lead = coordinator(model, where)
        assert lead.execute_query("go").content == "end"
        assert where.scheduler.in_use == where.active_count == 0
