"""Execution of one run: claim, replay of its journal, agents, end."""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

import asyncpg
import structlog

from bottega.agents.history import query_of
from bottega.errors import FencedError, UnreadMessagesError
from bottega.events import log
from bottega.events.payloads import warning
from bottega.events.types import Event, EventType, RunStatus
from bottega.events.wakeups import Notifier
from bottega.execution.async_tasks import SubagentRuntime, end_all, running_subagents
from bottega.execution.budget import DayBudgets
from bottega.execution.build_agents import Teams
from bottega.execution.claim import ClaimedRun, hand_back
from bottega.execution.dag import run_dag
from bottega.execution.journal import End, Journal
from bottega.execution.linked.working import agent_of_task, written
from bottega.execution.live_text import LiveText
from bottega.execution.load.fair_queue import FairQueue
from bottega.execution.load.leases import Held
from bottega.execution.mcp.tools import McpSessions
from bottega.execution.memory import facts_of, use_memory
from bottega.execution.observed.recorder import ObservedRecorder, about
from bottega.execution.observed.traced import recorder_of
from bottega.execution.replay import fold
from bottega.execution.retrieval import MemorySources
from bottega.execution.step_writer import StepWriter
from bottega.execution.turns.conversation import conversation_of
from bottega.execution.turns.ends import broken, end_of
from bottega.execution.turns.messages import split_turns
from bottega.execution.waiting.inbox import take_messages
from bottega.execution.waiting.interrupts import take_decisions
from bottega.execution.waiting.loops import Wait
from bottega.execution.waiting.tasks import Soon
from bottega.files.run_files import RunFiles
from bottega.files.store import FileStore
from bottega.memory.learning.episode_recorder import EpisodeRecorder
from bottega.memory.working.prompts import RunMemory
from bottega.redaction import Redactor

logger = structlog.get_logger(__name__)

_SELF_CANCELLED = RuntimeError("something that the run awaited was cancelled")


@dataclass(slots=True)
class _UnderWay:
    """A run that is being executed here.

    Attributes:
        cancelled: a client or the worker asked for its end.
        lost: another worker has it.
        held: ``None`` once it ends or is handed back.
        recorder: set once it began.
        wait: why it is suspended, if it is.
        ending: closes what only this attempt uses.
    """

    tenant_id: UUID
    task: "asyncio.Task[Any]"
    held: Held | None
    cancelled: bool = False
    lost: bool = False
    recorder: ObservedRecorder | None = None
    wait: Wait | None = None
    ending: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)


