"""Asynchronous sub-agents of a run. The journal records their tasks, which resume after a crash."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json

from bottega.agents.messages import AgentUsage
from bottega.agents.query import current_call
from bottega.clock import monotonic
from bottega.db.pool import acting_as
from bottega.engine.child_runs import ChildRuns, Spreading, give_files
from bottega.engine.claim import ClaimedRun
from bottega.engine.journal import CANCELLED, Journal, TaskPlace
from bottega.engine.recorder import JournalRecorder
from bottega.engine.replay import ENDS, RestoredTasks, RunReplay, replay_tasks
from bottega.engine.workers import Load
from bottega.events.data import (
    AttemptData,
    Failure,
    SubagentDispatchedData,
    SubagentStatusData,
    SubagentStoppedData,
    TaskFailure,
)
from bottega.events.types import EventType
from bottega.subagents.handle import Listener, Parent, SubagentHandle, SubagentStatus
from bottega.subagents.plugins import sees_dispatches
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.shared_context import private_folder_of
from bottega.subagents.swarm import ChildEnd, Swarm, SwarmOptions
from bottega.subagents.telemetry import Totals
from bottega.subagents.tools import screening, shown_usage


class ResumedTasks:
    """The unfinished tasks of a resumed run.

    A task is dispatched again when the task's parent repeats the call that dispatched the task. If
    the parent or the run ends before the parent repeats the call, this class writes the task's end.
    """

    def __init__(
        self, recorder: JournalRecorder, restored: RestoredTasks, registry: SubagentRegistry
    ) -> None:
        self._tasks = recorder.tasks
        self._registry = registry
        self._replay = recorder.journal.replay
        self._restored = restored.tasks
        self._unfinished = dict.fromkeys(restored.unfinished())

    def resume(self) -> None:
        """Write a ``subagent.resumed`` event for each task that has no child run."""
        for task_id in self._unfinished:
            if self._restored[task_id].params.is_remote:
                continue
            data = AttemptData(attempt=self._restored[task_id].attempt)
            self._tasks.write(self._place(task_id), EventType.SUBAGENT_RESUMED, data)

    def ended(self, task_id: UUID) -> None:
        """End the tasks that are below an ended task and were not dispatched again."""
        if task_id not in self._unfinished:
            return
        del self._unfinished[task_id]
        below = [each for each in self._unfinished if task_id in self._replay.line(each)]
        for task in below:
            if self._registry.get(task) is None:
                self._cancel(task)

    def close(self) -> None:
        """End the remaining tasks, because the run is over."""
        for each in list(self._unfinished):
            self._cancel(each)

    def _cancel(self, task_id: UUID) -> None:
        del self._unfinished[task_id]
        place, restored = self._place(task_id), self._restored[task_id]
        moved: SubagentStatusData = {
            "attempt": restored.attempt,
            "from": "queued",
            "to": "cancelled",
        }
        self._tasks.write(place, EventType.SUBAGENT_STATUS_CHANGED, moved)
        end = SubagentStoppedData(
            duration_ms=round(restored.waited * 1000),
            token_usage=restored.spent.to_dict(),
            error=TaskFailure(code="cancelled", message="parent-ended"),
        )
        self._tasks.write(place, EventType.SUBAGENT_CANCELLED, end)

    def _place(self, task_id: UUID) -> TaskPlace:
        above = self._replay.line(task_id)
        agent = self._restored[task_id].params.agent_name
        return TaskPlace(task_id, self._replay.task(task_id).parent_id, agent, len(above) - 1)


# Reads the tasks of the list $3: only those below the task $4, or all if $4 is NULL.
_LOOK_UP = """
WITH RECURSIVE up AS (
    SELECT t.id AS task, t.parent_id FROM tasks t
    WHERE t.tenant_id = $1 AND t.run_id = $2 AND t.id = ANY($3) AND t.mode = 'async'
    UNION ALL
    SELECT up.task, t.parent_id FROM up JOIN tasks t ON t.id = up.parent_id
    WHERE t.tenant_id = $1 AND t.run_id = $2
)
SELECT t.id, t.status, t.error, t.duration_ms,
       answer_in(t.tenant_id, t.run_id, answer.data) AS output,
       answer.data ->> 'stop_reason' AS stop_reason,
       coalesce(CASE t.status WHEN 'completed' THEN answer.data -> 'usage' END,
                t.usage, '{}') AS usage
FROM tasks t CROSS JOIN LATERAL event_data(t.tenant_id, t.run_id, t.answer_seq) AS answer(data)
WHERE t.tenant_id = $1 AND t.run_id = $2
  AND t.id IN (SELECT up.task FROM up WHERE up.parent_id IS NOT DISTINCT FROM $4)
