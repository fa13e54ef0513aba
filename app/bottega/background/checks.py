"""Background work that decides the success checks of completed runs.

A run's agent or graph defines the checks; for an item of an eval, the eval's case defines them. The
end of a run adds rows to ``run_checks``: for the run's answer, and for each answer of a node or
sub-agent if a model or plugin must judge this answer. A worker leases due rows, decides the checks
without a transaction, and stores the verdicts in these rows and in the run's episode. If the worker
dies, another worker decides the checks after the lease has expired.

A round has three stages: simple checks, which need no plugin or model; checks by plugins; and
checks by models (judges). Each stage has separate tasks, so no check waits for a check of a later
stage. If a check cannot be decided, for example because a judge's model fails, the next round
tries the check again. The pauses between rounds grow. A failed check decides the run's outcome at
once, without later stages. If the tenant's daily budget cannot pay for a judge, the judge is tried
again each day for a week.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json

from bottega import metrics
from bottega.agents.output import LONGEST_JUDGED, Check, decide_alone, quoted
from bottega.agents.provider import LLMProvider
from bottega.db.failures import is_transient
from bottega.db.pool import acting_as
from bottega.definitions.agents import with_default
from bottega.definitions.pinned import Pin, PinnedDefinitions, PinnedModels, pins_of
from bottega.errors import (
    BottegaError,
    BudgetBusyError,
    BudgetExhaustedError,
    ModelError,
    PluginError,
)
from bottega.leased_work import LeasedWork
from bottega.llm.structured_output import Judge
from bottega.logger import Logger
from bottega.redaction import Redactor
from bottega.subagents.plugins import bounded


@dataclass(frozen=True, slots=True)
class EndResult:
    """The result of a run.

    Attributes:
        task: the run's input.
        output: the answer.
    """

    task: Any
    output: Any

    @property
    def text(self) -> str:
        """The answer as text. An answer that is no text becomes JSON."""
        return self.output if isinstance(self.output, str) else to_json(self.output).decode()


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """The decision of one check.

    Attributes:
        passed: true if the check passed; ``None`` if the check could not be decided.
        reason: why the check passed or failed; empty for a simple check that passed.
        signature: signature of the check's failure; see :mod:`bottega.memory.text.signature`.
    """

    type: str
    passed: bool | None
    reason: str = ""
    signature: str = ""

    def clean(self, remove_secrets: Callable[[str], str]) -> "CheckVerdict":
        """Return the verdict without secrets, with at most 500 characters of its reason."""
        # PostgreSQL stores no NUL in JSON.
        reason = remove_secrets(self.reason.replace("\x00", " "))
        return replace(self, reason=reason[:500], signature=remove_secrets(self.signature)[:200])


Ask = Callable[[Check, EndResult], Awaitable[tuple[bool, str]]]
"""Function from check and result to (passed, reason), which calls a model or a plugin."""


async def decide(check: Check, result: EndResult, outside: Mapping[str, Ask]) -> CheckVerdict:
    """Decide a check.

    Args:
        outside: by type of check, the function that asks a model or a plugin for the decision.
    """
    kind = check["type"]
    try:
        if kind in outside:
            verdict = await outside[kind](check, result)
        else:
            verdict = await decide_alone(check, result.text)
    except BottegaError as error:
        return CheckVerdict(kind, None, error.detail)
    return CheckVerdict(kind, *verdict, signature=_signature(check))


def passed(verdicts: Sequence[CheckVerdict]) -> bool | None:
    """Return true if all checks passed, false if one check failed, and ``None`` otherwise."""
    if any(each.passed is False for each in verdicts):
        return False
    return True if all(each.passed for each in verdicts) else None


def _signature(check: Check) -> str:
    """Return the signature of a failed check, such as ``check:contains "VAT"``."""
    about = check.get("value") if check["type"] in ("contains", "equals") else check.get("name")
    named = f"check:{check['type']}"
    return named if about is None else f"{named} {quoted(' '.join(str(about).split()))}"


MOST_TRIES = 6

JUDGED_WITHIN_S = 150.0
"""Timeout of a judge's call in seconds, including the wait for the provider's limits."""
_OURS, _PLUGINS, _JUDGES = range(3)
_STAGE_OF = {"python": _PLUGINS, "judge": _JUDGES}
_UNPAID_FOR = timedelta(days=7)
"""Longest time after a run's end in which judges wait for a later day's budget."""
UNPAID = "budget"
"""Stored reason of checks that no daily budget could pay."""
_CHANNEL = "run_checks"

_READ = """
SELECT t.name AS tenant, r.agent, r.pinned, r.input, r.output, c.results, c.asked,
       r.ended_at < now() - $3::interval AS is_old,
       e.batch #> ARRAY['checks', r.batch ->> 'case'] AS of_eval
