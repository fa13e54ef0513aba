"""The trace of an episode, as mining sees it and as a model reads it. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any
from uuid import UUID

from bottega.events.payloads import TOOL_ERROR
from bottega.memory.episodes.episode import READ_OUTSIDE, SEARCHABLE, Episode, Outcome, StorageState
from bottega.memory.patterns.owners import owner_of, shared_texts
from bottega.memory.text.identities import told_arguments, told_line, without_identities
from bottega.memory.text.signature import failure_signature

DISPATCH, FAN_OUT = "dispatch_subagent", "dispatch_subagents"
PLUMBING = frozenset(
    (
        *(DISPATCH, FAN_OUT, "poll_subagent", "await_subagent", "cancel_subagent"),
        *("send_to_subagent", "recall_memory", "set_plan", "search_memory"),
    )
)
"""Tools that support an agent's work and do no part of the task."""
_LOOKS = PLUMBING - {DISPATCH, FAN_OUT}
"""Those that cure nothing: they only look at work that others do."""
MOST_CALLS = 40
"""Most calls of an episode that mining reads: its first ones."""
_CURE = re.compile(r"\d+\. .*?: (?P<done>.+?)(?: → .*)? \(worked after (?P<failed>.+) failed\)")
_SHORT = 72  # bytes of arguments, and of a result or an error
_TELLING = 160  # of the arguments of a call that failed, or that worked after one


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call by the run's root agent."""

    name: str
    ok: bool = True
    signature: str | None = None  # the kind of failure, if it failed
    is_agent: bool = False
    is_defined: bool = True  # false: the model invented the name, or the request defined it


@dataclass(frozen=True, slots=True)
class Observed:
    """An episode as mining sees it."""

    episode_id: UUID
    at: datetime
    task_type: str | None
    domain: str | None
    outcome: Outcome  # the judged one, people's feedback included
    trust: int
    calls: tuple[TracedCall, ...]  # see :func:`calls_of`
    owner: str = ""  # see :func:`bottega.memory.patterns.owners.owner_of`
    agent: str | None = None

    @property
    def good(self) -> bool:
        return self.outcome is Outcome.SUCCESS


def counts(episode: Episode) -> bool:
    """Return true if an episode's outcome is evidence about the patterns that its run was given.
    That remains so when the episode ages or is consolidated."""
    return (
        episode.trust >= READ_OUTSIDE
        and Outcome.CANCELLED not in (episode.outcome, episode.judged)
        and episode.state.state not in (StorageState.QUARANTINED, StorageState.DELETED)
    )


def observed(episode: Episode) -> Observed | None:
    """Convert an episode for mining; ``None`` if it has no trace or nothing may be learned from it.
    Imported, cancelled, quarantined, deleted and consolidated episodes are excluded."""
    if not counts(episode) or episode.state.state not in SEARCHABLE or not episode.trace:
        return None
    assert episode.id is not None, "it is not stored yet"
    return Observed(
        episode_id=episode.id,
        at=episode.at,
        task_type=episode.task_type,
        domain=episode.domain,
        outcome=episode.judged,
        trust=episode.trust,
        calls=calls_of(episode),
        owner=owner_of(episode.user_id, episode.session_id),
        agent=episode.agent,
    )


def without_private_texts(episodes: Sequence[Observed]) -> list[Observed]:
    """Return the episodes without texts that fewer than three owners have. Names of defined agents
    and tools stay. Calls of undefined names are removed: the model wrote them, or the request."""
    texts = ((text, each.owner) for each in episodes for text in _texts(each))
    shared = {None, *shared_texts(texts), *(each.agent for each in episodes)}
    return [
        replace(
            each,
            domain=each.domain if each.domain in shared else None,
            task_type=each.task_type if each.task_type in shared else None,
            calls=tuple(
                call if call.signature in shared else replace(call, signature=None)
                for call in each.calls
                if call.is_defined or call.name in shared
            ),
        )
        for each in episodes
    ]


def _texts(episode: Observed) -> Iterator[str]:
    """Yield the texts of an episode that are no names of definitions."""
    said = [episode.domain, *(call.signature for call in episode.calls)]
    said += [call.name for call in episode.calls if not call.is_defined]
    if episode.task_type != episode.agent:
        said.append(episode.task_type)
    yield from filter(None, said)