"""


@dataclass(frozen=True, slots=True)
class SubagentRuntime:
    """State of asynchronous sub-agents, shared by all runs of a worker.

    Attributes:
        plugins: objects whose functions are called before the dispatch and after the end of a task.
        totals: counters of the worker's tasks since the worker's start.
        children: the child runs that the worker's runs await.
    """

    registry: SubagentRegistry
    plugins: Sequence[object]
    totals: Totals
    children: ChildRuns

    def serves(self, run: ClaimedRun) -> bool:
        """Return true if a run has asynchronous sub-agents or a parent, or if plugins see calls."""
        is_seen = any(map(sees_dispatches, self.plugins))
        return run.uses_subagents or run.parent_task is not None or is_seen

    def load(self, runs: int) -> Load:
        """Return the current load of this worker."""
        registry, scheduler = self.registry, self.registry.scheduler
        options = scheduler.options
        idle = {"running": 0, "parked": 0, "queued": 0}
        tenants: defaultdict[UUID | None, dict[str, Any]] = defaultdict(
            lambda: {**idle, "queue": Counter(), "breakers": []}
        )
        total: Counter[int] = Counter()
        for handle in registry.handles():
            if handle.is_remote:
                continue
            if handle.status is SubagentStatus.QUEUED:
                of_tenant = tenants[handle.tenant_id]
                of_tenant["queued"] += 1
                of_tenant["queue"][handle.priority] += 1
                total[handle.priority] += 1
            elif handle.status.is_active:
                of_tenant = tenants[handle.tenant_id]
                of_tenant["running"] += 1
                of_tenant["parked"] += not handle.holds_slot
        for tenant, breaker in scheduler.circuits.open(scheduler.now()):
            tenants[tenant]["breakers"].append(breaker)
        pool = {
            "size": scheduler.capacity,
            "min": options.min_workers,
            "max": options.max_workers,
            "busy": scheduler.in_use,
            "parked": scheduler.parked,
            "queued": registry.queued_count,
            "queue": dict(total),
            "runs": runs,
            "totals": self.totals.snapshot(),
        }
        loads = {tenant: load for tenant, load in tenants.items() if tenant is not None}
        return Load(pool, loads)

    def cancel(self, run_id: UUID, task_id: UUID) -> None:
        """Cancel an asynchronous task and all tasks below it, if this worker executes the task."""
        handle = self.registry.get(task_id)
        if handle is not None and handle.run_id == run_id:
            self.registry.cancel(task_id, CANCELLED["message"])


@asynccontextmanager
async def running_subagents(
    runtime: SubagentRuntime,
    recorder: JournalRecorder,
    run: ClaimedRun,
    pool: asyncpg.Pool,
    is_suspended: Callable[[], bool],
) -> AsyncIterator[None]:
    """Execute a run's asynchronous sub-agents during the block. Stop them after the block.

    Args:
        is_suspended: returns true if the block ends because the run is suspended.

    Raises:
        Exception: an error in a sub-agent that must end the run.
    """
    me = asyncio.current_task()
    assert me is not None
    journal = recorder.journal
    spreading = Spreading(runtime.children, recorder, run)
    ends = await spreading.ends_of(journal.replay.child_runs())
    usages = {task_id: end.usage for task_id, end in ends.items()}
    restored = replay_tasks(journal.replay, run.claimed_at, usages)
    resumed = ResumedTasks(recorder, restored, runtime.registry)
    began, seconds_left = monotonic(), run.remaining_s
    options = SwarmOptions(
        run_id=run.run_id,
        tenant_id=run.tenant_id,
        task_root=run.task_root,
        listener=JournalListener(recorder, resumed, spreading),
        remaining=lambda: seconds_left - (monotonic() - began),
        outer=recorder.accounts.all,
        plugins=runtime.plugins,
        restored=restored.tasks,
        waits=restored.waits,
        cancelled=recorder.tasks.cancelled,
        lookup=lambda ids, asking: _look_up(pool, journal, ids, asking),
        is_suspended=is_suspended,
        broke=lambda error: me.cancel(),
        awaits=recorder.check_suspend,
        remote=spreading,
        own_task=run.own_task,
    )
    swarm = Swarm(runtime.registry, options)
    _restore_files(swarm, run, journal.replay, restored, ends.values())
    recorder.swarm, recorder.screen, recorder.loops.tasks = swarm, screening(swarm), swarm.handles
    recorder.repeat(restored.usage, restored.paid)
    resumed.resume()
    try:
        yield
    except asyncio.CancelledError:
        if swarm.broken is None:
            raise
        me.uncancel()
        raise swarm.broken from None
    finally:
        try:
            await swarm.close()
        finally:
            if not swarm.suspended:
                resumed.close()


def _restore_files(
    swarm: Swarm,
    run: ClaimedRun,
    replay: RunReplay,
    restored: RestoredTasks,
    ends: Iterable[ChildEnd],
) -> None:
    """Restore a run's files from the parent run, from earlier attempts and from child runs."""
    give_files(swarm, run)
    for end in ends:
        for path, text in end.files.items():
            swarm.context.restore(path, text)
    for write in replay.writes:
        swarm.restore_file(*write)
    for each in restored.over:
        swarm.context.forget(private_folder_of(each))


