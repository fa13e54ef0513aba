"""What mining looks at of an episode: who was called, in which order, and how it went. Pure."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from bottega.memory.episode import READ_OUTSIDE, SEARCHABLE, Episode, Outcome, StorageState
from bottega.memory.owners import owner_of, shared_texts
from bottega.memory.signature import failure_signature

DISPATCH = "dispatch_subagent"
PLUMBING = frozenset(
    {DISPATCH, "poll_subagent", "await_subagent", "recall_memory", "set_plan", "search_memory"}
)
"""Tools that help an agent to work, and do nothing of the task themselves."""
MOST_CALLS = 40
"""Calls of an episode that are looked at: its first ones."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the agent that the run began with.

    Attributes:
        name: of the tool, or of the agent.
        signature: the kind of failure, of one that failed.
        is_agent: whether an agent was asked.
        is_defined: whether there is a tool or agent of this name. If not, the model made it up.
    """

    name: str
    ok: bool = True
    signature: str | None = None
    is_agent: bool = False
    is_defined: bool = True


@dataclass(frozen=True, slots=True)
class Observed:
    """An episode, as mining sees it.

    Attributes:
        outcome: with what people said of it.
        calls: in the order in which they ended, without those of sub-agents and those that only
            help to work.
        owner: whose episode it is; see :func:`bottega.memory.owners.owner_of`.
        agent: the one that its run began with.
    """

    episode_id: UUID
    at: datetime
    task_type: str | None
    domain: str | None
    outcome: Outcome
    trust: int
    calls: tuple[Call, ...]
    complexity: float | None = None
    owner: str = ""
    agent: str | None = None

    @property
    def good(self) -> bool:
        return self.outcome is Outcome.SUCCESS


def is_evidence(episode: Episode) -> bool:
    """Whether anything may be learned of an episode: no import, nothing that somebody cancelled,
    none that is quarantined, deleted, or stood for by another one."""
    return counts(episode) and episode.state.state in SEARCHABLE


def counts(episode: Episode) -> bool:
    """Whether what came of the patterns that it was given is evidence. It stays that when the
    episode grows old, or is stood for by another one."""
    return (
        episode.trust >= READ_OUTSIDE
        and Outcome.CANCELLED not in (episode.outcome, episode.judged)
        and episode.state.state not in (StorageState.QUARANTINED, StorageState.DELETED)
    )


def observed(episode: Episode) -> Observed | None:
    """What can be mined of an episode that has its trace; ``None``: nothing."""
    if not is_evidence(episode) or not episode.trace:
        return None
    complexity = episode.task.get("complexity")
    return Observed(
        episode_id=_known(episode.id),
        at=episode.at,
        task_type=episode.task_type,
        domain=episode.domain,
        outcome=episode.judged,
        trust=episode.trust,
        calls=calls_of(episode),
        complexity=complexity if isinstance(complexity, int | float) else None,
        owner=owner_of(episode.user_id, episode.session_id),
        agent=episode.agent,
    )


def without_private_texts(episodes: Sequence[Observed], owners: int) -> list[Observed]:
    """The episodes without the texts that fewer owners have. Names of agents and tools that are
    defined stay. A call of another name goes, as its name is a text of the model's."""
    shared = shared_texts(
        ((text, each.owner) for each in episodes for text in _texts(each)), owners
    )
    return [_cleared(each, shared) for each in episodes]


def _texts(episode: Observed) -> Iterator[str]:
    """The texts of an episode that are not names out of definitions."""
    said = [episode.domain, *(call.signature for call in episode.calls)]
    said += [call.name for call in episode.calls if not call.is_defined]
    if episode.task_type != episode.agent:
        said.append(episode.task_type)
    yield from filter(None, said)


def _cleared(episode: Observed, shared: Container[str]) -> Observed:
    private = {text for text in _texts(episode) if text not in shared}
    if not private:
        return episode
    return replace(
        episode,
        domain=None if episode.domain in private else episode.domain,
        task_type=None if episode.task_type in private else episode.task_type,
        calls=tuple(
            replace(call, signature=None) if call.signature in private else call
            for call in episode.calls
            if call.is_defined or call.name not in private
        ),
    )


def calls_of(episode: Episode) -> tuple[Call, ...]:
    """The calls of the agent that the run began with, the first :data:`MOST_CALLS`, if the episode
    has its trace."""
    return tuple(_calls(episode))[:MOST_CALLS]


def _known(episode_id: UUID | None) -> UUID:
    assert episode_id is not None, "it is not stored yet"
    return episode_id


def _calls(episode: Episode) -> Iterator[Call]:
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
                yield Call(name, ok, _signature(step), name in agents, ok or name in defined)
        elif (
            DISPATCH in own
            and last.get(task_id) == at
            and (agent := step.get("agent"))
            and agent not in own
        ):
            # The end of one that ran beside its parent: no call of the parent tells of it.
            yield Call(agent, "error" not in step, _signature(step), is_agent=True)


def _signature(step: Mapping[str, Any]) -> str | None:
    """As the run itself calls this failure when it looks for help."""
    if "error" not in step:
        return None
    if isinstance(known := step.get("signature"), str):
        return known
    error = step["error"]
    if isinstance(error, Mapping):
        return failure_signature(str(error.get("code")), str(error.get("message")))
    return failure_signature("tool_error", str(error), step.get("tool"))
