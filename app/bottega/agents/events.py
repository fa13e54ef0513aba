"""Events of a query, for the agent's hooks."""

from typing import Any

from bottega.agents.hooks import AgentEvent, AgentStatus, HookDecision, Outcome, run_hooks
from bottega.agents.recording import Query


class QueryFailed(Exception):  # noqa: N818
    """An error that ends a query with a response; never leaves the loop.

    Attributes:
        reason: the response's ``stop_reason``.
        content: the response's partial text.
    """

    def __init__(self, text: str, code: str, reason: str = "error", content: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.code = code
        self.reason = reason
        self.content = content


async def fire(query: Query, event: AgentEvent, value: Any = None, **fields: Any) -> Outcome:
    """Run the hooks of an event.

    Args:
        fields: fields of :class:`AgentStatus` that the event sets.

    Raises:
        QueryFailed: a hook decided FAIL, or raised.
        HookContractError: a hook's decision or value breaks the event's contract.
    """
    hooks = query.agent.hooks.get(event)
    if not hooks:
        return Outcome(HookDecision.CONTINUE, value)
    status = AgentStatus(event, query.agent, query.iteration, **fields)
    outcome = await run_hooks(hooks, status, value)
    if outcome.decision is HookDecision.FAIL:
        text = (
            outcome.value if isinstance(outcome.value, str) else f"a hook on {event} decided FAIL"
        )
        raise QueryFailed(text, "hook_failed")
    return outcome
