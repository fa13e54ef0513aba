"""Mining: search, without a model, for behaviour that successful runs have in common.

Mining finds the order in which runs called sub-agents, and calls that helped after an error. A
finding is only a guess: the runs chose the behaviour themselves, so their success may have another
cause. Therefore the finding becomes a candidate, which the experiment tests in other runs.
Mining does not learn the order or the choice of tools, because this advice helped no run in the
benchmarks of learning.

First, mining removes texts (a domain, a task type, a failure's message) that occur in the runs of
fewer than three users, because runs of all users read patterns.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import sha256
from itertools import chain, groupby, islice
from math import sqrt
from typing import Any, NamedTuple
from uuid import UUID

from pydantic_core import to_json

from bottega.memory.episodes.episode import READ_OUTSIDE, SEARCHABLE, Episode, Outcome, StorageState
from bottega.memory.episodes.scope import owner_of, shared_texts
from bottega.memory.patterns.evidence import Tally
from bottega.memory.patterns.pattern import (
    LONGEST_NAME,
    Applicability,
    Category,
    Condition,
    Content,
    ContentKind,
    Evidence,
    Guide,
    Pattern,
)
from bottega.memory.text.identities import told_arguments, told_line, without_identities
from bottega.memory.text.injection import suspicious

DISPATCH, FAN_OUT = "dispatch_subagent", "dispatch_subagents"
PLUMBING = frozenset(
    (
        *(DISPATCH, FAN_OUT, "poll_subagent", "await_subagent", "cancel_subagent"),
        *("send_to_subagent", "recall_memory", "set_plan", "search_memory"),
    )
)
"""Tools that only support an agent's work; mining omits the calls of these tools."""
_LOOKS = PLUMBING - {DISPATCH, FAN_OUT}
"""Tools whose success cannot correct a failure, because they only support the work of others."""
MOST_CALLS = 40
"""Number of an episode's first calls that mining reads."""
_CURE = re.compile(r"\d+\. .*?: (?P<done>.+?)(?: → .*)? \(worked after (?P<failed>.+) failed\)")
_SHORT = 72  # maximum number of bytes of arguments, of a result and of an error


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call of the run's root agent."""

    name: str
    ok: bool = True
    signature: str | None = None  # signature of the failure, if the call failed
    is_agent: bool = False
    is_defined: bool = True  # false: a model or a request named the tool


@dataclass(frozen=True, slots=True)
class Observed:
    """The facts about an episode that mining needs."""

    episode_id: UUID
    at: datetime
    task_type: str | None
    domain: str | None
    outcome: Outcome  # from feedback or checks if known, otherwise from the run
    trust: int
    calls: tuple[TracedCall, ...]  # see :func:`calls_of`
    owner: str = ""  # see :func:`bottega.memory.episodes.scope.owner_of`
    agent: str | None = None

    @property
    def good(self) -> bool:
        return self.outcome is Outcome.SUCCESS


def counts(episode: Episode) -> bool:
    """Return true if an episode's outcome is evidence about the patterns that the run got. Ageing
    and consolidation of the episode do not change the result."""
    return (
        episode.trust >= READ_OUTSIDE
        and Outcome.CANCELLED not in (episode.outcome, episode.judged)
        and episode.state.state not in (StorageState.QUARANTINED, StorageState.DELETED)
    )


def observation_of(episode: Episode) -> Observed | None:
    """Convert an episode for mining; ``None``: the episode has no trace, or is imported, cancelled,
    quarantined, deleted or consolidated."""
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
    """Remove from episodes the texts that fewer than three owners have.

    Names of defined agents and tools stay. Names of all other calls count as texts, because a model
    or a request wrote these names.
    """
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
    words = [episode.domain, *(call.signature for call in episode.calls)]
    words += [call.name for call in episode.calls if not call.is_defined]
    if episode.task_type != episode.agent:
        words.append(episode.task_type)
    yield from filter(None, words)


def calls_of(episode: Episode) -> tuple[TracedCall, ...]:
    """Return the first calls of the root agent, in the order in which they ended.

    The result omits calls of the tools in :data:`PLUMBING`. Without a trace, the result is empty.
    """
    return tuple(islice(_calls(episode), MOST_CALLS))


