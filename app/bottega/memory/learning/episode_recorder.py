"""Construction of a run's episode from the run's events.

The recorder reads each event once. The recorder's memory is bounded, because the trace keeps only
the first and the last steps.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from pydantic_core import to_json

from bottega.agents.messages import Usage
from bottega.agents.output import LONGEST_JUDGED
from bottega.agents.tools import WITHIN_RUN
from bottega.events.data import (
    LlmCompletedData,
    ToolEndedData,
    ToolErrorData,
    ToolStartedData,
    is_repeated,
)
from bottega.events.types import (
    Data,
    EventError,
    EventType,
    RunStatus,
)
from bottega.graph.publication import as_text
from bottega.memory.episodes.episode import (
    LONGEST_TEXT,
    OWN_RUN,
    READ_OUTSIDE,
    Episode,
    Outcome,
    State,
    StorageState,
    Summary,
    episode_id_of,
)
from bottega.memory.learning.mining import told_steps
from bottega.memory.learning.reflection import reflect
from bottega.memory.patterns.adherence import FAILED_TASK, Adherence
from bottega.memory.patterns.pattern import APPLIED
from bottega.memory.patterns.task_analysis import Goals
from bottega.memory.text.injection import suspicious
from bottega.memory.text.signature import failure_signature
from bottega.memory.text.summaries import cut, summary_of
from bottega.memory.working_memory import SEARCH_MEMORY, SET_PLAN, plan_of

_OF_MEMORY = frozenset((SET_PLAN, SEARCH_MEMORY, "recall_memory"))
"""Tools of the memory; the trace omits the calls of these tools."""

_STEP_BYTES = 300
_SUMMARY_TOKENS = 480  # about 4 bytes per token, within LONGEST_SUMMARY
_LONGEST_TAG = 64
_MOST_PARTS = 32

_ENDED = {RunStatus.COMPLETED: Outcome.UNKNOWN, RunStatus.CANCELLED: Outcome.CANCELLED}


@dataclass(frozen=True, slots=True)
class RunFacts:
    run_id: UUID
    session_id: str | None
    principal: str | None
    input: str | Sequence[Mapping[str, Any]]  # a text, or messages with at least one user message
    first: str  # name of the root agent, or of a DAG's graph
    definitions: Mapping[str, Mapping[str, Any]]  # definitions of the run's agents, by name
    metadata: Mapping[str, Any]  # may contain ``domain``, ``task_type`` and ``tags``
    user: str | None = None  # name that the tenant's product uses for the end user
    agent: str | None = None  # name of the root agent; ``None`` for a DAG
    sent_tools: frozenset[str] = frozenset()  # names of tools that the request defines
    silent: frozenset[str] = frozenset()  # agents whose work is not stored in the episode

    @property
    def question(self) -> str:
        if isinstance(self.input, str):
            return self.input
        texts: list[str] = [each["content"] for each in self.input if each["role"] == "user"]
        return texts[-1] if texts else ""

    def said(self, name: str) -> str | None:
        """Return a value from the metadata of the run or of its root agent."""
        for metadata in (self.metadata, self.definitions.get(self.first, {}).get("metadata", {})):
            value = metadata.get(name)
            if isinstance(value, str) and value.strip():
                return value.strip()[:_LONGEST_TAG]
        return None

    @property
    def task_type(self) -> str:
        return self.said("task_type") or self.first

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Names of the root agent's tools and sub-agents."""
        definition = self.definitions.get(self.first, {})
        subagents = definition.get("subagents") or {}
        tools = [tool["name"] for tool in definition.get("tools", ())]
        return tuple(dict.fromkeys((*tools, *subagents.get("names", ()))))

    @property
    def tags(self) -> tuple[str, ...]:
        found = self.metadata.get("tags")
        tag_list = found if isinstance(found, list) else []
        tags = (tag.strip()[:_LONGEST_TAG] for tag in tag_list if isinstance(tag, str))
        return tuple(dict.fromkeys(filter(None, tags)))[:20]


@dataclass(slots=True)
class RunPart:
    """The work of a graph's node or of a sub-agent in a run.

    Attributes:
        part: ``GRAPH/NODE`` for a node, or the name of a sub-agent.
        received: answers that this node or sub-agent got, by the name of the node that answered.
        task_id: id of the task, if the node or sub-agent had exactly one task.
        checks: checks of the answer.
        passed: true: all checks passed; false: a check failed (``reason``); ``None``: no result.
    """

    part: str
    agent: str
    input: str
    node: str | None = None
    received: Mapping[str, str] = field(default_factory=dict)
    output: str | None = None
    error: EventError | None = None
    task_id: UUID | None = None
    checks: Sequence[Mapping[str, Any]] = ()
    passed: bool | None = None
    reason: str | None = None

    @property
    def is_bad(self) -> bool:
        return not self.passed and (self.passed is False or self.error is not None)


