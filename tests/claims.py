"""Claims of runs for tests that have no worker."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from bottega.db.base import DEFAULT_TENANT
from bottega.execution.claim import ClaimedRun


def claim_of(run_id: UUID, **changed: Any) -> ClaimedRun:
    """Return the first claim of a plain run of the default tenant, with some values changed."""
    run = ClaimedRun(
        tenant_id=DEFAULT_TENANT,
        run_id=run_id,
        attempt=1,
        last_seq=2,
        carried_seq=0,
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        timeout_s=600.0,
        remaining_s=600.0,
        crashes=0,
        is_cancelled=False,
        cancelled_tasks=frozenset(),
        task_root=run_id,
        tenant="default",
        mode="orchestrated",
        input="Write a report.",
        agent="writer",
        agents={"writer": {"subagents": None}},
        graph_name=None,
        graph=None,
        session_id=None,
        session_base=(),
        user=None,
        principal=None,
        metadata={},
        token_budget=None,
        memory="full",
        salt=UUID(int=1),
        assigned_as=run_id,
    )
    return replace(run, **changed)
