"""Whether a task may be dispatched (spec page 3, S3, S4, S8). Decides, and changes nothing."""

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
    """Refuse what is beyond a limit. Over ``max_concurrent`` is not: that task waits.

    Args:
        limits: of all parents together; each has its own.
        counts: of the tasks that wait.
        room: how many of this parent's tasks would not wait at all.
        wait: seconds until the breaker lets a task of this kind through; ``None``: it does.

    Raises:
        SubagentRefusedError: its kinds, with a text for the model.
    """
    own = parent.limits
    if parent.is_over:
        raise SubagentQuotaExceededError("whoever dispatches this is over already")
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
    """Refuse what the queue has no place for.

    Beyond its bounds it has one place for each tenant. A tenant of which nothing waits gets it at
    once, and so does a run of which nothing waits while its tenant has not used it.
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
