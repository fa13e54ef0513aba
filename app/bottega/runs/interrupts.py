"""Client operations on interrupts. An interrupt is a tool call that waits for people."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from pydantic_core import to_json
from sqlalchemy import ColumnElement, and_, or_, select, text, true
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from bottega.db.pages import PageItems, fetch_page, lateral_rows, paged
from bottega.db.pool import AsyncConnection
from bottega.db.tables import interrupts, runs
from bottega.errors import ConflictError, InvalidInputError, NotFoundError
from bottega.json_schema.arguments import argument_schema
from bottega.json_schema.output import output_schema
from bottega.tenants import audit

Place = tuple[datetime, UUID]
"""Position in a list of interrupts: time of creation or decision, and id of an interrupt."""
_OF_FEW = ("run_id", "session_id", "user_id")
"""Filters that have an index. The index does not have the order of the list."""

_RESOLVE = text(
    "SELECT resolve_interrupt(:tenant, :id, 'resolved', CAST(:said AS jsonb), CAST(:by AS jsonb))"
    " ->> 'refused'"
)
_FIELDS = {
    "approval": frozenset(("decision", "arguments", "comment")),
    "question": frozenset(("answer",)),
    "client_tool": frozenset(("result", "error")),
}
_now = interrupts.c
_OF_RUN = ("agent", "graph", "principal", "user_id", "last_seq")
_OF_CALL = ("id", "run_id", "tool", "tool_call_id", "arguments", "status")
_same_run = and_(runs.c.tenant_id == _now.tenant_id, runs.c.id == _now.run_id)
_run = lateral_rows(runs, _same_run, "session_id", *_OF_RUN)
_SHOWN = select(interrupts, _run.c.session_id, _run.c.user_id.label("user")).join(_run, true())
_of_runs = lateral_rows(interrupts, _same_run, *_now.keys())
_SHOWN_OF_RUNS = select(_of_runs, runs.c.session_id, runs.c.user_id.label("user")).join_from(
    runs, _of_runs, true()
)


async def page(
    tx: AsyncConnection,
    tenant_id: UUID,
    filters: Mapping[str, Any],
    *,
    by_decision: bool = False,
    after: Place | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List a page of interrupts, sorted by time.

    Args:
        filters: required values by column; ``None``: any value.
        by_decision: list only decided interrupts, sorted by the time of their decisions.
    """
    values = {name: value for name, value in filters.items() if value is not None}
    few = values.get("status") == "pending" or not values.keys().isdisjoint(_OF_FEW)
    of_runs = {name: values.pop(name) for name in _OF_FEW[1:] if name in values}
    columns: ReadOnlyColumnCollection[str, Any] = _of_runs.c if of_runs else _now
    query = _SHOWN.where(_now.tenant_id == tenant_id)
    if of_runs:
        own = (runs.c[name] == value for name, value in of_runs.items())
        query = _SHOWN_OF_RUNS.where(runs.c.tenant_id == tenant_id, *own)
    query = query.where(*(columns[name] == value for name, value in values.items()))
    at = columns.resolved_at if by_decision else columns.created_at
    if by_decision:
        query = query.where(at.is_not(None))
    query = paged(query, at, columns.id, after=after, descending=descending)
    return await fetch_page(tx, query, limit, by_index=not few)


async def get(tx: AsyncConnection, tenant_id: UUID, interrupt_id: UUID) -> dict[str, Any]:
    """Return an interrupt.

    Raises:
        NotFoundError: the tenant has no such interrupt.
    """
    query = _SHOWN.where(_now.tenant_id == tenant_id, _now.id == interrupt_id)
    row = (await tx.execute(query)).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"there is no interrupt {interrupt_id}")
    return dict(row)


async def of_client(
    tx: AsyncConnection,
    tenant_id: UUID,
    *,
    ids: Sequence[UUID] = (),
    run_id: UUID | None = None,
    session_id: str | None = None,
) -> list[dict[str, Any]]:
    """Return the client tool calls that meet at least one of the conditions, the oldest first.

    Args:
        ids: return the calls with these ids.
        run_id: return all calls of this run.
        session_id: return the pending calls of this session.

    Returns:
        ``id``, ``run_id``, ``tool``, ``tool_call_id``, ``arguments`` and ``status`` of each call,
        and ``agent``, ``graph``, ``principal``, ``user_id`` and ``last_seq`` of the call's run.
    """
    conditions: list[ColumnElement[bool]] = [_now.id.in_(ids)]
    conditions += [] if run_id is None else [_now.run_id == run_id]
    if session_id is not None:
        conditions.append(and_(_run.c.session_id == session_id, _now.status == "pending"))
    query = (
        select(*(_now[name] for name in _OF_CALL), *(_run.c[name] for name in _OF_RUN))
        .join(_run, true())
        .where(
            _now.tenant_id == tenant_id,
            or_(*conditions),
            _now.kind == "client_tool",
        )
        .order_by(_now.created_at, _now.id)
    )
    return [dict(row) for row in (await tx.execute(query)).mappings()]


