"""Conversion of imported records to episodes. Pure."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

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

_TOKENS = LONGEST_SUMMARY // 4
_STEPS_READ = 1000
"""Steps of a trace that its summary reads: half from the start, half from the end."""


def imported(given: Mapping[str, Any], *, principal: str, now: datetime) -> Episode:
    """Build an episode from an import, at the lowest trust.

    Args:
        given: the body of ``POST /v1/episodes``.
        principal: the importer.
        now: the end time, if ``given`` has none.
    """
    task, result = dict(given["task"]), dict(given["result"])
    execution = {name: value for name, value in given["execution"].items() if name != "trace"}
    trace = given["execution"]["trace"]
    asked, answered = task["original_input"], result["output"]
    error = result["error"]
    task["original_input"] = asked[:LONGEST_TEXT]
    full_output = None
    text = "" if answered is None else as_text(answered)
    if len(text) > LONGEST_TEXT:
        full_output, result["output"] = answered, text[:LONGEST_TEXT]
    return Episode(
        at=given["at"] or now,
        outcome=Outcome(given["outcome"]),
        session_id=given["session_id"],
        user_id=given["user"],
        domain=given["domain"],
        task_type=given["task_type"],
        failure_signature=error
        and failure_signature(error["type"], error["message"], error["tool"]),
        trust=IMPORTED,
        origin={"principal": principal, "run": None, "tool": None},
        task=task,
        execution=execution,
        result=result,
        metadata=given["metadata"],
        tags=tuple(dict.fromkeys(given["tags"])),
        reflection=given["reflection"],
        trace=trace or None,
        input=asked if len(asked) > LONGEST_TEXT else None,
        output=full_output,
        summary=_summary(asked, [*task["goals"], text], error, trace),
    )


def _summary(
    asked: str, results: Sequence[str], error: Mapping[str, Any] | None, trace: Sequence[Any]
) -> Summary:
    """Build the texts by which an episode is searched."""
    half = _STEPS_READ // 2
    read = trace if len(trace) <= _STEPS_READ else [*trace[:half], *trace[-half:]]
    texts = (
        asked,
        "\n".join(filter(None, results)),
        ": ".join(filter(None, (error["type"], error["message"]))) if error else "",
        "\n".join(map(as_text, read)),
    )
    return Summary(*(summary_of(text, _TOKENS) for text in texts))
