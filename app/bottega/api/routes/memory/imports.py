"""Episodes that clients import: from the body of a request to an episode."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from bottega.api.schemas.memory.episodes import EpisodeFailure, NewEpisode
from bottega.errors import InvalidInputError
from bottega.graph.rendering import as_text
from bottega.memory.episodes.episode import (
    IMPORTED,
    LONGEST_SUMMARY,
    LONGEST_TEXT,
    Episode,
    Outcome,
    Summary,
)
from bottega.memory.text.signature import failure_signature
from bottega.memory.text.summaries import summary_of

CLOCK_SKEW = timedelta(minutes=5)
"""Tolerance for a client's clock that runs ahead."""
_TOKENS = LONGEST_SUMMARY // 4
_STEPS_READ = 1000
"""Steps of a trace that its summary reads: half from the start, half from the end."""


def imported(body: NewEpisode, *, principal: str, now: datetime, pointer: str = "/at") -> Episode:
    """Build an episode at the lowest trust. Pure.

    Args:
        principal: the importer.
        now: the end time, if ``body`` has none.
        pointer: to the end time in the request.

    Raises:
        InvalidInputError: it ended in the future.
    """
    if body.at is not None and body.at > now + CLOCK_SKEW:
        raise InvalidInputError("this is in the future: say when it ended", pointer=pointer)
    given = body.model_dump()
    asked, output, error = body.task.original_input, body.result.output, body.result.error
    trace = given["execution"].pop("trace")
    text = "" if output is None else as_text(output)
    is_long = len(text) > LONGEST_TEXT
    return Episode(
        at=body.at or now,
        outcome=Outcome(body.outcome),
        session_id=body.session_id,
        user_id=body.user,
        domain=body.domain,
        task_type=body.task_type,
        failure_signature=failure_signature(error.type, error.message, error.tool)
        if error
        else None,
        trust=IMPORTED,
        origin={"principal": principal, "run": None, "tool": None},
        task=given["task"] | {"original_input": asked[:LONGEST_TEXT]},
        execution=given["execution"],
        result=given["result"] | ({"output": text[:LONGEST_TEXT]} if is_long else {}),
        metadata=given["metadata"],
        tags=tuple(dict.fromkeys(body.tags)),
        reflection=given["reflection"],
        trace=trace or None,
        input=asked if len(asked) > LONGEST_TEXT else None,
        output=output if is_long else None,
        summary=_summary(asked, [*body.task.goals, text], error, trace),
    )


def _summary(
    asked: str, results: Sequence[str], error: EpisodeFailure | None, trace: Sequence[Any]
) -> Summary:
    """Build the texts by which an episode is searched."""
    half = _STEPS_READ // 2
    read = trace if len(trace) <= _STEPS_READ else [*trace[:half], *trace[-half:]]
    texts = (
        asked,
        "\n".join(filter(None, results)),
        ": ".join(filter(None, (error.type, error.message))) if error else "",
        "\n".join(map(as_text, read)),
    )
    return Summary(*(summary_of(text, _TOKENS) for text in texts))
