"""The states of an asynchronous task, the moves between them, and its messages. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from bottega.errors import IllegalTransition


class SubagentStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    STREAMING = "streaming"
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """True if no move leads out of the state."""
        return not _MOVES[self]


_FINAL = (
    SubagentStatus.COMPLETED,
    SubagentStatus.FAILED,
    SubagentStatus.TIMEOUT,
    SubagentStatus.CANCELLED,
)
_MOVES: dict[SubagentStatus, frozenset[SubagentStatus]] = {
    SubagentStatus.QUEUED: frozenset((SubagentStatus.RUNNING, SubagentStatus.CANCELLED)),
    SubagentStatus.RUNNING: frozenset((SubagentStatus.STREAMING, SubagentStatus.WAITING, *_FINAL)),
    SubagentStatus.STREAMING: frozenset((SubagentStatus.WAITING, *_FINAL)),
    SubagentStatus.WAITING: frozenset((SubagentStatus.QUEUED, *_FINAL)),
    **{final: frozenset() for final in _FINAL},
}


def check_move(old: SubagentStatus, new: SubagentStatus) -> None:
    """Check that a move is legal.

    Raises:
        IllegalTransition: the move is illegal, as any move from a final state or to ``old``.
    """
    if new not in _MOVES[old]:
        legal = ", ".join(sorted(_MOVES[old])) or "none: it is final"
        raise IllegalTransition(f"no move leads from {old} to {new}; from {old} to: {legal}")


def stands_still(statuses: Iterable[SubagentStatus], missing: int) -> bool:
    """Check if a wait for the end of ``missing`` of these tasks cannot end without people."""
    at_work = (status for status in statuses if not status.is_final)
    return sum(status is not SubagentStatus.WAITING for status in at_work) < missing


@dataclass(slots=True)
class Mailbox:
    """Messages of a parent to a task, by id.

    Attributes:
        unread: their texts, in order.
        known: all that were ever sent.
        heard: texts that this try has read.
        recorded: those that an earlier attempt read, by model call.
        calls: number of the last model call whose result an earlier attempt recorded.
    """

    unread: dict[str, str] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    heard: dict[str, str] = field(default_factory=dict)
    recorded: dict[int, dict[str, str]] = field(default_factory=dict)
    calls: int = 0

    def put(self, message_id: str, text: str) -> None:
        self.known.add(message_id)
        self.unread[message_id] = text

    def due(self, call: int) -> dict[str, str]:
        """Return the messages to read before a model call."""
        told = self.recorded.pop(call, {})
        for message_id in told:
            self.unread.pop(message_id, None)
        if call > self.calls:
            told, self.unread = told | self.unread, {}
        self.heard |= told
        return told

    def again(self) -> None:
        """Let the next try read what this one has read."""
        self.unread, self.heard = self.heard | self.unread, {}