async def started_with(
    connection: AsyncConnection, tenant_id: UUID, run_id: UUID
) -> Mapping[str, Any]:
    """Return a run's ``agent``, ``principal``, ``user`` and ``metadata``; ``{}``: unknown run."""
    columns = runs.c.agent, runs.c.principal, runs.c.user_id.label("user"), runs.c.metadata
    query = select(*columns).where(runs.c.tenant_id == tenant_id, runs.c.id == run_id)
    row = (await connection.execute(query)).mappings().one_or_none()
    return {} if row is None else dict(row)


async def resolve(
    tx: AsyncConnection,
    interrupt: Mapping[str, Any],
    answer: Mapping[str, Any],
    *,
    by: Mapping[str, Any],
    actor: str,
) -> dict[str, Any]:
    """Store the decision on an interrupt, so that the run can continue. Return the interrupt.

    Args:
        answer: the decision; see :class:`bottega.agents.approval.Resolution`.
        by: ``key_id`` and ``name`` of the API key that sent the decision.

    Raises:
        InvalidInputError: ``answer`` is not a valid decision on an interrupt of this kind.
        ConflictError: the decision is too late: ``resolved``, ``expired`` or ``cancelled``.
    """
    if interrupt["status"] != "pending":
        raise _too_late(interrupt["status"])
    await _check(interrupt, answer)
    tenant_id, interrupt_id = interrupt["tenant_id"], interrupt["id"]
    values = {"tenant": tenant_id, "id": interrupt_id}
    values |= {"said": to_json(answer).decode(), "by": to_json(by).decode()}
    if refused := await tx.scalar(_RESOLVE, values):
        raise _too_late(refused)
    details = {"kind": interrupt["kind"], "tool": interrupt["tool"]}
    if "decision" in answer:
        details["decision"] = answer["decision"]
    await audit.note(tx, tenant_id, actor, "interrupt.resolve", str(interrupt_id), details)
    return await get(tx, tenant_id, interrupt_id)


def _too_late(status: str) -> ConflictError:
    return ConflictError(f"the interrupt is {status}: its run goes on without you", code=status)


async def _check(interrupt: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Check that a decision has the fields that the interrupt's kind and schema require."""
    kind, schema = interrupt["kind"], interrupt["schema"]
    if other := sorted(set(answer) - _FIELDS[kind]):
        expected = ", ".join(sorted(_FIELDS[kind]))
        raise InvalidInputError(
            f"an interrupt of the kind '{kind}' accepts only: {expected}", pointer=f"/{other[0]}"
        )
    if kind == "approval":
        await _check_approval(schema, answer)
    elif kind == "question":
        await _check_answer(schema, answer)
    elif len(answer) != 1:
        raise InvalidInputError("send exactly one of the fields 'result' and 'error'")


async def _check_approval(schema: Any, answer: Mapping[str, Any]) -> None:
    if "decision" not in answer:
        raise InvalidInputError("the decision is missing", pointer="/decision")
    if "arguments" not in answer:
        return
    if answer["decision"] == "deny":
        raise InvalidInputError("a denied call must have no 'arguments'", pointer="/arguments")
    try:
        known = await asyncio.to_thread(argument_schema, json.dumps(schema))
    except InvalidInputError:
        return  # the schema is invalid, so only the MCP server or the client checks the arguments
    try:
        await asyncio.to_thread(known.check, answer["arguments"])
    except InvalidInputError as error:
        raise InvalidInputError(error.detail, pointer="/arguments") from None


async def _check_answer(schema: Any, answer: Mapping[str, Any]) -> None:
    if "answer" not in answer:
        raise InvalidInputError("the answer is missing", pointer="/answer")
    if schema is None:
        return
    problems = await asyncio.to_thread(partial(output_schema(schema).problems, answer["answer"]))
    if problems:
        first = problems[0]
        raise InvalidInputError(first.message, pointer=f"/answer{first.pointer}")
