"""The states of an asynchronous task and the moves between them (spec page 3, S2). Pure."""

from enum import StrEnum

from bottega.errors import IllegalTransition


class SubagentStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    STREAMING = "streaming"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """No move leads out of it."""
        return not _MOVES[self]


_FINAL = (
    SubagentStatus.COMPLETED,
    SubagentStatus.FAILED,
    SubagentStatus.TIMEOUT,
    SubagentStatus.CANCELLED,
)
_MOVES: dict[SubagentStatus, frozenset[SubagentStatus]] = {
    SubagentStatus.QUEUED: frozenset((SubagentStatus.RUNNING, SubagentStatus.CANCELLED)),
    SubagentStatus.RUNNING: frozenset((SubagentStatus.STREAMING, *_FINAL)),
    SubagentStatus.STREAMING: frozenset(_FINAL),
    **{final: frozenset() for final in _FINAL},
}


def check_move(old: SubagentStatus, new: SubagentStatus) -> None:
    """Refuse a move that is not legal.

    Raises:
        IllegalTransition: it is not; a final state has none, and staying is no move.
    """
    if new not in _MOVES[old]:
        legal = ", ".join(sorted(_MOVES[old])) or "none: it is final"
        raise IllegalTransition(f"no move leads from {old} to {new}; from {old} to: {legal}")
