"""Tools with which a model dispatches, polls, awaits and cancels tasks, and sends messages to them.

Plugins check dispatches, messages, and calls of synchronous sub-agents.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Annotated, Any
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from bottega.agents.agent import BaseAgent
from bottega.agents.loop import FINAL_ANSWER
from bottega.agents.messages import AssistantMessage, ToolCall, ToolResult, Usage
from bottega.agents.query import CurrentCall, Query, Screen
from bottega.agents.shared_memory import awareness_message
from bottega.agents.tools import ToolBase, error_result, explain, success_result
from bottega.errors import CycleError, InvalidInputError, SubagentRefusedError
from bottega.subagents.child import (
    FAN_OUT,
    ChildTask,
    answer_file,
    excerpt,
    fan_out_places,
    is_long,
    own_file_tools,
    places_of,
)
from bottega.subagents.handle import (
    DispatchParams,
    Mailbox,
    Mode,
    SubagentHandle,
    SubagentStatus,
    as_id,
)
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.plugins import (
    PluginContext,
    Refused,
    Skip,
    before_dispatch,
    checked_metadata,
    guarded,
)
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.shared_context import MAX_CONTENT, MAX_PATH_BYTES
from bottega.subagents.swarm import AsyncSubagents, DispatchingTool, QueryScope, Swarm, context_of

Answer = dict[str, Any]


class SubagentTool(DispatchingTool):
    """Base class of the tools for sub-agents.

    Attributes:
        arguments: type of the arguments that :meth:`answer` receives.
    """

    timeout_s = None
    idempotent = True
    local = True
    arguments: "type[Arguments]"

    def create_schema(self) -> dict[str, Any]:
        return schema_of(self.arguments)

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            arguments = self.arguments.model_validate(tool_call.arguments)
        except ValidationError as error:
            return error_result(tool_call, explain(error), InvalidInputError.code)
        call, scope = self.shared.scope()
        try:
            return success_result(tool_call, await self.answer(call, scope, arguments))
        except InvalidInputError as error:
            return error_result(tool_call, error.detail, error.code)

    @abstractmethod
    async def answer(self, call: CurrentCall, scope: QueryScope, arguments: Any) -> Answer:
        """Execute a tool call; return the result for the model.

        Raises:
            InvalidInputError: the call cannot be executed; the model reads the error's text.
        """


MOST_TASKS, MOST_DISPATCHED = 50, 100
"""Maximum number of tasks that one call may list, and that one call may dispatch."""
MOST_PARTIAL = 10_000
"""Maximum number of characters of an unfinished answer in a call's result."""
USUAL_PRIORITY, LAST_PRIORITY = 5, 10

TaskId = Annotated[str, Field(max_length=100)]
TaskIds = Annotated[
    list[TaskId],
    Field(min_length=1, max_length=MOST_TASKS, description="Ids that a dispatch answered."),
]

FilePath = Annotated[str, Field(min_length=1, max_length=MAX_PATH_BYTES)]


def checked_input(files: dict[str, str]) -> dict[str, str]:
    """Check that the files together have at most ``MAX_CONTENT`` characters."""
    if sum(map(len, files.values())) > MAX_CONTENT:
        raise ValueError(f"the files of input may have at most {MAX_CONTENT} characters together")
    return files


class Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DispatchArguments(Arguments):
    prompt: str = Field(min_length=1, max_length=10_000, description="What the task is to do.")
    instructions: str | None = Field(
        default=None, max_length=5_000, description="How it is to work: its system message."
    )
    agent: str | None = Field(default=None, max_length=64)
    priority: int = Field(
        default=USUAL_PRIORITY, ge=1, le=LAST_PRIORITY, description="1 goes first, 10 last."
    )
    timeout_ms: int | None = Field(default=None, ge=5_000, le=600_000)
    token_budget: int | None = Field(
        default=None, ge=1, le=10**12, description="Tokens it may spend."
    )
    metadata: Annotated[dict[str, Any], AfterValidator(checked_metadata)] = Field(
        default_factory=dict
    )
    input: Annotated[dict[FilePath, str], AfterValidator(checked_input)] = Field(
        default_factory=dict,
        max_length=20,
        description="Files for it, by path below its folder's input/.",
    )
    retries: int = Field(
        default=0, ge=0, le=3, description="Further tries if its model or a tool fails."
    )