FROM runs r JOIN run_checks c ON c.tenant_id = r.tenant_id AND c.run_id = r.id
LEFT JOIN runs e ON e.tenant_id = r.tenant_id AND e.id = r.parent_run_id
JOIN tenants t ON t.id = r.tenant_id
WHERE r.tenant_id = $1 AND r.id = $2 AND c.part = $4
"""
_STORE = """
UPDATE run_checks SET stage = $5, tries = $6, status = $7, passed = $8,
    results = coalesce($9, results), error = $10, reason = $11, updated_at = clock_timestamp(),
    asked = CASE WHEN $7 = 'pending' THEN asked END,
    next_at = coalesce(
        clock_timestamp() + make_interval(secs => $12),
        (date_trunc('day', now() AT TIME ZONE 'UTC') + interval '1 day') AT TIME ZONE 'UTC')
WHERE tenant_id = $1 AND run_id = $2 AND stage = $3 AND tries = $4 AND status = 'pending'
  AND part = $13
"""

_HOLD = "SELECT hold_episode_of($1, $2)"
_LABEL = "SELECT label_episode_of($1, $2)"
_LABEL_PART = "SELECT label_part_of($1, $2, $3)"


ModelsFor = Callable[[PinnedModels, UUID, Any], Awaitable[LLMProvider]]
"""Function from a run, its id and a definition's ``model`` to a model for which the tenant pays."""
PluginCheck = Callable[[Mapping[str, Any]], Any]
"""A plugin's ``check_success``; ``docs/guides/agents-in-python.md`` describes it."""

logger = Logger(__name__)


@dataclass(frozen=True, slots=True)
class _EndedRun:
    """An ended run, or the work of one agent in the run, whose checks must be decided.

    Attributes:
        agent: name of the agent, or of the DAG's graph, that defines the checks.
        unpaid: the errors of the judges for which the daily budget could not pay.
    """

    tenant_id: UUID
    tenant: str
    run_id: UUID
    agent: str
    definition: Mapping[str, Any]
    pins: Sequence[Pin]
    providers: Mapping[str, Mapping[str, Any]]
    operators: frozenset[str]
    result: EndResult
    unpaid: list[BudgetExhaustedError] = field(default_factory=list)


class _Unpaid(NamedTuple):
    """State of the judges for which the daily budget could not pay.

    Attributes:
        is_all: true if the budget is the only reason for undecided checks.
        is_busy: true if other calls have reserved budget, and may give back a part of it.
        is_old: true if the run ended too long ago to wait for the next day's budget.
    """

    reason: str
    is_all: bool
    is_busy: bool
    is_old: bool


