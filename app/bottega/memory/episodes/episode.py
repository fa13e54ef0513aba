"""Episodes, which are the stored records of finished runs.

An episode is immutable. :class:`State` stores all later changes: accesses, age, consolidation and
feedback.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timedelta
from enum import StrEnum
from hashlib import md5
from typing import Any
from uuid import UUID

from pydantic import TypeAdapter

from bottega.memory.text.identities import without_identities

LONGEST_TEXT = 2000
"""Maximum number of characters of an input or output in an episode; longer values are bodies."""
LONGEST_SUMMARY = 2000
"""Maximum number of characters of each text that searches use."""


class Outcome(StrEnum):
    """Outcome of a run.

    - UNKNOWN: the run completed, and neither a person nor a check has judged the run.
    - SUCCESS, PARTIAL: feedback or checks judged the run as a success, or as a partial success.
    - FAILURE: feedback or checks judged the run as a failure, or the run failed or timed out.
    - CANCELLED: the run was cancelled.
    """

    UNKNOWN = "UNKNOWN"
    SUCCESS = "SUCCESS"
    PARTIAL = "PARTIAL"
    FAILURE = "FAILURE"
    CANCELLED = "CANCELLED"


class StorageState(StrEnum):
    """Stage of an episode's life.

    As time passes, an active episode becomes mature, then aged, then archived, but is never
    deleted. Similar mature episodes may be consolidated. The trace of an aged episode is in the
    object store, and only queries with a similar vector find the episode. An archived episode can
    be read by id, but not searched.
    """

    ACTIVE = "active"
    MATURE = "mature"
    AGED = "aged"
    ARCHIVED = "archived"
    CONSOLIDATED = "consolidated"
    DELETED = "deleted"
    QUARANTINED = "quarantined"


_DAYS = {StorageState.MATURE: 30, StorageState.AGED: 180, StorageState.ARCHIVED: 365}


def ended_before(stage: StorageState, now: datetime) -> datetime:
    """Return a time. Episodes that ended before this time are due for ``stage``."""
    return now - timedelta(days=_DAYS[stage])


SEARCHABLE = frozenset((StorageState.ACTIVE, StorageState.MATURE, StorageState.AGED))

OWN_RUN, READ_OUTSIDE, IMPORTED = 3, 2, 1
"""Levels of trust: a run of this service, a run that read external text, and an import."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Texts of an episode for searches; each has at most :data:`LONGEST_SUMMARY` characters."""

    task: str = ""
    result: str = ""
    errors: str = ""
    steps: str = ""

    @property
    def whole(self) -> str:
        return "\n".join(text for text in (self.task, self.result, self.errors, self.steps) if text)


@dataclass(frozen=True, slots=True)
class State:
    """Fields of an episode that may change.

    Attributes:
        feedback: ``{outcome, score, comment, by, at}``, if a user gave feedback on the run.
        label: outcome that feedback or checks gave the run; ``None``: the run was not judged.
        label_source: ``feedback``, ``eval`` or ``check``.
        verdict: ``{outcome, reason, by, at}`` of the judgement that has the most weight.
        bodies: fields that are stored separately. Each body has ``part`` (``trace``, ``input`` or
            ``output``), ``bytes`` (size of the JSON), and ``storage`` (``database`` or
            ``objects``).
    """

    state: StorageState = StorageState.ACTIVE
    access_count: int = 0
    last_access: datetime | None = None
    consolidated_into: UUID | None = None
    feedback: Mapping[str, Any] | None = None
    bodies: tuple[Mapping[str, Any], ...] = ()
    label: Outcome | None = None
    label_source: str | None = None
    verdict: Mapping[str, Any] | None = None

    @property
    def referenced_by(self) -> tuple[UUID, ...]:
        return () if self.consolidated_into is None else (self.consolidated_into,)