class FanOutArguments(Arguments):
    """Several tasks. If one task is invalid, the other tasks are still valid."""

    tasks: list[Any] = Field(
        min_length=1, max_length=MOST_DISPATCHED, description="As for dispatch_subagent."
    )


class PollArguments(Arguments):
    task_ids: TaskIds | None = Field(default=None, description="Without it: all your tasks.")
    include_partial_output: bool = True
    max_partial_output_length: int = Field(default=2_000, ge=0, le=MOST_PARTIAL)


class AwaitArguments(Arguments):
    task_id: TaskId | None = None
    task_ids: TaskIds | None = None
    mode: Mode = Field(
        default="all", description="any_success: until one has completed, or all are over."
    )
    quorum: int | None = Field(
        default=None, ge=1, le=MOST_TASKS, description="How many, in that mode."
    )
    timeout_ms: int = Field(default=300_000, ge=1_000, le=600_000)


class CancelArguments(Arguments):
    task_ids: TaskIds


class SendArguments(Arguments):
    task_id: TaskId
    message: str = Field(min_length=1, max_length=10_000)


@cache
def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return a class's JSON Schema, without titles and the class's docstring, which cost tokens.

    All tools share the schema, so that no run makes it again; nobody may change it.
    """
    schema = model.model_json_schema()
    for field in schema["properties"].values():
        field.pop("title", None)
    del schema["title"]
    schema.pop("description", None)
    return schema


NOT_FOUND = "not_found"


TaskTexts = Mapping[str, UUID | None]
"""Ids of tasks by the model's texts; ``None``: the text is no UUID."""


def distinct(texts: Iterable[str]) -> TaskTexts:
    """Return the ids without duplicates; two spellings of a UUID are the same id."""
    ids = {as_id(each) or each: each for each in texts}
    return {text: task if isinstance(task, UUID) else None for task, text in ids.items()}


def find(scope: QueryScope, task_id: UUID | None) -> SubagentHandle | None:
    """Return the task with this id if it is a descendant of the calling query."""
    return None if task_id is None else scope.swarm.registry.get(task_id, scope)


async def report(
    scope: QueryScope,
    ids: TaskTexts,
    longest_partial: int,
    *,
    news: bool = False,
    reads: bool = True,
) -> dict[str, Any]:
    """Build the result of ``poll_subagent``.

    Args:
        news: if true, omit outputs that the caller has already read.
        reads: if true, record that the caller has read the outputs.
    """
    now = scope.swarm.registry.scheduler.now()
    views: dict[str, dict[str, Any] | None] = {}
    if longest_partial and (remote := scope.swarm.options.remote) is not None:
        handles = [handle for task in ids.values() if (handle := find(scope, task)) is not None]
        await remote.read_texts([each for each in handles if each.is_remote])
    for each, task in ids.items():
        handle = find(scope, task)
        views[each] = None if handle is None else _view(scope, handle, now, longest_partial, news)
        if handle is not None and reads:
            _note_read(scope, handle, longest_partial)
    gone = {task: each for each, task in ids.items() if task and views[each] is None}
    if gone and (lookup := scope.swarm.options.lookup) is not None:
        for task, view in (await lookup(list(gone), scope.task_id)).items():
            sent_before = news and scope.dispatched.get(task, False)
            views[gone[task]] = _shortened(scope, task, view, sent_before=sent_before)
            if reads and task in scope.dispatched:
                scope.dispatched[task] = True
    tasks = [
        view or {"task_id": each, "status": NOT_FOUND, "error": "no task of yours has this id"}
        for each, view in views.items()
    ]
    counts = {str(status): 0 for status in SubagentStatus} | {NOT_FOUND: 0}
    for view in tasks:
        counts[view["status"]] += 1
    return {"tasks": tasks, "summary": {"total": len(tasks), **counts}}


def own_tasks(scope: QueryScope) -> tuple[TaskTexts, str | None]:
    """Return ids of at most ``MOST_TASKS`` tasks of the caller, and a text about all other tasks.

    The function chooses tasks whose outcome the caller has not read, then the latest tasks. The ids
    are in the order of dispatch.
    """
    places = {task_id: place for place, task_id in enumerate(scope.dispatched)}
    children = scope.children

    def first_then_latest(task_id: UUID) -> tuple[bool, int]:
        child = children.get(task_id)
        return child is None or child.received, -places[task_id]

    ordered = sorted(places, key=first_then_latest)
    chosen, others = ordered[:MOST_TASKS], ordered[MOST_TASKS:]
    ids = {str(each): each for each in sorted(chosen, key=places.__getitem__)}
    if not others:
        return ids, None
    under_way = sum(each in children and not children[each].status.is_final for each in others)
    return ids, (
        f"{len(others)} more of your tasks are not listed ({under_way} under way, "
        f"{len(others) - under_way} over): name their ids"
    )


