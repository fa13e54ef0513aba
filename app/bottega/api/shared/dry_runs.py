"""Dry runs of graphs: what they need is read here, the rest happens in a process of its own."""

import asyncio
from collections import Counter
from signal import SIGABRT, SIGKILL, SIGXCPU
from typing import Any
from uuid import UUID

from pydantic_core import to_json

from bottega.api.shared.processes import ProcessEndedError, output_of
from bottega.container import Service
from bottega.definitions.pinned import PinnedDefinitions, pins_of
from bottega.dry_run.start import LONGEST_S, NO_MEMORY, command
from bottega.errors import LimitedError, UnavailableError

_AT_ONCE = 2
_OF_ONE_TENANT = 4
"""Limit on a tenant's dry runs; one is in progress, and others wait."""
_TOO_LARGE = (-SIGXCPU, -SIGKILL, -SIGABRT, NO_MEMORY)


class DryRuns:
    """The dry runs of this process: one at a time per tenant, two in all."""

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._turns: dict[UUID, asyncio.Lock] = {}
        self._asked: Counter[UUID] = Counter()

    async def answer(self, tenant_id: UUID, plan: dict[str, Any]) -> bytes:
        """Make a dry run of a tenant's graph; see :func:`bottega.dry_run.result.dry_run`.

        Raises:
            LimitedError: ``dry_runs``: too many others of the tenant are in progress.
            UnavailableError: ``dry_run_too_large``: it takes too long, or too much memory.
        """
        if self._asked[tenant_id] >= _OF_ONE_TENANT:
            raise LimitedError(
                f"{_OF_ONE_TENANT} dry runs of the tenant are in progress: try again in a few "
                "seconds",
                code="dry_runs",
                retry_after_s=5,
            )
        self._asked[tenant_id] += 1
        try:
            async with self._turns.setdefault(tenant_id, asyncio.Lock()), self._slots:
                return await self._run(to_json(plan))
        finally:
            self._asked[tenant_id] -= 1
            if not self._asked[tenant_id]:
                del self._asked[tenant_id], self._turns[tenant_id]

    async def _run(self, plan: bytes) -> bytes:
        try:
            async with asyncio.timeout(self._longest_s):
                return await output_of(command(), plan)
        except (TimeoutError, ProcessEndedError) as error:
            if isinstance(error, ProcessEndedError) and error.status not in _TOO_LARGE:
                raise
            raise UnavailableError(
                "the dry run takes too long, or too much memory: make one of a smaller graph, or "
                "start a run",
                code="dry_run_too_large",
            ) from None


async def plan_of(
    service: Service, tenant_id: UUID, graph: str, agent: str | None, question: str
) -> dict[str, Any]:
    """Read the versions that a run started now would have.

    Raises:
        UnknownAgentError, InvalidInputError: as for a run; see :func:`bottega.runs.submit.submit`.
    """
    service.pins.forget(tenant_id, agent, graph)  # they may be stale
    pins = await service.pins.find(service.database.pool, tenant_id, agent, graph)
    wanted = set(pins_of(tenant_id, pins.pinned))
    found = await PinnedDefinitions(service.database.pool).get(wanted)
    agents = {pin.name: found[pin] for pin in wanted if pin.kind == "agent"}
    return {
        "graph": graph,
        "version": pins.pinned["graph"]["version"],
        "agent": agent,
        "content": next(found[pin] for pin in wanted if pin.kind == "graph"),
        "agents": agents,
        "mcp_servers": {pin.name: found[pin] for pin in wanted if pin.kind == "mcp_server"},
        "versions": pins.pinned["agents"],
        "input": question,
    }
