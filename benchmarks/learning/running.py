"""One run of the scripted team, reported event by event, and the memory of each arm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from benchmarks.learning import model
from benchmarks.learning.memory import Episodes, Patterns
from benchmarks.learning.model import Decided
from benchmarks.learning.world import (
    AGENTS,
    ERRORS,
    ORDER_WELL,
    RECOVERIES,
    RECOVERY_WELL,
    TOOL_WELL,
    TOOLS,
    TYPES,
    Right,
    Task,
    World,
)
from bottega.agents.parts import estimated_tokens
from bottega.engine.retrieval import (
    MOST_EPISODES,
    Assignment,
    MemorySources,
    episode_event,
    patterns_for,
    render_episode,
)
from bottega.events.types import TOOL_ERROR, EventType, RunStatus
from bottega.memory.episodes.episode import Episode, Outcome, State
from bottega.memory.episodes.scope import LearningOptions
from bottega.memory.learning.episode_recorder import EpisodeRecorder, RunFacts
from bottega.memory.patterns.pattern import Features
from bottega.memory.patterns.task_analysis import analyse
from bottega.memory.text.signature import failure_signature

LEAD = "lead"
TENANT = UUID(int=1)
PROMPT_TOKENS = 400
"""Tokens of a call without memory."""
_ALIKE = 3
_SECONDS = 2.0  # per call
_SESSIONS = 5  # patterns may depend on the session
_DEFINITIONS: Mapping[str, Mapping[str, Any]] = {
    LEAD: {
        "tools": [{"name": each, "type": "builtin"} for each in (*TOOLS, *RECOVERIES)],
        "subagents": {"names": list(AGENTS)},
        "memory_scope": "tenant",
    },
    **{each: {"tools": []} for each in AGENTS},
}

Event = Mapping[str, Any]
"""The data of ``context.recalled``."""


@dataclass(frozen=True, slots=True)
class Played:
    """The result of a run.

    Attributes:
        tokens: tokens that the model read and wrote.
        given: tokens of memory's texts, each text once.
        harmed: the run followed memory where it was wrong and a guess would have been right.
    """

    episode: Episode
    good: bool
    tokens: int
    given: int
    harmed: bool


@dataclass(slots=True)
class _Run:
    """Emits the events of one run."""

    task: Task
    telling: EpisodeRecorder
    texts: list[str] = field(default_factory=list)
    calls: int = 0
    tokens: int = 0

    def recalled(self, events: Sequence[Event]) -> list[str]:
        for each in events:
            self.telling.hear(EventType.CONTEXT_RECALLED, None, LEAD, each)
        new = [each["content"] for each in events if each["content"]]
        self.texts += new
        return new

    def think(self) -> None:
        """Call the model; all texts from memory are in each prompt."""
        self.calls += 1
        read = PROMPT_TOKENS + sum(map(estimated_tokens, self.texts))
        usage = {"input": read, "output": 40}
        self.tokens += read + 40
        completed = {"call": self.calls, "message": {}, "usage": usage}
        self.telling.hear(EventType.LLM_COMPLETED, None, LEAD, completed)

    def call(self, name: str, error: str | None = None) -> None:
        self.think()
        about = {"call": self.calls, "tool_call_id": "t1", "name": name}
        hear = self.telling.hear
        hear(EventType.TOOL_STARTED, None, LEAD, {**about, "arguments": {"about": name}})
        if name in AGENTS:
            child = UUID(int=(self.task.run_id.int + self.calls) % 2**128)
            hear(EventType.AGENT_STARTED, child, name, {})
            done = {"output": f"{name} is done", "usage": {}}
            hear(EventType.AGENT_COMPLETED, child, name, done)
        if error is None:
            data = {"status": "success", "result": f"{name} answered", "error": None}
            hear(EventType.TOOL_COMPLETED, None, LEAD, {**about, **data})
        else:
            failure = {"type": TOOL_ERROR, "message": error}
            failed = {"status": "error", "result": None, "error": failure}
            hear(EventType.TOOL_FAILED, None, LEAD, {**about, **failed})


async def play(task: Task, right: Right, giving: "Nothing") -> Played:
    about = RunFacts(
        run_id=task.run_id,
        session_id=f"session {task.run_id.int % _SESSIONS}",
        principal=None,
        input=task.text,
        first=LEAD,
        definitions=_DEFINITIONS,
        metadata={"domain": task.domain, "task_type": task.task_type},
    )
    goals = analyse(
        about.question,
        domain=task.domain,
        task_type=task.task_type,
        capabilities=about.capabilities,
    )
    telling = EpisodeRecorder(about)
    telling.goals = goals
    run = _Run(task, telling)
    run.recalled(await giving.start(task, goals.features))

    order = model.order(run.texts, task.heeds[0], task.guesses[0])
    for agent in order.choice:
        run.call(agent)
    tool = model.tool(run.texts, task.heeds[1], task.guesses[1])
    name = tool.choice[0]
    harmed = [_harms(order, right.order[task.domain]), _harms(tool, (right.tool[task.task_type],))]
    tool_well = task.luck[1] < TOOL_WELL[name != right.tool[task.task_type]]
    recovery: str | None = None
    if tool_well:
        run.call(name)
    else:
        error = ERRORS[name].format(n=task.number)
        run.call(name, error)
        helped = run.recalled(await giving.failed(task, goals.features, name, error))
        then = model.recovery(name, run.texts, helped, task.heeds[2], task.guesses[2])
        recovery = then.choice[0]
        harmed.append(_harms(then, (right.recovery[name],)))
        tool_well = task.luck[2] < RECOVERY_WELL[recovery != right.recovery[name]]
        run.call(recovery, None if tool_well else f"{recovery} did not help, attempt {task.number}")
    run.think()

    order_well = task.luck[0] < ORDER_WELL[order.choice != right.order[task.domain]]
    good = order_well and tool_well
    answer = model.report(order.choice, name, recovery) if task.tells else "Done."
    episode = _ended(run, good, order_well, answer)
    given = sum(map(estimated_tokens, run.texts))
    return Played(episode, good, run.tokens, given, any(harmed))


def _harms(decided: Decided, right: tuple[str, ...]) -> bool:
    return decided.heeded and decided.choice != right and decided.guess == right


def _ended(run: _Run, good: bool, order_well: bool, answer: str) -> Episode:
    """Return the episode as the service would store it."""
    why = "nothing came of the tools" if order_well else "the parts do not fit together"
    error = {"code": "refused", "message": f"the reader refused it: {why}"}
    row = run.telling.episode(
        RunStatus.COMPLETED if good else RunStatus.FAILED,
        output=answer if good else None,
        stop_reason="answer" if good else None,
        error=None if good else error,
        duration_s=_SECONDS * run.calls,
    )
    # A success check of the team accepts only what is right; failed runs need none.
    state = State(label=Outcome.SUCCESS, label_source="check") if good else State()
    traced = row["bodies"].get("trace")
    return Episode.from_row({**row, "at": run.task.at}, trace=traced, state=state)


# --- The memory of the arms -------------------------------------------------------------------


class Nothing:
    """No memory."""

    async def start(self, task: Task, features: Features) -> list[Event]:
        """Return the memory at a run's start."""
        return []

    async def failed(self, task: Task, features: Features, tool: str, error: str) -> list[Event]:
        return []

    async def learn(self, played: Played) -> None:
        """Learn from a run."""

    def night(self) -> None:
        """Do the work between two days."""