def shown_usage(usage: Usage) -> dict[str, int]:
    """Return a task's tokens, the only part of the usage that a model needs."""
    return {"input": usage.input, "output": usage.output}


def shown(scope: QueryScope, task_id: UUID, output: str) -> str | dict[str, Any]:
    """Return a task's answer; of a long answer, return only the head, the tail and a file path."""
    if not is_long(output):
        return output
    return excerpt(output) | ({"file": answer_file(task_id)} if task_id in scope.dispatched else {})


def _shortened(
    scope: QueryScope, task_id: UUID, view: dict[str, Any], *, sent_before: bool
) -> dict[str, Any]:
    """Shorten a task's long answer; remove an answer that the caller has got before."""
    if "final_output" not in view:
        return view
    if sent_before:
        kept = {key: view[key] for key in view if key not in ("final_output", "stop_reason")}
        return kept | {"sent_before": True}
    return view | {"final_output": shown(scope, task_id, view["final_output"])}


def _view(
    scope: QueryScope, handle: SubagentHandle, now: float, longest_partial: int, news: bool
) -> dict[str, Any]:
    view: dict[str, Any] = {"task_id": str(handle.task_id), "status": str(handle.status)}
    is_own = handle.parent is scope
    if longest_partial and handle.partial_output and handle.final_output is None:
        unread = handle.text_length - handle.polled if news and is_own else handle.text_length
        if new := handle.partial_output[-min(unread, longest_partial) :] if unread else "":
            view["partial_output"] = new
    if handle.final_output is not None:
        view["final_output"] = handle.final_output
        if handle.stop_reason not in (None, FINAL_ANSWER):
            view["stop_reason"] = handle.stop_reason
    if handle.error is not None:
        view["error"] = handle.error
    if handle.status.is_final and handle.mailbox and handle.mailbox.unread and not handle.is_remote:
        view["unread_messages"] = len(handle.mailbox.unread)
    view["duration_ms"] = handle.duration_ms(now)
    view["token_usage"] = shown_usage(handle.token_usage)
    sent_before = news and is_own and handle.received
    return _shortened(scope, handle.task_id, view, sent_before=sent_before)


def _note_read(scope: QueryScope, handle: SubagentHandle, longest_partial: int) -> None:
    if handle.parent is not scope:
        return
    handle.received = handle.received or handle.status.is_final
    if handle.task_id in scope.dispatched:
        scope.dispatched[handle.task_id] = handle.received
    if longest_partial:
        handle.polled = handle.text_length


async def checked_message(
    swarm: Swarm, query: Query, handle: SubagentHandle, text: str
) -> str | Skip | Refused:
    """Return a message as the guards changed it, or a guard's decision to refuse or skip it."""
    request = DispatchParams(text, agent=handle.agent_name)
    said = await guarded(swarm.options.plugins, _context_of(swarm, query), request)
    return said.prompt if isinstance(said, DispatchParams) else said


def _context_of(swarm: Swarm, query: Query) -> PluginContext:
    return PluginContext(
        run_id=swarm.run_id,
        tenant_id=swarm.options.tenant_id,
        parent_id=swarm.id_at(query.path),
        depth=query.depth,
        agent=query.agent.agent_id or query.agent.agent_name,
    )


def screening(swarm: Swarm) -> Screen:
    """Return a function that calls the plugins before each call of a synchronous sub-agent.

    The function returns the question as the plugins changed it, or a tool result if a plugin
    refused or skipped the call.
    """

    async def screen(call: CurrentCall, tool_call: ToolCall, question: str) -> str | ToolResult:
        plugins, context = swarm.options.plugins, _context_of(swarm, call.query)
        request = DispatchParams(question, agent=tool_call.name)
        said = await before_dispatch(plugins, context, request)
        if isinstance(said, Refused):
            return error_result(tool_call, said.detail)
        if isinstance(said, Skip):
            return success_result(tool_call, said.result)
        return said.prompt

    return screen


