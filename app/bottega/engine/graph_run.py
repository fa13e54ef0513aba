"""Execution of a run's graph in DAG mode: no agent coordinates, decisions do.

A node starts once its incoming edges are decided. Every agent gets the run's own question, and its
sources' answers along the graph. :mod:`bottega.graph.decisions` decides; here nodes are executed,
and what was decided is recorded. A resumed run takes no decision twice: it replays its nodes, and
recorded edges stay as they are.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any

from bottega.agents import AgentUsage, AssistantResponse, BaseAgent, Query, SharedMemoryGraph
from bottega.agents.approval import EXPIRES_S, Interrupt
from bottega.agents.checks import unmet_check
from bottega.agents.history import QueryInput
from bottega.agents.messages import AssistantMessage, ToolCall, ToolStatus, Usage
from bottega.agents.query import CurrentCall, current_call, next_query
from bottega.agents.tool_calls import answer_calls
from bottega.engine.build_agents import Team
from bottega.engine.journal import CANCELLED, End, is_answered
from bottega.engine.recorder import JournalRecorder
from bottega.errors import BudgetExhaustedError
from bottega.events.types import AgentFailed, EventType, RunStatus
from bottega.graph.decisions import (
    Decision,
    EdgeDecided,
    GraphCourse,
    GraphRules,
    MissingArgumentError,
    NodeEnd,
    NodeSkipped,
    arguments_of,
)
from bottega.graph.publication import as_text
from bottega.subagents.budget import DOLLARS, Account, billionths

TOOL_FAILED = "tool_failed"
TIMEOUT = "timeout"
CHECK_FAILED = "check_failed"
_NO_RETRY = frozenset(
    (
        *("cancelled", "denied", "invalid_arguments", "unknown_tool", "budget_exhausted"),
        *("model_bad_request", "model_unauthorized", "model_forbidden", "model_not_found"),
        *("model_context_too_long", "model_filtered", "model_refused", "unpriced_model"),
    )
)
"""Codes of errors that another try cannot mend."""
_LATER = ("408", "425", "429")
"""HTTP statuses below 500 that another try may mend."""


@dataclass(slots=True)
class _Failure:
    """The names of a node's error that its ``retry`` may list: its code, and an HTTP status."""

    code: str
    status: str | None = None

    def is_retried(self, retry: Mapping[str, Any]) -> bool:
        if (wanted := retry.get("on")) is not None:
            return self.code in wanted or self.status in wanted
        if self.status is not None and self.status[0] in "34":
            return self.status in _LATER
        return self.code not in _NO_RETRY


