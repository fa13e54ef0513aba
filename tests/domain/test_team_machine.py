"""A run of agents whose models do anything in any order, beside a simple account of it."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bottega.agents import AssistantMessage, AssistantResponse
from bottega.agents.history import check_history
from bottega.errors import ModelError
from bottega.subagents.handle import SubagentHandle
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.plugins import DispatchRequest, PluginContext, Refused
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.states import SubagentStatus
from bottega.subagents.swarm import Swarm, SwarmOptions
from tests.domain.scripted import COST, Notes, call
from tests.domain.subagents import Heard, coordinator, is_empty, passed, registry, results, settled
from tests.domain.virtual import VirtualLoop
from tests.examples import examples

S = SubagentStatus
LIMITS = SubagentLimits(
    max_concurrent=2,
    max_queued=4,
    max_concurrent_global=3,
    max_queue_size=6,
    max_depth=2,
    default_timeout=60.0,
    max_timeout=80.0,
    max_steps_per_subagent=6,
)
OVER = {str(status) for status in S if status.is_final}
MODES = ("all", "any", "any_success", "quorum")
TASK = st.fixed_dictionaries(
    {"agent": st.sampled_from([None, "nest"]), "retries": st.integers(0, 3)},
    optional={
        "timeout_ms": st.sampled_from([30_000, 80_000]),
        "priority": st.integers(1, 10),
        "token_budget": st.sampled_from([100_000, 100_000, 100]),
    },
)


class Marks:
    """Guard that marks each text, and refuses some."""

    guard = True

    async def before_dispatch(self, ctx: PluginContext, params: DispatchRequest) -> Any:
        if "bad" in params.prompt:
            return Refused("not here")
        return None if params.prompt.endswith("!") else {"prompt": f"{params.prompt}!"}


class Softens:
    """Guard that changes a word after each mark."""

    guard = True

    async def before_dispatch(self, ctx: PluginContext, params: DispatchRequest) -> Any:
        soft = params.prompt.replace("hard", "soft")
        return None if soft == params.prompt else {"prompt": soft}


class Asked:
    """A model call under way, which ends when the test says so."""

    def __init__(self, messages: Any) -> None:
        self.messages = list(messages)
        self.said = [m.content for m in messages if m.role == "user"]
        self.prompt: str = self.said[0].partition("\n")[0]
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    @property
    def ids(self) -> list[str]:
        """Ids of the caller's own tasks."""
        fan_outs = (each["tasks"] for each in results(self.messages) if _is_fan_out(each))
        return [task["task_id"] for tasks in fan_outs for task in tasks if "task_id" in task]


def _is_fan_out(result: Any) -> bool:
    return isinstance(result, dict) and any("index" in task for task in result.get("tasks", ()))


class Puppet:
    """Model whose calls wait for the test."""

    def __init__(self, hear: Callable[[Asked], object]) -> None:
        self.open: dict[Asked, None] = {}
        self.hear = hear

    async def invoke(self, messages: Any, tools: Any = (), **options: Any) -> AssistantMessage:
        check_history(messages)
        asked = Asked(messages)
        self.hear(asked)
        self.open[asked] = None
        try:
            answer = await asked.answer
        finally:
            del self.open[asked]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            return AssistantMessage(content=answer, usage=COST)
        return AssistantMessage(tool_calls=(answer,), usage=COST)