class DispatchTool(SubagentTool):
    name = "dispatch_subagent"
    arguments: type[Arguments] = DispatchArguments

    def __init__(self, shared: AsyncSubagents) -> None:
        super().__init__(shared)
        self.subagents = tuple(shared.agents.values())
        known = "".join(f"\n- {name}: {a.description}" for name, a in shared.agents.items())
        helper = " Without an agent, a helper like you does it." if shared.anonymous else ""
        self.description = (
            "Starts a task that runs beside you, and answers its task_id at once; then "
            "poll_subagent, or await_subagent." + (f"{helper} Agents:{known}" if known else "")
        )

    def create_schema(self) -> dict[str, Any]:
        return self._task_schema()

    def _task_schema(self) -> dict[str, Any]:
        schema = schema_of(DispatchArguments)
        agent = {"type": "string", "enum": list(self.shared.agents)}
        properties = schema["properties"] | {"agent": agent}
        if not self.shared.agents:
            del properties["agent"]
        own = {} if self.shared.anonymous else {"required": [*schema["required"], "agent"]}
        return schema | {"properties": properties} | own

    async def answer(self, call: CurrentCall, scope: QueryScope, arguments: Any) -> Answer:
        place = (call.query.model_calls, call.index)
        return self.answer_of(await self.dispatch(call, scope, place, arguments), call)

    def replayed(self, tool_call: ToolCall) -> None:
        call, scope = self.shared.scope()
        self._make_room(scope, len(self._asked(tool_call)))
        places = places_of(call.query.model_calls, call.index, tool_call)
        for place, asked in zip(places, self._asked(tool_call), strict=True):
            child = self._child(call, scope, place)
            if child.known() is not None:
                child.give_again(asked.get("input") or {})

    def _asked(self, tool_call: ToolCall) -> Sequence[Mapping[str, Any]]:
        return [tool_call.arguments]

    def _make_room(self, scope: QueryScope, tasks: int) -> None:
        """Raise ``max_concurrent`` of a query that dispatches many tasks in one call."""
        if tasks > scope.limits.max_concurrent_of_call:
            scope.limits = scope.limits.of_large_call()

    async def dispatch(
        self,
        call: CurrentCall,
        scope: QueryScope,
        place: tuple[int, int],
        arguments: DispatchArguments,
    ) -> SubagentHandle | Answer:
        """Dispatch one task; return the task, or the answer for the model if none was dispatched.

        Raises:
            InvalidInputError: the agent does not exist, or a guard refuses the task.
        """
        self._check_agent(arguments.agent)
        child = self._child(call, scope, place)
        if (handle := child.known()) is None:
            decided = await _decided(scope, arguments, self.shared.share_metadata)
            if isinstance(decided, Skip):
                return {"status": "skipped", "result": decided.result}
            if isinstance(decided, Refused):
                telemetry = self.shared.registry.telemetry
                telemetry.count("subagent.dispatch.rejected", reason="guard")
                raise InvalidInputError(decided.detail)
            try:
                handle = child.dispatch(decided, arguments.input)
            except SubagentRefusedError as error:
                return {"error": error.detail, **error.about}
        else:
            child.give_again(arguments.input)
        return handle

    def _check_agent(self, name: str | None) -> None:
        names = ", ".join(self.shared.agents) or "none"
        if name is None and not self.shared.anonymous:
            raise InvalidInputError(f"name one of your agents in 'agent': {names}")
        if name is not None and name not in self.shared.agents:
            raise InvalidInputError(f"there is no agent '{name}'; use: {names}")

    def _child(self, call: CurrentCall, scope: QueryScope, place: tuple[int, int]) -> ChildTask:
        may_dispatch = scope.depth + 1 < scope.limits.max_depth
        configure = self._equip if may_dispatch else self.shared.configure
        return ChildTask(scope, call.query, place, self.shared.agents, configure)

    def _equip(self, helper: BaseAgent) -> None:
        helper.registered_tools += self._tools_of_helpers
        self.shared.configure(helper)

    @cached_property
    def _tools_of_helpers(self) -> tuple[ToolBase, ...]:
        return _tools(self.shared.without_agents())

    def answer_of(self, started: SubagentHandle | Answer, call: CurrentCall) -> Answer:
        """Return the answer for the model about a dispatched or refused task."""
        if not isinstance(started, SubagentHandle):
            return started
        is_queued = started.status is SubagentStatus.QUEUED
        scheduler = self.shared.registry.scheduler
        estimate = scheduler.estimated_start_ms(started) if is_queued else None
        if estimate is not None and started.priority > _best_to_come(call):
            estimate = None
        return {
            "task_id": str(started.task_id),
            "status": str(started.status),
            "queue_position": started.queue_position if is_queued else None,
            "estimated_start_ms": estimate,
        }