@dataclass(frozen=True, slots=True)
class Episode:
    """Record of a finished run; ``docs/explain/memory.md`` describes the keys of its objects.

    Attributes:
        at: time at which the run ended.
        kind: ``episode``, or ``consolidated`` if it replaces several similar episodes.
        user_id: the integrator's name for the end user to whom the episode belongs.
        agent: the run's root agent; ``None``: the run executed a graph.
        outcome: outcome of the run at the run's end; ``state.label`` overrides this outcome.
        failure_signature: signature of the first failure (:mod:`bottega.memory.text.signature`).
        failure_signatures: signatures of all failures in order, without duplicates.
        trust: 3 for a run of this service, 2 if this run read external text, 1 for an import.
        origin: keys ``principal``, ``run``, ``tool``.
        task: keys ``original_input``, ``goals``, ``constraints``, ``context``, ``complexity``.
        execution: keys ``plan``, ``adaptations``, ``duration_s``, ``resources``.
        result: keys ``output``, ``error``, ``side_effects``, ``quality``.
        metadata: keys ``tools_used``, ``strategies_applied``, ``agents``.
        trace: the steps, in order.
        input, output: the full values, if they are too long for ``task`` and ``result``.
        parts: work of nodes and sub-agents, in order; results of searches and lists omit this
            field.
    """

    at: datetime
    outcome: Outcome
    task: Mapping[str, Any]
    summary: Summary
    id: UUID | None = None
    kind: str = "episode"
    run_id: UUID | None = None
    session_id: str | None = None
    user_id: str | None = None
    agent: str | None = None
    domain: str | None = None
    task_type: str | None = None
    failure_signature: str | None = None
    failure_signatures: tuple[str, ...] = ()
    trust: int = IMPORTED
    origin: Mapping[str, Any] = field(default_factory=dict)
    execution: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    reflection: Mapping[str, Any] | None = None
    trace: Sequence[Mapping[str, Any]] | None = None
    input: Any = None
    output: Any = None
    instances: int = 1
    parts: Sequence[Mapping[str, Any]] = ()
    state: State = State()

    def to_row(self) -> dict[str, Any]:
        """Return the episode as an argument of the SQL function ``store_episode``."""
        bodies = {"trace": self.trace, "input": self.input, "output": self.output}
        return {
            **{name: getattr(self, name) for name in _COLUMNS},
            "summary": asdict(self.summary),
            "bodies": {part: body for part, body in bodies.items() if body is not None},
            "state": self.state.state,
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any], **more: Any) -> "Episode":
        """Build an episode from a row of ``episodes`` with decoded JSON.

        Args:
            more: fields that are not in the row (``state``, ``tags``, the bodies …).
        """
        return _FROM_ROW.validate_python({**row, **more})

    @property
    def judged(self) -> Outcome:
        """Outcome from feedback or checks; if neither exists, the outcome at the run's end."""
        return self.state.label or self.outcome

    @property
    def verdict(self) -> Mapping[str, Any] | None:
        """``{outcome, reason, by, at}`` of a judgement or of a decision on a tool call."""
        if self.state.verdict is not None or not (decided := self.metadata.get("approval")):
            return self.state.verdict
        return {"outcome": None, "reason": decided["reason"], "by": "approval", "at": self.at}

    @property
    def failed_because(self) -> str:
        """The reason of a verdict that is not success, as a line for a model; or an empty text."""
        verdict = self.verdict or {}
        reason = " ".join((verdict.get("reason") or "").split())
        if not reason or self.judged is Outcome.SUCCESS:
            return ""
        by = verdict["by"] if verdict["by"] != "approval" else self.metadata["approval"]["how"]
        short = without_identities(reason)[:300].rstrip(". ")
        return f"Failed because: {short} ({by})."


_FROM_ROW = TypeAdapter(Episode)
_COLUMNS = tuple(
    each.name
    for each in fields(Episode)
    if each.name not in ("summary", "trace", "input", "output", "state")
)


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Filter of episodes: all conditions that are neither ``None`` nor empty must be true.

    Attributes:
        tags: the episode must have all these tags.
        after, before: exclusive bounds of the end time.
        part: the episode must contain work of this node (``GRAPH/NODE``) or sub-agent.
        min_trust: minimum trust of the episode, 1 to 3.
    """

    domain: str | None = None
    task_type: str | None = None
    outcomes: Sequence[str] = ()
    session_id: str | None = None
    tags: Sequence[str] = ()
    after: datetime | None = None
    before: datetime | None = None
    failure_signature: str | None = None
    part: str | None = None
    min_trust: int = 1


def episode_id_of(run_id: UUID) -> UUID:
    return derived_id(f"episode {run_id}")


def derived_id(text: str) -> UUID:
    return UUID(md5(text.encode(), usedforsecurity=False).hexdigest())
