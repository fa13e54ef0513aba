"""A run of agents whose models do anything in any order, beside a simple account of it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bottega.agents import AssistantResponse, BaseAgent
from bottega.errors import ModelError
from bottega.subagents.handle import Parent, SubagentHandle, SubagentStatus
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.swarm import Swarm, SwarmOptions
from tests.domain.elsewhere import ChildRun, Others
from tests.domain.puppet import Asked, Ears, Marks, Puppet, Softens, guarded
from tests.domain.scripted import Notes, call
from tests.domain.subagents import coordinator, is_empty, passed, registry, results, settled
from tests.domain.virtual import VirtualLoop
from tests.examples import examples

S = SubagentStatus
LIMITS = SubagentLimits(
    max_concurrent=2,
    max_queued=3,
    max_concurrent_global=3,
    max_queue_size=5,
    max_depth=2,
    default_timeout=60.0,
    max_timeout=80.0,
    max_steps_per_subagent=6,
)
OVER = {str(status) for status in S if status.is_final}
MODES = ("all", "any", "any_success", "quorum")
TASK = st.fixed_dictionaries(
    {
        "agent": st.sampled_from([None, "nest", "scout"]),
        "retries": st.sampled_from([0, 0, 0, 1, 2, 3]),
    },
    optional={
        "input": st.just({"notes": "maps"}),
        "timeout_ms": st.sampled_from([30_000, 80_000]),
        "priority": st.integers(1, 10),
        "token_budget": st.sampled_from([100_000, 100_000, 100]),
    },
)


class Team(RuleBasedStateMachine):
    """Machine that answers model calls and ends child runs.

    The root's query begins again after its end.
    """

    @initialize(
        tasks=st.lists(TASK, min_size=2, max_size=4),
        spread_above=st.sampled_from([0, 0, 1, 2, 50]),
        begins=st.booleans(),
    )
    def begin(self, tasks: list[dict[str, Any]], spread_above: int, begins: bool) -> None:
        self.loop = VirtualLoop()
        self.model = Puppet(self.observe)
        self.limits = replace(LIMITS, spread_above=spread_above)
        self.where: SubagentRegistry = registry(self.limits)
        self.wanted: dict[str, dict[str, Any]] = {}
        self.files: dict[str, str | None] = {}
        self.begins = begins
        self.told: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.numbers = 0
        self.problems: list[Exception] = []
        self.do(self.start)
        self.dispatch_from(next(iter(self.model.open)), tasks, "hard")

    def start(self) -> None:
        self.heard = Ears(self.happens, self.refuses)
        self.handles: dict[str, SubagentHandle] = {}
        self.others = Others(begins=self.begins)
        self.answered["root"] = 0
        recorder = Notes()
        options = SwarmOptions(
            listener=self.heard, plugins=[Softens(), Marks()], remote=self.others
        )
        recorder.swarm = Swarm(self.where, options)
        nest = coordinator(self.model, self.where, description="nests", max_iterations=99)
        nest.agent_name = "nest"
        scout = BaseAgent("You look.", provider=self.model, agent_name="scout", description="looks")
        lead = coordinator(self.model, self.where, nest, scout, max_iterations=99)
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
            self.wanted[guarded(task["prompt"])] = task
        self.refusals: list[tuple[int, bool]] = []
        self.use(asked, "dispatch_subagents", tasks=tasks)
        refused = [task for task in tasks if guarded(task["prompt"]) not in self.handles]
        if "bad" in words:
            assert len(refused) == len(tasks)
            return
        for task, (here, for_want_of_place) in zip(refused, self.refusals, strict=True):
            assert not (for_want_of_place and self.spreads(task, here))

    def spreads(self, task: dict[str, Any], here: int) -> bool:
        """Return true if a child run does a task of a parent with so many under way here."""
        is_leaf = task.get("agent") != "nest"
        return is_leaf and not task["retries"] and here >= self.limits.spread_above

    def here(self, parent: Parent) -> list[SubagentHandle]:
        """Return a parent's tasks under way, without child runs."""
        own = [handle for handle in self.handles.values() if handle.parent is parent]
        return [handle for handle in own if not (handle.is_remote or handle.status.is_final)]

    def happens(self, handle: SubagentHandle, event: str) -> None:
        if event == "dispatched":
            here = len(self.here(handle.parent))
            self.handles[handle.prompt] = handle
            if handle.is_remote and handle.queue_position:
                self.problems.append(AssertionError(f"{handle.prompt} waits in no queue here"))
            if handle.is_remote != self.spreads(self.wanted[handle.prompt], here):
                self.problems.append(AssertionError(f"{handle.prompt}, spread: {handle.is_remote}"))

    def refuses(self, parent: Parent, data: dict[str, Any]) -> None:
        here = self.here(parent)
        is_full = data["code"] == "subagent_queue_full"
        is_many = not is_full and data.get("limit") == LIMITS.max_queued
        self.refusals.append((len(here), is_full or is_many))
        own = Counter(handle.status for handle in here)[S.QUEUED]
        all_ = self.count_here(S.QUEUED)
        if (is_many and own < LIMITS.max_queued) or (is_full and all_ < LIMITS.max_queue_size):
            self.problems.append(AssertionError(f"{own} and {all_} wait: {data}"))

    def count_here(self, status: S) -> int:
        known = self.where.handles()
        return sum(handle.status is status and not handle.is_remote for handle in known)

    def may_dispatch(self, asked: Asked) -> bool:
        return not self.is_of_task(asked) or self.handles[asked.prompt].agent == "nest"

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
            late = [each for each in under_way if self.is_over_elsewhere(self.by_id(each))]
            task_id = data.draw(st.sampled_from(late or under_way or asked.ids), "id")
            text = f"{words} {self.number()}"
            handle = self.by_id(task_id)
            before = len(self.sent_to(handle))
            is_late = handle.status.is_final or self.is_over_elsewhere(handle)
            self.use(asked, "send_to_subagent", task_id=task_id, message=text)
            if handle.is_remote:
                is_sent = "bad" not in words and not is_late
                assert len(self.sent_to(handle)) == before + is_sent

    def is_over_elsewhere(self, handle: SubagentHandle) -> bool:
        run = self.others.runs.get(handle.prompt)
        return run is not None and run.end is not None

    @rule(data=st.data())
    def read_a_file(self, data: st.DataObject) -> None:
        if asked := self.some_call(data, self.children_of):
            run = self.others.runs[data.draw(st.sampled_from(self.children_of(asked)), "run")]
            known = run.end.files if run.end is not None and run.is_heard else {}
            self.files[asked.prompt] = known.get(run.path)
            self.use(asked, "read_file", path=run.path)

    def children_of(self, asked: Asked) -> list[str]:
        """Return the prompts of a caller's own tasks that are child runs."""
        ids = asked.ids
        return [name for name, run in self.others.runs.items() if str(run.handle.task_id) in ids]

    def by_id(self, task_id: str) -> SubagentHandle:
        return next(each for each in self.handles.values() if str(each.task_id) == task_id)

    @rule(seconds=st.sampled_from([1, 1, 6, 31]))
    def time_passes(self, seconds: int) -> None:
        for run in list(self.others.runs.values()):
            if run.is_awaited and run.told is None:
                self.do(run.begin)
            elif run.is_awaited and run.end is not None:
                self.do(run.be_heard)

        async def pass_() -> None:
            await passed(seconds)
            await settled()

        self.loop.run_until_complete(pass_())

    # What child runs do

    @rule(
        data=st.data(),
        until=st.sampled_from(["refused", "begun", "over", "over", "over", "heard", "heard"]),
        how=st.sampled_from([S.COMPLETED, S.COMPLETED, S.FAILED, S.TIMEOUT, S.CANCELLED]),
        calls=st.integers(0, 3),
    )
    def a_child_run_goes_on(self, data: st.DataObject, until: str, how: S, calls: int) -> None:
        if (run := self.some_run(data)) is None:
            return
        if run.told is None and until == "refused":
            self.do(run.get_no_budget)
            assert (run.handle.status, run.handle.error_code) == (S.FAILED, "budget_exhausted")
            return
        is_over = run.end is not None
        if run.told is None:
            self.do(run.begin)
        if until != "begun" and not is_over:
            run.finish(how, calls)
            self.answered[run.handle.prompt] = calls
        if until == "heard" or is_over:
            self.do(run.be_heard)
            assert run.handle.status.is_final

    def some_run(self, data: st.DataObject) -> ChildRun | None:
        """Choose a child run under way."""
        runs = [name for name, run in self.others.runs.items() if run.is_awaited]
        return self.others.runs[data.draw(st.sampled_from(runs), "run")] if runs else None

    # What they get

    def observe(self, asked: Asked) -> None:
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
            assert not handle.is_remote
            self.reads_messages(asked, handle)
        found = results(asked.messages)
        last = asked.messages[-1]
        if last.role == "tool" and found:
            self.reads(asked, last, found[-1])

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
        """Count the messages that a task's last try has not read; a child run does not tell."""
        if handle.is_remote:
            return 0
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

    def reads(self, asked: Asked, message: Any, result: Any) -> None:
        """Check the result of a tool beside the states of the tasks."""
        name = message.tool_results[0].tool_name
        if name == "read_file":
            content = result["content"] if isinstance(result, dict) else None
            assert content == self.files[asked.prompt]
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
        assert len(holders) == self.where.scheduler.in_use <= 2
        assert not any(handle.is_remote for handle in holders)
        assert self.where.queued_count == self.count_here(S.QUEUED) <= LIMITS.max_queue_size + 1
        assert self.where.active_count == self.count_here(S.RUNNING)

    @invariant()
    def child_runs_are_as_their_tasks(self) -> None:
        remote = {prompt for prompt, handle in self.handles.items() if handle.is_remote}
        assert remote == self.others.runs.keys()
        for run in self.others.runs.values():
            self.is_as_its_task(run)

    def is_as_its_task(self, run: ChildRun) -> None:
        handle, outcome = run.handle, None if run.end is None else run.end.outcome
        if run.told is not None:
            assert list(run.told.values()) == self.sent_to(handle)
        if run.is_awaited:
            assert handle.status is S.RUNNING
        elif run.is_left:
            assert handle.status is S.CANCELLED
            assert (handle.final_output, handle.token_usage.input) == (None, 0)
        elif outcome is not None:
            assert (handle.status, handle.final_output) == (outcome.status, outcome.output)
            assert (handle.error, handle.error_code) == (outcome.error, outcome.error_code)
            assert handle.token_usage.input == 10 * self.answered[handle.prompt]

    @invariant()
    def child_runs_get_their_work(self) -> None:
        for prompt, run in self.others.runs.items():
            task = self.wanted[prompt]
            caller = "lead" if run.handle.parent.owner is None else "nest"
            assert run.work.agent == task.get("agent", caller)
            assert run.work.is_helper == ("agent" not in task)
            assert run.work.question.startswith(f"{prompt}\n")
            assert run.folder in run.work.question
            given = task.get("input", {}).items()
            assert run.work.files == {f"{run.folder}/input/{name}": text for name, text in given}

    def run_is_over(self) -> None:
        response: AssistantResponse = self.root.result()
        assert response.is_answer == (response.error is None)
        assert not self.model.open
        assert all(handle.status.is_final for handle in self.handles.values())
        assert not any(run.is_awaited for run in self.others.runs.values())
        of_tasks = sum(handle.token_usage.input for handle in self.handles.values())
        assert response.usage.input == 10 * self.answered["root"] + of_tasks

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for _ in range(1000):
            if self.root.done():
                break
            for asked in list(self.model.open):
                if asked in self.model.open:
                    self.say(asked)
            self.time_passes(6)
        self.run_is_over()
        self.loop.run_until_complete(self.where.shutdown())
        self.do(lambda: None)
        assert is_empty(self.where)
        self.loop.close()


TestTeam = Team.TestCase
TestTeam.settings = settings(max_examples=examples(12), stateful_step_count=50, deadline=None)
