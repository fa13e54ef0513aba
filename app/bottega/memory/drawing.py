"""Which runs are given a pattern, drawn by lot (spec page 4, M23). Pure.

The lot is a hash: it is the same however often it is drawn, so a run that is resumed or tried again
stays on its side, and nobody who writes tasks can choose the side without knowing the salt.
"""

from hashlib import sha256
from uuid import UUID

from bottega.memory.options import LearningOptions
from bottega.memory.pattern import Arm, PatternState


def drawn(salt: UUID, run: UUID, pattern_id: UUID, version: int, kind: str) -> float:
    """A number from 0 (included) to 1 (excluded), evenly distributed.

    Args:
        salt: of the tenant.
        kind: what is drawn; draws of different kinds say nothing of each other.
    """
    said = b"".join((salt.bytes, run.bytes, pattern_id.bytes, f"{version} {kind}".encode()))
    # As many bits as a float holds: more could be rounded up to 1.
    return (int.from_bytes(sha256(said).digest()[:8]) >> 11) / 2**53


def arm_of(
    state: PatternState,
    salt: UUID,
    run: UUID,
    pattern_id: UUID,
    version: int,
    options: LearningOptions,
) -> Arm:
    """The side of a run that a pattern applies to: whether a validated one is used or withheld,
    whether a candidate is on trial or the run its control."""
    if state is PatternState.VALIDATED:
        withheld = drawn(salt, run, pattern_id, version, "withheld") < options.withheld_share
        return Arm.WITHHELD if withheld else Arm.USED
    assert state is PatternState.CANDIDATE, f"one that is {state} is not given"
    on_trial = drawn(salt, run, pattern_id, version, "trial") < options.trial_share
    return Arm.TRIAL if on_trial else Arm.CONTROL