class Team(RuleBasedStateMachine):
    """Machine that answers model calls; the root's query begins again after its end."""

    @initialize(tasks=st.lists(TASK, min_size=2, max_size=4))
    def begin(self, tasks: list[dict[str, Any]]) -> None:
        self.loop = VirtualLoop()
        self.model = Puppet(self.hear)
        self.where: SubagentRegistry = registry(LIMITS)
        self.told: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.numbers = 0
        self.problems: list[Exception] = []
        self.do(self.start)
        self.dispatch_from(next(iter(self.model.open)), tasks, "hard")

    def start(self) -> None:
        self.heard = Heard()
        self.handles: dict[str, SubagentHandle] = {}
        keep = self.heard.on_event

        def on_event(handle: SubagentHandle, event: str, data: dict[str, Any]) -> None:
            self.handles[handle.prompt] = handle
            keep(handle, event, data)

        self.heard.on_event = on_event  # type: ignore[method-assign]
        recorder = Notes()
        options = SwarmOptions(listener=self.heard, plugins=[Softens(), Marks()])
        recorder.swarm = Swarm(self.where, options)
        nest = coordinator(self.model, self.where, description="nests", max_iterations=99)
        nest.agent_name = "nest"
        lead = coordinator(self.model, self.where, nest, max_iterations=99)
        self.root = self.loop.create_task(lead.execute_query_async("root", recorder=recorder))

    def do(self, action: Callable[[], Any]) -> Any:
        async def acted() -> Any:
            try:
                return action()
            finally:
                await settled()

        return self.loop.run_until_complete(acted())

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def some_call(self, data: st.DataObject, fit: Callable[[Asked], object]) -> Asked | None:
        """Choose an open model call that fits."""
        if self.root.done():
            self.run_is_over()
            self.do(self.start)
        calls = sorted(self.model.open, key=lambda asked: asked.prompt)
        calls = [asked for asked in calls if fit(asked)]
        return data.draw(st.sampled_from(calls), "call") if calls else None

    def answer(self, asked: Asked, answer: Any) -> None:
        self.do(lambda: asked.answer.set_result(answer))

    def use(self, asked: Asked, tool: str, **arguments: Any) -> None:
        self.answered[asked.prompt] += 1
        self.answer(asked, call(tool, f"{tool}-{self.number()}", **arguments))

    # What models do

    @rule(data=st.data(), how=st.sampled_from(["say", "again", "again", "no"]))
    def a_task_ends(self, data: st.DataObject, how: str) -> None:
        if (asked := self.some_call(data, self.is_of_task)) is None:
            return
        handle = self.handles[asked.prompt]
        before = self.tries(handle)
        if how == "say":
            self.say(asked)
            return
        code = "model_unavailable" if how == "again" else "model_rejected"
        self.answer(asked, ModelError("down", code=code))
        if how == "again" and before <= handle.retries:
            assert self.tries(handle) == before + 1
        else:
            assert (handle.status, handle.error_code) == (S.FAILED, code)

    @rule(data=st.data())
    def a_task_works(self, data: st.DataObject) -> None:
        if asked := self.some_call(data, self.is_of_task):
            self.use(asked, "list_files")

    @rule(data=st.data(), well=st.booleans())
    def the_root_ends(self, data: st.DataObject, well: bool) -> None:
        asked = self.some_call(data, lambda asked: not self.is_of_task(asked) and asked.ids[4:])
        if asked is None:
            return
        if well:
            self.say(asked)
        else:
            self.answer(asked, ModelError("down", code="model_unavailable"))
        assert self.root.done()

    def is_of_task(self, asked: Asked) -> bool:
        return asked.prompt != "root"

    def say(self, asked: Asked) -> None:
        self.answered[asked.prompt] += 1
        self.answer(asked, f"found {asked.prompt}")

    def tries(self, handle: SubagentHandle) -> int:
        """Return the number of a task's tries so far."""
        numbers = [
            d["attempt"] for p, e, d in self.heard.events if (p, e) == (handle.prompt, "retried")
        ]
        assert numbers == list(range(2, len(numbers) + 2))
        return len(numbers) + 1

    @rule(
        data=st.data(),
        tasks=st.lists(TASK, min_size=1, max_size=4),
        words=st.sampled_from(["soft", "hard", "hard", "hard bad"]),
    )
    def dispatch(self, data: st.DataObject, tasks: list[dict[str, Any]], words: str) -> None:
        if asked := self.some_call(data, self.may_dispatch):
            self.dispatch_from(asked, tasks, words)

    def dispatch_from(self, asked: Asked, tasks: list[dict[str, Any]], words: str) -> None:
        for task in tasks:
            task["prompt"] = f"{words} task {self.number()}"
            if task["agent"] is None or self.is_of_task(asked):
                del task["agent"]
        self.use(asked, "dispatch_subagents", tasks=tasks)

    def may_dispatch(self, asked: Asked) -> bool:
        return not self.is_of_task(asked) or bool(self.handles[asked.prompt].named)

    @rule(data=st.data())
    def poll(self, data: st.DataObject) -> None:
        if asked := self.some_call(data, self.has_tasks):
            self.use(asked, "poll_subagent")

    def has_tasks(self, asked: Asked) -> bool:
        return bool(asked.ids)

    @rule(
        data=st.data(),
        mode=st.sampled_from(MODES),
        timeout_ms=st.sampled_from([1_000, 1_000, 40_000]),
    )
    def wait(self, data: st.DataObject, mode: str, timeout_ms: int) -> None:
        if (asked := self.some_call(data, self.has_tasks)) is None:
            return
        ids = data.draw(st.lists(st.sampled_from(asked.ids), min_size=1, max_size=4), "ids")
        quorum = {"quorum": 1} if mode == "quorum" else {}
        self.use(asked, "await_subagent", task_ids=ids, mode=mode, timeout_ms=timeout_ms, **quorum)

    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        if asked := self.some_call(data, self.has_tasks):
            ids = data.draw(st.lists(st.sampled_from(asked.ids), min_size=1, max_size=3), "ids")
            self.use(asked, "cancel_subagent", task_ids=ids)
            for task_id in ids:
                self.is_stopped(task_id)

    def is_stopped(self, task_id: str) -> None:
        handle = self.by_id(task_id)
        assert handle.status.is_final
        below = [child for scope in handle.scopes for child in scope.children.values()]
        assert all(child.status.is_final for child in below)

    @rule(data=st.data(), words=st.sampled_from(["hard word", "hard word", "bad word"]))
    def send(self, data: st.DataObject, words: str) -> None:
        if asked := self.some_call(data, self.has_tasks):
            under_way = [each for each in asked.ids if not self.by_id(each).status.is_final]
            task_id = data.draw(st.sampled_from(under_way or asked.ids), "id")
            text = f"{words} {self.number()}"
            self.use(asked, "send_to_subagent", task_id=task_id, message=text)

    def by_id(self, task_id: str) -> SubagentHandle:
        return next(each for each in self.handles.values() if str(each.task_id) == task_id)

    @rule(seconds=st.sampled_from([1, 1, 6, 31]))
    def time_passes(self, seconds: int) -> None:
        async def pass_() -> None:
            await passed(seconds)
            await settled()

        self.loop.run_until_complete(pass_())

    # What they get

    def hear(self, asked: Asked) -> None:
        """Check what a model reads; an agent takes an error here for one of its model."""
        try:
            self.check(asked)
        except Exception as error:
            self.problems.append(error)
            raise

    def check(self, asked: Asked) -> None:
        handle = self.handles.get(asked.prompt)
        if handle is not None:
            assert asked.prompt.startswith("soft")
            assert asked.prompt.endswith("!")
            assert not handle.status.is_final
            self.reads_messages(asked, handle)
        found = results(asked.messages)
        last = asked.messages[-1]
        if last.role == "tool" and found:
            self.reads(last, found[-1])

    def reads_messages(self, asked: Asked, handle: SubagentHandle) -> None:
        heard, sent = asked.said[1:], self.sent_to(handle)
        assert heard == sent[: len(heard)]
        assert len(heard) >= self.told[asked.prompt]
        self.told[asked.prompt] = len(heard)

    def sent_to(self, handle: SubagentHandle) -> list[str]:
        return [
            data["message"]
            for prompt, event, data in self.heard.events
            if (prompt, event) == (handle.prompt, "message_sent")
        ]

    def unread(self, handle: SubagentHandle) -> int:
        """Count the messages that a task's last try has not read."""
        sent, read = set(), set()
        for prompt, event, data in self.heard.events:
            if prompt != handle.prompt:
                continue
            if event == "message_sent":
                sent.add(data["message_id"])
            elif event == "message_read":
                read.add(data["message_id"])
            elif event == "retried":
                read.clear()
        return len(sent - read)

    def reads(self, message: Any, result: Any) -> None:
        """Check the result of a tool beside the states of the tasks."""
        name = message.tool_results[0].tool_name
        if name not in ("poll_subagent", "await_subagent", "cancel_subagent"):
            return
        assert isinstance(result, dict), result
        for view in result["tasks"]:
            handle = self.by_id(view["task_id"])
            if view["status"] in OVER:
                assert handle.status == view["status"]
            if "final_output" in view:
                assert view["final_output"] == handle.final_output
            if name != "cancel_subagent" and view["status"] in OVER:
                assert view.get("unread_messages", 0) == self.unread(handle)
        if name == "await_subagent":
            self.is_met(result)

    def is_met(self, result: dict[str, Any]) -> None:
        statuses = [view["status"] for view in result["tasks"]]
        if result["status"] == "none_succeeded":
            assert OVER.issuperset(statuses)
            assert "completed" not in statuses
        elif result["wait_timed_out"]:
            assert not OVER.issuperset(statuses)
        elif len(statuses) > 1:
            assert result["status"] == "done"
            assert OVER.intersection(statuses)

    # Invariants

    @invariant()
    def no_model_read_anything_wrong(self) -> None:
        assert not self.problems

    @invariant()
    def tasks_end_once(self) -> None:
        ends = Counter(prompt for prompt, event, _ in self.heard.events if event in OVER)
        for prompt, handle in self.handles.items():
            assert ends[prompt] == handle.status.is_final

    @invariant()
    def each_pays_for_its_calls(self) -> None:
        for prompt, handle in self.handles.items():
            assert handle.token_usage.input <= 10 * self.answered[prompt]
            if handle.status is S.COMPLETED:
                assert handle.token_usage.input == 10 * self.answered[prompt]

    @invariant()
    def no_finished_task_asks(self) -> None:
        for asked in self.model.open:
            handle = self.handles.get(asked.prompt)
            assert handle is None or not handle.status.is_final

    @invariant()
    def slots_are_within_limits(self) -> None:
        holders = [handle for handle in self.where.handles() if handle.holds_slot]
        assert len(holders) == self.where.scheduler.busy <= 2
        assert self.where.queued_count <= LIMITS.max_queue_size + 1

    def run_is_over(self) -> None:
        response: AssistantResponse = self.root.result()
        assert response.is_answer == (response.error is None)
        assert not self.model.open
        assert all(handle.status.is_final for handle in self.handles.values())

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for _ in range(1000):
            if self.root.done():
                break
            for asked in list(self.model.open):
                if asked in self.model.open:
                    self.answer(asked, "enough")
            self.time_passes(6)
        self.run_is_over()
        self.loop.run_until_complete(self.where.shutdown())
        self.do(lambda: None)
        assert is_empty(self.where)
        self.loop.close()


TestTeam = Team.TestCase
TestTeam.settings = settings(max_examples=examples(12), stateful_step_count=50, deadline=None)