@dataclass(slots=True)
class GraphRun:
    """A run's nodes under way.

    Args:
        question: of every agent.
        about: the run's ``input``, as text, and ``metadata``.

    Attributes:
        responses: of the nodes that have ended.
    """

    team: Team
    recorder: JournalRecorder
    question: QueryInput
    about: Mapping[str, Any]
    responses: dict[str, AssistantResponse] = field(default_factory=dict)
    _usage: AgentUsage = AgentUsage()
    _queries: dict[str, Query] = field(default_factory=dict)
    _under_way: dict[asyncio.Task[AssistantResponse], str] = field(default_factory=dict)

    async def run(self) -> End:
        """Run the nodes, in parallel where the graph allows; return the run's end.

        Raises:
            Exception: from a node (the recorder's, a hook's bug); all nodes under way are
                cancelled first.
        """
        self.recorder.loops.between = self._is_between
        course = GraphCourse(self._rules, self.about, self.recorder.journal.replay.edges)
        try:
            async with asyncio.TaskGroup() as group:
                self._follow(course.begin(), group)
                while self._under_way:
                    await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
                    for task in [task for task in self._under_way if task.done()]:
                        name = self._under_way.pop(task)
                        self._follow(course.end(self._ended(name, task.result())), group)
                    self.recorder.looks_if_it_waits()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the one that stopped the others
        return end_of_graph(self._rules, self._graph, self.responses, course, self._usage)

    @property
    def _rules(self) -> GraphRules:
        assert self.team.rules is not None
        return self.team.rules

    @property
    def _graph(self) -> SharedMemoryGraph:
        assert self.team.graph is not None
        return self.team.graph

    def _is_between(self) -> bool:
        """Return true if a node is about to begin, between tries, or has ended just now."""
        opened = self.recorder.tasks.open
        return any(self._queries[name] not in opened for name in self._under_way.values())

    def _follow(self, decisions: list[Decision], group: asyncio.TaskGroup) -> None:
        """Record decisions, and start nodes."""
        for decision in decisions:
            if isinstance(decision, EdgeDecided):
                if not decision.taken:
                    self._graph.close_edge(decision.source, decision.target)
                self._record(EventType.EDGE_DECIDED, **decision._asdict())
            elif isinstance(decision, NodeSkipped):
                self._skip(decision)
            else:
                name = decision.name
                query = self._queries[name] = self._query(name)
                about = {"node": name, "type": self._rules.nodes[name].type}
                self._record_of(name, EventType.NODE_STARTED, about)
                self._under_way[group.create_task(self._execute(name, query))] = name

    def _skip(self, skipped: NodeSkipped) -> None:
        name = skipped.name
        if not self._rules.is_plain:
            self._graph.withdraw(name)
            self._record(EventType.NODE_SKIPPED, node=name, reason=skipped.reason)
            return
        self.responses[name] = AssistantResponse(
            error=f"skipped, because {skipped.source} has no answer",
            error_code="predecessor_failed",
            stop_reason="error",
        )
        self.recorder.query_ended(self._query(name), self.responses[name])

    def _record(self, kind: EventType, **data: Any) -> None:
        if not self._rules.is_plain:
            self.recorder.journal.add(kind, data)

    def _record_of(self, name: str, kind: EventType, data: dict[str, Any]) -> None:
        """Record an event of a node's own."""
        if not self._rules.is_plain:
            place = self.recorder.tasks.place_at(self._queries[name].path, self._agent_name(name))
            self.recorder.tasks.write(place, kind, data)

    def _agent_name(self, name: str) -> str:
        return self._rules.nodes[name].agent or ""

    def _query(self, name: str) -> Query:
        index = self.team.numbers[name]
        return Query(self.team.agents[name], (), self.recorder, path=((0, index),))

    def _ended(self, name: str, response: AssistantResponse) -> NodeEnd:
        """Note a node's end; return it as a fact to decide by."""
        self.responses[name] = response
        is_failed = not is_answered(self._queries[name], response)
        if not is_failed:
            self._record_of(name, EventType.NODE_COMPLETED, {"node": name})
            return NodeEnd(name, output=response.content, output_json=response.output_json)
        if not self._rules.is_plain:
            self._graph.withdraw(name)
        error = {"code": response.error_code or "agent_failed", "message": response.error}
        self._record_of(name, EventType.NODE_FAILED, {"node": name, "error": error})
        return NodeEnd(name, is_failed=True)

    async def _execute(self, name: str, query: Query) -> AssistantResponse:
        """Execute a node, with the new tries that it may have."""
        node = self.team.nodes.get(name, {})
        if (budget := node.get("budget")) is not None:
            self.recorder.node_accounts[query.path] = _accounts_of(name, budget)
        retry: Mapping[str, Any] | None = node.get("retry")
        while True:
            response, failure = await self._try(name, node, query)
            self._usage += response.usage
            if failure is None or retry is None or query.tries > retry["max"]:
                return response
            if not failure.is_retried(retry):
                return response
            if not self._is_replayed(query):
                await asyncio.sleep(retry["backoff_s"])
            query = self._queries[name] = self._next_try(name, query)

    def _next_try(self, name: str, before: Query) -> Query:
        """Return the query of a node's next try, with an agent that knows nothing of the last."""
        agent = self.team.agents[name] = self.team.agents[name].fresh_copy()
        return Query(
            agent,
            (),
            self.recorder,
            path=before.path,
            model_calls=before.model_calls,
            earlier_calls=before.model_calls,
            tries=before.tries + 1,
        )

    def _is_replayed(self, query: Query) -> bool:
        """Return true if an earlier attempt has made the next try."""
        task = self.recorder.journal.replay.task(self.recorder.tasks.id_of(query))
        return len(task.failures) > query.tries or (query.tries + 1, "call") in task.tools

    async def _try(
        self, name: str, node: Mapping[str, Any], query: Query
    ) -> tuple[AssistantResponse, _Failure | None]:
        kind = self._rules.nodes[name].type
        if kind == "agent":
            response = self._known_failure(query) or await self._ask(name, node, query)
            if response.error is None:
                reason = await unmet_check(node.get("success_check", ()), response.content)
                if reason is not None:
                    response = _failed(CHECK_FAILED, reason, response.usage)
            code = None if is_answered(query, response) else response.error_code or "agent_failed"
            return response, None if code is None else _Failure(code)
        self.recorder.tasks.open[query] = None
        try:
            if kind == "tool":
                return await self._call(name, node, query)
            return await self._ask_people(name, node, query)
        finally:
            self.recorder.tasks.open.pop(query, None)

    # Agents

    def _known_failure(self, query: Query) -> AssistantResponse | None:
        """Return the failure of a try that an earlier attempt recorded; it is not repeated."""
        if self._rules.is_plain:
            return None
        replay = self.recorder.journal.replay
        task = replay.task(self.recorder.tasks.id_of(query))
        if len(task.failures) < query.tries:
            return None
        event = task.failures[query.tries - 1]
        failed = AgentFailed.of(event.data)
        usage = AgentUsage.from_dict(failed.usage)
        is_paid = event.seq > replay.carried_seq
        self.recorder.repeat(usage, usage if is_paid else Usage())
        for account in self.recorder.node_accounts.get(query.path, ()):
            account.spend(usage)
        query.model_calls += usage.model_calls
        return _failed(failed.error["code"], failed.error["message"], usage)

    async def _ask(self, name: str, node: Mapping[str, Any], query: Query) -> AssistantResponse:
        accounts = self.recorder.node_accounts.get(query.path, ())
        if not accounts and "timeout_s" not in node:
            return await self._answer(query)
        asked = asyncio.ensure_future(self._answer(query))
        try:
            while not asked.done():
                await asyncio.wait([asked], timeout=node.get("timeout_s"))
                if not asked.done() and not self._waits_for_people(query):
                    text = f"'{name}' has not answered within {node['timeout_s']:g} s"
                    return await self._stop(asked, query, TIMEOUT, text)
            return asked.result()
        except BudgetExhaustedError as error:
            if not any(error.detail.startswith(account.name) for account in accounts):
                raise
            return await self._stop(asked, query, error.code, error.detail)
        finally:
            asked.cancel()
            await asyncio.wait([asked])

    def _waits_for_people(self, query: Query) -> bool:
        """Return true if a query cannot go on without people, whose time does not count."""
        return any(each is query and needs for each, needs in self.recorder.loops.needing_people())

    async def _answer(self, query: Query) -> AssistantResponse:
        agent = query.agent
        assert isinstance(agent, BaseAgent)
        next_query.set(query)
        execute: Callable[[], Awaitable[AssistantResponse]]
        execute = partial(agent.execute_query_async, self.question)
        found = await self.recorder.tasks.cancellable(query.path, agent, execute)
        return found or AssistantResponse(
            error=CANCELLED["message"], error_code=CANCELLED["code"], stop_reason="cancelled"
        )

    async def _stop(
        self, asked: "asyncio.Task[AssistantResponse]", query: Query, code: str, text: str
    ) -> AssistantResponse:
        """End a query from outside."""
        asked.cancel()
        await asyncio.wait([asked])
        self.recorder.tasks.stopped(query.path, {"code": code, "message": text})
        return _failed(code, text, query.usage)

    # Tools and people

    async def _call(
        self, name: str, node: Mapping[str, Any], query: Query
    ) -> tuple[AssistantResponse, _Failure | None]:
        tool = query.agent.registered_tools[0]
        outputs = {each: response.output_json for each, response in self.responses.items()}
        try:
            arguments = arguments_of(node.get("arguments", {}), outputs | {"run": self.about})
        except MissingArgumentError as error:
            return _failed(TOOL_FAILED, str(error)), _Failure("invalid_arguments")
        query.model_calls += 1
        made = AssistantMessage(
            tool_calls=(ToolCall(id="call", name=tool.name, arguments=arguments),)
        )
        (result,) = await answer_calls(query, made, {tool.name: tool}, [])
        if result.status is ToolStatus.ERROR:
            kind = result.error_type or TOOL_FAILED
            code = TIMEOUT if "timeout" in kind else TOOL_FAILED
            status = None if result.error_status is None else str(result.error_status)
            failure = _Failure(code if code == TIMEOUT else kind, status)
            return _failed(code, result.error or "", query.usage), failure
        return await self._said(name, query, result.result), None

    async def _ask_people(
        self, name: str, node: Mapping[str, Any], query: Query
    ) -> tuple[AssistantResponse, _Failure | None]:
        query.model_calls += 1
        call = ToolCall(id="call", name=name)
        interrupt = Interrupt(
            kind="question",
            question=node["ask"],
            schema=node["schema"],
            expires_s=node.get("expires_s", EXPIRES_S),
            node=name,
            who=node.get("who", "run"),
        )
        token = current_call.set(CurrentCall(query, 0, call.id))
        try:
            said = (await self.recorder.decision(query, call, interrupt)).said
        finally:
            current_call.reset(token)
        if "answer" in said:
            return await self._said(name, query, said["answer"]), None
        code = str(said.get("reason", "denied"))
        return _failed(code, "nobody answered in time"), _Failure(code)

    async def _said(self, name: str, query: Query, value: Any) -> AssistantResponse:
        """Publish what a tool or a person gave; return it as the node's answer."""
        text = as_text(value)
        if text.strip():
            publication = await self._graph.publish(
                name,
                text,
                version=self.recorder.version_of(query),
                timestamp=self.recorder.published_at(query),
            )
            self.recorder.published(query, publication)
            self.recorder.publications_ended(query)
        return AssistantResponse(content=text, output_json=value, usage=query.usage)


