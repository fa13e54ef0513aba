"""Context of a tool call: tenant, end user, session, and whether the call is cancelled."""

import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from pydantic_core import from_json, to_json

from bottega.errors import InvalidInputError

MOST_ANNOTATION_BYTES = 8192
"""Limit of the annotations of one tool call, or of all hooks of one query, in bytes of JSON."""


class QueryScopePort(Protocol):
    """Work that a query started and that must stop when the query ends."""

    async def close(self, error: BaseException | None = None) -> None:
        """Stop the work of a query that has ended or failed with ``error``. Wait for the stop."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The run, tenant, end user and session of a query. An unknown field is ``None``.

    Attributes:
        run_id: id of the run. The service sets the id; a program without the service may
            choose an id.
        tenant: name of the tenant.
        user: the name that the tenant's product uses for the end user.
        session_id: id of the session, which is a conversation.
    """

    run_id: UUID | None = None
    tenant: str | None = None
    user: str | None = None
    session_id: str | None = None


class CancelScope:
    """A flag that is set when a tool call is over: done, timed out or cancelled with the run.

    An ``async`` tool is cancelled like any task. Nothing can cancel a thread, so a tool that works
    in a thread for a long time should check this flag and stop.

    Attributes:
        is_cancelled: true when no one waits for the call's result any more.
    """

    def __init__(self) -> None:
        self.is_cancelled = False
        self._waits: list[threading.Event] = []

    def wait(self, seconds: float) -> bool:
        """Block a tool's thread until the call is over (return true) or ``seconds`` have passed."""
        over = threading.Event()
        self._waits.append(over)
        try:
            return self.is_cancelled or over.wait(seconds)
        finally:
            self._waits.remove(over)

    def cancel(self) -> None:
        """Set the flag, because the call is over. The query continues."""
        self.is_cancelled = True
        for over in tuple(self._waits):
            over.set()


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The context of a tool call.

    A tool receives the context if its function, or its class's ``execute``, has a parameter of
    this type. The tool's schema omits the parameter, so the model does not see the context.

    Attributes:
        agent: name of the agent that calls the tool.
        caller: run, tenant, end user and session of the query.
        task_id: id of the sub-agent's task, or ``None`` for the root agent and outside a run.
        tool_call_id: the call's id from the model.
        cancel: flag that is set when the call is over.
        annotations: metadata that :meth:`annotate` collected.
    """

    agent: str = ""
    caller: Caller = Caller()
    task_id: UUID | None = None
    tool_call_id: str = ""
    cancel: CancelScope = field(default_factory=CancelScope)
    annotations: dict[str, Any] = field(default_factory=dict)

    @property
    def run_id(self) -> UUID | None:
        """Id of the run, or ``None`` if it is unknown, as in a program without the service."""
        return self.caller.run_id

    @property
    def tenant(self) -> str | None:
        """Name of the tenant, or ``None`` if it is unknown."""
        return self.caller.tenant

    @property
    def user(self) -> str | None:
        """Name of the end user, or ``None`` if it is unknown."""
        return self.caller.user

    @property
    def session_id(self) -> str | None:
        """Id of the session, or ``None`` if the run belongs to no session."""
        return self.caller.session_id

    def annotate(self, **metadata: Any) -> None:
        """Add metadata to the answer that the agent publishes in the shared memory after the query.

        The metadata is dropped if the tool's result is an error.

        Raises:
            InvalidInputError: JSON cannot represent a value, or all values together exceed 8,192
                bytes.
        """
        self.annotations.update(annotated(self.annotations, metadata))


def annotated(known: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Merge new annotations into earlier annotations; return JSON values.

    Raises:
        InvalidInputError: JSON cannot represent a value, or the result is too long.
    """
    try:
        encoded = to_json({**known, **more})
    except ValueError as error:  # also raised for a type that JSON does not have
        raise InvalidInputError(f"annotations must be JSON values: {error}") from error
    if len(encoded) > MOST_ANNOTATION_BYTES:
        raise InvalidInputError(
            f"the annotations have {len(encoded):,} bytes as JSON, but at most "
            f"{MOST_ANNOTATION_BYTES:,} are allowed: annotate with a reference to long content"
        )
    values: dict[str, Any] = from_json(encoded)
    return values


current_context: ContextVar[ToolContext | None] = ContextVar("current_context", default=None)
