"""The errors that Bottega raises; each error has a stable code and a kind.

    BottegaError
    ├── InvalidInputError     invalid       the request cannot be carried out as written
    │   ├── CycleError        conflict      an edge or a sub-agent would close a cycle
    │   ├── UnknownAgentError invalid       no agent of this name
    │   ├── UserRequiredError invalid       the key requires an end user, but the request names none
    │   ├── InvalidQueryError invalid       an agent cannot answer this query
    │   └── NoProviderError   invalid       an agent has no model
    ├── UnauthenticatedError  unauthenticated  no valid credentials
    ├── ForbiddenError        forbidden     the caller may not do this
    ├── NotFoundError         not_found
    ├── ConflictError         conflict
    │   ├── AgentBusyError    conflict      another query of the agent has not ended
    │   └── BusyError         conflict      another run of the conversation has not ended
    ├── VersionConflictError  precondition
    ├── LimitedError          limited       a limit is reached; a later retry may work
    ├── SubagentRefusedError  limited       a task was refused at its dispatch
    │   ├── SubagentQueueFullError      too many tasks wait
    │   ├── SubagentDepthExceededError  tasks would be nested too deeply
    │   ├── SubagentQuotaExceededError  the parent's or tenant's quota is used up
    │   └── SubagentCircuitOpenError    tasks of the same agent failed repeatedly
    ├── UnavailableError      unavailable   a dependency is down; a retry may work
    │   └── DatabaseAwayError unavailable   the database is away
    ├── UpstreamError         upstream      a tenant's server does not answer
    ├── ModelError            model         a model or its server failed (see ``retryable``)
    ├── HookContractError     internal      a hook's result is not allowed for its event
    ├── PluginError           internal      a plugin failed to configure an agent
    ├── HistoryError          internal      a model server would refuse the history
    ├── IllegalTransition     internal      a status cannot change to the new status
    ├── BudgetExhaustedError  internal      the run's tokens are used up
    │   └── BudgetBusyError   internal      a call waited too long for the tenant's budget
    └── FencedError           internal      another worker has claimed this worker's run

Bottega itself decides by the kind: the API chooses an HTTP status, and a worker retries a run or
ends it. Clients of the API should decide by the *code*. The text is for people.
"""

from collections.abc import Sequence
from enum import StrEnum


class ErrorKind(StrEnum):
    """The kind of a failure; it does not depend on HTTP."""

    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"
    PRECONDITION = "precondition"
    LIMITED = "limited"
    UNAVAILABLE = "unavailable"
    MODEL = "model"
    UPSTREAM = "upstream"
    INTERNAL = "internal"


LONGEST_DETAIL = 4000


def shortened(text: str) -> str:
    """Cut an error text, which may contain long quotes, to ``LONGEST_DETAIL`` characters."""
    return text if len(text) <= LONGEST_DETAIL else f"{text[: LONGEST_DETAIL - 1]}…"


class BottegaError(Exception):
    """Base class of all errors.

    Args:
        detail: a sentence about the error and its correction, cut to ``LONGEST_DETAIL``.
        code: stable identifier; defaults to the class's code.
        pointer: JSON Pointer (RFC 6901) to the wrong part of the input, if any.
    """

    kind: ErrorKind = ErrorKind.INTERNAL
    code: str = "internal"

    def __init__(self, detail: str, *, code: str | None = None, pointer: str | None = None) -> None:
        self.detail = shortened(detail)
        super().__init__(self.detail)
        self.pointer = pointer
        if code is not None:
            self.code = code


class InvalidInputError(BottegaError):
    kind = ErrorKind.INVALID
    code = "invalid"


class CycleError(InvalidInputError):
    """An edge or a sub-agent would close a cycle; ``path``: the cycle's nodes, first = last."""

    kind = ErrorKind.CONFLICT
    code = "cycle"

    def __init__(self, path: Sequence[str], *, what: str = "edge") -> None:
        self.path = tuple(path)
        super().__init__(f"this {what} would close a cycle: {' -> '.join(self.path)}")


class UnknownAgentError(InvalidInputError):
    code = "unknown_agent"


class UnknownReferenceError(InvalidInputError):
    """Definitions refer to missing definitions; ``places``: JSON Pointer and detail of each."""

    code = "unknown_reference"

    def __init__(self, places: Sequence[tuple[str, str]]) -> None:
        self.places = tuple(places)
        said = "; ".join(f"{pointer}: {detail}" for pointer, detail in self.places)
        super().__init__(
            f"{said}. Correct the names, or send `allow_missing` to store the definitions anyway"
        )


class UserRequiredError(InvalidInputError):
    """The key requires an end user, but the request names none; ``pointer``: the field ``user``."""

    code = "user_required"

    def __init__(self, pointer: str | None) -> None:
        super().__init__(
            "this key requires that each request names the end user it is for: send 'user'",
            pointer=pointer,
        )


class InvalidQueryError(InvalidInputError):
    code = "invalid_query"


class NoProviderError(InvalidInputError):
    code = "no_provider"


class UnauthenticatedError(BottegaError):
    kind = ErrorKind.UNAUTHENTICATED
    code = "unauthenticated"


