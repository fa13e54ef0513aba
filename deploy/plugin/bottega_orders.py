"""A plugin for a service: a tool, a hook and a guard.

Install the plugin in the service's environment (``pip install ./deploy/plugin``) and restart the
service. An agent gets the tool and the hook if its ``metadata`` has ``{"orders": true}``.
"""

import logging
from collections.abc import Mapping
from typing import Any

from bottega.agents import AgentEvent, AgentStatus, BaseAgent, ToolContext, tool
from bottega.subagents.prompt_guard import PromptGuard

log = logging.getLogger(__name__)

ORDERS = {"ada": ["a kettle", "two cups"], "bob": ["a lamp"]}  # a real plugin asks a database


@tool(name="open_orders", description="Lists the customer's open orders.", idempotent=True)
def open_orders(context: ToolContext) -> list[str]:
    """Return the orders of the run's end user; the model cannot request orders of other users."""
    if context.user is None:
        raise ValueError("the run has no user: start it with `user`")
    context.annotate(source="orders")  # shown with the agent's publication in the graph
    return ORDERS.get(context.user, [])


def report(status: AgentStatus) -> None:
    """Log each answer once, even if the run is resumed after a crash."""
    log.info("%s answered, error: %s", status.agent.agent_name, status.error)


def configure_agent(agent: BaseAgent, definition: Mapping[str, Any]) -> None:
    """Add the tool and the hook to an agent; a worker calls this for every agent of every run."""
    if definition["metadata"].get("orders"):
        agent.register_tool(open_orders)
        agent.on(AgentEvent.QUERY_END).when(lambda status: not status.replayed).do(report)


prompt_guard = PromptGuard(deny=[r"card\s+number"], max_prompt_chars=20_000)
"""Refuses prompts for asynchronous sub-agents that ask for card numbers."""