def end_all(runtime: SubagentRuntime, recorder: JournalRecorder, run: ClaimedRun) -> None:
    """End the unfinished tasks of a run that ends before the tasks are resumed."""
    restored = replay_tasks(recorder.journal.replay, run.claimed_at)
    resumed = ResumedTasks(recorder, restored, runtime.registry)
    resumed.resume()
    resumed.close()


_OTHER_KINDS = {"warning": EventType.WARNING, "message_read": EventType.MESSAGE_DELIVERED}


class JournalListener(Listener):
    """Writer of task events into the run's journal and into the task rows."""

    def __init__(
        self, recorder: JournalRecorder, resumed: ResumedTasks, spreading: Spreading
    ) -> None:
        self._recorder = recorder
        self._resumed = resumed
        self._spreading = spreading

    def on_event(self, handle: SubagentHandle, event: str, data: dict[str, Any]) -> None:
        if event == "output_chunk":
            return  # subscribers get the chunk as an llm.delta frame
        final = handle.status.is_final
        if event == "status_changed" and final and handle.status is not SubagentStatus.COMPLETED:
            self._stopped(handle)
        kind = _OTHER_KINDS.get(event) or EventType(f"subagent.{event}")
        if kind is EventType.SUBAGENT_DISPATCHED:
            data = {**_dispatched(handle), **data}
            if handle.is_remote:
                data["child_run_id"] = str(self._spreading.id_of(handle.task_id))
        elif kind in ENDS:
            data = self._ended(handle, data)
        tasks = self._recorder.tasks
        tasks.write(tasks.place_at(handle.path, handle.agent_name), kind, data)
        if kind in ENDS:
            self._resumed.ended(handle.task_id)
            if handle.running is not None:  # the task's model calls may end after the task
                handle.running.add_done_callback(lambda _: self._recorder.check_suspend())
        self._recorder.check_suspend()

    def refused(self, parent: Parent, data: dict[str, Any]) -> None:
        call = current_call.get()
        assert call is not None
        refusal = {"call": call.query.model_calls, "tool_call_id": call.id, **data}
        self._recorder.tasks.add(call.query, EventType.SUBAGENT_BACKPRESSURE, refusal)

    def _ended(self, handle: SubagentHandle, data: dict[str, Any]) -> dict[str, Any]:
        if (usage := self._recorder.child_usage.pop(handle.task_id, None)) is not None:
            data = data | {"usage": usage.to_dict()}
        if handle.status is not SubagentStatus.COMPLETED:
            return data
        answer = self._recorder.answered.pop(handle.task_id, None)
        if answer is not None:
            return data | {"answer_seq": answer}
        return data | {"output": handle.final_output}

    def _stopped(self, handle: SubagentHandle) -> None:
        """Write the end events of the task's queries, because stopped queries write none."""
        error = Failure(code=handle.error_code or "failed", message=handle.error or "")
        self._recorder.tasks.stopped(handle.path, error)


def _dispatched(handle: SubagentHandle) -> SubagentDispatchedData:
    """Return the event data from which a resumed run dispatches the task again."""
    call = current_call.get()
    data = SubagentDispatchedData(
        call=handle.path[-1][0],
        tool_call_id=call.id if call else None,
        agent=handle.agent,
        prompt=handle.prompt,
        instructions=handle.instructions,
        priority=handle.priority,
        timeout_ms=round(handle.timeout * 1000),
        token_budget=handle.token_budget,
        metadata=dict(handle.metadata),
    )
    if handle.retries:
        data["retries"] = handle.retries
    if handle.shared_keys:
        data["share_metadata"] = list(handle.shared_keys)
    return data


async def _look_up(
    pool: asyncpg.Pool, journal: Journal, ids: Sequence[UUID], asking: UUID | None
) -> dict[UUID, dict[str, Any]]:
    """Read the rows of tasks that are not in memory. Return their results for ``poll_subagent``."""
    tenant_id = journal.tenant_id
    async with acting_as(pool, tenant_id) as connection:
        rows = await connection.fetch(_LOOK_UP, tenant_id, journal.run_id, list(ids), asking)
    tasks: dict[UUID, dict[str, Any]] = {}
    for row in rows:
        view: dict[str, Any] = {"task_id": str(row["id"]), "status": row["status"]}
        if row["output"] is not None:
            view["final_output"] = row["output"]
        if row["stop_reason"] is not None:  # the answer is incomplete
            view["stop_reason"] = row["stop_reason"]
        if row["error"] is not None:
            view["error"] = from_json(row["error"])["message"]
        view["duration_ms"] = row["duration_ms"] or 0
        view["token_usage"] = shown_usage(AgentUsage.from_dict(from_json(row["usage"])).tokens)
        tasks[row["id"]] = view
    return tasks