class ForbiddenError(BottegaError):
    kind = ErrorKind.FORBIDDEN
    code = "forbidden"


class NotFoundError(BottegaError):
    kind = ErrorKind.NOT_FOUND
    code = "not_found"


def no_run(run_id: object) -> NotFoundError:
    """Return the error for a run that is not stored."""
    return NotFoundError(
        f"there is no run {run_id}: it never existed, was deleted, or was lost when the database "
        "failed over to a standby that did not have the last commits"
    )


class ConflictError(BottegaError):
    kind = ErrorKind.CONFLICT
    code = "conflict"


class LogWentBackError(ConflictError):
    """A client has an event of a run, but the run's log no longer has this event."""

    code = "log_went_back"


class AgentBusyError(ConflictError):
    """An agent object gets a query before the end of its previous query: histories would mix."""

    code = "agent_busy"

    def __init__(self, agent: str) -> None:
        super().__init__(
            f"the agent '{agent}' already answers a query: await that query, or query a copy "
            "(agent.fresh_copy())"
        )


class BusyError(ConflictError):
    """A conversation has an unfinished run; ``run_id`` is the oldest unfinished run."""

    code = "conversation_busy"

    def __init__(self, detail: str, *, run_id: str) -> None:
        super().__init__(detail)
        self.run_id = run_id


class UserErasingError(ConflictError):
    """A request names an end user whose data is being erased."""

    code = "user_erasing"

    def __init__(self) -> None:
        super().__init__(
            "the data of this user is being erased: wait until GET /v1/users/{user} answers 404"
        )


class VersionConflictError(BottegaError):
    kind = ErrorKind.PRECONDITION
    code = "version_conflict"


class LimitedError(BottegaError):
    """A limit of the tenant is reached; a retry after ``retry_after_s`` seconds may succeed."""

    kind = ErrorKind.LIMITED
    code = "limited"

    def __init__(self, detail: str, *, code: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(detail, code=code)
        self.retry_after_s = retry_after_s


class SubagentRefusedError(BottegaError):
    """The dispatch of a task was refused; the model reads the detail.

    Args:
        about: the limit and the used amount, as in the event ``subagent.backpressure``.

    Attributes:
        reason: reason of the refusal; a label of metrics.
    """

    kind = ErrorKind.LIMITED
    code = "subagent_refused"
    reason = "queue_full"

    def __init__(self, detail: str, **about: int | float) -> None:
        super().__init__(detail)
        self.about = about


class SubagentQueueFullError(SubagentRefusedError):
    code = "subagent_queue_full"


class SubagentDepthExceededError(SubagentRefusedError):
    code = "subagent_depth_exceeded"
    reason = "depth"


class SubagentQuotaExceededError(SubagentRefusedError):
    """A parent has too many tasks, or too little of a budget remains for one more task."""

    code = "subagent_quota_exceeded"

    def __init__(self, detail: str, *, reason: str = "queue_full", **about: int | float) -> None:
        super().__init__(detail, **about)
        self.reason = reason


class SubagentCircuitOpenError(SubagentRefusedError):
    """The circuit breaker of the task's agent is open; try again after ``retry_after_ms``."""

    code = "subagent_circuit_open"
    reason = "circuit_open"

    def __init__(self, detail: str, *, retry_after_ms: int) -> None:
        super().__init__(detail, retry_after_ms=retry_after_ms)
        self.retry_after_ms = retry_after_ms


class UnavailableError(BottegaError):
    kind = ErrorKind.UNAVAILABLE
    code = "unavailable"


class DatabaseAwayError(UnavailableError):
    code = "database_unavailable"


class UpstreamError(BottegaError):
    """A tenant's server is unreachable, or its response is invalid."""

    kind = ErrorKind.UPSTREAM
    code = "upstream"


class ModelError(BottegaError):
    """A failure of a model or of its server.

    Args:
        retryable: true if the same call may succeed later.
        retry_after_s: seconds to wait before a retry; ``None``: the server sent no time.
        last_code: code of the last failed try, if ``code`` is for several failed tries.
    """

    kind = ErrorKind.MODEL
    code = "model_error"

    def __init__(
        self,
        detail: str,
        *,
        code: str | None = None,
        retryable: bool = False,
        retry_after_s: float | None = None,
        last_code: str | None = None,
    ) -> None:
        super().__init__(detail, code=code)
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.last_code = last_code


class HookContractError(BottegaError):
    code = "hook_contract"


class PluginError(BottegaError):
    code = "plugin_failed"


class HistoryError(BottegaError):
    code = "history"


class IllegalTransition(BottegaError):  # noqa: N818 (a public name)
    code = "illegal_transition"


class BudgetExhaustedError(BottegaError):
    code = "budget_exhausted"


class BudgetBusyError(BudgetExhaustedError):
    """A call waited too long for a budget: other calls have reserved it, or it cannot be read."""


class FencedError(BottegaError):
    code = "fenced"


class PendingRequestError(BottegaError):
    """A run may not complete yet, because it must first handle a message or a cancellation."""

    code = "pending_request"


def is_internal(error: Exception) -> bool:
    """Return true for errors of the kind ``internal``."""
    return isinstance(error, BottegaError) and error.kind is ErrorKind.INTERNAL
