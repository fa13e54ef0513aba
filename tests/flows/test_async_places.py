"""A tenant's limit of asynchronous sub-agents over worker processes."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, Reply, calls, response, text
from tests.flows.test_async_tenants import completed
from tests.flows.test_processes import environment
from tests.processes import command
from tests.service import running
from tests.tenants import holder
from tests.waiting import until

TENANTS = ("one", "two", "three")
LIMIT = 2
HELD = """
SELECT coalesce(sum(held[1]), 0) FROM model_shares WHERE provider = '*subagents'
"""


class Leaves:
    """Model of tasks that dispatch others and of leaves, whose calls it counts.

    Attributes:
        now, most: a tenant's calls of leaves at this moment, and the most at one moment.
        gate: opens for their answers.
    """

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.gate = asyncio.Event()

    def decide(self, request: dict[str, Any]) -> Reply:
        prompt = swarm.prompt_of(request)
        tenant, kind = prompt.split("-")
        if kind == "leaf":
            return self._counted(tenant)
        leaf = ("dispatch_subagent", {"prompt": f"{tenant}-leaf"})
        nest = ("dispatch_subagent", {"prompt": f"{tenant}-nest", "agent": "nest"})
        asked = [leaf, nest, nest, leaf] if kind == "root" else [leaf]
        return swarm.plays({prompt: [calls(*asked), swarm.awaits(), text("done")]})(request)

    def _counted(self, tenant: str) -> Reply:
        def make(body: dict[str, Any]) -> ASGIApp:
            async def app(scope: Scope, receive: Receive, send: Send) -> None:
                self.now[tenant] += 1
                self.most[tenant] = max(self.most[tenant], self.now[tenant])
                try:  # the server cancels it when its caller is gone
                    await self.gate.wait()
                    for _ in range(50):
                        await asyncio.sleep(0)
                finally:
                    self.now[tenant] -= 1
                await response(text("done"), body)(scope, receive, send)

            return app

        return make


@pytest.mark.deep
async def test_tenants_keep_to_their_limits_over_workers_of_which_one_is_killed(
    settings: Settings, database_url: str, model: FakeModel, owner: asyncpg.Pool
) -> None:
    leaves = Leaves()
    model.decide = leaves.decide
    limited = environment(database_url, model, BOTTEGA_SUBAGENT_TENANT_MAX_CONCURRENT=str(LIMIT))
    holders = [await holder(database_url, name) for name in TENANTS]
    async with (
        AsyncExitStack() as clients,
        running(settings, database_url) as bottega,
        command("worker", **limited) as killed,
        command("worker", **limited),
    ):
        runs = []
        for name, each in zip(TENANTS, holders, strict=True):
            client = await clients.enter_async_context(each.client(bottega))
            await swarm.coordinator(client, "nest")
            await swarm.coordinator(client, subagents={"names": ["nest"]})
            runs += [(client, await swarm.start(client, f"{name}-root")) for _ in range(5)]
        of_all = LIMIT * len(TENANTS)
        await until(lambda: owner.fetchval(HELD), lambda held: held == of_all)
        await until(lambda: leaves.now.total() > 0)
        killed.kill()
        leaves.gate.set()
        for client, run_id in runs:
            await completed(client, run_id)
        await until(lambda: owner.fetchval(HELD), lambda held: held == 0)
    assert {*leaves.most} == {*TENANTS}
    assert max(leaves.most.values()) <= LIMIT, leaves.most


async def test_the_runs_of_two_workers_share_their_tenant_s_places(
    settings: Settings, database_url: str, model: FakeModel, owner: asyncpg.Pool
) -> None:
    leaves = Leaves()
    model.decide = leaves.decide
    limited = settings.model_copy(
        update={
            "openai_base_url": model.base_url,
            "subagent_tenant_max_concurrent": 1,
            "worker_concurrency": 1,
        }
    )
    async with (
        running(limited, database_url, worker=True) as bottega,
        running(limited, database_url, worker=True),
    ):
        await swarm.coordinator(bottega.client, "nest")
        await swarm.coordinator(bottega.client, subagents={"names": ["nest"]})
        runs = [await swarm.start(bottega.client, "one-root") for _ in range(2)]
        await swarm.until(database_url, "SELECT count(*) >= 6 FROM tasks WHERE depth = 0")
        await until(lambda: leaves.now.total() == 1)
        assert await owner.fetchval(HELD) == 1
        leaves.gate.set()
        for run_id in runs:
            await completed(bottega.client, run_id)
    assert leaves.most == {"one": 1}