def calls_of(episode: Episode) -> tuple[TracedCall, ...]:
    """Return the first calls of the root agent; none without a trace.

    They are in the order in which they ended. :data:`PLUMBING` is left out.
    """
    return tuple(islice(_calls(episode), MOST_CALLS))


def failures_in(calls: Sequence[TracedCall]) -> Iterator[tuple[TracedCall, TracedCall | None]]:
    """Yield the first failure of each kind, and the call after it."""
    met: set[str] = set()
    for call, then in zip(calls, [*calls[1:], None], strict=False):
        if call.signature is not None and call.signature not in met:
            met.add(call.signature)
            yield call, then


def _calls(episode: Episode) -> Iterator[TracedCall]:
    trace = episode.trace or ()
    agents = {step.get("agent") for step in trace if step.get("task_id") is not None}
    agents |= set(episode.metadata.get("agents") or ())
    own = {step["tool"] for step in trace if step.get("task_id") is None and "tool" in step}
    defined = agents | set((episode.metadata.get("features") or {}).get("capabilities") or ())
    last = {step.get("task_id"): at for at, step in enumerate(trace) if "tool" not in step}
    for at, step in enumerate(trace):
        task_id, name = step.get("task_id"), step.get("tool")
        if task_id is None:
            if name and name not in PLUMBING:
                ok = "error" not in step
                is_defined = "defined_by" not in step and (ok or name in defined)
                yield TracedCall(name, ok, _signature(step), name in agents, is_defined)
        elif (
            {DISPATCH, FAN_OUT} & set(own)
            and last.get(task_id) == at
            and (agent := step.get("agent"))
            and agent not in own
        ):
            # The end of an asynchronous sub-agent: no call of its parent reports it.
            yield TracedCall(agent, "error" not in step, _signature(step), is_agent=True)


def _signature(step: Mapping[str, Any]) -> str | None:
    """Return a failure's signature, the one that the run used to retrieve recovery patterns."""
    if "error" not in step:
        return None
    if isinstance(known := step.get("signature"), str):
        return known
    error = step["error"]
    if isinstance(error, Mapping):
        return failure_signature(
            str(error.get("code")), str(error.get("message")), step.get("agent")
        )
    return failure_signature(TOOL_ERROR, str(error), step.get("tool"))


def told_steps(trace: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each step, in order: who called what, with which result.

    The call of the same task that worked after failed ones names them. Lines about failures have
    the word "failed", which :func:`bottega.memory.text.summaries.summary_of` keeps first.
    """
    lines: list[str] = []
    failed: dict[Any, dict[str, None]] = {}  # per task: the tools that failed, and no cure yet
    for step in trace:
        tool, task = step.get("tool"), step.get("task_id")
        tells = "error" in step or task in failed
        given = told_arguments(step.get("arguments"), _TELLING if tells else _SHORT)
        did = f"{tool} {given}".rstrip() if tool else "answer"
        line = f"{step.get('step')}. {step.get('agent')}: {did}"
        if "error" in step:
            line += f" failed: {told_line(_message(step['error']), _SHORT)}"
            if tool:
                failed.setdefault(task, {})[str(tool)] = None
        else:
            said = told_line(step.get("answer") or step.get("result") or "", _SHORT)
            line += f" → {said}" if said else ""
            if tool and tool not in _LOOKS and (before := failed.pop(task, None)):
                line += f" (worked after {', '.join(before)} failed)"
        lines.append(line)
    return lines


def cure_in(steps: str, tool: str) -> str:
    """Return the first call that worked after ``tool`` failed, with its arguments.

    Args:
        steps: lines of :func:`told_steps`.

    Returns:
        one line; empty if no call did.
    """
    for line in steps.splitlines():
        found = _CURE.fullmatch(line)
        if found and tool in found["failed"].split(", "):
            return without_identities(found["done"])
    return ""


def is_call(line: str, call: str) -> bool:
    """Check if a line of :func:`told_steps` is about a call, as :func:`cure_in` returns it."""
    did = without_identities(line).partition(": ")[2]
    return did == call or did.startswith((f"{call} → ", f"{call} (worked after "))


def _message(error: Any) -> Any:
    return error.get("message") or error.get("code") if isinstance(error, Mapping) else error