class EpisodeRecorder:
    """Recorder that reads a run's events in order, and builds the run's episode at the end.

    Args:
        clean: function that removes secrets from a text. The recorder calls ``clean`` before it
            shortens a text, because ``clean`` recognises only whole secrets.
        reflects: true: rules write the episode's reflection; false: a model writes it later.
    """

    def __init__(
        self, about: RunFacts, clean: Callable[[str], str] = str, *, reflects: bool = True
    ) -> None:
        self.about = about
        self._reflects = reflects
        self.goals: Goals | None = None  # analysis of the task, if there is one
        self.parts: Sequence[RunPart] = ()  # set when the run ends
        self._clean = clean
        self._first: list[dict[str, Any]] = []
        self._last: deque[dict[str, Any]] = deque(maxlen=120)
        self._steps = 0
        self._requests: dict[tuple[Any, ...], Any] = {}
        self._tools: Counter[str] = Counter()
        self._usage = Usage()
        self._model_calls = 0
        self._retries = 0
        self._errors: dict[str, None] = {}
        self._signatures: dict[str, None] = {}
        self._tasks: dict[UUID, bool] = {}  # success of each ended task
        self._last_texts: dict[UUID | None, str] = {}  # the last text of each task's model
        self._following = Adherence()
        self._outside = {
            tool["name"]: tool
            for definition in about.definitions.values()
            for tool in definition.get("tools", ())
            if tool["type"] in ("http", "mcp")
            or (tool["type"] == "builtin" and tool["name"] not in WITHIN_RUN)
        }
        self._of_memory = _OF_MEMORY.difference(about.capabilities)
        self._suspicion: str | None = None
        self._is_silent = False  # true: the current event's agent is in ``silent``
        self._plans: list[list[str]] = []
        self._asked_people: dict[str, tuple[str, Mapping[str, Any]]] = {}  # tool and arguments
        self.decided: list[tuple[str, str]] = []  # reason, and ``denied`` or ``edited``

    def observe(self, event_type: str, task_id: UUID | None, agent: str | None, data: Data) -> None:
        self._is_silent = task_id is not None and agent in self.about.silent
        match event_type:
            case EventType.LLM_COMPLETED:
                self._model_calls += 1
                completed: LlmCompletedData = data
                self._usage += Usage.from_dict(completed["usage"])
                text = completed["message"].get("content") or ""
                self._last_texts[task_id] = self._short(text)
            case EventType.TOOL_STARTED:
                started: ToolStartedData = data
                call = task_id, started["call"], started["tool_call_id"]
                self._requests[call] = started["arguments"]
                self._following.tool_started(task_id, started)
            case EventType.TOOL_COMPLETED | EventType.TOOL_FAILED:
                failed = event_type == EventType.TOOL_FAILED
                self._following.tool_ended(task_id, data, failed=failed)
                self._tool_ended(agent, task_id, data, failed=failed)
            case EventType.LLM_FAILED:
                self._retries += is_repeated(data)
                self._failed(agent, task_id, data, None)
            case EventType.INTERRUPT_CREATED:
                self._asked_people[data["interrupt_id"]] = data["tool"], data["arguments"]
            case EventType.INTERRUPT_RESOLVED:
                question = self._asked_people.pop(data["interrupt_id"], None)
                self._decision(*question or ("", {}), data["resolution"] or {})
            case EventType.CONTEXT_RECALLED:
                self._following.recalled(data)
            case _ if task_id is not None:
                self._task(event_type, task_id, agent, data)

    def _task(self, event_type: str, task_id: UUID, agent: str | None, data: Data) -> None:
        self._following.task(event_type, task_id, agent, data)
        if event_type == EventType.AGENT_COMPLETED:
            self._tasks.setdefault(task_id, True)
            text, output = self._last_texts.pop(task_id, ""), data.get("output")
            self._step(agent, task_id, answer=text if output is None else self._short(output))
        elif event_type in FAILED_TASK:
            if self._tasks.get(task_id) is not False:
                self._failed(agent, task_id, data, agent)
            self._tasks[task_id] = False

    def _decision(
        self, tool: str, arguments: Mapping[str, Any], resolution: Mapping[str, Any]
    ) -> None:
        """Store the reason why a person denied or edited a call; later runs can read the reason."""
        if self._is_silent:
            return
        if resolution.get("decision") == "deny" and resolution.get("comment"):
            self.decided.append((self._short(resolution["comment"]), "denied"))
        edited = resolution.get("arguments")
        for name, value in edited.items() if isinstance(edited, Mapping) else ():
            if value != (was := arguments.get(name)):
                old, new = (self._short(to_json(each).decode()) for each in (was, value))
                self.decided.append((f"{tool}: {name} {old} became {new}", "edited"))

    def _failed(
        self, agent: str | None, task_id: UUID | None, data: Data, name: str | None
    ) -> None:
        error = EventError.of(data)
        failure = ToolErrorData(type=error.code or "error", message=error.message or "")
        signature = self._erred(failure, name)
        self._step(agent, task_id, error=error._asdict(), signature=signature)

    def _tool_ended(
        self, agent: str | None, task_id: UUID | None, ended: ToolEndedData, *, failed: bool
    ) -> None:
        name, error = ended["name"], ended["error"]
        arguments = self._requests.pop((task_id, ended["call"], ended["tool_call_id"]), {})
        if name in self._of_memory:
            plan = plan_of(arguments) if name == SET_PLAN and not failed else None
            if plan and len(self._plans) <= 10:
                self._plans.append(plan)
            return
        self._tools[name] += 1
        step = {
            "tool": name,
            "arguments": self._short(to_json(arguments, serialize_unknown=True).decode()),
            "status": ended["status"],
        }
        if name in self.about.sent_tools:
            step["defined_by"] = "request"
        text = ""
        if error is not None:
            text = error["message"]
            step |= {"error": self._short(text), "signature": self._erred(error, name)}
        elif ended["result"] is not None:
            text = as_text(ended["result"])
            step["result"] = self._short(text)
        if name in self._outside and self._suspicion is None:
            self._suspicion = suspicious(text)
        self._step(agent, task_id, **step)

    def _step(self, agent: str | None, task_id: UUID | None, **what: Any) -> None:
        self._steps += 1
        if self._is_silent:
            return
        step = {"step": self._steps, "agent": agent, "task_id": task_id, **what}
        if len(self._first) < 40:
            self._first.append(step)
        else:
            self._last.append(step)

    def _erred(self, error: ToolErrorData, name: str | None) -> str:
        message = self._clean(error["message"])
        signature = failure_signature(error["type"], message, name, error.get("status"))
        if self._is_silent:
            return signature
        if len(self._signatures) < 19:  # at most 20, together with the signature of the run itself
            self._signatures[signature] = None
        if len(self._errors) < 10:
            self._errors[f"{name or error['type']}: {cut(message, _STEP_BYTES)}"] = None
        return signature

    def _short(self, text: str) -> str:
        return cut(self._clean(text), _STEP_BYTES)

    @property
    def trace(self) -> list[dict[str, Any]]:
        """The stored steps; a gap in the steps' numbers means that the trace omits steps."""
        return [*self._first, *self._last]

    def episode(
        self,
        status: RunStatus,
        *,
        output: Any,
        stop_reason: str | None,
        error: Mapping[str, Any] | None,
        duration_s: float,
    ) -> dict[str, Any]:
        """Return the episode, without its end time, as an argument of SQL's ``store_episode``.

        ``duration_s`` is the time from the run's first start, in seconds."""
        about = self.about
        if error is not None:
            own = failure_signature(error["code"], self._clean(error["message"]))
            self._signatures.setdefault(own)
            self._errors.setdefault(f"{error['code']}: {self._short(error['message'])}")
        question = self._clean(about.question)
        answer = "" if output is None else self._clean(as_text(output))
        failed_tasks = sum(not well for well in self._tasks.values())
        quality: dict[str, Any] = {"stop_reason": stop_reason, "failed_tasks": failed_tasks}
        if self._suspicion:  # later runs neither get the episode nor learn from it
            quality["quarantined"] = self._suspicion
        told = Episode(
            id=episode_id_of(about.run_id),
            at=None,  # type: ignore[arg-type]
            run_id=about.run_id,
            session_id=about.session_id,
            user_id=about.user,
            agent=about.agent,
            outcome=_ENDED.get(status, Outcome.FAILURE),
            domain=about.said("domain"),
            task_type=about.task_type,
            failure_signature=next(iter(self._signatures), None),
            failure_signatures=tuple(self._signatures),
            trust=READ_OUTSIDE if self._tools.keys() & self._outside else OWN_RUN,
            origin={"principal": about.principal, "run": about.run_id, "tool": None},
            task={**self._analysed(), "original_input": question[:LONGEST_TEXT]},
            execution=self._execution(duration_s),
            result={
                "output": None if output is None else answer[:LONGEST_TEXT],
                "error": error,
                "side_effects": self._side_effects(),
                "quality": quality,
            },
            metadata=self._metadata(),
            tags=about.tags,
            summary=self._summary(question, answer),
            trace=self.trace or None,
            input=about.input if len(question) > LONGEST_TEXT else None,
            output=output if len(answer) > LONGEST_TEXT else None,
            parts=[*map(self._told, self._kept_parts())],
            state=State(StorageState.QUARANTINED if self._suspicion else StorageState.ACTIVE),
        )
        if self._reflects:
            told = replace(told, reflection=reflect(told))
        return told.to_row()

    @property
    def part_checks(self) -> list[dict[str, str]]:
        """The parts whose checks a model or plugin must decide, as data of ``run_checks``."""
        return [
            {"part": each.part, "agent": each.agent} | self._asked_of(each)
            for each in self._kept_parts()
            if each.checks and each.passed is None and each.output is not None
        ]

    def _asked_of(self, part: RunPart) -> dict[str, str]:
        texts = {"input": part.input, "output": part.output or ""}
        return {name: self._clean(text)[:LONGEST_JUDGED] for name, text in texts.items()}

    def _kept_parts(self) -> list[RunPart]:
        ranked = sorted(self.parts, key=lambda each: not each.is_bad)[:_MOST_PARTS]
        return [each for each in self.parts if any(each is kept for kept in ranked)]

    def _told(self, part: RunPart) -> dict[str, Any]:
        own = [each for each in self.trace if part.task_id and each["task_id"] == part.task_id]
        calls = told_steps(each for each in own if "answer" not in each)
        error, verdict = part.error, None
        if part.passed is not None:
            outcome = Outcome.SUCCESS if part.passed else Outcome.FAILURE
            reason = None if part.reason is None else self._short(part.reason)
            verdict = {"outcome": outcome, "reason": reason, "by": "check"}
        return {
            "part": part.part,
            "agent": part.agent,
            "node": part.node,
            "input": self._short(part.input),
            "received": [
                {"source": source, "content": self._short(text)}
                for source, text in [*part.received.items()][:4]
            ],
            "steps": summary_of("\n".join(calls), _STEP_BYTES // 4, whole_lines=True),
            "output": None if part.output is None else cut(self._clean(part.output), 1_000),
            "error": error and {"code": error.code, "message": self._short(error.message or "")},
            "verdict": verdict,
        }

    def _analysed(self) -> dict[str, Any]:
        if self.goals is None:
            return {"goals": [], "constraints": [], "context": {}, "complexity": None}
        return {
            "goals": [*map(self._clean, self.goals.goals)],
            "constraints": [*map(self._clean, self.goals.constraints)],
            "context": {"criteria": [*map(self._clean, self.goals.criteria)]},
            "complexity": self.goals.complexity,
        }

    def _metadata(self) -> dict[str, Any]:
        patterns = self._following.to_json()
        metadata: dict[str, Any] = {
            "tools_used": sorted(self._tools),
            "strategies_applied": [p["id"] for p in patterns if p["arm"] in APPLIED],
            "agents": sorted(self.about.definitions),
        }
        if patterns:
            metadata["patterns"] = patterns
        if self.decided:
            reason = "; ".join(reason for reason, _ in self.decided)[:2000]
            metadata["approval"] = {"reason": reason, "how": self.decided[-1][1]}
        if self.goals is not None:
            metadata["features"] = dict(self.goals.features)
        return metadata

    def _summary(self, question: str, answer: str) -> Summary:
        about = self.about
        around = [about.said("domain"), about.first, *about.tags]
        steps = [" ".join(filter(None, around)), *told_steps(self.trace)]
        return Summary(
            task=summary_of(question, _SUMMARY_TOKENS),
            result=summary_of(answer, _SUMMARY_TOKENS),
            errors=summary_of("\n".join(self._errors), _SUMMARY_TOKENS),
            steps=summary_of("\n".join(steps), _SUMMARY_TOKENS, whole_lines=True),
        )

    def _execution(self, duration_s: float) -> dict[str, Any]:
        plan, *adaptations = self._plans or [[]]
        resources = {
            "model_calls": self._model_calls,
            "tool_calls": self._tools.total(),
            "usage": self._usage.to_dict(),
            "tasks": len(self._tasks),
            "retries": self._retries,
            "steps": self._steps,
        }
        spent = {"duration_s": round(duration_s, 3), "resources": resources}
        return {"plan": plan, "adaptations": adaptations, **spent}

    def _side_effects(self) -> list[dict[str, Any]]:
        return [
            {"tool": name, "calls": self._tools[name]}
            for name, tool in sorted(self._outside.items())
            if self._tools[name] and tool.get("method", "GET") not in ("GET", "HEAD")
        ]
