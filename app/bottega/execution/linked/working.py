"""Execution of a linked run: the agent of its task, and the files that it reads and writes."""

from collections.abc import Callable
from typing import Any

from bottega.agents.agent import BaseAgent
from bottega.execution.claim import ClaimedRun
from bottega.subagents.child import copy_for_task, helper_of
from bottega.subagents.shared_context import folder_of
from bottega.subagents.swarm import Swarm


def agent_of_task(
    agent: BaseAgent, run: ClaimedRun, configure: Callable[[BaseAgent], object]
) -> BaseAgent:
    """Return the agent of a linked run's task.

    Args:
        agent: the defined one, or that whose helper does the task.
        configure: called with a new helper.
    """
    link = run.link
    assert link is not None
    if link["helper_of"] is None:
        return copy_for_task(agent, link["instructions"], link["most_steps"])
    helper = helper_of(agent, link["instructions"], link["most_steps"])
    configure(helper)
    return helper


def give_files(swarm: Swarm, run: ClaimedRun) -> None:
    """Give a linked run the shared files that its parent had when it was dispatched."""
    for path, content in (run.link or {}).get("files", {}).items():
        swarm.context.restore(path, content)


def written(swarm: object, run: ClaimedRun) -> dict[str, Any]:
    """Return the files of a linked run's own folder that it got otherwise or not at all."""
    if run.link is None or run.own_task is None or not isinstance(swarm, Swarm):
        return {}
    folder, given = folder_of(run.own_task), run.link["files"]
    texts = swarm.context.texts(folder)
    return {path: text for path, text in texts.items() if given.get(path) != text}
