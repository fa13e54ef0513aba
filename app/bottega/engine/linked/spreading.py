"""Work of a run's tasks in linked runs: its budgets, agents and files, and what they return."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import structlog

from bottega.agents.agent import BaseAgent
from bottega.agents.messages import AgentUsage
from bottega.engine.claim import ClaimedRun
from bottega.engine.linked.runs import LinkedRuns, Linking, linked_id
from bottega.engine.recorder import JournalRecorder
from bottega.errors import BudgetExhaustedError, FencedError
from bottega.events.steps import encoded
from bottega.subagents.budget import DOLLARS, TOKENS, Account, Unit
from bottega.subagents.child import copy_for_task, helper_of
from bottega.subagents.handle import Parent, SubagentHandle
from bottega.subagents.linked.work import LinkedEnd, LinkedWork
from bottega.subagents.shared_context import folder_of
from bottega.subagents.swarm import Swarm

logger = structlog.get_logger(__name__)

_CANCELS_S = 2.0
"""Longest wait for the end of a linked run whose task was cancelled."""
_LEAST_TOKENS = 2_000
"""Smallest part of a budget: less does not pay for a call of most models."""


class Spreading:
    """The tasks of one run that linked runs do.

    Args:
        recorder: of the run.
    """

    def __init__(self, linked: LinkedRuns, recorder: JournalRecorder, run: ClaimedRun) -> None:
        self._linked = linked
        self._recorder = recorder
        self._run = run
        self._linking = Linking(run.tenant_id, run.run_id, run.attempt)
        self._with_parts: defaultdict[Parent, dict[UUID, SubagentHandle]] = defaultdict(dict)
        self._begun: set[UUID] = set()

    def id_of(self, task_id: UUID) -> UUID:
        """Return the id of a task's linked run."""
        return linked_id(self._run.task_root, self._run.run_id, task_id)

    async def do(
        self, handle: SubagentHandle, work: LinkedWork, pay: Callable[[AgentUsage], None]
    ) -> LinkedEnd:
        """Do a task's work as a linked run: see :class:`bottega.subagents.linked.work.Elsewhere`.

        A message of before a crash, which the run may not have got, is sent again. If the task is
        cancelled, this returns when its linked run is over, so that its part of the budgets stays
        reserved until then, but after :data:`_CANCELS_S` at the latest.
        """
        recorder, run_id = self._recorder, self.id_of(handle.task_id)
        known = recorder.journal.known
        await recorder.journal.commit()  # a linked run needs its task
        left = handle.parent.remaining()
        async with self._parts(handle) as (tokens, dollars):
            new = {
                "id": run_id,
                "agent": work.agent,
                "input": work.question,
                "timeout_s": handle.timeout,
                "left_s": self._run.timeout_s if left is None else max(0.0, left),
                "token_budget": tokens,
                "cost_budget": _cost(dollars),
                "link": {
                    "helper_of": work.agent if work.is_helper else None,
                    "instructions": work.instructions,
                    "most_steps": work.most_steps,
                    "task_id": handle.task_id,
                    "files": work.files,
                },
            }
            unread = {} if handle.mailbox is None else handle.mailbox.unread
            told = {key: encoded(text, known) for key, text in unread.items()}
            self._begun.add(handle.task_id)
            text = encoded(new, known)
            ending = self._linked.end_of(self._linking, run_id, text, told)
            try:
                end = await asyncio.shield(ending)
            except asyncio.CancelledError:
                if handle.status.is_final:  # its parent cancelled it
                    self._linked.cancel(self._linking, run_id)
                    await self._pay_cancelled(run_id, ending, pay)
                raise
            finally:
                ending.cancel()
        self._paid_for(end.usage, pay)
        recorder.linked_usage[handle.task_id] = end.usage
        return end

    async def _pay_cancelled(
        self,
        run_id: UUID,
        ending: "asyncio.Future[LinkedEnd]",
        pay: Callable[[AgentUsage], None],
    ) -> None:
        try:
            async with asyncio.timeout(_CANCELS_S):
                end = await asyncio.shield(ending)
        except (TimeoutError, FencedError):
            pass
        except Exception:
            logger.exception("linked_run.usage_unknown", run_id=str(run_id))
        else:
            self._paid_for(end.usage, pay)

    def _paid_for(self, usage: AgentUsage, pay: Callable[[AgentUsage], None]) -> None:
        self._recorder.accounts.paid_before(usage)
        self._recorder.spent += usage
        pay(usage)

    async def tell(self, handle: SubagentHandle, message_id: str, text: str) -> bool:
        if handle.task_id not in self._begun:
            return True  # it gets the message when it begins
        run_id, content = self.id_of(handle.task_id), encoded(text, self._recorder.journal.known)
        return await self._linked.tell(self._linking, run_id, message_id, content)

    async def ends_of(self, tasks: Mapping[UUID, UUID | None]) -> dict[UUID, LinkedEnd]:
        """Return the ends of finished tasks' linked runs, by task; cancel those under way.

        Args:
            tasks: the linked run of each; ``None``: the one that this run gave it.
        """
        runs = {run_id or self.id_of(task_id): task_id for task_id, run_id in tasks.items()}
        ends = await self._linked.ends(self._run.tenant_id, list(runs)) if runs else {}
        for run_id in runs.keys() - ends.keys():
            self._linked.cancel(self._linking, run_id)
        return {runs[run_id]: end for run_id, end in ends.items()}

    @asynccontextmanager
    async def _parts(self, handle: SubagentHandle) -> AsyncIterator[tuple[int | None, int | None]]:
        """Reserve a task's part of the budgets above it; yield its tokens and its money."""
        day = set(map(id, self._recorder.accounts.day))  # a linked run itself pays from the day
        above = [account for account in handle.parent.accounts if id(account) not in day]
        others = self._with_parts[handle.parent]
        paid = sum(not other.status.is_final for other in others.values())
        sharers = max(1, handle.parent.elsewhere - paid)
        reserved: list[tuple[Account, int]] = []
        parts = []
        others[handle.task_id] = handle
        try:
            for unit in (TOKENS, DOLLARS):
                accounts = [a for a in above if a.unit is unit and a.limit is not None]
                own = handle.account.limit if unit is TOKENS else None
                part = await part_of(accounts, unit, own, sharers) if accounts else own
                parts.append(part)
                for account in accounts:
                    account.reserved += part or 0
                    reserved.append((account, part or 0))
            yield parts[0], parts[1]
        finally:
            del others[handle.task_id]
            for account, amount in reserved:
                account.give_back(amount)