class SuccessChecks:
    """Decider of all tenants' success checks. Several processes may decide checks at once.

    Args:
        models_for: returns a judge's model.
        plugins: check functions, by the name of the plugin.
        known: returns the tenant's redactor, which removes secrets from the reasons of checks.

    Attributes:
        stages: the work of each stage, which workers lease.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        models_for: ModelsFor,
        plugins: Mapping[str, PluginCheck],
        *,
        redactor_of: Callable[[UUID, str], Awaitable[Redactor]],
    ) -> None:
        self._pool = pool
        self._models_for = models_for
        self._plugins = plugins
        self._redactor_of = redactor_of
        self._definitions = PinnedDefinitions(pool)
        self.stages = [
            LeasedWork(
                pool=pool,
                name=name,
                columns="run_id uuid, part text, stage smallint, tries integer",
                # The lease is longer than any stage, because a stage's checks run at the same time
                # and have timeouts.
                lease_s=180.0,
                share=8,
                places=places,
                do=self._check,
                channel=_CHANNEL,
            )
            for name, places in (("check", 64), ("plugin", None), ("judge", None))
        ]

    def run_end_hook(self, episode_stored: Callable[[], None]) -> Callable[[bool, bool], None]:
        """Return a function that wakes this process's background work after a run's end.

        The function's parameters: true if the run stored an episode; true if checks are due.

        Args:
            episode_stored: function that is called after the end of a run that stored an episode.
        """

        def on_run_finished(has_episode: bool, has_checks: bool) -> None:
            if has_episode:
                episode_stored()
            if has_checks:
                self.stages[_OURS].loop.wake_soon()

        return on_run_finished

    async def _check(self, tenant_id: UUID, rows: Sequence[asyncpg.Record]) -> None:
        """Decide the checks of one stage of a run. If an internal error occurs, store the error."""
        (claimed,) = rows
        try:
            await self._check_run(claimed)
        except Exception as error:
            if is_transient(error):  # a worker tries again when the lease has expired
                raise
            logger.error("run.not_checked", run_id=str(claimed["run_id"]), exc_info=error)
            why = f"an internal error ({type(error).__name__}): see the worker's log"
            await self._store(claimed, [], error=why)

    async def _check_run(self, claimed: asyncpg.Record) -> None:
        tenant_id, run_id, stage = claimed["tenant_id"], claimed["run_id"], claimed["stage"]
        async with acting_as(self._pool, tenant_id) as connection:
            key = tenant_id, run_id, _UNPAID_FOR, claimed["part"]
            row = await connection.fetchrow(_READ, *key)
        if row is None:  # the run was deleted
            return
        run = await self._ended(claimed, row)
        checks: Sequence[Check] = run.definition.get("success_check") or ()
        known_verdicts = [CheckVerdict(**each) for each in from_json(row["results"])]
        known_verdicts = known_verdicts or [CheckVerdict(each["type"], None) for each in checks]
        outside: Mapping[str, Ask] = {
            "judge": partial(self._judge, run),
            "python": partial(self._call, run),
        }
        stages = [_STAGE_OF.get(each["type"], _OURS) for each in checks]
        each = list(zip(checks, known_verdicts, stages, strict=True))
        verdicts = await asyncio.gather(
            *(
                decide(check, run.result, outside)
                if before.passed is None and of == stage
                else _same(before)
                for check, before, of in each
            )
        )
        clean = (await self._redactor_of(tenant_id, run.tenant)).text
        verdicts = [each.clean(clean) for each in verdicts]
        undecided = [of for of, each in zip(stages, verdicts, strict=True) if each.passed is None]
        unchecked, unpaid = set(undecided), None
        if run.unpaid:
            is_busy = any(isinstance(each, BudgetBusyError) for each in run.unpaid)
            is_all = len(run.unpaid) == len(undecided)
            unpaid = _Unpaid(run.unpaid[0].detail, is_all, is_busy, row["is_old"])
        await self._store(claimed, verdicts, unchecked, unpaid=unpaid)

    async def _ended(self, claimed: asyncpg.Record, row: asyncpg.Record) -> _EndedRun:
        tenant_id, pinned = claimed["tenant_id"], from_json(row["pinned"])
        judged: tuple[Literal["agent", "graph"], str] = ("agent", row["agent"])
        result = EndResult(from_json(row["input"]), from_json(row["output"] or "null"))
        if row["asked"] is not None:
            asked = from_json(row["asked"])
            judged, result = ("agent", asked["agent"]), EndResult(asked["input"], asked["output"])
        elif row["agent"] is None:
            judged = ("graph", pinned["graph"]["name"])
        pins = tuple(pins_of(tenant_id, pinned))
        wanted = {pin for pin in pins if pin.kind == "provider" or (pin.kind, pin.name) == judged}
        definition_rows = await self._definitions.get(wanted)
        definitions = {(pin.kind, pin.name): each for pin, each in definition_rows.items()}
        definition = {"model": None, **definitions.get(judged, {})}
        if row["of_eval"] is not None and row["asked"] is None:
            definition["success_check"] = from_json(row["of_eval"])
        return _EndedRun(
            tenant_id=tenant_id,
            tenant=row["tenant"],
            run_id=claimed["run_id"],
            agent=judged[1],
            definition=with_default(definition, pinned.get("default_model")),
            pins=pins,
            providers={
                name: each for (kind, name), each in definitions.items() if kind == "provider"
            },
            operators=frozenset(pinned.get("operators") or ()),
            result=result,
        )

    async def _judge(self, run: _EndedRun, check: Check, result: EndResult) -> tuple[bool, str]:
        model = run.definition["model"] if check["model"] is None else check["model"]
        task = result.task if isinstance(result.task, str) else to_json(result.task).decode()
        told = {"task": task[:LONGEST_JUDGED], "result": result.text[:LONGEST_JUDGED]}
        try:
            async with asyncio.timeout(JUDGED_WITHIN_S):
                provider = await self._models_for(run, run.run_id, model)
                judge = Judge(lambda run, name: provider, None)
                return await judge.judge((run.tenant_id, run.run_id), check["criteria"], told)
        except BudgetExhaustedError as error:
            run.unpaid.append(error)
            raise
        except TimeoutError:
            why = f"the judge did not answer within {JUDGED_WITHIN_S:g} s"
            raise ModelError(why, code="model_timeout", retryable=True) from None

    async def _call(self, run: _EndedRun, check: Check, result: EndResult) -> tuple[bool, str]:
        name = check["name"]
        if name not in self._plugins:
            raise PluginError(f"this worker has no plugin '{name}' with check_success: install it")
        about = {
            "run_id": str(run.run_id),
            "tenant_id": str(run.tenant_id),
            "agent": run.agent,
            "input": result.task,
            "output": result.output,
        }
        try:
            verdict = await bounded(self._plugins[name], about, timeout_s=30.0)
        except Exception as error:
            logger.warning("plugin.failed", name=name, run_id=str(run.run_id), exc_info=error)
            raise PluginError(
                f"the plugin '{name}' failed ({type(error).__name__}): see the worker's log"
            ) from error
        match verdict:
            case bool():
                return verdict, "" if verdict else f"the plugin '{name}' said no"
            case (bool() as good, str() as reason):
                return good, reason
        raise PluginError(f"the plugin '{name}' returned neither true nor false")

    async def _store(
        self,
        claimed: asyncpg.Record,
        verdicts: Sequence[CheckVerdict],
        left: Collection[int] = (),
        error: str | None = None,
        *,
        unpaid: _Unpaid | None = None,
    ) -> None:
        """Store the verdicts of a stage, or an error if there are no verdicts.

        Args:
            left: numbers of the stages that have undecided checks. The next of these stages begins.
                If there is no next stage, or if a check failed, the round is over.
            unpaid: the judges for which the budget could not pay. If all other checks are decided,
                or have no tries left, the row waits until the budget can pay.
        """
        stage, tries = claimed["stage"], claimed["tries"]
        good, later = passed(verdicts) if verdicts else None, None
        if good is None:
            later = min((each for each in left if each > stage), default=None)
        status, reason, then = "done", None, (min(left, default=stage), tries)
        pause_s: float | None = min(600.0, 5.0 * 4.0 ** (tries - 1))
        if later is not None:
            status, then, pause_s = "pending", (later, tries - 1), 0.0
        elif good is None and unpaid is not None and (unpaid.is_all or tries >= MOST_TRIES):
            status, reason, then = "pending", unpaid.reason, (then[0], tries - 1)
            if not unpaid.is_busy:
                pause_s = None  # wait until the next day (UTC)
                if unpaid.is_old:
                    status, reason = "unknown", UNPAID
        elif good is None:
            status = "pending" if tries < MOST_TRIES else "failed"
            reason = None if unpaid is None else unpaid.reason
        key, part = (claimed["tenant_id"], claimed["run_id"]), claimed["part"]
        has_verdict = any(each.reason or each.passed is not None for each in verdicts)
        results = to_json([asdict(each) for each in verdicts]).decode() if has_verdict else None
        changes = (*then, status, good, results, error, reason, pause_s)
        async with acting_as(self._pool, claimed["tenant_id"]) as connection:
            await connection.execute(_HOLD, *key)
            result = await connection.execute(_STORE, *key, stage, tries, *changes, part)
            if good is not None and result == "UPDATE 1":  # not stored: another worker decided
                label = (_LABEL_PART, *key, part) if part else (_LABEL, *key)
                await connection.execute(*label)
                is_judge = any(each.type == "judge" and each.passed == good for each in verdicts)
                metrics.verdicts.labels("judge" if is_judge else "check").inc()
        if later is not None:
            self.stages[later].loop.wake()


async def _same(verdict: CheckVerdict) -> CheckVerdict:
    return verdict
