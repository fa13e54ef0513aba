"""Memory for a run's parts. A part of a run is an agent node of the graph, or a sub-agent.

Before a part's first model call, the part gets memory of what the same part did in earlier runs.
The log has this memory as events ``context.recalled`` of the part's task, so a resumed run has the
same prompts without a search. At the run's end, the run's episode gets the work of each part.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from uuid import UUID

from bottega import metrics
from bottega.agents.messages import AssistantResponse, HumanMessage
from bottega.agents.output import ALONE, Check, unmet_check
from bottega.agents.query import Path, Query
from bottega.agents.subagent import AGENT_FAILED
from bottega.engine.claim import ClaimedRun
from bottega.engine.journal import Journal, RunObserver, Tasks, is_answered
from bottega.engine.replay import EPISODE
from bottega.engine.retrieval import (
    MOST_EPISODES,
    MemorySources,
    continues,
    part_events,
    tells_a_topic,
)
from bottega.events.data import ContextRecalledData, WarningData
from bottega.events.types import EventError, EventType
from bottega.graph.decisions import name_of_node
from bottega.logger import Logger
from bottega.memory.episodes.episode import EpisodeFilter
from bottega.memory.episodes.scope import NO_USER, MemoryScope, memory_used, scope_of_run
from bottega.memory.learning.episode_recorder import RunPart
from bottega.memory.prompts import Recalled
from bottega.subagents.swarm import TaskOfQuery

_PATIENCE_S = 2.0
_MOST_SEARCHES = 200
"""Maximum number of memory searches in a run."""
_MOST_CALLS = 8  # maximum number of remembered calls of a sub-agent

_Given = list[ContextRecalledData]
"""Data of events ``context.recalled``."""

logger = Logger(__name__)


class PartRule(NamedTuple):
    """A part's name, memory mode, memory scope and success checks."""

    part: str
    memory: str
    scope: MemoryScope | None
    checks: Sequence[Check]


