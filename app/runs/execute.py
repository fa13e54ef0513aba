"""Execute one run: claim it, fold its journal, build its agents, let them work, write the end."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg
import structlog
from pydantic_core import from_json

from app.agents import AgentFactory, AssistantResponse, BaseAgent
from app.agents.messages import AssistantMessage, HumanMessage, StandardMessage, SystemMessage
from app.agents.provider import LLMProvider
from app.definitions.graphs import to_graph
from app.errors import BottegaError, FencedError
from app.events import log
from app.events.types import EventType, RunStatus
from app.runs.fold import Fold, fold
from app.runs.journal import Journal
from app.runs.recorder import JournalRecorder

logger = structlog.get_logger(__name__)

_HAND_BACK = """
UPDATE runs SET status = 'queued'
WHERE tenant_id = $1 AND id = $2 AND attempt = $3 AND status = 'running'
"""
_LOG_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Executor:
    """What executing runs needs.

    Attributes:
        provider_for: the provider of a model name; ``None`` is the default model.
        wake: told a run's id after each commit to its log.
        max_crashes: a run whose worker died more often than this ends as failed.
    """

    pool: asyncpg.Pool
    provider_for: Callable[[str | None], LLMProvider]
    wake: Callable[[UUID], None]
    max_crashes: int

    async def execute(self, tenant_id: UUID, run_id: UUID) -> None:
        """Execute a run to its end, or until another worker takes it away.

        Cancelling it hands the run back: its journal stays, and the next worker goes on there.
        """
        answer = await self.pool.fetchval("SELECT claim_run($1, $2)", tenant_id, run_id)
        if answer is None:
            return  # it is over already, or was deleted: a job delivered twice does no harm
        claim = from_json(answer)
        self.wake(run_id)
        journal = Journal(
            self.pool,
            tenant_id,
            run_id,
            attempt=claim["attempt"],
            last_seq=claim["last_seq"],
            wake=self.wake,
            folded=await self._fold(tenant_id, run_id, claim),
        )
        bound = logger.bind(run_id=str(run_id), attempt=journal.attempt)
        try:
            await _execute(journal, claim, self.provider_for, self.max_crashes)
        except FencedError:
            bound.warning("run.fenced")
        except asyncio.CancelledError:
            await journal.close()
            await self.pool.execute(_HAND_BACK, tenant_id, run_id, journal.attempt)
            bound.info("run.handed_back")
            raise
        finally:
            await journal.close()

    async def _fold(self, tenant_id: UUID, run_id: UUID, claim: dict[str, Any]) -> Fold:
        if claim["attempt"] == 1:
            return Fold()
        events = []
        after = 0
        while page := await log.read(self.pool, tenant_id, run_id, after, _LOG_PAGE):
            events += page
            after = page[-1].seq
        return fold(events)


async def _execute(
    journal: Journal,
    claim: dict[str, Any],
    provider_for: Callable[[str | None], LLMProvider],
    max_crashes: int,
) -> None:
    """Take the claimed run to its final event."""
    if claim["crashes"] >= max_crashes:
        detail = f"its worker died {claim['crashes']} times while executing it"
        await journal.finish(RunStatus.FAILED, error={"code": "crashed", "message": detail})
        return
    recorder = JournalRecorder(journal)
    try:
        async with asyncio.timeout(max(0.0, claim["remaining_s"])):
            agent, warnings = build(claim, provider_for)
            for code, message in warnings:
                journal.add(EventType.WARNING, {"code": code, "message": message})
            response = await agent.execute_query_async(_query(claim["input"]), recorder=recorder)
    except TimeoutError:
        detail = f"the run took longer than its timeout_s of {claim['timeout_s']:g} s"
        await journal.finish(RunStatus.TIMEOUT, error={"code": "timeout", "message": detail})
        return
    except FencedError:
        raise
    except BottegaError as error:
        failure = {"code": error.code, "message": error.detail}
        await journal.finish(RunStatus.FAILED, error=failure)
        return
    except Exception:
        logger.exception("run.broken", run_id=str(journal.run_id))
        failure = {"code": "internal", "message": "the run broke on an internal error; see the log"}
        await journal.finish(RunStatus.FAILED, error=failure)
        return
    await _finish(journal, recorder, response)


async def _finish(journal: Journal, recorder: JournalRecorder, response: AssistantResponse) -> None:
    """Write the end that the root's response means."""
    if response.error is not None and not response.content:
        error = {"code": response.error_code or "agent_failed", "message": response.error}
        await journal.finish(
            RunStatus.FAILED, error=error, stop_reason=response.stop_reason, usage=response.usage
        )
        return
    await journal.finish(
        RunStatus.COMPLETED,
        output=response.content,
        stop_reason=response.stop_reason,
        usage=response.usage,
        answer_seq=recorder.answer_seq,
    )


def build(
    claim: dict[str, Any], provider_for: Callable[[str | None], LLMProvider]
) -> tuple[BaseAgent, list[tuple[str, str]]]:
    """The run's root agent with its sub-agents and its own copy of the graph.

    Args:
        claim: ``agent`` is the root's name, ``agents`` the pinned definitions by name, ``graph``
            the pinned graph's definition or ``None``.

    Returns:
        the root, and warnings as (code, message).
    """
    factory = AgentFactory()
    definitions: dict[str, dict[str, Any]] = claim["agents"]
    for name, definition in definitions.items():
        factory.register(
            name,
            BaseAgent,
            subagent_description=definition["description"] or None,
            stateless=definition["stateless"],
            defaults={
                "system_message": definition["system_message"],
                "description": definition["description"] or None,
                "agent_name": name,
                "max_iterations": definition["max_iterations"],
                "provider": provider_for(definition["model"]),
            },
        )
    if claim["graph"] is not None:
        factory.with_memory_graph(to_graph(claim["graph"]))

    def create(name: str) -> BaseAgent:
        children = definitions[name]["subagents"]["names"] if definitions[name]["subagents"] else []
        return factory.create(name, subagents=[create(child) for child in children])

    return create(claim["agent"]), list(factory.warnings)


_ROLES: dict[str, type[SystemMessage | HumanMessage | AssistantMessage]] = {
    "system": SystemMessage,
    "user": HumanMessage,
    "assistant": AssistantMessage,
}


def _query(value: str | list[dict[str, str]]) -> str | list[StandardMessage]:
    if isinstance(value, str):
        return value
    return [_ROLES[message["role"]](content=message["content"]) for message in value]