class FanOutTool(DispatchTool):
    name = "dispatch_subagents"
    arguments = FanOutArguments

    def __init__(self, shared: AsyncSubagents) -> None:
        super().__init__(shared)
        self.subagents = ()
        self.description = (
            "Starts several tasks in one call, as dispatch_subagent does. Answers for each its "
            "task_id, or the error for which it was not started; the others start all the same."
        )

    def create_schema(self) -> dict[str, Any]:
        schema = schema_of(FanOutArguments)
        tasks = schema["properties"]["tasks"] | {"items": self._task_schema()}
        return schema | {"properties": {"tasks": tasks}}

    def _asked(self, tool_call: ToolCall) -> Sequence[Mapping[str, Any]]:
        tasks = tool_call.arguments.get("tasks")
        return tasks if isinstance(tasks, list) else [{}]

    async def answer(self, call: CurrentCall, scope: QueryScope, arguments: Any) -> Answer:
        self._make_room(scope, len(arguments.tasks))
        places = fan_out_places(call.query.model_calls, call.index, len(arguments.tasks))
        tasks = zip(places, arguments.tasks, strict=True)
        each_one = (self._one(call, scope, *each) for each in tasks)
        if scope.swarm.options.plugins:
            started = await asyncio.gather(*each_one)
        else:  # no await suspends here, so all tasks are queued before the first task begins
            started = [await one for one in each_one]
        answers = [self.answer_of(each, call) for each in started]
        return {"tasks": [{"index": index, **answer} for index, answer in enumerate(answers)]}

    async def _one(
        self, call: CurrentCall, scope: QueryScope, place: tuple[int, int], asked: Any
    ) -> SubagentHandle | Answer:
        try:
            arguments = DispatchArguments.model_validate(asked)
            return await self.dispatch(call, scope, place, arguments)
        except ValidationError as error:
            return {"error": explain(error)}
        except InvalidInputError as error:
            return {"error": error.detail}


def _best_to_come(call: CurrentCall) -> int:
    """Return the best priority of the tasks that later calls in the same message dispatch."""
    history = call.query.agent.conversation_history
    message = next((each for each in reversed(history) if isinstance(each, AssistantMessage)), None)
    later = [] if message is None else message.tool_calls[call.index + 1 :]
    asked: list[Any] = []
    for other in later:
        if other.name == DispatchTool.name:
            asked.append(other.arguments)
        elif other.name == FAN_OUT and isinstance(tasks := other.arguments.get("tasks"), list):
            asked += tasks
    given = (each.get("priority", USUAL_PRIORITY) for each in asked if isinstance(each, dict))
    return min((each for each in given if isinstance(each, int)), default=LAST_PRIORITY)


async def _decided(
    scope: QueryScope, arguments: DispatchArguments, share_metadata: Collection[str]
) -> DispatchParams | Skip | Refused:
    """Return a task's parameters as the plugins changed them, or a plugin's refusal or skip."""
    asked = DispatchParams(
        prompt=arguments.prompt,
        agent=arguments.agent,
        instructions=arguments.instructions,
        priority=arguments.priority,
        timeout=None if arguments.timeout_ms is None else arguments.timeout_ms / 1000,
        token_budget=arguments.token_budget,
        metadata=arguments.metadata,
        retries=arguments.retries,
    )
    decided: DispatchParams | Skip | Refused = asked
    if scope.swarm.options.plugins:
        context = context_of(scope)
        decided = await before_dispatch(scope.swarm.options.plugins, context, asked)
    if isinstance(decided, DispatchParams):
        decided.shared_keys = tuple(key for key in share_metadata if key in decided.metadata)
    return decided


CANCELLED = "its parent cancelled it"


class PollTool(SubagentTool):
    name = "poll_subagent"
    description = (
        "Says how tasks are doing, with what they wrote since you last read it. Never waits."
    )

    arguments = PollArguments

    async def answer(self, call: CurrentCall, scope: QueryScope, arguments: Any) -> Answer:
        longest = arguments.max_partial_output_length if arguments.include_partial_output else 0
        if arguments.task_ids is not None:
            return await report(scope, distinct(arguments.task_ids), longest, news=True)
        ids, note = own_tasks(scope)
        answer = await report(scope, ids, longest, news=True)
        return answer | ({"note": note} if note else {})