def _failed(code: str, text: str, usage: AgentUsage = AgentUsage()) -> AssistantResponse:
    return AssistantResponse(error=text, error_code=code, usage=usage, stop_reason="error")


def _accounts_of(name: str, budget: Mapping[str, Any]) -> tuple[Account, ...]:
    """Return the accounts of a node's own budget."""
    found = []
    if (tokens := budget.get("tokens")) is not None:
        found.append(Account(f"the budget of the node '{name}'", tokens))
    if (cost := budget.get("cost")) is not None:
        limit = billionths(Decimal(cost["amount"]))
        title = f"the cost budget of the node '{name}'"
        found.append(Account(title, limit, unit=DOLLARS, needs_price=True))
    return tuple(found)


def end_of_graph(
    rules: GraphRules,
    graph: SharedMemoryGraph,
    responses: Mapping[str, AssistantResponse],
    course: GraphCourse,
    usage: AgentUsage,
) -> End:
    """Return the run's end, derived from the nodes' responses. Pure.

    Its output is the text of the only answering node, or texts by node; after a failure that ends
    the run the texts of all nodes that finished, and partial texts of those that failed. ``error``
    says which failed, and ``stop_reason`` is of the first of them in the order of the graph.
    """
    order = graph.get_topological_order()
    # A sink's answer at its iteration limit counts as output, since no agent depends on it.
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
) -> dict[str, str]:
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
    return {"code": code, "message": text}
