"""Episodes: the stored records of finished runs. Pure.

An episode is immutable. Later changes (accesses, age, consolidation, feedback) are in
:class:`State`.
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
"""Characters of an input or output in the episode itself; longer ones are stored as bodies."""
LONGEST_SUMMARY = 2000
"""Characters of each text that is searched."""


class Outcome(StrEnum):
    """Outcome of a run.

    UNKNOWN: it completed, and nobody judged it. SUCCESS, PARTIAL: by feedback or checks. FAILURE:
    by these, or it failed or timed out. CANCELLED: it was cancelled, which says nothing about its
    work.
    """

    UNKNOWN = "UNKNOWN"
    SUCCESS = "SUCCESS"
    PARTIAL = "PARTIAL"
    FAILURE = "FAILURE"
    CANCELLED = "CANCELLED"


class StorageState(StrEnum):
    """Stage of an episode's life.

    Age moves an active episode on, and never deletes it: similar mature ones may be consolidated;
    aged ones have their trace in cold storage, and only queries with a near vector find them;
    archived ones are not searchable, but readable by id.
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
    """Return the time before which episodes of ``stage``, or a later one, ended."""
    return now - timedelta(days=_DAYS[stage])


SEARCHABLE = frozenset((StorageState.ACTIVE, StorageState.MATURE, StorageState.AGED))

OWN_RUN, READ_OUTSIDE, IMPORTED = 3, 2, 1
"""Levels of trust: an own run, a run that read text of others, an import."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Texts by which an episode is searched and embedded, at most :data:`LONGEST_SUMMARY` each."""

    task: str = ""
    result: str = ""
    errors: str = ""
    steps: str = ""

    @property
    def whole(self) -> str:
        """All texts as one."""
        return "\n".join(text for text in (self.task, self.result, self.errors, self.steps) if text)


@dataclass(frozen=True, slots=True)
class State:
    """Mutable state of an episode.

    Attributes:
        feedback: ``{outcome, score, comment, by, at}``, if a user gave feedback on its run.
        label: outcome of its run by feedback or checks; ``None``: nobody judged it.
        label_source: ``feedback``, ``eval`` or ``check``.
        verdict: ``{outcome, reason, by, at}`` of who counts most among those that judged the run.
        bodies: the parts that are stored apart: ``part`` (``trace``, ``input`` or ``output``),
            ``bytes`` of its JSON, ``storage`` (``database`` or ``objects``).
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
    """Episode; ``docs/explain/memory.md`` describes the fields of its parts.

    Attributes:
        at: the end of the run.
        kind: ``episode``, or ``consolidated`` for one that replaces several similar ones.
        user_id: the integrator's name for the end user that owns it.
        agent: the run's first agent; ``None`` for the run of a DAG.
        outcome: of the run, as known at its end; ``state.label`` counts more.
        failure_signature: of the first failure (:mod:`bottega.memory.text.signature`).
        failure_signatures: of all failures, without duplicates; that of the first one comes first.
        trust: 3 own run, 2 a run that read text of others, 1 an import.
        origin: ``principal``, ``run``, ``tool``.
        task: ``original_input``, ``goals``, ``constraints``, ``context``, ``complexity``.
        execution: ``plan``, ``adaptations``, ``duration_s``, ``resources``.
        result: ``output``, ``error``, ``side_effects``, ``quality``.
        metadata: ``tools_used``, ``strategies_applied``, ``agents``.
        trace: the steps, in order.
        input, output: the full values, if too long for ``task`` and ``result``.
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
            more: fields stored elsewhere (``state``, ``tags``, the bodies …).
        """
        return _FROM_ROW.validate_python({**row, **more})

    @property
    def judged(self) -> Outcome:
        """The label if it has one, else the outcome of the run."""
        return self.state.label or self.outcome

    @property
    def verdict(self) -> Mapping[str, Any] | None:
        """``{outcome, reason, by, at}`` of who judged the run, or decided on its tool calls."""
        if self.state.verdict is not None or not (decided := self.metadata.get("approval")):
            return self.state.verdict
        return {"outcome": None, "reason": decided["reason"], "by": "approval", "at": self.at}

    @property
    def failed_because(self) -> str:
        """One line for a model: the reason of a verdict that is no success; else empty."""
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
    """Filter of episodes: all conditions must hold; ``None`` and empty ones are ignored.

    Attributes:
        tags: the episode must have all of them.
        after, before: bounds of the end time, exclusive.
        min_trust: 1 to 3.
    """

    domain: str | None = None
    task_type: str | None = None
    outcomes: tuple[Outcome, ...] = ()
    session_id: str | None = None
    tags: tuple[str, ...] = ()
    after: datetime | None = None
    before: datetime | None = None
    failure_signature: str | None = None
    min_trust: int = 1


def episode_id_of(run_id: UUID) -> UUID:
    return derived_id(f"episode {run_id}")


def derived_id(text: str) -> UUID:
    """Return an id that depends on a text only."""
    return UUID(md5(text.encode(), usedforsecurity=False).hexdigest())
