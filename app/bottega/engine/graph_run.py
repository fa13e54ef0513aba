"""Execution of a run's graph in DAG mode. Rules, not agents, decide which nodes run.

A node starts when the rules have decided all of the node's incoming edges. The node's agent gets
the run's question, and the answers of the nodes before it. :mod:`bottega.graph.decisions` decides
which nodes run. This module executes the nodes and records the decisions. A resumed run replays the
recorded nodes and keeps the recorded decisions.

A node that is a graph is executed in the same way, as a sub-graph. The first nodes of the sub-graph
read the texts that the node received. Each execution of a node has a path and a name in the log.
The id of the node's task is derived from the path. In the name ``improve/2/draft``, ``improve`` is
the node, 2 is the number of the node's turn (from 1) or list element (from 0), and ``draft`` is a
node of the sub-graph.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

from pydantic_core import from_json

from bottega.agents import AgentUsage, AssistantResponse, BaseAgent, Query, SharedMemoryGraph
from bottega.agents.approval import EXPIRES_S, Interrupt
from bottega.agents.messages import (
    DEMANDS,
    AssistantMessage,
    HumanMessage,
    StandardMessage,
    SystemMessage,
    ToolCall,
    ToolStatus,
    Usage,
)
from bottega.agents.output import unmet_check
from bottega.agents.query import CurrentCall, Path, current_call, next_query
from bottega.agents.subagent import AGENT_FAILED
from bottega.agents.tool_calls import answer_calls
from bottega.engine.build_agents import Team
from bottega.engine.child_runs import ElementRuns
from bottega.engine.journal import CANCELLED, End, is_answered, name_of
from bottega.engine.recorder import JournalRecorder
from bottega.engine.replay import NodeReplay
from bottega.engine.waiting import AwaitedRuns
from bottega.errors import BudgetExhaustedError, NotFoundError
from bottega.events.data import (
    AgentFailedData,
    EdgeDecidedData,
    Failure,
    NodeCompletedData,
    NodeData,
    NodeFailedData,
    NodeSkippedData,
    NodeStartedData,
    NodeType,
)
from bottega.events.types import Data, EventError, EventType, RunStatus
from bottega.graph.decisions import (
    Decision,
    EdgeDecided,
    EdgeKey,
    GraphCourse,
    GraphRules,
    MissingArgumentError,
    NodeEnd,
    NodeSkipped,
    arguments_of,
    is_last_turn,
    name_of_node,
    referred,
)
from bottega.graph.publication import MemoryItem, PropagationPolicy, as_text
from bottega.memory.learning.episode_recorder import RunPart
from bottega.subagents.budget import DOLLARS, Account, billionths
from bottega.subagents.child import excerpt, is_long
from bottega.subagents.handle import SubagentStatus
from bottega.subagents.shared_context import file_reader

TOOL_FAILED = "tool_failed"
TIMEOUT = "timeout"
CHECK_FAILED = "check_failed"
NOT_A_LIST = "not_a_list"
TOO_MANY_ITEMS = "too_many_items"
MAX_ITERATIONS = "max_iterations"
_NO_RETRY = frozenset(
    (
        *("cancelled", "denied", "invalid_arguments", "unknown_tool", "budget_exhausted"),
        *(NOT_A_LIST, TOO_MANY_ITEMS),
        *("model_bad_request", "model_unauthorized", "model_forbidden", "model_not_found"),
        *("model_context_too_long", "model_filtered", "model_refused", "unpriced_model"),
    )
)
"""Codes of errors that another try would not change."""
_LATER = ("408", "425", "429")
"""HTTP statuses below 500 after which another try may succeed."""
MOST_PARTS = 10_000
"""Maximum number of elements and turns in a run's graphs, because all are kept in memory."""
MOST_RECEIVED = 64_000_000
"""Maximum number of characters in all copies of received texts. Each child run has a copy."""


@dataclass(slots=True)
class _Failure:
    """The failure of a try. A node's ``retry`` may list codes and HTTP statuses.

    Attributes:
        code: the code of the tool's error; if no tool was called, the code of the node's error.
        node_code: the code of the node's error, if it differs from ``code``.
    """

    code: str
    status: str | None = None
    node_code: str | None = None

    def is_retried(self, retry: Mapping[str, Any]) -> bool:
        if (error_codes := retry.get("on")) is not None:
            return not {self.code, self.status, self.node_code}.isdisjoint(error_codes)
        if self.status is not None and self.status[0] in "34":
            return self.status in _LATER
        return self.code not in _NO_RETRY


class LongList(NamedTuple):
    """A list that is too long for prompts."""

    file: str
    text: str

    @property
    def shown(self) -> str:
        """Text that replaces the list in prompts."""
        return as_text({**excerpt(self.text), "file": self.file})


@dataclass(slots=True)
class PartCount:
    """Counter of the elements and turns that a run has begun. Each try counts."""

    begun: int = 0

    def begin(self, more: int) -> AssistantResponse | None:
        """Count elements or turns. Return a failure if their sum in the run is above the limit."""
        if self.begun + more > MOST_PARTS:
            text = f"the run has more than {MOST_PARTS} elements and turns in all its graphs"
            return _failed(TOO_MANY_ITEMS, text)
        self.begun += more
        return None


_REPLAY_CHECK_S = 0.02
"""Seconds between two checks whether the replay of a timed-out node can be stopped."""
_WHOLE = object()


