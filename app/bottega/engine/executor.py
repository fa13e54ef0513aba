"""Executor of a worker's runs. It replays a claimed run, executes the agents and ends the run."""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from uuid import UUID

import asyncpg

from bottega.agents.messages import (
    demands_message,
    query_messages,
    query_of,
    split_turns,
    with_demands,
)
from bottega.db.failures import is_outage, is_transient
from bottega.engine.async_tasks import SubagentRuntime, end_all, running_subagents
from bottega.engine.budget import DayBudgets
from bottega.engine.build_agents import Teams
from bottega.engine.child_runs import ElementRuns, agent_of_task, changed_files
from bottega.engine.claim import ClaimedRun, hand_back
from bottega.engine.conversation import broken, conversation_of, end_of
from bottega.engine.graph_run import GraphRun
from bottega.engine.journal import End, Journal, RunEpisode
from bottega.engine.live_text import LiveText
from bottega.engine.mcp import McpSessions
from bottega.engine.memory import run_facts, use_facts, use_memory
from bottega.engine.parts import RunParts
from bottega.engine.recorder import FairQueue, JournalRecorder
from bottega.engine.replay import replay_run
from bottega.engine.retrieval import MemorySources
from bottega.engine.telemetry import about, observe
from bottega.engine.waiting import Debounced, SuspendReason, deliver
from bottega.engine.workers import RunLease
from bottega.errors import FencedError, PendingRequestError
from bottega.events import log
from bottega.events.data import Failure, WarningData
from bottega.events.listener import Notifier
from bottega.events.log import StepWriter
from bottega.events.types import EventType, RunStatus
from bottega.files.inputs import RunFiles
from bottega.files.store import FileStore
from bottega.logger import Logger, bound_context
from bottega.memory.learning.episode_recorder import EpisodeRecorder
from bottega.memory.prompts import RunMemory
from bottega.redaction import Redactor
from bottega.secrets.lookup import SecretLookup

logger = Logger(__name__)

_SELF_CANCELLED = RuntimeError("something that the run awaited was cancelled")


@dataclass(slots=True)
class ActiveRun:
    """A run that this worker is executing.

    Attributes:
        cancelled: true if a client requested the run's cancellation.
        lost: true if another worker has claimed the run.
        lease: the run's lease; ``None`` after the run has ended or was handed back.
        is_leaving: true if this worker is handing back the run; a lost lease then does not matter.
        recorder: the attempt's recorder; set when the attempt begins.
        wait: the reason for which this worker suspends the run; ``None``: no suspension.
        ending: exit stack that closes the attempt's resources.
    """

    tenant_id: UUID
    task: "asyncio.Task[Any]"
    lease: RunLease | None
    is_leaving: bool = False
    cancelled: bool = False
    lost: bool = False
    recorder: JournalRecorder | None = None
    wait: SuspendReason | None = None
    ending: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)


