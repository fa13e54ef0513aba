"""Stand-in for the other workers: child runs that begin and end when the test says so."""

import asyncio
from collections.abc import Callable, Sequence

from bottega.agents import AgentUsage
from bottega.errors import BudgetExhaustedError
from bottega.subagents.handle import SubagentHandle, SubagentOutcome, SubagentStatus
from bottega.subagents.shared_context import folder_of
from bottega.subagents.swarm import ChildEnd, ChildWork
from tests.domain.scripted import COST


class ChildRun:
    """Child run of a task.

    Attributes:
        told: messages that it got, by id; ``None``: it has not begun.
        end: ``None``: it is under way.
        is_left: its parent cancelled it.
    """

    def __init__(self, handle: SubagentHandle, work: ChildWork) -> None:
        self.handle = handle
        self.work = work
        self.told: dict[str, str] | None = None
        self.end: ChildEnd | None = None
        self.is_left = False
        loop = asyncio.get_running_loop()
        self.budget: asyncio.Future[None] = loop.create_future()
        self.news: asyncio.Future[ChildEnd] = loop.create_future()

    @property
    def folder(self) -> str:
        return folder_of(self.handle.task_id)

    @property
    def path(self) -> str:
        """Path of the file that it leaves."""
        return f"{self.folder}/output/found"

    @property
    def is_awaited(self) -> bool:
        return not (self.is_left or self.news.done())

    @property
    def is_heard(self) -> bool:
        """True if its parent knows its end."""
        return self.news.done() and not self.news.cancelled()

    def begin(self) -> None:
        self.budget.set_result(None)

    def get_no_budget(self) -> None:
        self.news.cancel()
        self.budget.set_exception(BudgetExhaustedError("nothing is left"))

    def finish(self, status: SubagentStatus, calls: int) -> None:
        """End the run; its parent does not hear of it yet."""
        prompt = self.handle.prompt
        if status is SubagentStatus.COMPLETED:
            outcome = SubagentOutcome(status, output=f"found {prompt}", stop_reason="final_answer")
        else:
            code = "model_unavailable" if status is SubagentStatus.FAILED else str(status)
            outcome = SubagentOutcome(status, error=f"no {prompt}", error_code=code)
        usage = AgentUsage(calls * COST.input, calls * COST.output, model_calls=calls)
        self.end = ChildEnd(outcome, usage, {self.path: f"seen {prompt}"})

    def be_heard(self) -> None:
        assert self.end is not None
        self.news.set_result(self.end)


class Others:
    """The other workers, as the run of a parent sees them.

    Args:
        begins: child runs begin at once, instead of when the test says so.

    Attributes:
        runs: all child runs, by the task's prompt.
    """

    def __init__(self, *, begins: bool) -> None:
        self.begins = begins
        self.runs: dict[str, ChildRun] = {}

    async def do(
        self, handle: SubagentHandle, work: ChildWork, pay: Callable[[AgentUsage], None]
    ) -> ChildEnd:
        assert handle.prompt not in self.runs
        run = self.runs[handle.prompt] = ChildRun(handle, work)
        if self.begins:
            run.begin()
        try:
            await run.budget
            run.told = {} if handle.mailbox is None else dict(handle.mailbox.unread)
            end = await run.news
        except asyncio.CancelledError:
            run.is_left = True
            raise
        pay(end.usage)
        return end

    async def tell(self, handle: SubagentHandle, message_id: str, text: str) -> bool:
        run = self.runs.get(handle.prompt)
        if run is None or run.told is None:
            return True  # it gets the message when it begins
        if run.end is None:
            run.told[message_id] = text
        return run.end is None

    async def read_texts(self, handles: Sequence[SubagentHandle]) -> None: ...