class Told(Nothing):
    """The oracle: the right way, rendered as a pattern."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def start(self, task: Task, features: Features) -> list[Event]:
        right = self._world.right(task.number)
        order = " → ".join(f"call {each}" for each in right.order[task.domain])
        return [_said(f"Steps: {order}"), _said(f"Action: use {right.tool[task.task_type]}")]

    async def failed(self, task: Task, features: Features, tool: str, error: str) -> list[Event]:
        return [_said(f"Action: call {self._world.right(task.number).recovery[tool]} next")]


def _said(text: str) -> Event:
    return {"source": "oracle", "version": 1, "content": f"[pattern, told]\n  {text}"}


class LastFew(Nothing):
    """The last episodes, about any task."""

    def __init__(self) -> None:
        self._episodes: list[Episode] = []

    async def start(self, task: Task, features: Features) -> list[Event]:
        return [_episode(each) for each in reversed(self._episodes[-MOST_EPISODES:])]

    async def learn(self, played: Played) -> None:
        self._episodes.append(played.episode)


def _episode(episode: Episode) -> Event:
    return {"source": f"episode:{episode.id}", "version": 1, "content": render_episode(episode)}


class Remembering(Nothing):
    """The service's memory.

    Args:
        learns: use patterns, not only episodes.
    """

    def __init__(self, world: World, options: LearningOptions, *, learns: bool) -> None:
        self.episodes = Episodes(len(world.tasks))
        self.patterns = Patterns(self.episodes, options)
        self._taught: Any = MemorySources(self.episodes, self.patterns, options)  # type: ignore[arg-type]
        self._salt = world.salt
        self._learns = learns

    async def start(self, task: Task, features: Features) -> list[Event]:
        found = await self.look(task, features)
        self.episodes.touch(each["source"] for each in found)
        return found

    async def look(self, task: Task, features: Features) -> list[Event]:
        """Retrieve memory for a task without counting an access."""
        found = await self._patterns(task, features)
        hits = await self.episodes.search(
            task.text, k=MOST_EPISODES, domain=task.domain, now=task.at
        )
        return [*found, *(episode_event(hit.episode, hit.score) for hit in hits if hit.relevant)]

    async def failed(self, task: Task, features: Features, tool: str, error: str) -> list[Event]:
        signature = failure_signature(TOOL_ERROR, error, tool)
        known = {**features, "error_type": TOOL_ERROR, "tool": tool}
        found = await self._patterns(task, known, signature)
        alike = self.episodes.similar_failures(signature, 2 * _ALIKE)
        alike.sort(key=lambda each: each.judged is not Outcome.SUCCESS)
        return [*found, *map(_episode, alike[:_ALIKE])]

    async def _patterns(
        self, task: Task, features: Features, signature: str | None = None
    ) -> list[Event]:
        if not self._learns:
            return []
        self.patterns.now = task.at
        lot = Assignment(self._salt, task.run_id, learns=True)
        found: list[Any] = await patterns_for(
            self._taught, TENANT, features, lot, failure_signature=signature
        )
        return found

    async def learn(self, played: Played) -> None:
        await self.episodes.store(played.episode)
        if self._learns:
            self.patterns.now = played.episode.at
            self.patterns.reflect(played.episode)

    def night(self) -> None:
        if self._learns:
            self.patterns.night()


class Misaddressed(Nothing):
    """The placebo: another arm's current memory, but for another task.

    The task has another domain and type; a failure is that of another tool.
    """

    def __init__(self, of: Remembering) -> None:
        self._of = of

    async def start(self, task: Task, features: Features) -> list[Event]:
        other, known = _other(task, features)
        return await self._of.look(other, known)

    async def failed(self, task: Task, features: Features, tool: str, error: str) -> list[Event]:
        other, known = _other(task, features)
        others = [each for each in TOOLS if each != tool]
        name = others[int(task.elsewhere[2] * len(others))]
        return await self._of.failed(other, known, name, ERRORS[name].format(n=task.number))


def _other(task: Task, features: Features) -> tuple[Task, Features]:
    domain, task_type, _ = task.elsewhere
    text = task.text.replace(task.domain, domain)
    text = text.replace(TYPES[task.task_type].format("")[:-1], TYPES[task_type].format("")[:-1])
    other = replace(task, domain=domain, task_type=task_type, text=text)
    return other, {**features, "domain": domain, "task_type": task_type}