@dataclass(frozen=True, slots=True)
class Executor:
    """Executor of the runs of this worker.

    Attributes:
        writer: stores the steps of all runs.
        teams: source of a run's agents.
        notifier: sends wake-ups to subscribers.
        max_crashes: a run fails after this number of crashes of its workers.
        live_text: writer of the models' live text.
        secrets: tenants' secrets, which are removed from runs' logs; ``None``: no secrets.
        runtime: state of asynchronous sub-agents; ``None``: runs with such sub-agents fail.
        sources: memory of earlier runs.
        on_run_finished: called with two booleans: an episode was stored; success checks are due.
        prompt_tokens: maximum size of a root agent's prompt in tokens.
        day_budgets: daily budgets of tenants; ``None``: there are no limits.
        files: store of all tenants' files; ``None``: runs have no files.
        mcp: connections to MCP servers; ``None``: runs have no connections.
        stopping: event that is set when this worker begins to stop.
    """

    pool: asyncpg.Pool
    writer: StepWriter
    teams: Teams
    notifier: Notifier
    max_crashes: int
    live_text: LiveText | None = None
    secrets: SecretLookup | None = None
    runtime: SubagentRuntime | None = None
    sources: MemorySources | None = None
    on_run_finished: Callable[[bool, bool], None] = lambda episode, checks: None
    prompt_tokens: int = 20_000
    day_budgets: DayBudgets | None = None
    files: FileStore | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    mcp: McpSessions | None = None
    _fair: FairQueue = field(default_factory=FairQueue)
    _under_way: dict[UUID, ActiveRun] = field(default_factory=dict)

    def leases(self) -> list[RunLease]:
        """Return the leases of the runs that this worker executes. Thread-safe."""
        return [lease for entry in list(self._under_way.values()) if (lease := entry.lease)]

    def hold(self) -> None:
        """Called when this worker stops. From now on, hand back each run that needs a model call.

        This worker may stop before the answer arrives. Then the next worker must repeat the call.
        """
        self._fair.is_held = True

    def under_way(self) -> list[tuple[UUID, UUID]]:
        return [(entry.tenant_id, run_id) for run_id, entry in self._under_way.items()]

    def cancel(self, run_id: UUID, task_id: UUID | None = None) -> None:
        """Cancel a run that this worker executes, or one of the run's tasks. Idempotent."""
        entry = self._under_way.get(run_id)
        if entry is None:
            return
        if task_id is not None:
            if entry.recorder is not None:
                entry.recorder.tasks.cancel(task_id)
                if self.runtime is not None:
                    self.runtime.cancel(run_id, task_id)
        elif not entry.cancelled and not entry.task.cancelling():
            # If this worker is handing the run back, the next worker cancels the run.
            entry.cancelled = True
            entry.task.cancel()

    async def take(self, run_ids: Collection[UUID]) -> set[UUID]:
        """Deliver new messages and decisions to runs. Return the ids of runs that accept them."""
        open_here = {
            run_id: (entry.tenant_id, recorder.inbox, recorder.interrupts)
            for run_id in run_ids
            if (entry := self._under_way.get(run_id)) is not None
            and (recorder := entry.recorder) is not None
            and recorder.inbox.known is not None
        }
        await deliver(self.pool, open_here)
        return set(open_here)

    def child_ended(self, run_id: UUID) -> None:
        """Tell the parent run that a child run has ended. Idempotent."""
        if self.runtime is not None:
            self.runtime.children.note_end(run_id)

    async def hand_back_waiting(self) -> None:
        """Wait until this worker stops. Then hand back the runs that wait for a failing model."""
        await self.stopping.wait()
        for entry in self._under_way.values():
            self._hand_back_if_waiting(entry)

    def _hand_back_if_waiting(self, entry: ActiveRun) -> None:
        """Suspend a run whose agents have all waited long enough, or check that again later. If
        this worker stops, hand back a run that needs a model.
        """
        is_over = entry.lease is None or entry.is_leaving
        if entry.recorder is None or is_over or entry.task.cancelling():
            return
        entry.recorder.interrupts.tasks.show()
        if self.stopping.is_set() and entry.recorder.loops.needs_a_model:
            entry.task.cancel()
        elif (wait := entry.recorder.loops.wait) is None:
            return
        elif wait.left_s <= 0:
            entry.wait = wait
            entry.task.cancel()
        elif wait.until_s is None or wait.left_s < wait.until_s:
            asyncio.get_running_loop().call_later(wait.left_s, self._hand_back_if_waiting, entry)

    def lose(self, run: RunLease) -> None:
        """Stop the execution of a run that another worker executes. Write no more events."""
        entry = self._under_way.get(run.run_id)
        if entry is not None and entry.lease == run and not entry.is_leaving:
            _lose(entry)

    async def execute(self, run: ClaimedRun) -> bool:
        """Execute a claimed run until the run ends, or until another worker executes it.

        If this call is cancelled, this worker hands the run back to the queue, and the next worker
        resumes the run.

        Returns:
            False if the run's tenant has no more due runs.
        """
        task = asyncio.current_task()
        assert task is not None
        earlier = self._under_way.get(run.run_id)
        lease = RunLease(run.tenant_id, run.run_id, run.attempt)
        entry = self._under_way[run.run_id] = ActiveRun(run.tenant_id, task, lease)
        try:
            with bound_context(**about(run)):
                return await self._execute(run, entry, earlier)
        finally:
            # This worker may already have begun, and even ended, a later attempt of the run.
            if self._under_way.get(run.run_id) is entry:
                del self._under_way[run.run_id]

    async def _execute(self, run: ClaimedRun, entry: ActiveRun, earlier: ActiveRun | None) -> bool:
        run_id = run.run_id
        self.notifier.began(run_id, run.quiet_s)
        recorder = entry.recorder = self._recorder_of(run, entry)
        journal = recorder.journal
        bound = logger.bind(attempt=run.attempt)
        try:
            await self._begin(recorder, run, entry, earlier)
            await self._take_to_its_end(recorder, run, entry)
        except FencedError:
            bound.warning("run.fenced")
        except PendingRequestError:
            entry.is_leaving = True
            await self._hand_back(run, journal, None, "message")
        except asyncio.CancelledError:
            if not entry.task.cancelling():  # only a call within the run was cancelled
                await self._break(recorder, run, _SELF_CANCELLED)
            elif entry.lost:
                entry.task.uncancel()
                bound.warning("run.fenced")
            elif entry.cancelled:
                entry.task.uncancel()
                await self._end_cancelled(recorder, run)
            else:
                entry.is_leaving = True
                await self._hand_back(run, journal, entry.wait, "drain")
                bound.info("run.handed_back", wait=entry.wait)
                raise
        except Exception as error:
            if is_transient(error):  # the database was away for too long
                bound.warning("run.put_off", error=str(error))
                await self._put_off(run, entry)
            elif journal.finishing:
                raise
            else:
                await self._break(recorder, run, error)
        finally:
            entry.lease = None
            self.notifier.wake(run_id)
            await self._close_day_budgets(recorder)
            await journal.close()
            await entry.ending.aclose()
        return journal.others_due

    async def _begin(
        self,
        recorder: JournalRecorder,
        run: ClaimedRun,
        entry: ActiveRun,
        earlier: ActiveRun | None,
    ) -> None:
        if earlier is not None:  # this worker lost the run and claimed it again
            _lose(earlier)
            await asyncio.wait([earlier.task])
        if self.secrets is not None:
            await self.secrets.known(run.tenant_id, run.tenant)
        for observer in recorder.journal.observers:
            observer.began()
            entry.ending.callback(observer.closed)

    def _journal_of(self, run: ClaimedRun) -> Journal:
        redactor = Redactor() if self.secrets is None else self.secrets.redactor(run.tenant_id)
        by_rules, is_full = not (self.sources and self.sources.analyst), run.memory == "full"
        episode = None
        if is_full:
            episode = RunEpisode(EpisodeRecorder(run_facts(run), redactor.text, reflects=by_rules))
        return Journal(self.writer, run, episode=episode, wake=self.notifier.wrote, known=redactor)

    def _recorder_of(self, run: ClaimedRun, entry: ActiveRun) -> JournalRecorder:
        recorder = JournalRecorder(
            self._journal_of(run),
            run,
            fair=self._fair,
            day=() if self.day_budgets is None else self.day_budgets.open(run.tenant_id, run.payer),
            live_text=self.live_text,
            run_files=self._files_of(run),
            waits=Debounced(functools.partial(self._hand_back_if_waiting, entry)),
        )
        observe(recorder, run)
        if run.memory != "off" or "recalled" in (run.parent_task or {}):
            question = run_facts(run).question
            tasks, sources = recorder.tasks, self.sources
            recorder.parts = RunParts(run, question, recorder.journal, tasks, sources)
            recorder.journal.observers.append(recorder.parts)
        return recorder

    def _files_of(self, run: ClaimedRun) -> RunFiles | None:
        if self.files is None:
            return None
        return RunFiles(self.files, run.tenant_id, run.run_id, run.session_id)

    async def _take_to_its_end(
        self, recorder: JournalRecorder, run: ClaimedRun, entry: ActiveRun
    ) -> None:
        if run.is_cancelled:
            await self._end_cancelled(recorder, run)
        elif run.crashes >= self.max_crashes:
            detail = f"{run.crashes} workers died while they executed the run"
            error = Failure(code="crashed", message=detail)
            await self._end_tasks(recorder, run)
            await self._finish(recorder, run, End(RunStatus.FAILED, error=error))
        else:
            await self._go_on(recorder, run, entry)

    async def _hand_back(
        self, run: ClaimedRun, journal: Journal, wait: SuspendReason | None, cause: str
    ) -> None:
        """Commit the current step. Then queue the run again, or suspend the run if it must wait."""
        with contextlib.suppress(Exception):
            await journal.commit()
        await journal.close()
        if wait is None:
            await hand_back(self.pool, run, cause)
            return
        is_for_people = wait.reason in ("person", "client")
        cause = "interrupt" if is_for_people else wait.reason
        await hand_back(self.pool, run, cause, asdict(wait))

    async def _break(self, recorder: JournalRecorder, run: ClaimedRun, error: Exception) -> None:
        await self._finish(recorder, run, broken(error, run.run_id, recorder.spent))

    async def _put_off(self, run: ClaimedRun, entry: ActiveRun) -> None:
        entry.is_leaving = True
        while True:
            try:
                await hand_back(self.pool, run, "drain")
                return
            except Exception as error:
                if not is_transient(error):
                    raise

    async def _end_tasks(self, recorder: JournalRecorder, run: ClaimedRun) -> None:
        journal = recorder.journal
        unended = self.runtime is not None and recorder.swarm is None and run.uses_subagents
        if not journal.is_replayed and (unended or journal.episode is not None):
            await self._replay(journal)
        if self.runtime is not None and unended:
            end_all(self.runtime, recorder, run)

    async def _end_cancelled(self, recorder: JournalRecorder, run: ClaimedRun) -> None:
        await self._end_tasks(recorder, run)
        end = End(RunStatus.CANCELLED, stop_reason="cancelled", usage=recorder.spent)
        # If another worker has claimed the run, the claim told that worker about the cancellation.
        with contextlib.suppress(FencedError):
            await self._finish(recorder, run, end)

    async def _finish(self, recorder: JournalRecorder, run: ClaimedRun, end: End) -> None:
        await self._close_day_budgets(recorder)
        journal = recorder.journal
        if recorder.parts is not None and journal.episode is not None:
            journal.episode.recorder.parts = await recorder.parts.judged()
        files = changed_files(recorder.swarm, run)
        await journal.finish(replace(end, messages=recorder.inbox.read, files=files))
        for observer in journal.observers:
            observer.ended(end)
        self.on_run_finished(journal.episode is not None, journal.is_judged)

    async def _close_day_budgets(self, recorder: JournalRecorder) -> None:
        accounts = recorder.accounts
        day, accounts.day = accounts.day, ()
        if self.day_budgets is not None:
            await self.day_budgets.close(day)

    async def _go_on(self, recorder: JournalRecorder, run: ClaimedRun, entry: ActiveRun) -> None:
        journal = recorder.journal
        limit = asyncio.timeout(max(0.0, run.remaining_s))
        began = False

        def suspended() -> bool:
            """Return true if this worker stops the run and the run continues later."""
            return entry.lost or not (
                entry.cancelled or limit.expired() or not entry.task.cancelling()
            )

        try:
            await self._replay(journal)
            recorder.inbox.open()
            if run.messages or journal.replay.asked_people:
                sent_to = run.tenant_id, recorder.inbox, recorder.interrupts
                await deliver(self.pool, {run.run_id: sent_to})
            began = True
            async with limit:
                if (runtime := self.runtime) is not None and runtime.serves(run):
                    async with running_subagents(runtime, recorder, run, self.pool, suspended):
                        end = await self._work(recorder, run, entry)
                else:
                    end = await self._work(recorder, run, entry)
            await self._finish(recorder, run, end)
        except (FencedError, PendingRequestError):
            raise
        except Exception as error:
            if is_outage(error) or (not began and is_transient(error)):
                raise
            timeout_s = run.timeout_s if limit.expired() else None
            end = broken(error, run.run_id, recorder.spent, timeout_s=timeout_s)
            await self._finish(recorder, run, end)

    async def _work(self, recorder: JournalRecorder, run: ClaimedRun, entry: ActiveRun) -> End:
        tasks, ending = recorder.tasks, entry.ending
        session = None
        if self.mcp is not None and run.mcp_servers:
            session = self.mcp.open(run, tasks, ending)
        team = await self.teams.of(run, session)
        for code, message in team.warnings:
            recorder.journal.add(EventType.WARNING, WarningData(code=code, message=message))
        conversation = None
        if run.in_conversation:
            conversation = await conversation_of(self.pool, run, self.prompt_tokens // 2)
        query = with_demands(query_messages(query_of(run.input)), demands_message(run.demands))
        if run.mode == "dag" and team.graph is not None:
            if conversation is not None:
                conversation.begin(team.agents)
            history, question = split_turns(query)
            about = {"input": run_facts(run).question, "metadata": run.metadata}
            elements = None
            if self.runtime is not None:
                elements = ElementRuns(self.runtime.children, recorder, run)
            graph = GraphRun(
                team,
                recorder,
                question,
                about,
                run.first,
                history,
                elements=elements,
                given=run.given,
            )
            end = await (graph.run() if run.parent_task is None else graph.element(run.parent_task))
        else:
            (agent,) = team.agents.values()
            if run.parent_task is not None:
                agent = agent_of_task(agent, run, self.teams.helped)
            if run.memory != "off":
                await use_memory(agent, run, recorder, self.sources, limit=self.prompt_tokens)
            if conversation is not None or run.facts_mode != "off":
                agent.memory = agent.memory or RunMemory(limit=self.prompt_tokens)
                await use_facts(agent, run, recorder.journal, self.pool)
            if conversation is not None:
                conversation.begin({run.first: agent})
            response = await agent.execute_query_async(query, recorder=recorder)
            end = end_of(response, recorder.answer_seq)
        return end if conversation is None else conversation.ended(end, team.agents, run)

    async def _replay(self, journal: Journal) -> None:
        if journal.has_earlier_steps:
            events = await log.read_all(self.pool, journal.tenant_id, journal.run_id)
            journal.resume(replay_run(events, journal.carried_seq), events)


def _lose(entry: ActiveRun) -> None:
    if entry.lost or (entry.recorder is not None and entry.recorder.journal.finishing):
        return  # the run's end is being stored; if the run was taken over, that will fail
    entry.lost = True
    entry.task.cancel()