class AwaitTool(SubagentTool):
    name = "await_subagent"
    description = (
        "Waits until a task, or all, any or a quorum of several, are over, or one has succeeded, "
        "and answers what they found. When timeout_ms is over first, they go on, and you may await "
        "them again."
    )

    arguments = AwaitArguments

    async def answer(self, call: CurrentCall, scope: QueryScope, arguments: Any) -> Answer:
        texts = list(arguments.task_ids or ())
        ids = distinct([*texts, arguments.task_id] if arguments.task_id is not None else texts)
        if not ids:
            raise InvalidInputError("invalid arguments: give task_id or task_ids")
        quorum = arguments.quorum
        if arguments.mode == "quorum" and (quorum is None or quorum > len(ids)):
            raise InvalidInputError(
                f"invalid arguments: quorum must be from 1 to {len(ids)}, the number of tasks"
            )
        key = (scope.task_id, call.query.model_calls, call.id)
        seconds = max(0.0, arguments.timeout_ms / 1000 - scope.swarm.options.waits.get(key, 0.0))
        met = await _met(scope, ids, arguments, seconds)
        answer = await report(scope, ids, 0 if met else MOST_PARTIAL)
        status = _status(arguments, met, [task["status"] for task in answer["tasks"]])
        return {"status": status, "wait_timed_out": not met, "tasks": answer["tasks"]}


async def _met(
    scope: QueryScope, ids: TaskTexts, arguments: AwaitArguments, seconds: float
) -> bool:
    found = {each: find(scope, task) for each, task in ids.items()}
    known = [handle for handle in found.values() if handle]
    gone = {
        each: task for each, task in ids.items() if not found[each] and task in scope.dispatched
    }
    if gone and arguments.mode == "any_success":
        views = (await report(scope, gone, 0))["tasks"]
        if any(view["status"] == SubagentStatus.COMPLETED for view in views):
            return True
    return await scope.wait(known, arguments.mode, arguments.quorum, seconds, len(gone))


def _status(arguments: AwaitArguments, met: bool, statuses: list[str]) -> str:
    if arguments.mode == "any_success" and met and SubagentStatus.COMPLETED not in statuses:
        return "none_succeeded"
    if len(statuses) == 1:
        return statuses[0]
    return "done" if met else "pending"


class CancelTool(SubagentTool):
    name = "cancel_subagent"
    description = "Stops tasks and all that they started. What they found so far is lost."

    arguments = CancelArguments

    async def answer(self, call: CurrentCall, scope: QueryScope, arguments: Any) -> Answer:
        ids = distinct(arguments.task_ids)
        for task in ids.values():
            if (handle := find(scope, task)) is not None:
                scope.swarm.registry.cancel(handle.task_id, CANCELLED)
        views = (await report(scope, ids, 0, reads=False))["tasks"]
        return {"tasks": [{name: view[name] for name in ("task_id", "status")} for view in views]}


class SendTool(SubagentTool):
    name = "send_to_subagent"
    description = "Sends a message to a task under way; it reads it before its next step."

    arguments = SendArguments

    async def answer(self, call: CurrentCall, scope: QueryScope, arguments: Any) -> Answer:
        handle = find(scope, as_id(arguments.task_id))
        if handle is None:
            raise InvalidInputError("none of your unfinished tasks has this id")
        message_id = str(scope.id_below((call.query.model_calls, call.index)))
        sent = {"task_id": str(handle.task_id), "status": "sent"}
        if handle.mailbox is not None and message_id in handle.mailbox.known:
            return sent  # an attempt before a crash has already sent the message
        text = await checked_message(scope.swarm, call.query, handle, arguments.message)
        if isinstance(text, Skip):
            return {**sent, "status": "skipped", "result": text.result}
        if isinstance(text, Refused):
            raise InvalidInputError(text.detail)
        if problem := _refusal(handle):
            raise InvalidInputError(problem)
        remote = scope.swarm.options.remote if handle.is_remote else None
        if remote is not None and not await remote.tell(handle, message_id, text):
            raise InvalidInputError("the task is over and reads no more messages")
        handle.mailbox = handle.mailbox or Mailbox()
        handle.mailbox.put(message_id, text)
        about = {"message_id": message_id, "message": text}
        handle.parent.listener.on_event(handle, "message_sent", about)
        return sent


