"""DAG mode (spec page 2, G16): a graph's agents by themselves, each once its sources are done.

No orchestrator decides anything here: every agent is asked the run's own question, and what its
predecessors answered reaches it along the graph.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from bottega.agents import AgentUsage, AssistantResponse, BaseAgent, Query, SharedMemoryGraph
from bottega.agents.current import next_query
from bottega.agents.history import QueryInput
from bottega.events.types import RunStatus
from bottega.runs.recorder import JournalRecorder
from bottega.runs.tasks import CANCELLED


@dataclass(frozen=True, slots=True)
class DagOutcome:
    """How a DAG ended.

    Attributes:
        output: of the sinks: the one sink's text, or texts by sink. If something failed: the
            texts of all agents that finished, and what there is of those that failed.
        error: which agents failed and which were not asked because of that.
        stop_reason: how the first one of them ended, in the order of the graph; of a DAG that is
            completed, ``max_iterations`` if those of a sink ran out.
    """

    status: RunStatus
    output: str | dict[str, str]
    usage: AgentUsage
    error: dict[str, str] | None = None
    stop_reason: str | None = None


async def run_dag(
    graph: SharedMemoryGraph,
    agents: Mapping[str, BaseAgent],
    question: QueryInput,
    recorder: JournalRecorder,
) -> DagOutcome:
    """Ask every agent of the graph, in parallel where the graph allows.

    Args:
        agents: one for each node.

    Raises:
        Exception: what a query raises instead of answering (the recorder's, a hook's bug); all
            agents under way are cancelled first.
    """
    asked: dict[str, asyncio.Task[AssistantResponse]] = {}
    try:
        async with asyncio.TaskGroup() as group:
            for index, name in enumerate(graph.get_topological_order()):
                sources = {source: asked[source] for source in graph.predecessors(name)}
                query = Query(agents[name], (), recorder, path=((0, index),))
                asked[name] = group.create_task(_ask(query, question, sources, recorder))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the one that stopped the others
    return outcome(graph, {name: task.result() for name, task in asked.items()})


async def _ask(
    query: Query,
    question: QueryInput,
    sources: Mapping[str, asyncio.Task[AssistantResponse]],
    recorder: JournalRecorder,
) -> AssistantResponse:
    for source, task in sources.items():
        if (await task).error is not None:
            response = AssistantResponse(
                error=f"not asked, because {source} has no answer",
                error_code="predecessor_failed",
                stop_reason="error",
            )
            recorder.query_ended(query, response)
            return response
    next_query.set(query)
    execute = partial(query.agent.execute_query_async, question)
    return await recorder.tasks.stoppable(query.path, query.agent, execute) or AssistantResponse(
        error=CANCELLED["message"], error_code=CANCELLED["code"], stop_reason="cancelled"
    )


def outcome(graph: SharedMemoryGraph, responses: Mapping[str, AssistantResponse]) -> DagOutcome:
    """What the agents' responses mean for the run. Pure."""
    usage = sum((response.usage for response in responses.values()), AgentUsage())
    sinks = [name for name in graph.get_topological_order() if not graph.successors(name)]
    # A text that was only reached is the run's output, as anywhere; nobody in the graph reads it.
    reached = [name for name in sinks if responses[name].error and responses[name].is_answer]
    good = {name: a for name, a in responses.items() if a.error is None or name in reached}
    texts = {name: a.content for name, a in responses.items() if name in good or a.content}
    if failed := {name: a for name, a in responses.items() if name not in good}:
        first = next(name for name in graph.get_topological_order() if name in failed)
        reason = failed[first].stop_reason
        return DagOutcome(RunStatus.FAILED, texts, usage, _explain(failed), reason)
    output = texts[sinks[0]] if len(sinks) == 1 else {name: texts[name] for name in sinks}
    ended = responses[reached[0]].stop_reason if reached else None
    return DagOutcome(RunStatus.COMPLETED, output, usage, stop_reason=ended)


def _explain(failed: Mapping[str, AssistantResponse]) -> dict[str, str]:
    causes = [
        f"{name} ({answer.error})"
        for name, answer in failed.items()
        if answer.error_code != "predecessor_failed"
    ]
    skipped = [name for name, answer in failed.items() if answer.error_code == "predecessor_failed"]
    text = f"failed: {', '.join(causes)}"
    if skipped:
        text += f"; not asked because of that: {', '.join(skipped)}"
    return {"code": "agent_failed", "message": text}