async def part_of(accounts: Sequence[Account], unit: Unit, own: int | None, sharers: int) -> int:
    """Return a task's part of budgets: what it asks for, else an equal part of what is left.

    Waits while other tasks' parts leave too little.

    Args:
        own: the task's own budget; ``None``: it has none.
        sharers: number of tasks that get their parts now, with this one.

    Raises:
        BudgetExhaustedError: too little is left, and no other task returns any.
    """
    least = _LEAST_TOKENS if unit is TOKENS else 1
    while True:
        tightest = min(accounts, key=lambda account: account.left or 0)
        left = tightest.left or 0
        part = max(least, left // sharers) if own is None else own
        if part <= left:
            return part
        if own is not None and left > 0 and not tightest.reserved:
            return left
        if not tightest.reserved:
            raise BudgetExhaustedError(tightest.used_up(least))
        await tightest.changed()


def _cost(billionths: int | None) -> dict[str, Any] | None:
    return None if billionths is None else {"amount": DOLLARS.text(billionths), "currency": "USD"}


def agent_of_task(
    agent: BaseAgent, run: ClaimedRun, configure: Callable[[BaseAgent], object]
) -> BaseAgent:
    """Return the agent of a linked run's task.

    Args:
        agent: the defined one, or that whose helper does the task.
        configure: called with a new helper.
    """
    link = run.link
    assert link is not None
    if link["helper_of"] is None:
        return copy_for_task(agent, link["instructions"], link["most_steps"])
    helper = helper_of(agent, link["instructions"], link["most_steps"])
    configure(helper)
    return helper


def give_files(swarm: Swarm, run: ClaimedRun) -> None:
    """Give a linked run the shared files that its parent had when it was dispatched."""
    for path, content in (run.link or {}).get("files", {}).items():
        swarm.context.restore(path, content)


def written(swarm: object, run: ClaimedRun) -> dict[str, Any]:
    """Return the files of a linked run's own folder that it got otherwise or not at all."""
    if run.link is None or run.own_task is None or not isinstance(swarm, Swarm):
        return {}
    folder, given = folder_of(run.own_task), run.link["files"]
    texts = swarm.context.texts(folder)
    return {path: text for path, text in texts.items() if given.get(path) != text}
