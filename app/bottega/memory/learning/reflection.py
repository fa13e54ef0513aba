"""Reflection: the lessons of one finished run.

Rules or a model write the insights. Insights are only texts. The evidence about patterns is in the
episode, which contains the applications of patterns.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Protocol
from uuid import UUID

from bottega.memory.episodes.episode import LONGEST_TEXT, Episode, Outcome
from bottega.memory.learning.mining import TracedCall, calls_of, counts, failures_in
from bottega.memory.patterns.pattern import OF_RUN, Application, Arm, Category
from bottega.memory.text.identities import without_identities
from bottega.memory.text.summaries import cut

MOST = 10
"""Maximum number of insights, and of failures, of one run."""
LONGEST = 300
_SPENT = ("model_calls", "tool_calls", "retries", "usage", "duration_s")


class Analyst(Protocol):
    """A model that analyses tasks and episodes.

    The answers of the model are data: they are bounded and checked, and never executed. The cost of
    a call is charged to ``run`` (tenant's id, run's id).

    Attributes:
        name: name of the model as the author of reflections.

    Raises:
        ModelError, UnavailableError: the model is unavailable, or its answer is unreadable.
    """

    @property
    def name(self) -> str: ...

    async def analyse(self, run: tuple[UUID, UUID], task: str) -> Mapping[str, Any]:
        """Return ``goals``, ``constraints``, ``criteria`` (texts) and ``complexity`` (0 to 1)."""
        ...

    async def reflect(self, run: tuple[UUID, UUID], about: Mapping[str, Any]) -> Sequence[str]:
        """Return insights on an episode, which has the form of :func:`asked_of`."""
        ...


Reflection = Mapping[str, Any]
"""Lessons of a run in JSON: ``insights`` (texts), ``patterns`` (``{uses}``: calls of a successful
run), ``failures`` (``{tool, signature, then, recovered}``), ``performance`` (numbers), and the
author ``by``: ``rules``, or a model."""


def reflect(episode: Episode) -> Reflection:
    """Reflect on an episode by rules; use the episode's trace only if the trace is loaded."""
    calls = calls_of(episode)
    failures = [
        {
            "tool": call.name,
            "signature": call.signature,
            "then": None if then is None else then.name,
            "recovered": then is not None and then.ok,
        }
        for call, then in islice(failures_in(calls), MOST)
    ]
    well = [call.name for call in calls if call.ok] if episode.judged is Outcome.SUCCESS else []
    return {
        "insights": [_cure(each) for each in failures if each["recovered"]],
        "patterns": [{"uses": well[:MOST]}] if well else [],
        "failures": failures,
        "performance": _performance(episode, calls),
        "by": "rules",
    }


def with_insights(reflection: Reflection, insights: Sequence[str], by: str) -> Reflection:
    """Replace the insights of a reflection by a model's insights, limited in number and size."""
    lines = (cut(" ".join(each.split()), LONGEST) for each in insights)
    return {**reflection, "insights": [*dict.fromkeys(filter(None, lines))][:MOST], "by": by}


def asked_of(episode: Episode, reflection: Reflection) -> dict[str, Any]:
    """Return the fields of an episode that a model receives: limited, and without ids."""
    result = episode.result

    def text(value: Any) -> str:
        return without_identities(str(value or "")[:LONGEST_TEXT])

    error = result.get("error")
    return {
        "task": text(episode.task.get("original_input")),
        "domain": episode.domain,
        "task_type": episode.task_type,
        "outcome": episode.judged,
        "plan": episode.execution.get("plan") or [],
        "calls": [
            {"name": call.name, "ok": call.ok} | ({"error": call.signature} if not call.ok else {})
            for call in calls_of(episode)
        ],
        "result": text(result.get("output")),
        "error": {name: text(each) for name, each in error.items()} if error else None,
        "errors": text(episode.summary.errors),
        "performance": reflection["performance"],
    }


def applications_of(episode: Episode) -> list[Application]:
    """Return an application for each pattern that was given to, or withheld from, a run.

    The result is empty if the episode is not evidence. For a pattern of the categories ``OF_RUN``,
    ``good`` comes from the episode's outcome, including feedback; without an outcome, ``good`` is
    ``None``.
    """
    patterns = episode.metadata.get("patterns")
    if not isinstance(patterns, list) or not counts(episode):
        return []
    return [
        Application(
            pattern_id=UUID(each["id"]),
            version=each["version"],
            arm=Arm(each["arm"]),
            at=episode.at,
            episode_id=episode.id,
            followed=each.get("followed"),
            good=went_well(episode) if Category(each["category"]) in OF_RUN else each.get("good"),
            features=episode.metadata.get("features") or {},
            duration_s=episode.execution.get("duration_s"),
            tokens=_tokens(episode),
        )
        for each in patterns
    ]


def went_well(episode: Episode) -> bool | None:
    """Return true for success, false for any other outcome, and ``None`` for an unknown outcome."""
    return None if episode.judged is Outcome.UNKNOWN else episode.judged is Outcome.SUCCESS


def _cure(failure: Mapping[str, Any]) -> str:
    what = f"{failure['tool']} failed ({failure['signature']})"
    return cut(f"After {what}, {failure['then']} went well.", LONGEST)


def _performance(episode: Episode, calls: Sequence[TracedCall]) -> dict[str, Any]:
    spent = {**_resources(episode), "duration_s": episode.execution.get("duration_s")}
    costs = {name: spent[name] for name in _SPENT if spent.get(name) is not None}
    return costs | {"failed_calls": sum(not call.ok for call in calls)}


def _resources(episode: Episode) -> Mapping[str, Any]:
    resources: Mapping[str, Any] = episode.execution.get("resources") or {}
    return resources


def _tokens(episode: Episode) -> int | None:
    usage = _resources(episode).get("usage") or {}
    return usage.get("input", 0) + usage.get("output", 0) or None
