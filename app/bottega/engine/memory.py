"""Memory of earlier runs, which a run's root agent gets at the start and after failures.

The run's log has this memory as events ``context.recalled``. A resumed or repeated run reads the
memory from the log, without a new search.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json

from bottega import metrics
from bottega.agents.agent import BaseAgent
from bottega.agents.parts import content_text
from bottega.definitions.graphs import inner_of
from bottega.engine.claim import ClaimedRun
from bottega.engine.journal import Journal
from bottega.engine.recorder import JournalRecorder
from bottega.engine.replay import ANALYSIS
from bottega.engine.retrieval import (
    MOST_EPISODES,
    Assignment,
    MemorySources,
    ToolFailure,
    continues,
    episode_event,
    insight_events,
    patterns_for,
    pinned_events,
    render_episode,
    tells_a_topic,
    with_cures_once,
    without_repeated_insights,
)
from bottega.errors import BottegaError, UnavailableError
from bottega.events.data import ContextRecalledData, WarningData, context_recalled
from bottega.events.types import EventType
from bottega.logger import Logger
from bottega.memory.episodes.episode import EpisodeFilter, Outcome
from bottega.memory.episodes.scope import NO_USER, Scope, memory_used, scope_of_run
from bottega.memory.episodes.store import Hit
from bottega.memory.facts import UserFacts, fact_tools
from bottega.memory.learning.episode_recorder import RunFacts
from bottega.memory.learning.lessons import MOST_INSIGHTS, insights_in, pinned_for
from bottega.memory.learning.mining import cure_in
from bottega.memory.patterns.adherence import SOURCE
from bottega.memory.patterns.task_analysis import Goals, analyse, lines_of, refined
from bottega.memory.prompts import RunMemory
from bottega.memory.working_memory import Retrieved, SetPlan, WorkingMemory, search_tool
from bottega.tools.mcp import model_name, tools_in

_PATIENCE_S = 2.0
_ANALYSIS_S = 30.0
_HELPS = 8
"""Maximum number of retrievals after failures in a run."""
_READ, _ALIKE = 10, 3  # read at most 10 episodes with a similar failure, and use at most 3

_Ask = Callable[[], Awaitable[list[ContextRecalledData]]]

logger = Logger(__name__)


def run_facts(run: ClaimedRun) -> RunFacts:
    """Return the facts about a claimed run that are known before the run's start."""
    return RunFacts(
        run.run_id,
        run.session_id,
        run.principal,
        _text_of(run.input),
        run.first,
        {name: _with_mcp_tools(run, each) for name, each in run.agents.items()},
        run.metadata,
        run.user,
        run.agent,
        frozenset(
            tool["name"] for each in run.overrides.values() for tool in each.get("tools") or ()
        ),
        _silent(run),
    )


def _silent(run: ClaimedRun) -> frozenset[str]:
    """Return the agents with the memory mode ``off`` or ``read``: the episode omits their work."""
    graphs = [] if run.graph is None else [run.graph, *(each for _, each in inner_of(run.graph))]
    modes = [(name, each.get("memory")) for name, each in run.agents.items()]
    modes += [(node.get("agent"), node.get("memory")) for each in graphs for node in each["nodes"]]
    return frozenset(name for name, mode in modes if mode in ("off", "read") and name is not None)