def _refusal(handle: SubagentHandle) -> str | None:
    if handle.status.is_final or handle.suspended:
        return f"the task is {handle.status}: it reads no more messages"
    if handle.has_answered:
        return "the task has given its answer already: it reads no more messages"
    if handle.mailbox is None:
        return None
    if len(handle.mailbox.unread) >= 10 and not handle.is_remote:  # unknown for child runs
        unread = len(handle.mailbox.unread)
        return f"the task has {unread} unread messages: wait until it has read some"
    if len(handle.mailbox.known) >= 50:  # each message allows the task one more model call
        sent = len(handle.mailbox.known)
        return f"the task has got {sent} messages, which is the limit"
    return None


def _tools(shared: AsyncSubagents) -> tuple[ToolBase, ...]:
    kinds = (DispatchTool, FanOutTool, PollTool, AwaitTool, CancelTool, SendTool)
    return tuple(kind(shared) for kind in kinds)


def use_async_subagents(
    agent: BaseAgent,
    registry: SubagentRegistry,
    agents: Iterable[BaseAgent] | Mapping[str, BaseAgent] = (),
    *,
    limits: SubagentLimits | None = None,
    anonymous: bool = True,
    configure: Callable[[BaseAgent], object] = lambda helper: None,
    share_metadata: Collection[str] = (),
) -> None:
    """Register the sub-agent tools and the file tools on an agent.

    Args:
        agents: sub-agents that the agent may dispatch; each needs a description. The names are the
            keys of a mapping. Without a mapping, a name is the ``agent_id`` or ``agent_name``.
        limits: limits of the agent's tasks, by default the registry's limits.
        anonymous: true if the agent may dispatch helpers, which have no definition.
        configure: function called with each new helper.
        share_metadata: keys of a dispatch's metadata that the task's agent can read.

    Raises:
        InvalidInputError: ``missing_description``: a sub-agent has no description.
            ``duplicate_tool``: the agent has synchronous sub-agents, a tool's name is already used,
            or two sub-agents have the same name.
        CycleError: the agent is a direct or indirect sub-agent of one of ``agents``.
    """
    agents = dict(agents) if isinstance(agents, Mapping) else _by_name(agents)
    if agent.subagents:
        raise InvalidInputError(
            f"{agent.agent_name} cannot have both synchronous and asynchronous sub-agents",
            code="duplicate_tool",
        )
    for name, child in agents.items():
        if not child.description:
            raise InvalidInputError(
                f"the sub-agent '{name}' needs a description, so that models know when to call it",
                code="missing_description",
            )
        if path := child.path_to(agent):
            names = [member.agent_id or member.agent_name for member in (agent, *path)]
            raise CycleError(names, what="sub-agent")
    limits = limits or registry.limits
    shared = AsyncSubagents(registry, agents, limits, anonymous, configure, tuple(share_metadata))
    for tool in (*_tools(shared), *own_file_tools()):
        agent.register_tool(tool)
    if agent.memory_graph is not None:
        ids = {child.agent_id: name for name, child in agents.items() if child.agent_id}
        if message := awareness_message(agent.memory_graph, ids):
            agent.conversation_history.insert(1, message)


def _by_name(agents: Iterable[BaseAgent]) -> dict[str, BaseAgent]:
    found: dict[str, BaseAgent] = {}
    for child in agents:
        name = child.agent_id or child.agent_name
        if found.setdefault(name, child) is not child:
            raise InvalidInputError(
                f"two sub-agents are called '{name}'; give each sub-agent its own agent_name",
                code="duplicate_tool",
            )
    return found


def use_defined_subagents(
    agent: BaseAgent,
    registry: SubagentRegistry,
    agents: Iterable[BaseAgent],
    defined: Mapping[str, Any],
    configure: Callable[[BaseAgent], object] = lambda helper: None,
) -> None:
    """Register the sub-agent tools; ``defined``: field ``subagents`` of the agent's definition."""
    use_async_subagents(
        agent,
        registry,
        agents,
        limits=registry.limits.lowered(**defined.get("limits") or {}),
        anonymous=defined.get("anonymous", True),
        configure=configure,
        share_metadata=defined.get("share_metadata") or (),
    )
