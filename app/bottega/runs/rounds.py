"""Rounds of a run: messages and usage until its end, or until it asks its client for results.

A run without client tools has one round. A run with client tools has one more round for each answer
of its client. Every round is read from the log, so that old rounds can be read again.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.agents.messages import AssistantMessage
from bottega.db.tables import run_events
from bottega.definitions.store import AGENTS
from bottega.engine.replay import replay_run
from bottega.events.types import UNFINISHED, Event, EventType
from bottega.runs import interrupts, messages

_SPENDING = (EventType.LLM_COMPLETED, EventType.LLM_FAILED, EventType.LLM_CANCELLED)
_e = run_events.c


@dataclass(frozen=True, slots=True)
class Round:
    """A round of a run.

    Attributes:
        until: ``seq`` of the round's last event.
        said: messages of the root agent's model in order, without those that a check rejected.
        calls: interrupts that the client has to answer; empty: the run ended, or goes on.
        usage: tokens as the run's ``usage`` has them; ``None``: not known yet.
    """

    until: int
    said: Sequence[AssistantMessage]
    calls: Sequence[Mapping[str, Any]]
    usage: Mapping[str, Any] | None


async def round_of(tx: AsyncConnection, run: Mapping[str, Any], after: int) -> Round:
    """Return the round of a run that begins after the event with this ``seq``."""
    calls = await interrupts.of_client(tx, run["tenant_id"], run_id=run["id"])
    own = {each["id"] for each in calls}
    until: int = run["last_seq"]
    asked: Collection[UUID] = ()
    events: list[Event] = []
    for event in await messages.read_events(tx, run, *_since(after)):
        if event.type == EventType.RUN_WAITING:
            asked = own.intersection(map(UUID, event.data.get("interrupts", ())))
            if asked:
                until = event.seq
                break
        events.append(event)
    own_calls = replay_run(events).task(None).calls.values()
    said = [call.answer for call in own_calls if call.answer and not call.is_rejected]
    is_over = not asked and run["status"] not in UNFINISHED
    wanted = [
        each
        for each in calls
        if (each["id"] in asked if asked else not is_over and each["status"] == "pending")
    ]
    spent = run["usage"] if is_over else await _spent(tx, run, until)
    before = await _spent(tx, run, after) if after and spent is not None else None
    return Round(until, said, wanted, _without(spent, before))


class Checks(NamedTuple):
    """Kinds of checks that the answer of a run's agent has to pass.

    Attributes:
        schema: the answer must fit a JSON Schema, the run's or the agent's.
        policy: the agent must have called certain tools.
    """

    schema: bool
    policy: bool


async def checks_of(tx: AsyncConnection, run: Mapping[str, Any]) -> Checks:
    """Return the kinds of checks that the run's answer has to pass."""
    versions = AGENTS.versions.c
    names = ("output_schema", "tool_policy")
    query = select(*(versions.definition[name].label(name) for name in names)).where(
        versions.tenant_id == run["tenant_id"],
        versions.name == run["agent"],
        versions.version == run["pinned"]["agents"].get(run["agent"]),
    )
    row = dict((await tx.execute(query)).mappings().one_or_none() or {})
    schema = run["output_schema"] or row.get("output_schema")
    return Checks(schema is not None, bool(row.get("tool_policy")))


def _since(after: int) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions for a round's events: answers of the root agent, waits of the run."""
    of_root = (EventType.LLM_COMPLETED, EventType.ANSWER_REJECTED)
    own = and_(_e.type.in_(of_root), _e.task_id.is_(None))
    return _e.step > after, _e.seq > after, or_(own, _e.type == EventType.RUN_WAITING)


async def _spent(
    tx: AsyncConnection, run: Mapping[str, Any], until: int
) -> Mapping[str, Any] | None:
    usage = func.sum_usage(func.array_agg(_e.data["usage"]), type_=JSONB)
    query = select(usage).where(
        _e.tenant_id == run["tenant_id"],
        _e.run_id == run["id"],
        _e.seq <= until,
        _e.type.in_(_SPENDING),
        _e.data.has_key("usage"),
    )
    found: Mapping[str, Any] | None = await tx.scalar(query)
    return found


def _without(
    spent: Mapping[str, Any] | None, before: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    if spent is None or before is None:
        return spent
    names = ("input", "output", "cached", "reasoning")
    return {name: max(0, spent.get(name, 0) - before.get(name, 0)) for name in names}