@dataclass(slots=True)
class _Work:
    """The execution of a node, or of one element of a node.

    Attributes:
        name: name of the execution in the log.
        question: question to the agent or to all agents of a sub-graph.
        received: texts that the node received from its sources.
        item: the element; ``_WHOLE``: the whole node is executed.
        arguments: arguments of a tool; ``None``: computed from the outputs of other nodes.
    """

    node: Mapping[str, Any]
    kind: NodeType
    name: str
    query: Query
    question: Sequence[StandardMessage]
    received: Sequence[MemoryItem] = ()
    item: Any = _WHOLE
    arguments: Mapping[str, Any] | None = None


@dataclass(slots=True)
class GraphRun:
    """One execution of a run's graph, or of a sub-graph.

    Args:
        question: question to every agent.
        about: the run's ``input`` as text, and its ``metadata``.
        turns: messages before the question, if the run's input is a conversation.
        title: the graph's name.
        path, name: path and name of this graph in the run. A sub-graph's name ends with a slash.
        at_work: unfinished queries of the graph and all sub-graphs, by path.
        begun: log names of the unfinished nodes of the graph and all sub-graphs, by path.
        parts: counter for the elements and turns of the graph and all sub-graphs.
        elements: executor of elements as child runs; ``None``: child runs are not supported.
        given: texts by node name; a node in ``given`` publishes its text and is not executed.
        long_lists: long lists, by the text that replaces the list in prompts.

    Attributes:
        responses: responses of the nodes that have ended.
    """

    team: Team
    recorder: JournalRecorder
    question: Sequence[StandardMessage]
    about: Mapping[str, Any]
    title: str
    turns: Sequence[StandardMessage] = ()
    path: Path = ()
    name: str = ""
    at_work: dict[Path, Query] = field(default_factory=dict)
    begun: dict[Path, str] = field(default_factory=dict)
    parts: PartCount = field(default_factory=PartCount)
    elements: ElementRuns | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    long_lists: dict[str, LongList] = field(default_factory=dict)
    responses: dict[str, AssistantResponse] = field(default_factory=dict)
    _usage: AgentUsage = AgentUsage()
    _line: Sequence[str] = ()
    _spread: dict[str, AgentUsage] = field(default_factory=dict)
    _unfit: dict[str, str] = field(default_factory=dict)
    _queries: dict[str, Query] = field(default_factory=dict)
    _under_way: dict[asyncio.Task[AssistantResponse], str] = field(default_factory=dict)

    async def run(self) -> End:
        """Execute the graph's nodes, in parallel if the graph permits that. Return the run's end.

        Raises:
            Exception: an error of the recorder, or a bug in a hook. Before this method raises the
                error, it cancels all unfinished nodes.
        """
        self.recorder.loops.between = self._is_between
        for agent in self.team.agents.values():
            agent.conversation_history += self.turns
        course = GraphCourse(self._rules, self.about, self._recorded_edges())
        try:
            async with asyncio.TaskGroup() as group:
                self._follow(course.begin(), group)
                while self._under_way:
                    await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
                    for task in [task for task in self._under_way if task.done()]:
                        name = self._under_way.pop(task)
                        path = self._queries[name].path
                        del self.at_work[path], self.begun[path]
                        self._follow(course.end(self._ended(name, task.result())), group)
                    self.recorder.check_suspend()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the error that stopped the other nodes
        return end_of_graph(self._rules, self._graph, self.responses, course, self._usage)

    @property
    def _rules(self) -> GraphRules:
        assert self.team.rules is not None
        return self.team.rules

    @property
    def _graph(self) -> SharedMemoryGraph:
        assert self.team.graph is not None
        return self.team.graph

    def _recorded_edges(self) -> dict[EdgeKey, bool]:
        recorded, found = self.recorder.journal.replay.edges, {}
        for edges in self._rules.outgoing.values() if recorded else ():
            for edge in edges:
                key = self.name + edge.source, self.name + edge.target
                if key in recorded:
                    found[edge.source, edge.target] = recorded[key]
        return found

    def _is_between(self) -> bool:
        opened, is_pausing = self.recorder.tasks.open, self.recorder.loops.is_pausing
        above = {path[:length] for path in self.at_work for length in range(len(path))}
        return any(
            query not in opened and path not in above and not is_pausing(query)
            for path, query in self.at_work.items()
        )

    def _follow(self, decisions: list[Decision], group: asyncio.TaskGroup) -> None:
        for decision in decisions:
            if isinstance(decision, EdgeDecided):
                if not decision.taken:
                    self._graph.close_edge(decision.source, decision.target)
                decided = EdgeDecidedData(
                    source=self.name + decision.source,
                    target=self.name + decision.target,
                    taken=decision.taken,
                    reason=decision.reason,
                )
                self._record(EventType.EDGE_DECIDED, decided)
            elif isinstance(decision, NodeSkipped):
                self._skip(decision)
            else:
                name = decision.name
                query = self._queries[name] = self._query(name)
                self.at_work[query.path] = query
                self.begun[query.path] = self.name + name
                if self.name:
                    self.recorder.memory.names[query.path] = self.name + name
                kind = self._rules.nodes[name].type
                started = NodeStartedData(node=self.name + name, type=kind)
                self._record_of(name, EventType.NODE_STARTED, started)
                self._under_way[group.create_task(self._execute(name, query))] = name

    def _skip(self, skipped: NodeSkipped) -> None:
        name = skipped.name
        if not self._rules.is_plain:
            self._graph.withdraw(name)
            data = NodeSkippedData(node=self.name + name, reason=skipped.reason)
            self._record(EventType.NODE_SKIPPED, data)
            return
        self.responses[name] = AssistantResponse(
            error=f"skipped, because {skipped.source} has no answer",
            error_code="predecessor_failed",
            stop_reason="error",
        )
        self.recorder.query_ended(self._query(name), self.responses[name])

    def _record(self, kind: EventType, data: Data) -> None:
        if not self._rules.is_plain:
            self.recorder.journal.add(kind, data)

    def _record_of(self, name: str, kind: EventType, data: NodeData) -> None:
        if not self._rules.is_plain:
            place = self.recorder.tasks.place_at(self._queries[name].path, self._agent_name(name))
            self.recorder.tasks.write(place, kind, data)

    def _agent_name(self, name: str) -> str:
        return self._rules.nodes[name].agent or ""

    def _query(self, name: str) -> Query:
        index = self.team.numbers[name]
        return Query(self.team.agents[name], (), self.recorder, path=(*self.path, (0, index)))

    def _ended(self, name: str, response: AssistantResponse) -> NodeEnd:
        """Record a node's end. Return the end in the form that the rules need."""
        self.responses[name] = response
        is_failed = not is_answered(self._queries[name], response)
        self._note_part(name, response, is_failed=is_failed)
        if not is_failed:
            completed = NodeCompletedData(node=self.name + name)
            if (model := self._spread.get(name)) is not None:
                completed["usage"] = model.to_dict()
            self._record_of(name, EventType.NODE_COMPLETED, completed)
            return NodeEnd(name, output=response.content, output_json=response.output_json)
        if not self._rules.is_plain:
            self._graph.withdraw(name)
        error = Failure(code=response.error_code or "agent_failed", message=response.error or "")
        failed = NodeFailedData(node=self.name + name, error=error)
        self._record_of(name, EventType.NODE_FAILED, failed)
        return NodeEnd(name, is_failed=True)

    def _note_part(self, name: str, response: AssistantResponse, *, is_failed: bool) -> None:
        parts, agent, node = self.recorder.parts, self._agent_name(name), self.team.nodes[name]
        if parts is None or not agent or name in self.given:
            return
        text = next(each.content for each in self.question if isinstance(each, HumanMessage))
        received = {each.source_id: each.content for each in self._graph.pull_for(name)}
        task_id = self.recorder.tasks.id_of(self._queries[name])
        rule = parts.of_node(self.title, node)
        part = RunPart(rule.part, agent, text, name, received, task_id=task_id)
        if is_failed:
            part.output = self._unfit.get(name)
            part.error = EventError(response.error_code or AGENT_FAILED, response.error)
        else:
            part.output = response.content
        is_unfit = response.error_code == CHECK_FAILED
        if "success_check" in node and (is_unfit or not is_failed):
            part.passed, part.reason = not is_unfit, response.error if is_unfit else None
        parts.node_ended(part, rule)

    async def _execute(self, name: str, query: Query) -> AssistantResponse:
        """Execute a node. Publish the node's output, unless the node's agent does so."""
        if (text := self.given.get(name)) is not None:
            return await self._give(name, query, text)
        node, kind = self.team.nodes[name], self._rules.nodes[name].type
        if (budget := node.get("budget")) is not None:
            self.recorder.node_accounts[query.path] = _accounts_of(name, budget)
        work = _Work(node, kind, self.name + name, query, self.question)
        if "for_each" in node:
            response = await self._for_each(name, work)
        else:
            work.received = self._graph.pull_for(name) if kind == "graph" else ()
            response = await self._with_tries(work)
        self._queries[name] = work.query
        if kind == "agent" and "for_each" not in node:
            self.team.agents[name] = _agent_of(work.query)
        elif response.error is None:
            await self._publish(name, work.query, response.content)
        self._usage += response.usage
        return response

    async def _with_tries(self, work: _Work) -> AssistantResponse:
        """Execute a node or an element. Retry after a failure as the node's ``retry`` permits."""
        retry: Mapping[str, Any] | None = work.node.get("retry")
        usage = AgentUsage()
        while True:
            response, failure = await self._try(work)
            usage += response.usage
            if failure is None or retry is None or work.query.tries > retry["max"]:
                break
            if not failure.is_retried(retry):
                break
            if not self._is_replayed(work):
                await self._pause(work, retry["backoff_s"])
            work.query = self.at_work[work.query.path] = self._next_try(work.query)
        return response.model_copy(update={"usage": usage})

    def _next_try(self, before: Query) -> Query:
        return Query(
            _agent_of(before).fresh_copy(),
            (),
            self.recorder,
            path=before.path,
            model_calls=before.model_calls,
            earlier_calls=before.model_calls,
            tries=before.tries + 1,
        )

    async def _pause(self, work: _Work, backoff_s: float) -> None:
        """Wait until ``backoff_s`` seconds have passed since the current try failed."""
        query = work.query
        failed_at = self._graph_ended_at(work) if work.kind == "graph" else self._failed_at(query)
        if failed_at is not None:
            backoff_s -= self.recorder.seconds_since(failed_at)
        if backoff_s > 0:
            with self.recorder.loops.pausing(query, backoff_s):
                self.recorder.check_suspend()
                await asyncio.sleep(backoff_s)

    def _failed_at(self, query: Query) -> datetime | None:
        replay = self.recorder.journal.replay
        task_id = self.recorder.tasks.id_of(query)
        if len(tries := replay.task(task_id).tries) >= query.tries:
            return tries[query.tries - 1].at
        return replay.tool_call(task_id, query.tries, "call").ended_at

    def _graph_ended_at(self, work: _Work) -> datetime | None:
        return max((node.at for node in self._replayed_try(work)), default=None)

    def _replayed_in(self, work: _Work, turn: int, tries: int) -> Sequence[NodeReplay]:
        nodes, prefix = self.recorder.journal.replay.nodes, _graph_name(work, turn, tries)
        names = [prefix + name_of_node(node) for node in work.node["definition"]["nodes"]]
        return [nodes[name] for name in names if name in nodes]

    def _is_replayed(self, work: _Work) -> bool:
        """Return true if an earlier attempt has begun the next try."""
        query = work.query
        if work.kind == "graph":
            return bool(self._replayed_in(work, 1, query.tries + 1))
        task = self.recorder.journal.replay.task(self.recorder.tasks.id_of(query))
        return len(task.tries) > query.tries or (query.tries + 1, "call") in task.tools

    async def _try(self, work: _Work) -> tuple[AssistantResponse, _Failure | None]:
        query = work.query
        if work.kind in ("agent", "graph"):
            is_graph = work.kind == "graph"
            failure = self._known_stop(work) if is_graph else self._known_failure(query)
            response = failure or await self._ask(work)
            if response.error is None:
                checks = work.node.get("success_check", ())
                if (reason := await unmet_check(checks, response.content)) is not None:
                    self._unfit[name_of_node(work.node)] = response.content
                    response = _failed(CHECK_FAILED, reason, response.usage)
            code = None if is_answered(query, response) else response.error_code or "agent_failed"
            return response, None if code is None else _Failure(code)
        self.recorder.tasks.open[query] = None
        try:
            return await (self._call if work.kind == "tool" else self._ask_people)(work)
        finally:
            self.recorder.tasks.open.pop(query, None)

    # Elements

    async def _for_each(self, name: str, work: _Work) -> AssistantResponse:
        """Execute a node for each element of a list. The node's output is the list of outputs."""
        if (known := self._known_list(name, work)) is not None:
            return known
        rule = work.node["for_each"]
        at = f"{rule['pointer'] or 'the root'} of {rule['from']}"
        try:
            items = referred(rule, self._outputs())
        except MissingArgumentError as error:
            return _failed(NOT_A_LIST, str(error))
        if not isinstance(items, list):
            return _failed(NOT_A_LIST, f"there is no list at {at}")
        if len(items) > rule["max"]:
            text = f"there are {len(items)} elements at {at}; the node's max is {rule['max']}"
            return _failed(TOO_MANY_ITEMS, text)
        if (failed := self.parts.begin(len(items))) is not None:
            return failed
        work.received = [
            item for item in self._graph.pull_for(name) if item.source_id != rule["from"]
        ]
        self.recorder.tasks.levels[work.query.path] = work.query.path
        if self.elements is None or len(items) <= rule["spread_above"]:
            ended = await self._elements(name, work, items, self._with_tries, rule["concurrency"])
            return self._collected(rule["on_error"], ended)
        characters = len(items) * self._received_characters(work)
        if characters > MOST_RECEIVED:
            text = (
                f"{len(items)} child runs would store {characters} characters of what the node "
                f"received; the maximum is {MOST_RECEIVED}: let the node receive less, or raise "
                "its spread_above"
            )
            return _failed(TOO_MANY_ITEMS, text)
        ended = await self._child_runs(self.elements, name, work, items)
        result = self._collected(rule["on_error"], ended)
        self._spread[name] = result.usage
        return result

    async def _elements(
        self,
        name: str,
        work: _Work,
        items: Sequence[Any],
        execute: Callable[[_Work], Awaitable[AssistantResponse]],
        most: int,
    ) -> Mapping[int, AssistantResponse]:
        """Execute at most ``most`` elements at once, and begin none after a fatal failure."""
        rule, ended = work.node["for_each"], dict[int, AssistantResponse]()
        received = SharedMemoryGraph()  # elements only read this graph
        received.received = work.received
        numbers = iter(range(len(items)))

        async def take_elements() -> None:
            for number in numbers:
                if rule["on_error"] == "fail" and any(end.error for end in ended.values()):
                    return
                element = self._element(name, work, received, number, items[number])
                path = element.query.path
                self.at_work[path] = element.query
                ended[number] = await execute(element)
                del self.at_work[path]

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(most, len(items))):
                    group.create_task(take_elements())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return ended

    async def _child_runs(
        self, runs: ElementRuns, name: str, work: _Work, items: Sequence[Any]
    ) -> Mapping[int, AssistantResponse]:
        """Execute elements as child runs. Meanwhile, the worker may suspend the parent run."""
        rule, query = work.node["for_each"], work.query
        may_fail, most = rule["on_error"] != "fail", len(items)
        if runs.are_limited(query.path):
            most = rule["concurrency"]  # the budgets are divided among this many child runs
        awaited = AwaitedRuns(len(items), most if may_fail else rule["concurrency"])
        under_way: set[Path] = set()

        async def execute(element: _Work) -> AssistantResponse:
            path = element.query.path
            del self.at_work[path]  # the child run works, not the element's query
            under_way.add(path)
            response = await self._child_run(runs, name, element, awaited)
            under_way.discard(path)
            if response.error is not None and not may_fail:
                for other in under_way:
                    runs.cancel(other)
                under_way.clear()
            self.at_work[path] = element.query
            return response

        await self.recorder.journal.commit()  # store the node's start before the child runs
        self.recorder.tasks.open[query] = None
        self.recorder.loops.child_runs[query] = awaited
        try:
            return await self._elements(name, work, items, execute, most)
        finally:
            del self.recorder.loops.child_runs[query]
            self.recorder.tasks.open.pop(query, None)

    def _received_characters(self, work: _Work) -> int:
        texts = [each.content for each in work.question if DEMANDS in each.metadata]
        texts += [each.content for each in work.received]
        texts += [self.long_lists[text].text for text in texts if text in self.long_lists]
        return sum(map(len, texts))

    async def _child_run(
        self, runs: ElementRuns, name: str, element: _Work, awaited: AwaitedRuns
    ) -> AssistantResponse:
        task: dict[str, Any] = {
            "node": [*self._line, name],
            "name": element.name,
            "item": element.item,
            "demands": [each.content for each in element.question[:-1]],
            "received": [
                {
                    "source": each.source_id,
                    "content": each.content,
                    "version": each.version,
                    "long_list": self.long_lists.get(each.content),
                }
                for each in element.received
            ],
        }
        parts = self.recorder.parts
        if parts is not None and element.kind == "agent":
            task["recalled"] = await parts.recalled(parts.of_node(self.title, element.node))
        try:
            if element.kind == "tool":
                task["arguments"] = self._arguments(element)
            request = {"input": as_text(element.item), "task": task}
            limit = element.node["for_each"]["concurrency"]
            end = await runs.end_of(element.query.path, request, awaited, limit)
        except MissingArgumentError as error:
            return _failed(TOOL_FAILED, str(error))
        except BudgetExhaustedError as error:
            return _failed(error.code, error.detail)
        outcome = end.outcome
        if outcome.status is SubagentStatus.COMPLETED:
            content = outcome.output or ""
            return AssistantResponse(content=content, output_json=end.output_json, usage=end.usage)
        code = outcome.error_code or str(outcome.status)
        return _failed(code, outcome.error or code, end.usage)

    async def element(self, task: Mapping[str, Any]) -> End:
        """Execute the element of the parent run's node for which this child run was started."""
        *self._line, name = task["node"]
        for above in self._line:
            self.team = self.team.team_of(above)
        graph, agent = SharedMemoryGraph(), self.team.agents[name]
        agent.memory_graph = graph
        policy, at = PropagationPolicy.FINAL_RESPONSE_ONLY, self.recorder.claimed_at
        graph.received = [
            MemoryItem(each["source"], each["content"], at, each["version"], policy)
            for each in task["received"]
        ]
        for item in task["received"]:
            if item["long_list"] is not None:
                self.long_lists[item["content"]] = LongList(*item["long_list"])
        query = Query(agent, (), self.recorder, path=((0, 0),))
        demands = [SystemMessage(content=each) for each in task["demands"]]
        work = _Work(
            self.team.nodes[name],
            self._rules.nodes[name].type,
            task["name"],
            query,
            [*demands, *self.question],
            graph.received,
            task["item"],
            task.get("arguments"),
        )
        self.recorder.memory.names[query.path] = work.name
        self.recorder.loops.between = self._is_between
        self.at_work[query.path] = query
        response = await self._with_tries(work)
        if response.error is not None:
            code = response.error_code or "agent_failed"
            error = Failure(code=code, message=response.error)
            return End(RunStatus.FAILED, error=error, usage=response.usage)
        return End(
            RunStatus.COMPLETED,
            output=response.content,
            output_json=response.output_json,
            usage=response.usage,
        )

    def _known_list(self, name: str, work: _Work) -> AssistantResponse | None:
        """Return a node's output if the log has the end of the node's child runs; else ``None``."""
        replay = self.recorder.journal.replay
        node = replay.nodes.get(work.name)
        if node is None or node.usage is None:
            return None
        published = replay.task(node.task_id).published
        assert published is not None
        text = replay.texts[published.seq] or ""
        usage = self._spread[name] = AgentUsage.from_dict(node.usage)
        is_paid = node.seq > replay.carried_seq
        self.recorder.repeat(usage, usage if is_paid else Usage(), work.query.path)
        for account in self.recorder.accounts_of(work.query.path):
            account.spend(usage)
        return AssistantResponse(content=text, output_json=from_json(text), usage=usage)

    def _element(
        self, name: str, work: _Work, received: SharedMemoryGraph, number: int, item: Any
    ) -> _Work:
        agent = self.team.agents[name].fresh_copy()
        agent.memory_graph = received
        path = (*work.query.path, (0, number))
        if self.name:
            self.recorder.memory.names[path] = work.name
        demands = [message for message in self.question if DEMANDS in message.metadata]
        return _Work(
            work.node,
            work.kind,
            f"{work.name}/{number}",
            Query(agent, (), self.recorder, path=path),
            [*demands, HumanMessage(content=as_text(item))],
            work.received,
            item,
        )

    def _collected(
        self, on_error: str, ended: Mapping[int, AssistantResponse]
    ) -> AssistantResponse:
        usage = sum((each.usage for each in ended.values()), AgentUsage())
        failed = {number: end for number, end in sorted(ended.items()) if end.error is not None}
        if failed and on_error == "fail":
            # Report the failed element, not elements that were cancelled after the failure.
            first = min(failed, key=lambda n: (failed[n].error_code == CANCELLED["code"], n))
            code = failed[first].error_code or "agent_failed"
            return _failed(code, f"element {first}: {failed[first].error}", usage)
        outputs = []
        for number in sorted(ended):
            end = ended[number]
            if number not in failed:
                outputs.append(end.content if end.output_json is None else end.output_json)
            elif on_error == "collect":
                code = end.error_code or "agent_failed"
                outputs.append({"error": {"code": code, "message": end.error}})
        return AssistantResponse(content=as_text(outputs), output_json=outputs, usage=usage)

    def _outputs(self) -> dict[str, Any]:
        outputs = {each: response.output_json for each, response in self.responses.items()}
        return outputs | {"run": self.about}

    # Graphs

    async def _run_graph(self, work: _Work) -> AssistantResponse:
        """Run a node's graph. In a loop, each turn reads the previous turn's output."""
        loop: Mapping[str, Any] | None = work.node.get("loop")
        most = _most_turns(work.node)
        usage, last = AgentUsage(), AssistantResponse()
        for turn in range(1, most + 1):
            if (failed := self.parts.begin(1)) is not None:
                return failed.model_copy(update={"usage": usage})
            last = await self._turn(work, turn, last)
            usage += last.usage
            is_failed = last.error is not None
            output_json = last.output_json
            end = NodeEnd(work.name, is_failed, None if is_failed else last.content, output_json)
            if loop is None or is_last_turn(loop["until"], end):
                break
        else:
            if loop is not None and loop["on_max"] == "fail":
                text = f"the condition of '{work.name}' did not hold within {most} turns"
                return _failed(MAX_ITERATIONS, text, usage)
        return last.model_copy(update={"usage": usage})

    async def _turn(self, work: _Work, turn: int, last: AssistantResponse) -> AssistantResponse:
        name, tries = name_of_node(work.node), work.query.tries
        received = [*work.received]
        if last.content:
            policy = PropagationPolicy.FINAL_RESPONSE_ONLY
            received.append(
                MemoryItem(name, last.content, self.recorder.claimed_at, turn - 1, policy)
            )
        team = self.team.team_of(name)
        assert team.graph is not None
        team.graph.received = received
        is_whole, node = work.item is _WHOLE, work.query.path
        path = (*node, (turn, tries - 1))
        self.recorder.tasks.levels[path] = node if is_whole else node[:-1]
        end = await GraphRun(
            team,
            self.recorder,
            work.question,
            self.about if is_whole else {**self.about, "input": as_text(work.item)},
            work.node["graph"],
            self.turns if is_whole else (),
            path,
            _graph_name(work, turn, tries),
            self.at_work,
            self.begun,
            self.parts,
            self.elements,
            long_lists=self.long_lists,
            _line=[*self._line, name],
        ).run()
        usage = end.usage or AgentUsage()
        if end.error is not None:
            return _failed(end.error["code"], end.error["message"], usage)
        text = "" if end.output is None else as_text(end.output)
        return AssistantResponse(content=text, output_json=end.output_json, usage=usage)

    # Tries

    def _known_failure(self, query: Query) -> AssistantResponse | None:
        if self._rules.is_plain:
            return None
        replay = self.recorder.journal.replay
        task = replay.task(self.recorder.tasks.id_of(query))
        if len(task.tries) < query.tries:
            return None
        event = task.tries[query.tries - 1]
        if event.type != EventType.AGENT_FAILED:
            return None
        failed: AgentFailedData = event.data
        usage = AgentUsage.from_dict(failed.get("usage") or {})
        is_paid = event.seq > replay.carried_seq
        self.recorder.repeat(usage, usage if is_paid else Usage(), query.path)
        for account in self.recorder.accounts_of(query.path):
            account.spend(usage)
        query.model_calls += usage.model_calls
        return _failed(failed["error"]["code"], failed["error"]["message"], usage)

    async def _ask(self, work: _Work) -> AssistantResponse:
        query, limit_s = work.query, work.node.get("timeout_s")
        execute = self._answer if work.kind == "agent" else self._run_graph
        accounts = self.recorder.accounts_of(query.path)
        if not accounts and limit_s is None:
            return await execute(work)
        self.recorder.spent_below[query.path] = AgentUsage()
        execution = asyncio.ensure_future(execute(work))
        try:
            if limit_s is not None and not await self._is_in_time(execution, work, limit_s):
                return await self._stop(execution, work, TIMEOUT, _too_slow(work))
            return await execution
        except BudgetExhaustedError as error:
            if not any(error.detail.startswith(account.name) for account in accounts):
                raise
            return await self._stop(execution, work, error.code, error.detail)
        finally:
            del self.recorder.spent_below[query.path]
            execution.cancel()
            await asyncio.wait([execution])

    async def _is_in_time(
        self, execution: "asyncio.Task[AssistantResponse]", work: _Work, limit_s: float
    ) -> bool:
        path = work.query.path
        with self.recorder.loops.timed(path, limit_s - self._passed_s(work)) as clock:
            expired = asyncio.ensure_future(clock.expired.wait())
            try:
                await asyncio.wait([execution, expired], return_when=asyncio.FIRST_COMPLETED)
            finally:
                expired.cancel()
        while not (execution.done() or work.kind == "agent" or self._may_stop(path)):
            await asyncio.wait([execution], timeout=_REPLAY_CHECK_S)
        return execution.done()

    def _may_stop(self, path: Path) -> bool:
        """Return true if there are nodes below the path, and all these nodes can be stopped.

        A node that ended in an earlier attempt is only replayed and cannot be stopped.
        """
        nodes, below = self.recorder.journal.replay.nodes, self._begun_below(path).values()
        is_open = (name not in nodes or nodes[name].status == "running" for name in below)
        return bool(below) and all(is_open)

    def _passed_s(self, work: _Work) -> float:
        """Return the seconds since an earlier attempt began this try, without waits for people."""
        recorder, query = self.recorder, work.query
        replay, task_id = recorder.journal.replay, recorder.tasks.id_of(query)
        if work.kind == "graph":
            response = self._replayed_try(work)
            began_at = min((node.began_at for node in response if node.began_at), default=None)
            ids = {node.task_id for node in response}
        else:
            task = replay.task(task_id)
            began_at, ids = task.began_at, {task_id}
            if len(task.tries) != query.tries - 1:
                return 0.0
            if task.tries and (began_at is None or began_at < task.tries[-1].at):
                return 0.0  # no earlier attempt began this try
        if began_at is None:
            return 0.0
        people_s = replay.people_s(ids, began_at, recorder.claimed_at)
        return max(0.0, recorder.seconds_since(began_at) - people_s)

    def _replayed_try(self, work: _Work) -> list[NodeReplay]:
        tries: list[NodeReplay] = []
        for turn in range(1, _most_turns(work.node) + 1):
            if not (replayed := self._replayed_in(work, turn, work.query.tries)):
                break
            tries += replayed
        return tries

    def _known_stop(self, work: _Work) -> AssistantResponse | None:
        """Return the failure if an earlier attempt stopped this try of a sub-graph after a timeout.

        The log has this failure only in the ends of the inner nodes, as ``stopped_by``.
        """
        response = self._replayed_try(work)
        if all(node.stopped_by != work.name for node in response):
            return None
        replay, path = self.recorder.journal.replay, work.query.path
        tasks = [replay.task(each) for each in replay.tasks_below({n.task_id for n in response})]
        used = [AgentUsage.from_dict(n.usage) for n in response if n.usage is not None]
        usage = sum((task.usage for task in tasks), sum(used, AgentUsage()))
        paid = sum((task.paid for task in tasks), sum(used, Usage()))
        self.recorder.repeat(usage, paid, path)
        for account in self.recorder.accounts_of(path):
            account.spend(usage)
        return _failed(TIMEOUT, _too_slow(work), usage)

    def _begun_below(self, path: Path) -> dict[Path, str]:
        paths = sorted((each for each in self.begun if _is_below(each, path)), key=len)
        return {each: self.begun[each] for each in reversed(paths)}

    async def _stop(
        self, execution: "asyncio.Task[AssistantResponse]", work: _Work, code: str, text: str
    ) -> AssistantResponse:
        """Cancel a try and record the error. Return the error as the response."""
        query, recorder, error = work.query, self.recorder, Failure(code=code, message=text)
        if work.kind == "agent":
            execution.cancel()
            await asyncio.wait([execution])
            recorder.tasks.stopped(query.path, error)
            return _failed(code, text, query.usage)
        # Write the ends of all inner nodes before any later event, in one step. The log has no
        # other event for the end of the try.
        for path, name in self._begun_below(query.path).items():
            recorder.tasks.stopped(path, error)
            place = recorder.tasks.place_at(path, name_of(self.at_work[path].agent))
            ended = NodeFailedData(node=name, error=error, stopped_by=work.name)
            recorder.tasks.write(place, EventType.NODE_FAILED, ended)
        if self.elements is not None:
            self.elements.cancel_below(query.path)
        execution.cancel()
        await asyncio.wait([execution])
        for at in (self.at_work, self.begun):
            for path in [each for each in at if _is_below(each, query.path)]:
                del at[path]
        return _failed(code, text, recorder.spent_below[query.path])

    # Agents

    async def _answer(self, work: _Work) -> AssistantResponse:
        query, agent = work.query, _agent_of(work.query)
        self._let_read(agent)
        if (parts := self.recorder.parts) is not None:
            parts.nodes[query.path] = parts.of_node(self.title, work.node)
        next_query.set(query)
        execute: Callable[[], Awaitable[AssistantResponse]]
        execute = partial(agent.execute_query_async, work.question)
        response = await self.recorder.tasks.cancellable(query.path, agent, execute)
        return response or AssistantResponse(
            error=CANCELLED["message"], error_code=CANCELLED["code"], stop_reason="cancelled"
        )

    # Tools and people

    def _arguments(self, work: _Work) -> dict[str, Any]:
        if work.arguments is not None:
            return dict(work.arguments)
        outputs = self._outputs() | ({} if work.item is _WHOLE else {"item": work.item})
        return arguments_of(work.node.get("arguments", {}), outputs)

    async def _call(self, work: _Work) -> tuple[AssistantResponse, _Failure | None]:
        query = work.query
        tool = query.agent.registered_tools[0]
        try:
            arguments = self._arguments(work)
        except MissingArgumentError as error:
            return _failed(TOOL_FAILED, str(error)), _Failure("invalid_arguments")
        query.model_calls += 1
        message = AssistantMessage(
            tool_calls=(ToolCall(id="call", name=tool.name, arguments=arguments),)
        )
        (result,) = await answer_calls(query, message, {tool.name: tool}, [])
        if result.status is ToolStatus.ERROR:
            kind = result.error_type or TOOL_FAILED
            code = TIMEOUT if "timeout" in kind else TOOL_FAILED
            status = None if result.error_status is None else str(result.error_status)
            failure = _Failure(kind, status, code)
            return _failed(code, result.error or "", query.usage), failure
        return _completed(query, result.result), None

    async def _ask_people(self, work: _Work) -> tuple[AssistantResponse, _Failure | None]:
        node, query = work.node, work.query
        query.model_calls += 1
        call = ToolCall(id="call", name=name_of_node(node))
        interrupt = Interrupt(
            kind="question",
            question=node["ask"],
            schema=node["schema"],
            expires_s=node.get("expires_s", EXPIRES_S),
            node=work.name,
            who=node.get("who", "run"),
        )
        token = current_call.set(CurrentCall(query, 0, call.id))
        try:
            answer = (await self.recorder.decision(query, call, interrupt)).said
        finally:
            current_call.reset(token)
        if "answer" in answer:
            return _completed(query, answer["answer"]), None
        code = str(answer.get("reason", "denied"))
        return _failed(code, "nobody answered in time"), _Failure(code)

    async def _publish(self, name: str, query: Query, text: str) -> None:
        """Publish a node's answer if the node has no agent that publishes.

        The log has the whole text of a long list. Agents that depend on the node get the list's
        head and tail, and a tool that reads the rest.
        """
        if text.strip():
            content = text
            if "for_each" in self.team.nodes[name] and is_long(text):
                long_list = LongList(f"/node/{self.name}{name}", text)
                content = long_list.shown
                self.long_lists[content] = long_list
            publication = await self._graph.publish(
                name,
                content,
                version=self.recorder.version_of(query),
                timestamp=self.recorder.published_at(query),
            )
            self.recorder.published(query, replace(publication, content=text))
            self.recorder.publications_ended(query)

    async def _give(self, name: str, query: Query, text: str) -> AssistantResponse:
        agent = _agent_of(query)
        is_agent = (
            self._rules.nodes[name].type == "agent" and "for_each" not in self.team.nodes[name]
        )
        value = None if is_agent and agent.output is None else json_or_text(text)
        response = AssistantResponse(content=text, output_json=value)
        if is_agent:
            self.recorder.query_started(query)
        await self._publish(name, query, text)
        if is_agent:
            self.recorder.query_ended(query, response)
        return response

    def _let_read(self, agent: BaseAgent) -> None:
        graph = agent.memory_graph
        if not self.long_lists or graph is None or agent.agent_id is None:
            return
        got = [self.long_lists.get(item.content) for item in graph.pull_for(agent.agent_id)]
        lists = LongLists({each.file: each.text for each in got if each is not None})
        can_read = any(tool.name == "read_file" for tool in agent.registered_tools)
        if lists.texts and not can_read:
            agent.register_tool(file_reader(lists.read))


