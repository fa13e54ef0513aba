"""Success checks of completed runs, in the background.

The statement that ends a run with checks orders them, by a row in ``run_checks``. A worker leases
due rows, decides the checks without a transaction, stores the verdicts and labels the run's
episode. If it dies, another one does them when the lease is over. What cannot be decided, such as a
judge that is down, is tried again with growing pauses.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from uuid import UUID

import asyncpg
import structlog
from pydantic_core import from_json, to_json

from bottega.agents.provider import LLMProvider
from bottega.background.verdicts import (
    LONGEST_JUDGED,
    Ask,
    Check,
    CheckVerdict,
    EndResult,
    decide,
    passed,
)
from bottega.db.engine import acting_as
from bottega.definitions.pinned import Pin, PinnedDefinitions, PinnedModels, pins_of
from bottega.errors import ModelError, PluginError
from bottega.events.log import is_transient
from bottega.leased_work import LeasedWork, WorkLoop
from bottega.llm.structured_output import Count, Judge
from bottega.redaction import Redactor
from bottega.subagents.plugins import bounded

MOST_TRIES = 6

_LEASE_S = 180.0
"""Longer than the checks of a claim take: they begin at once, each with a time limit."""
JUDGED_WITHIN_S = 150.0
"""For each judge, its wait for others included."""
_MOST = 64
_EACH = 16
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 600.0
_GROWTH = 4.0
_POLL_S = 30.0
_CHANNEL = "run_checks"

_CLAIM = "SELECT tenant_id, tenant, run_id, tries FROM claim_due_checks($1, $2, $3)"
_NEXT = "SELECT next_check_s()"
_READ = """
SELECT r.agent, r.pinned, r.input, r.output, c.results
FROM runs r JOIN run_checks c ON c.tenant_id = r.tenant_id AND c.run_id = r.id
WHERE r.tenant_id = $1 AND r.id = $2
"""
_STORE = """
UPDATE run_checks SET status = $4, passed = $5, results = coalesce($6, results), error = $7,
    updated_at = clock_timestamp(), next_at = clock_timestamp() + make_interval(secs => $8)
WHERE tenant_id = $1 AND run_id = $2 AND tries = $3 AND status = 'pending'
"""

_HOLD = "SELECT hold_episode_of($1, $2)"
_LABEL = "SELECT label_episode_of($1, $2)"

PLUGIN_TIMEOUT_S = 30.0
MODELS_AT_ONCE = 16

ModelsFor = Callable[[PinnedModels, Mapping[str, Any]], Awaitable[LLMProvider]]
"""Function (run, part of a definition with ``model``) → its models."""
PluginCheck = Callable[[Mapping[str, Any]], Any]
"""A plugin's ``check_success``; ``docs/operating.md`` says what it gets and returns."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _EndedRun:
    """A run to check; see :class:`PinnedModels`."""

    tenant_id: UUID
    tenant: str
    run_id: UUID
    agent: str
    definition: Mapping[str, Any]
    pins: Sequence[Pin]
    providers: Mapping[str, Mapping[str, Any]]
    operators: frozenset[str]
    result: EndResult