def failures_in(calls: Sequence[TracedCall]) -> Iterator[tuple[TracedCall, TracedCall | None]]:
    """Yield the first failure of each kind, and the call that follows the failure."""
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
        ok, signature = "error" not in step, step.get("signature")
        if task_id is None:
            if name and name not in PLUMBING:
                is_defined = "defined_by" not in step and (ok or name in defined)
                yield TracedCall(name, ok, signature, name in agents, is_defined)
        elif (
            {DISPATCH, FAN_OUT} & set(own)
            and last.get(task_id) == at
            and (agent := step.get("agent"))
            and agent not in own
        ):
            # The step is the end of an asynchronous sub-agent, which no call of the parent agent
            # reports.
            yield TracedCall(agent, ok, signature, is_agent=True)


def told_steps(trace: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each step, in order, with the agent, the call and the result.

    If a call succeeds after calls of the same task failed, the line of the successful call names
    the failed tools. Lines about failures contain the word "failed", because summaries prefer lines
    with such words.
    """
    lines: list[str] = []
    failed: dict[Any, dict[str, None]] = {}  # per task: tools that failed after the last success
    for step in trace:
        tool, task = step.get("tool"), step.get("task_id")
        tells = "error" in step or task in failed
        arguments = told_arguments(step.get("arguments"), 160 if tells else _SHORT)
        did = f"{tool} {arguments}".rstrip() if tool else "answer"
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
    """Return the first call that succeeded after ``tool`` failed, with the call's arguments.

    Args:
        steps: lines of :func:`told_steps`.

    Returns:
        One line, which is empty if no call succeeded.
    """
    for line in steps.splitlines():
        match = _CURE.fullmatch(line)
        if match and tool in match["failed"].split(", "):
            return without_identities(match["done"])
    return ""


def is_call(line: str, call: str) -> bool:
    """Return true if a line of :func:`told_steps` is about a ``call`` from :func:`cure_in`."""
    did = without_identities(line).partition(": ")[2]
    return did == call or did.startswith((f"{call} → ", f"{call} (worked after "))


def _message(error: Any) -> Any:
    return error.get("message") or error.get("code") if isinstance(error, Mapping) else error


NEWEST = 50
"""Maximum number of episodes per subject. Older episodes could hide a change for the worse."""
_MOST_NAMES = 8  # maximum number of names in a finding

Names = tuple[str, ...]
"""Names of tools and agents, in order."""


class _Subject(NamedTuple):
    """A group to compare: tasks of one domain and type, or failures of one kind and tool."""

    category: Category
    domain: str | None = None
    task_type: str | None = None
    signature: str | None = None
    tool: str | None = None


class _Item(NamedTuple):
    episode: Observed
    good: bool
    uses: Names  # sub-agents in order, or the call after the failure


def mine(episodes: Iterable[Observed]) -> list[Pattern]:
    """Return candidates, each with a fingerprint and the episodes that have the behaviour.

    The order of the episodes does not change the result. Episodes of trust 3 and episodes of trust
    2 are mined separately; of two equal findings, the result has the finding of trust 3. The
    running time is linear in the number of episodes, except for sorting.
    """
    ordered = without_private_texts(sorted(set(episodes), key=_age))
    by_domain: dict[str | None, Pattern] = {}
    for trust in (3, 2):
        subjects: defaultdict[_Subject, deque[_Item]] = defaultdict(lambda: deque(maxlen=NEWEST))
        for each in ordered:
            if each.trust == trust and each.outcome is not Outcome.CANCELLED:
                for subject, item in _items(each):
                    subjects[subject].append(item)
        for subject in sorted(subjects, key=lambda each: [part or "" for part in each]):
            for finding in _found(subject, subjects[subject]):
                pattern = _pattern(subject, finding, trust)
                by_domain.setdefault(pattern.fingerprint, pattern)
    return list(by_domain.values())


def _age(episode: Observed) -> tuple[datetime, UUID]:
    return episode.at, episode.episode_id


def _items(episode: Observed) -> Iterator[tuple[_Subject, _Item]]:
    """Yield one item for an episode's task type, if the outcome is known, and one per failure."""
    if episode.task_type is not None and episode.outcome is not Outcome.UNKNOWN:
        agents = tuple(name for name, _ in groupby(c.name for c in episode.calls if c.is_agent))
        uses = agents if 2 <= len(agents) <= _MOST_NAMES else ()
        subject = _Subject(Category.DECOMPOSITION, episode.domain, episode.task_type)
        yield subject, _Item(episode, episode.good, uses)
    for call, then in failures_in(episode.calls):
        if suspicious(call.signature or "") is None:
            well = then is not None and then.ok and episode.outcome is not Outcome.FAILURE
            subject = _Subject(Category.RECOVERY, episode.domain, None, call.signature, call.name)
            yield subject, _Item(episode, well, () if then is None else (then.name,))


class _Finding(NamedTuple):
    uses: Names
    affects: Names  # tools whose next call shows the effect; empty: the whole run
    gain: float  # difference of the expected success rates with and without the behaviour
    with_it: Tally
    without: Tally
    supporters: tuple[UUID, ...]  # the successful episodes with the behaviour, oldest first


def _found(subject: _Subject, items: Sequence[_Item]) -> list[_Finding]:
    """Return at most three behaviours whose episodes were clearly more successful, best first.

    At least three successful episodes must have the behaviour. The success rates with and without
    the behaviour must differ by at least 0.1, and by at least 1.5 standard deviations.
    """
    everything, patterns = _tally(items), []
    having: defaultdict[Names, list[_Item]] = defaultdict(list)
    for item in items:
        having[item.uses].append(item)
    often = sorted(filter(None, having), key=lambda uses: (-len(having[uses]), uses))
    for uses in often:
        with_it = _tally(having[uses])
        without = everything.without(with_it)
        if with_it.good < 3 or not without.n or with_it.rate <= without.rate:
            continue
        gain = round(with_it.expected - without.expected, 9)
        if gain >= max(0.1, 1.5 * sqrt(with_it.variance + without.variance)):
            supporters = tuple(each.episode.episode_id for each in having[uses] if each.good)
            affects: Names = ()
            # Runs without the pattern are judged by the calls that runs often made instead.
            if subject.category is Category.RECOVERY:
                alternatives = [each for each in often if each != uses][: _MOST_NAMES - 1]
                affects = tuple(sorted({*uses, *chain.from_iterable(alternatives)}))
            patterns.append(_Finding(uses, affects, gain, with_it, without, supporters))
    best = sorted(patterns, key=_order)[:3]
    return [each for each in best if each.gain >= 0.5 * best[0].gain]


def _tally(items: Iterable[_Item]) -> Tally:
    return Tally.of(each.good for each in items)


def _order(finding: _Finding) -> tuple[float, int, Names]:
    return -finding.gain, -len(finding.uses), finding.uses


def _pattern(subject: _Subject, finding: _Finding, trust: int) -> Pattern:
    uses, domain = finding.uses, subject.domain
    names = " → ".join(uses)
    if subject.category is Category.DECOMPOSITION:
        when = f"For tasks of the kind {subject.task_type}"
        do = f"divide the work: ask {', then '.join(uses)}"
        steps = [{"do": f"call {name}", "uses": [name]} for name in uses]
        kind = ContentKind.TEMPLATE
        fields: dict[str, Any] = {"steps": steps, "parameters": [], "rules": []}
        conditions: tuple[Condition, ...] = ()
    else:
        when = f"When {subject.tool} fails with “{subject.signature}”"
        do = f"call {uses[0]} {'once more' if uses == (subject.tool,) else 'next'}"
        kind, fields = ContentKind.HEURISTIC, {"condition": when, "action": do}
        conditions = ({"feature": "failure_signature", "op": "eq", "value": subject.signature},)
    there = f"{when} in the domain {domain}" if domain else when
    about = f"{subject.task_type or subject.tool}{f'/{domain}' if domain else ''}"
    words = [subject.category, subject.task_type, domain, subject.signature, uses]
    return Pattern(
        name=f"{about}: {names}"[:LONGEST_NAME],
        category=subject.category,
        # The advice omits the domain, so that patterns of several domains can be merged.
        content=Content(kind, fields, uses, finding.affects),
        applicability=Applicability(
            problem_types=() if subject.task_type is None else (subject.task_type,),
            domains=() if domain is None else (domain,),
            capabilities=tuple(sorted(set(uses))),
            conditions=conditions,
        ),
        description=f"{there}: {names}"[:LONGEST_NAME],
        summary=f"{there}: {do}.",
        detail=(
            f"Of the episodes in which it was found, {finding.with_it.good} of {finding.with_it.n} "
            f"went well with it, and {finding.without.good} of {finding.without.n} without."
        ),
        evidence=Evidence(mined_from=finding.supporters[-200:]),
        guide=Guide(when=there, how=do),
        origin={"mined": str(subject.category)},
        trust=trust,
        fingerprint=sha256(to_json(words)).hexdigest(),
    )