@dataclass(frozen=True, slots=True)
class LongLists:
    """Long lists that agents read as files, by path."""

    texts: Mapping[str, str]

    async def read(self, path: str) -> str:
        """Return the text of a file.

        Raises:
            NotFoundError: there is no file with this path.
        """
        if (text := self.texts.get(path)) is None:
            raise NotFoundError(f"there is no file '{path}'")
        return text


def _most_turns(node: Mapping[str, Any]) -> int:
    most: int = node["loop"]["max"] if "loop" in node else 1
    return most


def _graph_name(work: _Work, turn: int, tries: int) -> str:
    parts = [work.name, *([str(turn)] if "loop" in work.node else ())]
    parts += [f"try-{tries}"] if tries > 1 else []
    return f"{'/'.join(parts)}/"


def _agent_of(query: Query) -> BaseAgent:
    agent = query.agent
    assert isinstance(agent, BaseAgent)
    return agent


def _completed(query: Query, value: Any) -> AssistantResponse:
    return AssistantResponse(content=as_text(value), output_json=value, usage=query.usage)


def json_or_text(text: str) -> Any:
    """Parse a text as JSON. Return other texts unchanged."""
    try:
        return from_json(text)
    except ValueError:
        return text


def _too_slow(work: _Work) -> str:
    return f"'{work.name}' has not answered within {work.node['timeout_s']:g} s"


