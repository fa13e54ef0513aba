"""Checks before a dispatch. Pure."""

from bottega.errors import (
    SubagentCircuitOpenError,
    SubagentDepthExceededError,
    SubagentQueueFullError,
    SubagentQuotaExceededError,
)
from bottega.subagents.counts import Counts
from bottega.subagents.handle import Parent
from bottega.subagents.limits import SubagentLimits


def check_dispatch(
    parent: Parent,
    limits: SubagentLimits,
    *,
    counts: Counts,
    room: int,
    wait: float | None,
) -> None:
    """Check a dispatch against the limits. A task above ``max_concurrent`` waits, so it passes.

    Args:
        limits: limits of all parents together; ``parent.limits`` are its own.
        counts: counts of the registry's tasks.
        room: number of further tasks of this parent that would start at once.
        wait: seconds until the breakers let a task of this kind through; ``None``: now.

    Raises:
        SubagentRefusedError: a subclass per limit; the text is for the model.
    """
    own = parent.limits
    if parent.is_over:
        raise SubagentQuotaExceededError("the dispatching agent has ended already")
    if parent.depth >= own.max_depth:
        raise SubagentDepthExceededError(
            f"tasks may be nested {own.max_depth} deep, and this would be deeper: do it without a "
            "sub-agent",
            limit=own.max_depth,
        )
    if wait is not None:
        raise SubagentCircuitOpenError(
            "tasks for this agent with these instructions failed repeatedly, so none is taken for "
            f"about {wait:.0f} s: try later, or differently",
            retry_after_ms=round(wait * 1000),
        )
    for account in parent.accounts:
        if account.is_exhausted:
            raise SubagentQuotaExceededError(
                f"{account.name} is used up: {account.spent} of {account.limit} tokens are spent",
                size=account.spent,
                limit=account.limit or 0,
            )
    if parent.queued >= own.max_queued + room:
        raise SubagentQuotaExceededError(
            f"{parent.queued - room} of your tasks wait already, and no more may: await some "
            "before you dispatch others",
            size=parent.queued - room,
            limit=own.max_queued,
        )
    _check_queue(parent, limits, counts, room)


def _check_queue(parent: Parent, limits: SubagentLimits, counts: Counts, room: int) -> None:
    """Check that the queue has a place.

    Beyond its bounds the queue has one extra place per tenant. A tenant without queued tasks always
    gets a place. A run without queued tasks may use its tenant's extra place.
    """
    of_tenant = counts.queued_of_tenant(parent.tenant_id)
    if not of_tenant:
        return
    extra = 0 if counts.queued_of_run(parent.run_id) else 1
    sizes = [(counts.queued, limits.max_queue_size + extra * counts.tenants_queued)]
    if parent.tenant_id is not None:
        most = limits.tenant_max_queued or max(1, limits.max_queue_size // 2)
        sizes.append((of_tenant, most + extra))
    for size, limit in sizes:
        if size >= limit + room:
            raise SubagentQueueFullError(
                f"the queue is full ({size - room} of {limit}): try again once some tasks are done",
                size=size - room,
                limit=limit,
            )