@dataclass(frozen=True, slots=True)
class Executor:
    """The execution of runs in this worker.

    Attributes:
        writer: of the steps of all its runs.
        teams: makes the agents of runs.
        notifier: wakes subscribers.
        max_crashes: a run fails after so many deaths of its worker.
        live_text: shows the models' text while it comes in.
        known: returns what removes a tenant's secrets from logs.
        runtime: shared state of asynchronous sub-agents; without it, runs that use them fail.
        sources: memory of earlier runs.
        left_work: called after a run's end with (it stored an episode, it ordered checks).
        prompt_tokens: limit of a root agent's prompt.
        day_budgets: of tenants; ``None``: no limits.
        files: of all tenants; without them, runs have none.
        stopping: set when this worker is to stop.
        mcp: connections to MCP servers.
    """

    pool: asyncpg.Pool
    writer: StepWriter
    teams: Teams
    notifier: Notifier
    max_crashes: int
    live_text: LiveText | None = None
    known: Callable[[UUID], Redactor] = lambda tenant_id: Redactor(())
    runtime: SubagentRuntime | None = None
    sources: MemorySources | None = None
    left_work: Callable[[bool, bool], None] = lambda episode, checks: None
    prompt_tokens: int = 20_000
    day_budgets: DayBudgets | None = None
    files: FileStore | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    mcp: McpSessions | None = None
    _fair: FairQueue = field(default_factory=FairQueue)
    _under_way: dict[UUID, _UnderWay] = field(default_factory=dict)

    def held(self) -> list[Held]:
        """Return the runs that are being executed here. May be called from another thread."""
        return [held for entry in list(self._under_way.values()) if (held := entry.held)]

    def under_way(self) -> list[tuple[UUID, UUID]]:
        """Return tenant and id of the runs that are being executed here."""
        return [(entry.tenant_id, run_id) for run_id, entry in self._under_way.items()]

    def cancel(self, run_id: UUID, task_id: UUID | None = None) -> None:
        """Cancel a run that is being executed here, or one task of it. Idempotent."""
        entry = self._under_way.get(run_id)
        if entry is None:
            return
        if task_id is not None:
            if entry.recorder is not None:
                entry.recorder.tasks.cancel(task_id)
                if self.runtime is not None:
                    self.runtime.cancel(run_id, task_id)
        elif not entry.cancelled and not entry.task.cancelling():
            # A run that is being handed back ends at the next worker.
            entry.cancelled = True
            entry.task.cancel()

    async def take_decisions(self) -> None:
        """Let the runs here know what people decided on tool calls that wait."""
        asking = {
            run_id: (entry.tenant_id, entry.recorder.interrupts)
            for run_id, entry in self._under_way.items()
            if entry.recorder is not None and entry.recorder.interrupts.is_waiting
        }
        await take_decisions(self.pool, asking)

    async def take_messages(self, sent: Mapping[UUID, int]) -> None:
        """Let the runs here have what users sent to them; ``sent``: number of messages, by run."""
        here = {
            run_id: (entry.tenant_id, entry.recorder.inbox, sent[run_id])
            for run_id in sent
            if (entry := self._under_way.get(run_id)) is not None and entry.recorder is not None
        }
        await take_messages(self.pool, here)

    async def hand_back_waiting(self) -> None:
        """Hand back the runs that only wait for a model that is down, when this worker stops."""
        await self.stopping.wait()
        for entry in self._under_way.values():
            self._hand_back_if_waiting(entry)

    def _hand_back_if_waiting(self, entry: _UnderWay) -> None:
        """Hand back a run that only waits: for people, long for a model, or while this stops."""
        if entry.recorder is None or entry.held is None or entry.task.cancelling():
            return
        entry.recorder.interrupts.tasks.show()
        if self.stopping.is_set() and entry.recorder.loops.needs_a_model:
            entry.task.cancel()
        elif (wait := entry.recorder.loops.wait) is None:
            return
        elif wait.left_s <= 0:
            entry.wait = wait
            entry.task.cancel()
        elif wait.pause_s is not None and wait.left_s < wait.pause_s:
            asyncio.get_running_loop().call_later(wait.left_s, self._hand_back_if_waiting, entry)

    def lose(self, run: Held) -> None:
        """Stop executing a run that another worker has; write nothing more of it."""
        entry = self._under_way.get(run.run_id)
        if entry is not None and entry.held == run:
            _lose(entry)

    async def execute(self, run: ClaimedRun) -> None:
        """Execute a claimed run to its end, or until another worker takes it away.

        Cancelling this hands the run back: its journal stays, and the next worker resumes it.
        """
        task = asyncio.current_task()
        assert task is not None
        earlier = self._under_way.get(run.run_id)
        held = Held(run.tenant_id, run.run_id, run.attempt)
        entry = self._under_way[run.run_id] = _UnderWay(run.tenant_id, task, held)
        try:
            with structlog.contextvars.bound_contextvars(**about(run)):
                await self._execute(run, entry, earlier)
        finally:
            # A later attempt here may have begun, and ended before this one.
            if self._under_way.get(run.run_id) is entry:
                del self._under_way[run.run_id]

    async def _execute(self, run: ClaimedRun, entry: _UnderWay, earlier: _UnderWay | None) -> None:
        tenant_id, run_id = run.tenant_id, run.run_id
        self.notifier.began(run_id, run.quiet_s)
        known = self.known(tenant_id)
        episode_recorder = None
        if run.memory == "full":
            by_rules = self.sources is None or self.sources.analyst is None
            episode_recorder = EpisodeRecorder(facts_of(run), known.text, reflects=by_rules)
        journal = Journal(
            self.writer,
            run,
            episode_recorder=episode_recorder,
            wake=self.notifier.wrote,
            known=known,
        )
        entry.recorder = recorder_of(
            journal,
            run,
            fair=self._fair,
            day=() if self.day_budgets is None else self.day_budgets.open(tenant_id),
            live_text=self.live_text,
            run_files=self._files_of(run),
            waits=Soon(functools.partial(self._hand_back_if_waiting, entry)),
        )
        bound = logger.bind(attempt=run.attempt)
        try:
            if earlier is not None:  # this worker had lost the run, and did not know
                _lose(earlier)
                await asyncio.wait([earlier.task])
            entry.recorder.began()
            await self._take_to_its_end(entry.recorder, run, entry)
        except FencedError:
            bound.warning("run.fenced")
        except UnreadMessagesError:
            entry.held = None
            await self._hand_back(run, journal, Wait(0.0), "message")
        except asyncio.CancelledError:
            if not entry.task.cancelling():  # something in the run cancelled itself
                end = broken(_SELF_CANCELLED, run_id, entry.recorder.spent)
                await self._finish(entry.recorder, run, end)
            elif entry.lost:
                entry.task.uncancel()
                bound.warning("run.fenced")
            elif entry.cancelled:
                entry.task.uncancel()
                await self._end_cancelled(entry.recorder, run)
            else:
                entry.held = None  # its lease ends now; that does not mean it was lost
                await self._hand_back(run, journal, entry.wait or Wait(0.0))
                bound.info("run.handed_back", wait=entry.wait)
                raise
        finally:
            entry.held = None
            self.notifier.wake(run_id)
            await self._settle(entry.recorder)
            await journal.close()
            entry.recorder.closed()
            await entry.ending.aclose()

    def _files_of(self, run: ClaimedRun) -> RunFiles | None:
        if self.files is None:
            return None
        return RunFiles(self.files, run.tenant_id, run.run_id, run.session_id)

    async def _take_to_its_end(
        self, recorder: ObservedRecorder, run: ClaimedRun, entry: _UnderWay
    ) -> None:
        if run.is_cancelled:
            await self._end_cancelled(recorder, run)
        elif run.crashes >= self.max_crashes:
            detail = f"its worker died {run.crashes} times while executing it"
            error = {"code": "crashed", "message": detail}
            await self._end_tasks(recorder, run)
            await self._finish(recorder, run, End(RunStatus.FAILED, error=error))
        else:
            await self._go_on(recorder, run, entry)

    async def _hand_back(
        self, run: ClaimedRun, journal: Journal, wait: Wait, cause: str = "drain"
    ) -> None:
        """Leave the run to the next worker, after committing what is known of it."""
        with contextlib.suppress(Exception):
            await journal.commit()
        await journal.close()
        await hand_back(self.pool, run, wait.pause_s, wait.interrupts, cause)

    async def _end_tasks(self, recorder: ObservedRecorder, run: ClaimedRun) -> None:
        """End the asynchronous tasks of a run that ends before it could resume them."""
        unended = self.runtime is not None and recorder.swarm is None and run.uses_subagents
        if unended or recorder.journal.lacks_earlier_steps:
            events = await self._earlier_events(recorder.journal)
            if self.runtime is not None and unended:
                end_all(self.runtime, recorder, run, events)

    async def _end_cancelled(self, recorder: ObservedRecorder, run: ClaimedRun) -> None:
        await self._end_tasks(recorder, run)
        end = End(RunStatus.CANCELLED, stop_reason="cancelled", usage=recorder.spent)
        # Fenced: another worker has it, and sees the cancellation when it claims the run.
        with contextlib.suppress(FencedError):
            await self._finish(recorder, run, end)

    async def _finish(self, recorder: ObservedRecorder, run: ClaimedRun, end: End) -> None:
        """Write the run's end, after settling its tenant's day budget."""
        await self._settle(recorder)
        journal = recorder.journal
        files = written(recorder.swarm, run)
        await journal.finish(replace(end, messages=recorder.inbox.read, files=files))
        recorder.ended(end)
        self.left_work(journal.episode_recorder is not None, journal.checks(end))

    async def _settle(self, recorder: ObservedRecorder) -> None:
        accounts = recorder.accounts
        day, accounts.day = accounts.day, ()
        if self.day_budgets is not None:
            await self.day_budgets.close(day)

    async def _go_on(self, recorder: ObservedRecorder, run: ClaimedRun, entry: _UnderWay) -> None:
        """Take the claimed run to its final event."""
        journal = recorder.journal
        limit = asyncio.timeout(max(0.0, run.remaining_s))
        began = False

        def suspended() -> bool:
            """Return true if the current cancellation does not end the run."""
            return entry.lost or not (
                entry.cancelled or limit.expired() or not entry.task.cancelling()
            )

        try:
            events = await self._earlier_events(journal)
            journal.replay = fold(events, journal.carried_seq)
            recorder.inbox.open()
            await self.take_messages({run.run_id: run.messages})
            if journal.replay.asked_people:
                await take_decisions(self.pool, {run.run_id: (run.tenant_id, recorder.interrupts)})
            began = True
            async with limit:
                if (runtime := self.runtime) is not None and runtime.serves(run):
                    async with running_subagents(
                        runtime, recorder, run, events, self.pool, suspended
                    ):
                        end = await self._work(recorder, run, entry)
                else:
                    end = await self._work(recorder, run, entry)
            await self._finish(recorder, run, end)
        except (FencedError, UnreadMessagesError):
            raise
        except Exception as error:
            if not began and log.is_transient(error):
                raise  # the database was away for too long: a later attempt asks again
            timeout_s = run.timeout_s if limit.expired() else None
            end = broken(error, run.run_id, recorder.spent, timeout_s=timeout_s)
            await self._finish(recorder, run, end)

    async def _work(self, recorder: ObservedRecorder, run: ClaimedRun, entry: _UnderWay) -> End:
        """Run the agents; return the run's end."""
        tasks, ending = recorder.tasks, entry.ending
        session = None if self.mcp is None else self.mcp.open(run, tasks, ending)
        team = await self.teams.of(run, session)
        for code, message in team.warnings:
            recorder.journal.add(EventType.WARNING, warning(code, message))
        conversation = await conversation_of(self.pool, run, self.prompt_tokens // 2)
        given, question = split_turns(query_of(run.input))
        if run.mode == "dag" and team.graph is not None:
            if conversation is not None:
                conversation.begin(team.agents)
            for member in team.agents.values():
                member.conversation_history += given
            end = await run_dag(team.graph, team.agents, question, recorder)
        else:
            (agent,) = team.agents.values()
            if run.link is not None:
                agent = agent_of_task(agent, run, self.teams.helped)
            if run.memory != "off":
                await use_memory(agent, run, recorder, self.sources, limit=self.prompt_tokens)
            if conversation is not None:
                agent.memory = agent.memory or RunMemory(limit=self.prompt_tokens)
                conversation.begin({run.first: agent})
            agent.conversation_history += given
            response = await agent.execute_query_async(question, recorder=recorder)
            end = end_of(response, recorder.answer_seq)
        return end if conversation is None else conversation.ended(end, team.agents, run)

    async def _earlier_events(self, journal: Journal) -> list[Event]:
        """Return the events of earlier attempts, and add them to the episode."""
        if not journal.has_earlier_steps:
            return []
        events = await log.read_all(self.pool, journal.tenant_id, journal.run_id)
        journal.add_earlier_steps(events)
        return events


def _lose(entry: _UnderWay) -> None:
    if entry.lost or (entry.recorder is not None and entry.recorder.journal.finishing):
        return  # it is ending; if it was lost before, the database refuses the end
    entry.lost = True
    entry.task.cancel()
