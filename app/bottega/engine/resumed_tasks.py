"""Unfinished tasks of a run's earlier attempts, resumed by the next one."""

from uuid import UUID

from bottega.engine.recorder import JournalRecorder
from bottega.engine.replay_tasks import TaskReplay
from bottega.engine.task_rows import TaskPlace
from bottega.events.types import EventType
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.states import SubagentStatus


class ResumedTasks:
    """The unfinished tasks of a resumed run.

    A task is dispatched again when its parent reaches that call again. If the parent or the whole
    run ends before that, the task's end is written here.
    """

    def __init__(
        self, recorder: JournalRecorder, replay: TaskReplay, registry: SubagentRegistry
    ) -> None:
        self._tasks = recorder.tasks
        self._registry = registry
        self._replay = replay
        self._left = dict.fromkeys(replay.unfinished())

    def resume(self) -> None:
        """Write that each task is queued again."""
        for task_id in self._left:
            data = {"attempt": self._replay.tasks[task_id].attempt}
            self._tasks.write(self._place(task_id), EventType.SUBAGENT_RESUMED, data)

    def ended(self, task_id: UUID) -> None:
        """End the tasks below an ended task that were not dispatched again."""
        if task_id not in self._left:
            return
        del self._left[task_id]
        below = [each for each in self._left if task_id in self._replay.line(each)]
        for each in below:
            if self._registry.get(each) is None:
                self._cancel(each)

    def close(self) -> None:
        """End the remaining tasks, because the run is over."""
        for each in list(self._left):
            self._cancel(each)

    def _cancel(self, task_id: UUID) -> None:
        del self._left[task_id]
        place, restored = self._place(task_id), self._replay.tasks[task_id]
        moved = {"from": SubagentStatus.QUEUED, "to": SubagentStatus.CANCELLED}
        self._tasks.write(
            place, EventType.SUBAGENT_STATUS_CHANGED, {"attempt": restored.attempt, **moved}
        )
        end = {
            "duration_ms": round(restored.waited * 1000),
            "token_usage": restored.spent.to_dict(),
            "error": {"code": "cancelled", "message": "parent-ended"},
        }
        self._tasks.write(place, EventType.SUBAGENT_CANCELLED, end)

    def _place(self, task_id: UUID) -> TaskPlace:
        above = self._replay.line(task_id)
        agent = self._replay.tasks[task_id].params.agent
        return TaskPlace(task_id, self._replay.parents[task_id], agent, len(above) - 1)
