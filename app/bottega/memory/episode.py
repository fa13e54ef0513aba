"""What a run did and what came of it, as it is remembered (spec page 4, M8). Pure.

An episode is written once. What happens to it later (it is read, it grows old, it becomes one with
others, a person judges it) is beside it, in :class:`State`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from enum import StrEnum
from hashlib import md5
from typing import Any
from uuid import UUID

LONGEST_TEXT = 2000
"""Characters of an input or an output that the episode itself holds; longer ones have a body."""
LONGEST_SUMMARY = 2000
"""Characters of each text that an episode is found by."""


class Outcome(StrEnum):
    """How it ended. SUCCESS: the run completed and no task failed. PARTIAL: it completed otherwise,
    or ran out of iterations with an answer. FAILURE: it failed or took too long. CANCELLED:
    somebody ended it, which says nothing about what it did."""

    SUCCESS = "SUCCESS"
    PARTIAL = "PARTIAL"
    FAILURE = "FAILURE"
    CANCELLED = "CANCELLED"


class StorageState(StrEnum):
    """Where an episode is in its life (spec page 4, M15 and M16)."""

    ACTIVE = "active"
    MATURE = "mature"
    AGED = "aged"
    ARCHIVED = "archived"
    CONSOLIDATED = "consolidated"
    DELETED = "deleted"
    QUARANTINED = "quarantined"


SEARCHABLE = frozenset((StorageState.ACTIVE, StorageState.MATURE, StorageState.AGED))

OWN_RUN, READ_OUTSIDE, IMPORTED = 3, 2, 1
"""How far an episode is trusted: a run of our own, one that read what others wrote, an import."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The four texts that an episode is found by, and embedded as; each of bounded length."""

    task: str = ""
    result: str = ""
    errors: str = ""
    steps: str = ""

    def clipped(self) -> "Summary":
        """The same, within bounds."""
        return Summary(*(getattr(self, each.name)[:LONGEST_SUMMARY] for each in fields(self)))

    @property
    def whole(self) -> str:
        """All of it, as one text."""
        return "\n".join(text for text in (self.task, self.result, self.errors, self.steps) if text)


@dataclass(frozen=True, slots=True)
class Body:
    """A part of an episode that lies beside it.

    Attributes:
        part: ``trace``, ``input`` or ``output``.
        bytes: its length, as JSON.
        object_key: where it is in the object store; ``None``: it is in the database.
    """

    part: str
    bytes: int
    object_key: str | None = None


@dataclass(frozen=True, slots=True)
class State:
    """What has happened to an episode since.

    Attributes:
        referenced_by: episodes that stand for it, or refer to it.
        feedback: ``{outcome, score, comment, by, at}``, if a person judged its run.
        bodies: where the parts are that lie beside it.
    """

    state: StorageState = StorageState.ACTIVE
    access_count: int = 0
    last_access: datetime | None = None
    consolidated_into: UUID | None = None
    deleted_at: datetime | None = None
    referenced_by: tuple[UUID, ...] = ()
    feedback: Mapping[str, Any] | None = None
    bodies: tuple[Body, ...] = ()


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode; ``docs/http.md`` has the fields of its parts.

    Attributes:
        at: when it ended.
        kind: ``episode``, or ``consolidated`` for what several that were alike became.
        user_id: the integrator's name for the end user that it belongs to.
        agent: the one that its run began with; of a DAG's run none.
        outcome: as the run ended; a person's word on it is in ``state.feedback``.
        failure_signature: of what it failed on first (:mod:`bottega.memory.signature`).
        trust: 3 own run, 2 a run that read what others wrote, 1 an import.
        origin: ``principal``, ``run``, ``tool``.
        task: ``original_input``, ``goals``, ``constraints``, ``context``, ``complexity``.
        execution: ``plan``, ``adaptations``, ``duration_s``, ``resources``.
        result: ``output``, ``error``, ``side_effects``, ``quality``.
        metadata: ``tools_used``, ``strategies_applied``, ``agents``.
        trace: the steps, in order.
        input, output: in full, where they are longer than what ``task`` and ``result`` hold.
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
        """The episode as the SQL function ``store_episode`` takes it."""
        bodies = {"trace": self.trace, "input": self.input, "output": self.output}
        row = {name: getattr(self, name) for name in _COLUMNS}
        return row | {
            "summary": {each.name: getattr(self.summary, each.name) for each in fields(Summary)},
            "bodies": {part: body for part, body in bodies.items() if body is not None},
            "state": self.state.state,
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any], **more: Any) -> "Episode":
        """The episode of a row of ``episodes``, its JSON decoded.

        Args:
            more: other fields, which are kept elsewhere (``state``, ``tags``, the bodies …).
        """
        known = {name: row[name] for name in _COLUMNS if name in row}
        known |= {"outcome": Outcome(row["outcome"]), "summary": Summary(**row["summary"])}
        return cls(**(known | more))

    @property
    def judged(self) -> Outcome:
        """The outcome, as a person says it was, or else as it ended."""
        said = (self.state.feedback or {}).get("outcome")
        return self.outcome if said is None else Outcome(said)


_COLUMNS = (
    "id",
    "kind",
    "run_id",
    "session_id",
    "user_id",
    "agent",
    "at",
    "outcome",
    "domain",
    "task_type",
    "failure_signature",
    "trust",
    "origin",
    "task",
    "execution",
    "result",
    "metadata",
    "tags",
    "reflection",
    "instances",
)


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Which episodes; what is ``None`` or empty does not matter. All must hold.

    Attributes:
        tags: that it must all have.
        after, before: when it ended, exclusive.
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

    def but(self, **changes: Any) -> "EpisodeFilter":
        """The same with some of it changed."""
        return replace(self, **changes)


def episode_id_of(run_id: UUID) -> UUID:
    """The id of a run's episode, the same whoever stores it (``unclaimed_episode`` in SQL too)."""
    digest = md5(f"episode {run_id}".encode(), usedforsecurity=False)
    return UUID(digest.hexdigest())