class RunParts(RunObserver):
    """The parts of one run.

    Args:
        question: the run's question.
        sources: memory of earlier runs; ``None``: no memory is retrieved.

    Attributes:
        nodes: rules of the agent nodes that are being executed, by path.
    """

    def __init__(
        self,
        run: ClaimedRun,
        question: str,
        journal: Journal,
        tasks: Tasks,
        sources: MemorySources | None,
    ) -> None:
        self.nodes: dict[Path, PartRule] = {}
        self._run = run
        self._journal = journal
        self._tasks = tasks
        self._sources = sources
        self._question = "" if continues(run) else question
        self._searches: dict[tuple[str, str], asyncio.Future[_Given]] = {}
        self._recalled: dict[UUID | None, list[str]] = {}
        self._ended: dict[str, list[RunPart]] = {}
        self._quiet: set[str | None] = set()  # nodes without full memory

    def of_node(self, graph: str, node: Mapping[str, Any]) -> PartRule:
        """Return the rule of an agent node. If the node has no checks, use its agent's checks."""
        rule = self._of_agent(f"{graph}/{name_of_node(node)}", node["agent"])
        own = "success_check" in node or "for_each" in node
        return rule._replace(
            memory=node.get("memory") or rule.memory, checks=() if own else rule.checks
        )

    def _of_agent(self, part: str, agent: str) -> PartRule:
        defined = self._run.agents[agent]
        mode, scope = defined.get("memory", "full"), defined.get("memory_scope")
        return PartRule(part, mode, scope, defined.get("success_check") or ())

    def _of_query(self, query: Query) -> PartRule | None:
        name = query.agent.agent_name
        is_root = query.parent is None and self._run.parent_task is None
        if query.path in self.nodes or is_root or name not in self._run.agents:
            return self.nodes.get(query.path)
        return self._of_agent(name, name)

    # Memory of earlier runs

    async def add_recalled(self, query: Query) -> None:
        """Give a query's agent memory of what the same part did in earlier runs."""
        rule, task_id = self._of_query(query), self._tasks.id_of(query)
        if rule is None or rule.memory == "off":
            return
        if task_id not in self._recalled:
            self._recalled[task_id] = await self._texts(query, rule, task_id)
        if texts := self._recalled[task_id]:
            query.agent.memory = Recalled(texts)

    async def _texts(self, query: Query, rule: PartRule, task_id: UUID | None) -> list[str]:
        task = self._journal.replay.task(task_id)
        events = [each for each in task.contexts() if each["source"].startswith(EPISODE)]
        texts = [each.get("content") or "" for each in events]
        if texts or task.calls:
            return texts
        found: _Given | None = None
        if query.parent is None:  # the parent run has searched
            found = (self._run.parent_task or {}).get("recalled")
        if found is None:
            found = await self.recalled(rule, "" if query.path in self.nodes else _asked(query))
        for data in found:
            self._tasks.add(query, EventType.CONTEXT_RECALLED, data)
        return [data.get("content") or "" for data in found]

    async def recalled_by(self, agent: str, question: str) -> _Given:
        """Return the memory for a sub-agent that does a task as a child run."""
        return await self.recalled(self._of_agent(agent, agent), question)

    async def recalled(self, rule: PartRule, question: str = "") -> _Given:
        """Return the memory for a part. A part makes only one search for each question.

        Args:
            question: the question to the part; empty: the question of the run.
        """
        text = "\n".join(filter(None, (self._question, question)))
        key = rule.part, text
        if key not in self._searches:
            skips = rule.memory == "off" or len(self._searches) == _MOST_SEARCHES
            if self._sources is None or skips:
                return []
            self._searches[key] = asyncio.ensure_future(self._search(self._sources, rule, text))
        return await asyncio.shield(self._searches[key])

    async def _search(self, sources: MemorySources, rule: PartRule, text: str) -> _Given:
        run, events = self._run, _Given()
        owner = {"user": run.user, "session_id": run.session_id}
        scope = scope_of_run(rule.scope, **owner, agent=run.agent, shared=sources.shared)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                if tells_a_topic(text):
                    where = EpisodeFilter(part=rule.part)
                    result = await sources.episodes.semantic_search(
                        run.tenant_id, scope, text, k=MOST_EPISODES, where=where
                    )
                    hits = [hit for hit in result.hits if hit.relevant]
                    parts = await sources.episodes.parts(run.tenant_id, scope, hits, rule.part)
                    events = part_events(parts)
        except Exception as error:
            logger.warning("memory.unavailable", error=str(error))
            message = f"what '{rule.part}' did in earlier runs could not be read"
            message = f"{message}: {type(error).__name__}: {error}"[:500]
            self._journal.add(
                EventType.WARNING, WarningData(code="memory_unavailable", message=message)
            )
        nobody = memory_used(scope, **owner) == NO_USER
        metrics.recalls.labels("given" if events else "nobody" if nobody else "nothing").inc()
        return events

    # What the parts do

    def node_ended(self, part: RunPart, rule: PartRule) -> None:
        """Record the end of an agent node. In a loop, the last turn's end replaces earlier ends."""
        if rule.memory != "full":
            self._quiet.add(part.node)
            return
        texts = {name: text for name, text in part.received.items() if name not in self._quiet}
        self._ended[rule.part] = [replace(part, received=texts, checks=rule.checks)]

    def query_ended(self, query: Query, response: AssistantResponse) -> None:
        rule, task_id = self._of_query(query), self._tasks.id_of(query)
        if rule is not None and query.path not in self.nodes:
            error = EventError(response.error_code or AGENT_FAILED, response.error)
            answered = response.content if is_answered(query, response) else error
            self._task_ended(rule, task_id, _asked(query), answered)

    def child_ended(
        self, agent: str, task_id: UUID, question: str, answered: str | EventError
    ) -> None:
        """Record the end of a sub-agent that did a task as a child run."""
        self._task_ended(self._of_agent(agent, agent), task_id, question, answered)

    def _task_ended(
        self, rule: PartRule, task_id: UUID | None, question: str, answered: str | EventError
    ) -> None:
        if rule.memory != "full":
            return
        part = RunPart(rule.part, rule.part, question, task_id=task_id, checks=rule.checks)
        if isinstance(answered, str):
            part.output = answered
        else:
            part.error = answered
        calls = self._ended.setdefault(rule.part, [])
        calls[:] = [each for each in calls if each.task_id != task_id][: _MOST_CALLS - 1]
        calls.append(part)

    async def judged(self) -> list[RunPart]:
        """Check the parts. Return each part's last failed call or, if none failed, its last call.

        Checks by models and plugins follow after the run's end, so they have no result yet.
        """
        for part in [part for calls in self._ended.values() for part in calls]:
            alone = [each for each in part.checks if each["type"] in ALONE]
            if part.passed is None and part.output is not None and alone:
                part.reason = await unmet_check(alone, part.output)
                if part.reason is not None or len(alone) == len(part.checks):
                    part.passed = part.reason is None
        return [([p for p in calls if p.is_bad] or calls)[-1] for calls in self._ended.values()]


def _asked(query: Query) -> str:
    if query.tool_call is None and isinstance(query.task, TaskOfQuery):
        return query.task.handle.prompt
    return next((each.content for each in query.messages if isinstance(each, HumanMessage)), "")