def _with_mcp_tools(run: ClaimedRun, definition: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace MCP servers in a definition by their tools; each tool counts as one that writes."""
    tools = definition.get("tools", ())
    tools_found = [tool for tool in tools if tool["type"] == "mcp"]
    if not tools_found:
        return definition
    own = [
        {"type": "mcp", "name": model_name(tool["server"], each["name"]), "method": "CALL"}
        for tool in tools_found
        for each in tools_in(tool, run.mcp_servers[tool["server"]])
    ]
    return {**definition, "tools": [*(tool for tool in tools if tool["type"] != "mcp"), *own]}


def _text_of(question: str | Sequence[Mapping[str, Any]]) -> str | Sequence[Mapping[str, Any]]:
    """Replace content of a run's input that is no text, such as an image, by a short text."""
    if isinstance(question, str):
        return question
    return [{**message, "content": content_text(message["content"])} for message in question]


async def use_memory(
    agent: BaseAgent,
    run: ClaimedRun,
    recorder: JournalRecorder,
    sources: MemorySources | None,
    *,
    limit: int,
) -> None:
    """Give a run's root agent a working memory that contains memory of the tenant's earlier runs.

    Args:
        sources: memory of earlier runs; ``None``: no memory is retrieved.
        limit: maximum size of a prompt, in tokens.
    """
    about = run_facts(run)
    assignment = Assignment(run.salt, run.assigned_as, learns=run.memory == "full")
    analysis = await _analysis(about, recorder.journal, sources)
    goals = _goals(about, run.demands, analysis)
    working = WorkingMemory()
    lessons = MemoryRetriever(about, recorder.journal, sources, assignment, goals, working)
    tools = [SetPlan(working), search_tool(lessons.search)] if agent.registered_tools else []
    agent.memory = RunMemory(working, limit=limit, tools=tools)
    if recorder.journal.episode is not None:
        recorder.journal.episode.recorder.goals = goals
    if analysis is not None:
        working.load_task_context(
            goals=lines_of(analysis, "goals"),
            constraints=lines_of(analysis, "constraints"),
            criteria=lines_of(analysis, "criteria"),
            by="found by a model",
        )
    replay = recorder.journal.replay
    recalled: Sequence[ContextRecalledData] = replay.recalled
    if not recalled and not replay.asked and not continues(run):
        recalled = await lessons.found()
        if sources is not None:
            metrics.recalls.labels(lessons.result_of(recalled)).inc()
        for data in recalled:
            recorder.journal.add(EventType.CONTEXT_RECALLED, data, agent=agent.agent_name)
    lessons.take(recalled)
    recorder.lessons = lessons


async def use_facts(
    agent: BaseAgent, run: ClaimedRun, journal: Journal, pool: asyncpg.Pool
) -> None:
    """Give a root agent the facts about the run's user, if the agent's definition uses facts.

    The facts are written into the log, so that a resumed run has the same prompts.
    """
    if run.facts_mode == "off" or run.user is None:
        return
    facts = UserFacts(pool, run.tenant_id, run.user, run.run_id)
    memory = agent.memory
    assert isinstance(memory, RunMemory)
    if run.facts_mode == "write":
        memory.tools = [*memory.tools, *fact_tools(facts)]
    data = journal.replay.facts
    if data is None and not journal.replay.asked:
        data = await facts.recalled()
        if data is not None:
            journal.add(EventType.CONTEXT_RECALLED, data, agent=agent.agent_name)
    if data is not None:
        memory.facts, facts.listed_ids = data.get("content") or "", data.get("facts") or ()


def _goals(
    about: RunFacts, demands: Mapping[str, Sequence[str]], analysis: Mapping[str, Any] | None
) -> Goals:
    """Return the analysis of a task for memory searches.

    Each field comes from the request; if the request lacks it, from a model's analysis; else from
    the rules' analysis. Prompts do not contain the rules' analysis.
    """
    goals = analyse(
        about.question,
        domain=about.said("domain"),
        task_type=about.task_type,
        capabilities=about.capabilities,
    )
    said = {**demands, "criteria": demands.get("success_criteria")}
    return refined(refined(goals, analysis or {}), said)


async def _analysis(
    about: RunFacts, journal: Journal, sources: MemorySources | None
) -> Mapping[str, Any] | None:
    replay = journal.replay
    if replay.analysis is not None:
        analysis: Mapping[str, Any] = from_json(replay.analysis)
        return analysis
    if sources is None or sources.analyst is None or replay.asked:
        return None
    try:
        async with asyncio.timeout(_ANALYSIS_S):
            run = journal.tenant_id, journal.run_id
            said = await sources.analyst.analyse(run, about.question)
    except (BottegaError, TimeoutError) as error:
        text = f"rules analysed the task, since the model failed: {type(error).__name__}: {error}"
        journal.add(EventType.WARNING, WarningData(code="analysis_unavailable", message=text[:500]))
        return None
    data = context_recalled(f"{ANALYSIS}{sources.analyst.name}", to_json(said).decode())
    journal.add(EventType.CONTEXT_RECALLED, data, agent=about.first)
    return said


class MemoryRetriever:
    """Retriever that gives a run's root agent memory of earlier runs."""

    def __init__(
        self,
        about: RunFacts,
        journal: Journal,
        sources: MemorySources | None,
        assignment: Assignment,
        goals: Goals,
        working: WorkingMemory,
    ) -> None:
        self._about = about
        self._scope = _scope(about, shared=sources is not None and sources.shared)
        self._journal = journal
        self._sources = sources
        self._assignment = assignment
        self._features = goals.features
        self._working = working
        self._patterns: set[UUID] = set()
        self._helps = sum(map(len, journal.replay.helped.values()))

    def take(self, recalled: Sequence[ContextRecalledData]) -> None:
        """Add retrieved memory to the working memory."""
        self._know(recalled)
        shown = {data["source"]: text for data in recalled if (text := data.get("content"))}
        if shown:
            texts = with_cures_once([*shown.values()], set())
            self._working.retrieve_from_episodic(map(Retrieved, shown, texts))

    def _know(self, recalled: Iterable[ContextRecalledData]) -> None:
        """Record which patterns the run already has, so that no pattern is used twice."""
        sources = (data["source"] for data in recalled)
        self._patterns.update(
            UUID(source.removeprefix(SOURCE)) for source in sources if source.startswith(SOURCE)
        )

    def result_of(self, recalled: Sequence[Mapping[str, Any]]) -> str:
        """Return a metric's label: ``recalled``, ``nothing`` or ``nobody`` (no user or session)."""
        if _used(self._about, self._scope) == NO_USER:
            return "nobody"
        return "given" if any(data.get("content") for data in recalled) else "nothing"

    async def found(self) -> list[ContextRecalledData]:
        """Return patterns, lessons and episodes that may help this run, as event data."""
        if self._sources is None:
            return []
        patterns = partial(
            patterns_for, self._sources, self._journal.tenant_id, self._features, self._assignment
        )
        asks = (
            patterns,
            partial(self._pinned, self._sources),
            partial(self._episodes, self._sources),
        )
        return without_repeated_insights(await self._both(*asks))

    async def _pinned(self, sources: MemorySources) -> list[ContextRecalledData]:
        tenant_id = self._journal.tenant_id
        about, pool = self._about, sources.episodes.pool
        is_closed = about.definitions.get(about.first, {}).get("memory_scope") == "run"
        agent = None if is_closed else about.agent
        return pinned_events(await pinned_for(pool, tenant_id, self._scope, agent))

    async def _episodes(self, sources: MemorySources) -> list[ContextRecalledData]:
        if not tells_a_topic(self._about.question):
            return []
        found = await sources.episodes.semantic_search(
            self._journal.tenant_id,
            self._scope,
            self._about.question,
            k=MOST_EPISODES,
            domain=self._about.said("domain"),
        )
        hits = [hit for hit in found.hits if hit.relevant]
        insights = insights_in([(hit.episode, hit.score) for hit in hits], self._assignment.salt)
        return [*insight_events(insights[:MOST_INSIGHTS]), *map(episode_payload, hits)]

    async def _both(self, *asks: _Ask) -> list[ContextRecalledData]:
        """Return the results of searches, in order. Write a warning for each failed search."""
        answers = await asyncio.gather(*map(_in_time, asks), return_exceptions=True)
        events: list[ContextRecalledData] = []
        for answer in answers:
            if isinstance(answer, list):
                events += answer
            elif not isinstance(answer, Exception):
                raise answer
            else:
                logger.warning("memory.unavailable", error=str(answer))
                text = f"{type(answer).__name__}: {answer}"
                text = f"a part of the memory of earlier runs could not be read: {text}"
                self._journal.add(
                    EventType.WARNING, WarningData(code="memory_unavailable", message=text[:500])
                )
        return events

    async def search(self, query: str, in_session: bool) -> str:
        """Return the result of the tool ``search_memory``."""
        if self._sources is None:
            return "There is no memory of earlier tasks."
        session_id = self._about.session_id
        if in_session and session_id is None:
            return "This task belongs to no session: search with session=false."
        where = EpisodeFilter(session_id=session_id if in_session else None)
        try:
            hits = await self._sources.episodes.semantic_search(
                self._journal.tenant_id,
                self._scope,
                query,
                k=MOST_EPISODES,
                where=where,
                domain=self._about.said("domain"),
            )
        except Exception as error:  # the model must not see the text of the database's error
            logger.warning("memory.unavailable", error=str(error))
            raise UnavailableError("the memory cannot be read now: go on without it") from error
        texts = [render_episode(hit.episode) for hit in hits.hits if hit.relevant]
        return "\n\n".join(texts) or "No earlier task was like that."

    # Help after failures

    async def failed(
        self, call: int, tool_call_id: str, failures: Sequence[ToolFailure]
    ) -> Sequence[ContextRecalledData]:
        """Return help for a failed tool call of the root agent, as event data.

        Args:
            failures: failures of this call and of asynchronous tasks; ignored for a replayed call.
        """
        helped = self._journal.replay.helped.get(call, {})
        recalled: Sequence[ContextRecalledData] = helped.get(tool_call_id, ())
        if not recalled and failures and self._sources is not None and self._helps < _HELPS:
            self._helps += 1
            events = await self._looked_up(self._sources, failures)
            recalled = [{**data, "call": call, "tool_call_id": tool_call_id} for data in events]
            for data in recalled:
                self._journal.add(EventType.CONTEXT_RECALLED, data, agent=self._about.first)
        self._know(recalled)
        return recalled

    async def _looked_up(
        self, sources: MemorySources, failures: Sequence[ToolFailure]
    ) -> list[ContextRecalledData]:
        events: dict[str, ContextRecalledData] = {}
        for failure in failures:
            some = await self._helpful(sources, failure)
            self._know(some)
            for data in some:
                events.setdefault(data["source"], data)
        return [*events.values()]

    async def _helpful(
        self, sources: MemorySources, failure: ToolFailure
    ) -> list[ContextRecalledData]:
        tool, signature = failure.tool, failure.signature
        about = {"error_type": failure.error["type"], "tool": tool, "failure_signature": signature}
        patterns = partial(
            patterns_for,
            sources,
            self._journal.tenant_id,
            {**self._features, **about},
            self._assignment,
            but=frozenset(self._patterns),
        )
        return await self._both(patterns, partial(self._alike, sources, tool, signature))

    async def _alike(
        self, sources: MemorySources, tool: str, signature: str
    ) -> list[ContextRecalledData]:
        """Return episodes with a similar failure. Successful episodes come first.

        If some episodes have a cure (a call that worked after the failure), return only these.
        """
        episodes = await sources.episodes.similar_failures(
            self._journal.tenant_id, self._scope, signature, _READ
        )
        best = sorted(episodes, key=lambda each: each.judged is not Outcome.SUCCESS)
        cures = {each.id: cure_in(each.summary.steps, tool) for each in best}
        cured = [each for each in best if cures[each.id]]
        return [episode_event(each, cure=cures[each.id]) for each in (cured or best)[:_ALIKE]]


def _used(about: RunFacts, scope: Scope) -> str:
    return memory_used(scope, user=about.user, session_id=about.session_id)


def _scope(about: RunFacts, *, shared: bool) -> Scope:
    return scope_of_run(
        about.definitions.get(about.first, {}).get("memory_scope"),
        user=about.user,
        session_id=about.session_id,
        agent=about.agent,
        shared=shared,
    )


def episode_payload(hit: Hit) -> ContextRecalledData:
    """Return a found episode as event data, with the reason why the search found it."""
    data = episode_event(hit.episode, hit.score)
    data["why"] = hit.why
    return data


async def _in_time(ask: _Ask) -> list[ContextRecalledData]:
    async with asyncio.timeout(_PATIENCE_S):
        return await ask()
