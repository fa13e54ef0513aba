"""DAG mode: run a graph's agents, each once its predecessors are done.

There is no orchestrator. Every agent gets the run's own question, and its predecessors' answers
along the graph.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from bottega.agents import AgentUsage, AssistantResponse, BaseAgent, Query, SharedMemoryGraph
from bottega.agents.history import QueryInput
from bottega.agents.query import next_query
from bottega.engine.journal import End
from bottega.engine.recorder import JournalRecorder
from bottega.engine.task_rows import CANCELLED
from bottega.events.types import RunStatus


async def run_dag(
    graph: SharedMemoryGraph,
    agents: Mapping[str, BaseAgent],
    question: QueryInput,
    recorder: JournalRecorder,
) -> End:
    """Run every agent of the graph, in parallel where the graph allows; return the run's end.

    Raises:
        Exception: from a query (the recorder's, a hook's bug); all agents under way are cancelled
            first.
    """
    asked: dict[str, asyncio.Task[AssistantResponse]] = {}
    queries: dict[str, Query] = {}

    def between() -> bool:
        """Return true if an agent is about to begin, or has ended but its task has not."""
        return any(
            not task.done()
            and queries[name] not in recorder.tasks.open
            and all(asked[source].done() for source in graph.predecessors(name))
            for name, task in asked.items()
        )

    recorder.loops.between = between
    try:
        async with asyncio.TaskGroup() as group:
            for index, name in enumerate(graph.get_topological_order()):
                sources = {source: asked[source] for source in graph.predecessors(name)}
                agent = agents[name]
                query = queries[name] = Query(agent, (), recorder, path=((0, index),))
                execute = partial(agent.execute_query_async, question)
                asked[name] = group.create_task(_ask(query, execute, sources, recorder))
                asked[name].add_done_callback(lambda _: recorder.looks_if_it_waits())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the one that stopped the others
    return end_of_all(graph, {name: task.result() for name, task in asked.items()})


async def _ask(
    query: Query,
    execute: Callable[[], Awaitable[AssistantResponse]],
    sources: Mapping[str, asyncio.Task[AssistantResponse]],
    recorder: JournalRecorder,
) -> AssistantResponse:
    for source, task in sources.items():
        if (await task).error is not None:
            response = AssistantResponse(
                error=f"skipped, because {source} has no answer",
                error_code="predecessor_failed",
                stop_reason="error",
            )
            recorder.query_ended(query, response)
            return response
    next_query.set(query)
    return await recorder.tasks.cancellable(query.path, query.agent, execute) or AssistantResponse(
        error=CANCELLED["message"], error_code=CANCELLED["code"], stop_reason="cancelled"
    )


def end_of_all(graph: SharedMemoryGraph, responses: Mapping[str, AssistantResponse]) -> End:
    """Return the run's end, derived from the agents' responses. Pure.

    Its output is the text of the only sink, or texts by sink; after a failure the texts of all
    agents that finished, and partial texts of those that failed. ``error`` says which failed, and
    ``stop_reason`` is of the first of them in the order of the graph.
    """
    usage = sum((response.usage for response in responses.values()), AgentUsage())
    sinks = [name for name in graph.get_topological_order() if not graph.successors(name)]
    # A sink's answer at its iteration limit counts as output, since no agent depends on it.
    reached = [name for name in sinks if responses[name].error and responses[name].is_answer]
    good = {name: a for name, a in responses.items() if a.error is None or name in reached}
    texts = {name: a.content for name, a in responses.items() if name in good or a.content}
    if failed := {name: a for name, a in responses.items() if name not in good}:
        first = next(name for name in graph.get_topological_order() if name in failed)
        reason = failed[first].stop_reason
        return End(
            RunStatus.FAILED,
            output=texts,
            error=_explain(failed),
            usage=usage,
            stop_reason=reason,
        )
    output = texts[sinks[0]] if len(sinks) == 1 else {name: texts[name] for name in sinks}
    ended = responses[reached[0]].stop_reason if reached else None
    parsed = {name: found for name in sinks if (found := responses[name].output_json) is not None}
    return End(
        RunStatus.COMPLETED,
        output=output,
        usage=usage,
        stop_reason=ended,
        output_json=parsed.get(sinks[0]) if len(sinks) == 1 else parsed or None,
    )


def _explain(failed: Mapping[str, AssistantResponse]) -> dict[str, str]:
    causes = [
        f"{name} ({answer.error})"
        for name, answer in failed.items()
        if answer.error_code != "predecessor_failed"
    ]
    skipped = [name for name, answer in failed.items() if answer.error_code == "predecessor_failed"]
    text = f"failed: {', '.join(causes)}"
    if skipped:
        text += f"; skipped because of that: {', '.join(skipped)}"
    return {"code": "agent_failed", "message": text}
