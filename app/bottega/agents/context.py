"""The context of a tool call: for whom it is made, and whether its result is still wanted."""

import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from pydantic_core import from_json, to_json

from bottega.errors import InvalidInputError

MOST_ANNOTATION_BYTES = 8192
"""Bytes of the annotations of one tool call, or of one query's hooks, as JSON."""


class QueryScopePort(Protocol):
    """Work started by a query that must not outlive it."""

    async def close(self, error: BaseException | None = None) -> None:
        """End the work after the query ended or failed with ``error``; return when none runs."""


@dataclass(frozen=True, slots=True)
class Caller:
    """For whom a query runs; its sub-agents have the same. ``None``: unknown.

    Attributes:
        run_id: the run; only in the service, or if the caller sets it.
        tenant: name of the tenant.
        user: the caller's name for the end user.
        session_id: the session, or conversation.
    """

    run_id: UUID | None = None
    tenant: str | None = None
    user: str | None = None
    session_id: str | None = None


class CancelScope:
    """Says whether a tool call is over: done, timed out or cancelled with its run.

    An ``async`` tool is cancelled like any task. A tool in a thread cannot be; one that works for
    long should ask here, and stop.
    """

    def __init__(self) -> None:
        self._over = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        """True once nobody waits for the call's result."""
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep in a tool's thread; return true, early, as soon as the call is over."""
        return self._over.wait(seconds)

    def cancel(self) -> None:
        """Say that the call is over; it does not stop the query."""
        self._over.set()


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The context of a tool call.

    A tool gets it as a parameter of this type, of its function or its class's ``execute``. The
    parameter is no argument for the model: the tool's schema does not have it.

    Attributes:
        agent: name of the agent that calls the tool.
        caller: for whom the query runs.
        task_id: the sub-agent's task; ``None`` for the root, and without a run.
        tool_call_id: the call's id from the model.
        cancel: says whether the result is still wanted.
        annotations: what :meth:`annotate` collected.
    """

    agent: str = ""
    caller: Caller = Caller()
    task_id: UUID | None = None
    tool_call_id: str = ""
    cancel: CancelScope = field(default_factory=CancelScope)
    annotations: dict[str, Any] = field(default_factory=dict)

    @property
    def run_id(self) -> UUID | None:
        """The run; ``None``: unknown, as in a program without the service."""
        return self.caller.run_id

    @property
    def tenant(self) -> str | None:
        """Name of the tenant; ``None``: unknown."""
        return self.caller.tenant

    @property
    def user(self) -> str | None:
        """The end user; ``None``: unknown."""
        return self.caller.user

    @property
    def session_id(self) -> str | None:
        """The session; ``None``: the run belongs to none."""
        return self.caller.session_id

    def annotate(self, **metadata: Any) -> None:
        """Add metadata to what the agent publishes in its graph at the end of the query.

        A result that is an error adds none.

        Raises:
            InvalidInputError: values that JSON cannot hold, or more than 8,192 bytes in all.
        """
        self.annotations.update(annotated(self.annotations, metadata))


def annotated(known: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return annotations with others added, as JSON values.

    Raises:
        InvalidInputError: a value is not JSON, or they are too long in all.
    """
    try:
        encoded = to_json({**known, **more})
    except ValueError as error:  # also of a type that JSON does not know
        raise InvalidInputError(f"annotations must be JSON values: {error}") from error
    if len(encoded) > MOST_ANNOTATION_BYTES:
        raise InvalidInputError(
            f"the annotations have {len(encoded):,} bytes as JSON, and {MOST_ANNOTATION_BYTES:,} "
            "are allowed: annotate with a reference to long content"
        )
    values: dict[str, Any] = from_json(encoded)
    return values


current_context: ContextVar[ToolContext | None] = ContextVar("current_context", default=None)
