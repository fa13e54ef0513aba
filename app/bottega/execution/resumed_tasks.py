"""Unfinished tasks of a run's earlier attempts, resumed by the next one."""

from typing import Any
from uuid import UUID

from bottega.events.types import EventType
from bottega.execution.recorder import JournalRecorder
from bottega.execution.replay_tasks import TaskReplay
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.states import SubagentStatus


class ResumedTasks:
    """The unfinished tasks of a resumed run.

    A task is dispatched again when its parent reaches that call again. If the parent or the whole
    run ends before that, the task's end is written here.
    """

    def __init__(
        self, recorder: JournalRecorder, memory: TaskReplay, registry: SubagentRegistry
    ) -> None:
        self._journal = recorder.journal
        self._registry = registry
        self._memory = memory
        self._left = dict.fromkeys(memory.unfinished())

    def resume(self) -> None:
        """Write that each task is queued again."""
        for task_id in self._left:
            data = {"attempt": self._memory.tasks[task_id].attempt}
            self._write(task_id, EventType.SUBAGENT_RESUMED, data)
            self._row(task_id, SubagentStatus.QUEUED, **data)

    def ended(self, task_id: UUID) -> None:
        """End the tasks below an ended task that were not dispatched again."""
        if task_id not in self._left:
            return
        del self._left[task_id]
        below = [each for each in self._left if task_id in self._memory.line(each)]
        for each in below:
            if self._registry.get(each) is None:
                self._cancel(each)

    def close(self) -> None:
        """End the remaining tasks, because the run is over."""
        for each in list(self._left):
            self._cancel(each)

    def _cancel(self, task_id: UUID) -> None:
        del self._left[task_id]
        past, moved = self._memory.tasks[task_id], SubagentStatus.CANCELLED
        error = {"code": "cancelled", "message": "parent-ended"}
        duration_ms = round(past.waited * 1000)
        self._write(
            task_id,
            EventType.SUBAGENT_STATUS_CHANGED,
            {"attempt": past.attempt, "from": SubagentStatus.QUEUED, "to": moved},
        )
        usage = past.spent.model_dump()
        data = {"duration_ms": duration_ms, "token_usage": usage, "error": error}
        self._write(task_id, EventType.SUBAGENT_CANCELLED, data)
        self._row(task_id, moved, error=error, duration_ms=duration_ms)

    def _write(self, task_id: UUID, kind: EventType, data: dict[str, Any]) -> None:
        self._journal.add(
            kind,
            data,
            task_id=task_id,
            parent_task_id=self._memory.parents[task_id],
            agent=self._memory.tasks[task_id].params.agent,
            depth=len(self._memory.line(task_id)) - 1,
        )

    def _row(self, task_id: UUID, status: SubagentStatus, **fields: Any) -> None:
        self._journal.task(
            task_id,
            parent_id=self._memory.parents[task_id],
            agent=self._memory.tasks[task_id].params.agent,
            depth=len(self._memory.line(task_id)) - 1,
            status=status,
            **fields,
        )
