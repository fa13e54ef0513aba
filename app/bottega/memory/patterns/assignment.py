"""Random assignment of runs to the arms of a pattern's experiment. Pure.

The draw is a hash: a resumed or retried run keeps its arm, and an author of tasks cannot choose the
arm without the salt.
"""

from hashlib import sha256
from uuid import UUID

from bottega.memory.episodes.options import LearningOptions
from bottega.memory.patterns.pattern import Arm, PatternState


def uniform(salt: UUID, run: UUID, pattern_id: UUID, version: int, kind: str) -> float:
    """Return a number in [0, 1), evenly distributed; independent for different ``kind``s."""
    said = b"".join((salt.bytes, run.bytes, pattern_id.bytes, f"{version} {kind}".encode()))
    # Only as many bits as a float holds: more could be rounded up to 1.
    return (int.from_bytes(sha256(said).digest()[:8]) >> 11) / 2**53


def arm_of(
    state: PatternState,
    salt: UUID,
    run: UUID,
    pattern_id: UUID,
    version: int,
    options: LearningOptions,
) -> Arm:
    """Assign a run's arm: used or withheld if validated, trial or control if a candidate."""
    if state is PatternState.VALIDATED:
        withheld = uniform(salt, run, pattern_id, version, "withheld") < options.withheld_share
        return Arm.WITHHELD if withheld else Arm.USED
    on_trial = uniform(salt, run, pattern_id, version, "trial") < options.trial_share
    return Arm.TRIAL if on_trial else Arm.CONTROL