def _is_below(path: Path, above: Path) -> bool:
    return len(path) > len(above) and path[: len(above)] == above


def _failed(code: str, text: str, usage: AgentUsage = AgentUsage()) -> AssistantResponse:
    return AssistantResponse(error=text, error_code=code, usage=usage, stop_reason="error")


def _accounts_of(name: str, budget: Mapping[str, Any]) -> tuple[Account, ...]:
    nodes = []
    if (tokens := budget.get("tokens")) is not None:
        nodes.append(Account(f"the budget of the node '{name}'", tokens))
    if (cost := budget.get("cost")) is not None:
        limit = billionths(Decimal(cost["amount"]))
        title = f"the cost budget of the node '{name}'"
        nodes.append(Account(title, limit, unit=DOLLARS, needs_price=True))
    return tuple(nodes)


def end_of_graph(
    rules: GraphRules,
    graph: SharedMemoryGraph,
    responses: Mapping[str, AssistantResponse],
    course: GraphCourse,
    usage: AgentUsage,
) -> End:
    """Return the run's end, derived from the nodes' responses. Pure.

    If one node answers, the output is the node's text. If several nodes answer, the output is their
    texts by node name. After a failure that ends the run, the output has the texts of all finished
    nodes, and partial texts of failed nodes. ``error`` has the names of the failed nodes.
    ``stop_reason`` is the stop reason of the first failed node in topological order.
    """
    order = graph.get_topological_order()
    # A sink's answer at the iteration limit counts as output, because no agent depends on a sink.
    good = {name: responses[name] for name in order if course.statuses[name] == "completed"}
    ended = {name: responses[name] for name in order if name in responses}
    failed = {
        name: response
        for name, response in ended.items()
        if name not in good and not rules.nodes[name].goes_on
    }
    if failed:
        first = next(iter(failed.values()))
        return End(
            RunStatus.FAILED,
            output={name: a.content for name, a in ended.items() if name in good or a.content},
            error=_explain(rules, failed, first),
            usage=usage,
            stop_reason=first.stop_reason,
        )
    answering = [name for name in order if name in rules.answering]
    ran = {name: good[name] for name in answering if name in good}
    if not ran:
        return End(RunStatus.COMPLETED, usage=usage, stop_reason="no_output")
    texts = {name: response.content for name, response in ran.items()}
    parsed = {name: a.output_json for name, a in ran.items() if a.output_json is not None}
    reached = next((response for response in ran.values() if response.error), None)
    is_single = len(answering) == 1
    return End(
        RunStatus.COMPLETED,
        output=texts[answering[0]] if is_single else texts,
        usage=usage,
        stop_reason=None if reached is None else reached.stop_reason,
        output_json=parsed.get(answering[0]) if is_single else parsed or None,
    )


def _explain(
    rules: GraphRules, failed: Mapping[str, AssistantResponse], first: AssistantResponse
) -> Failure:
    causes = [
        f"{name} ({answer.error})"
        for name, answer in failed.items()
        if answer.error_code != "predecessor_failed"
    ]
    skipped = [name for name, answer in failed.items() if answer.error_code == "predecessor_failed"]
    text = f"failed: {', '.join(causes)}"
    if skipped:
        text += f"; skipped because of that: {', '.join(skipped)}"
    code = "agent_failed" if rules.is_plain else first.error_code or "agent_failed"
    return Failure(code=code, message=text)
