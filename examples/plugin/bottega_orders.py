"""A plugin for a service: a tool, a hook and a guard.

Install it beside the service (``pip install ./examples/plugin``) and restart. An agent gets the
tool and the hook if its ``metadata`` says so: ``{"orders": true}``.
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
    """Return the orders of the run's own end user: the model cannot ask for those of others."""
    if context.user is None:
        raise ValueError("the run has no user: start it with `user`")
    context.annotate(source="orders")  # shown with what the agent publishes in its graph
    return ORDERS.get(context.user, [])


def report(status: AgentStatus) -> None:
    """Log each answer once, even if the run is resumed after a crash."""
    log.info("%s answered, error: %s", status.agent.agent_name, status.error)


def configure_agent(agent: BaseAgent, definition: Mapping[str, Any]) -> None:
    """Equip an agent; a worker calls it for every agent of every run."""
    if definition["metadata"].get("orders"):
        agent.register_tool(open_orders)
        agent.on(AgentEvent.QUERY_END).when(lambda status: not status.replayed).do(report)


prompt_guard = PromptGuard(deny=[r"card\s+number"], max_prompt_chars=20_000)
"""Refuses prompts for asynchronous sub-agents that ask for what no agent may know."""