class SuccessChecks:
    """Does the success checks of all tenants' runs. Any number of processes may do so concurrently.

    Args:
        models_for: the models of judges.
        plugins: by name.
        count: counts the calls of judges.
        known: returns what removes a tenant's secrets from reasons.

    Attributes:
        loop: wake it when a check was ordered.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        models_for: ModelsFor,
        plugins: Mapping[str, PluginCheck],
        *,
        count: Count,
        known: Callable[[UUID], Redactor],
    ) -> None:
        self._pool = pool
        self._models_for = models_for
        self._plugins = plugins
        self._count = count
        self._known = known
        self._definitions = PinnedDefinitions(pool)
        self._asking = asyncio.Semaphore(MODELS_AT_ONCE)
        work = LeasedWork(
            pool=pool,
            claim=_CLAIM,
            limits=(_LEASE_S, _MOST, _EACH),
            next_s=_NEXT,
            do=self._check,
            tenants_at_once=_MOST,
        )
        self.loop = WorkLoop(_CHANNEL, work.do_due, poll_s=_POLL_S)

    def then(self, episode_stored: Callable[[], None]) -> Callable[[bool, bool], None]:
        """Return a function to call after a run's end with (it stored an episode, it has checks).

        It makes this process look soon for what the run left, if it left something.
        """

        def left_work(episode: bool, checks: bool) -> None:
            if episode:
                episode_stored()
            if checks:
                self.loop.wake_soon()

        return left_work

    async def _check(self, tenant_id: UUID, claimed: Sequence[asyncpg.Record]) -> None:
        await asyncio.gather(*(self._check_or_put_off(row) for row in claimed))

    async def _check_or_put_off(self, claimed: asyncpg.Record) -> None:
        """Check a run; store why that failed, so that the others of its claim go on."""
        try:
            await self._check_run(claimed)
        except Exception as error:
            if is_transient(error):  # the lease ends by itself
                raise
            log.error("run.not_checked", run_id=str(claimed["run_id"]), exc_info=error)
            why = f"an internal error ({type(error).__name__}); see the worker's log"
            await self._store(claimed, [], why)

    async def _check_run(self, claimed: asyncpg.Record) -> None:
        tenant_id, run_id = claimed["tenant_id"], claimed["run_id"]
        async with acting_as(self._pool, tenant_id) as connection:
            row = await connection.fetchrow(_READ, tenant_id, run_id)
        if row is None:  # deleted
            return
        run = await self._ended(claimed, row)
        asked: Sequence[Check] = run.definition.get("success_check") or ()
        known = [CheckVerdict(**each) for each in from_json(row["results"])]
        known = known or [CheckVerdict(each["type"], None) for each in asked]
        outside: Mapping[str, Ask] = {
            "judge": partial(self._judge, run),
            "python": partial(self._call, run),
        }
        each_with_known = list(zip(asked, known, strict=True))
        verdicts = await asyncio.gather(
            *(
                decide(check, run.result, outside) if before.passed is None else _same(before)
                for check, before in each_with_known
            )
        )
        clean = self._known(tenant_id).text
        await self._store(claimed, [each.clean(clean) for each in verdicts])

    async def _ended(self, claimed: asyncpg.Record, row: asyncpg.Record) -> _EndedRun:
        """Return the run, with the definitions that it was pinned to."""
        tenant_id, agent = claimed["tenant_id"], row["agent"]
        pinned = from_json(row["pinned"])
        pins = tuple(pins_of(tenant_id, pinned))
        wanted = {
            pin
            for pin in pins
            if pin.kind == "provider" or (pin.kind, pin.name) == ("agent", agent)
        }
        found = await self._definitions.get(wanted)
        definitions = {(pin.kind, pin.name): each for pin, each in found.items()}
        return _EndedRun(
            tenant_id=tenant_id,
            tenant=claimed["tenant"],
            run_id=claimed["run_id"],
            agent=agent,
            definition=definitions.get(("agent", agent), {}),
            pins=pins,
            providers={name: each for (kind, name), each in definitions.items() if kind != "agent"},
            operators=frozenset(pinned.get("operators") or ()),
            result=EndResult(from_json(row["input"]), from_json(row["output"] or "null")),
        )

    async def _judge(self, run: _EndedRun, check: Check, result: EndResult) -> tuple[bool, str]:
        model = run.definition["model"] if check["model"] is None else check["model"]
        task = result.task if isinstance(result.task, str) else to_json(result.task).decode()
        told = {"task": task[:LONGEST_JUDGED], "result": result.text[:LONGEST_JUDGED]}
        try:
            async with asyncio.timeout(JUDGED_WITHIN_S), self._asking:
                provider = await self._models_for(run, {"model": model, "model_patience_s": 0.0})
                judge = Judge(provider, None, count=self._count)
                return await judge.judge((run.tenant_id, run.run_id), check["criteria"], told)
        except TimeoutError:
            why = f"no judge was free, or answered, within {JUDGED_WITHIN_S:g} s"
            raise ModelError(why, code="model_timeout", retryable=True) from None

    async def _call(self, run: _EndedRun, check: Check, result: EndResult) -> tuple[bool, str]:
        name = check["name"]
        if name not in self._plugins:
            raise PluginError(f"this worker has no plugin '{name}' with check_success")
        about = {
            "run_id": str(run.run_id),
            "tenant_id": str(run.tenant_id),
            "agent": run.agent,
            "input": result.task,
            "output": result.output,
        }
        try:
            said = await bounded(self._plugins[name], about, timeout_s=PLUGIN_TIMEOUT_S)
        except Exception as error:
            log.warning("plugin.failed", name=name, run_id=str(run.run_id), exc_info=error)
            raise PluginError(
                f"the plugin '{name}' failed ({type(error).__name__}); the worker's log says more"
            ) from error
        match said:
            case bool():
                return said, "" if said else f"the plugin '{name}' said no"
            case (bool() as good, str() as reason):
                return good, reason
        raise PluginError(f"the plugin '{name}' returned neither true nor false")

    async def _store(
        self, claimed: asyncpg.Record, verdicts: Sequence[CheckVerdict], error: str | None = None
    ) -> None:
        """Store verdicts; none: only the error."""
        good, tries = passed(verdicts) if verdicts else None, claimed["tries"]
        status, pause_s = "done", 0.0
        if good is None:
            status = "pending" if tries < MOST_TRIES else "failed"
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * _GROWTH ** (tries - 1))
        key = claimed["tenant_id"], claimed["run_id"], tries
        results = to_json([asdict(each) for each in verdicts]).decode() if verdicts else None
        async with acting_as(self._pool, claimed["tenant_id"]) as connection:
            await connection.execute(_HOLD, *key[:2])
            stored = await connection.execute(_STORE, *key, status, good, results, error, pause_s)
            if good is not None and stored == "UPDATE 1":  # not if another worker has decided
                await connection.execute(_LABEL, *key[:2])


async def _same(verdict: CheckVerdict) -> CheckVerdict:
    return verdict
