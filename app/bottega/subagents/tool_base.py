"""Common parts of the tools for sub-agents: base class, arguments, and reports about tasks.

Functions of this module also call plugins about messages to tasks and synchronous sub-agent calls.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Annotated, Any
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from bottega.agents.loop import FINAL_ANSWER
from bottega.agents.messages import ToolCall, ToolResult, Usage
from bottega.agents.query import CurrentCall, Query, Screen
from bottega.agents.tools import error_result, explain, success_result
from bottega.errors import InvalidInputError
from bottega.subagents.child import answer_file, excerpt, is_long
from bottega.subagents.handle import DispatchParams, Mode, SubagentHandle, SubagentStatus, as_id
from bottega.subagents.plugins import (
    PluginContext,
    Refused,
    Skip,
    before_dispatch,
    checked_metadata,
    guarded,
)
from bottega.subagents.shared_context import MAX_CONTENT, MAX_PATH_BYTES
from bottega.subagents.swarm import DispatchingTool, QueryScope, Swarm


class SubagentTool(DispatchingTool):
    """Base of the tools for sub-agents.

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
    async def answer(self, call: CurrentCall, scope: QueryScope, arguments: Any) -> dict[str, Any]:
        """Execute a tool call; return the result for the model.

        Raises:
            InvalidInputError: the call cannot be executed; the model reads the reason.
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
    """Check that all files together have at most ``MAX_CONTENT`` characters."""
    if sum(map(len, files.values())) > MAX_CONTENT:
        raise ValueError(f"the files of input may have {MAX_CONTENT} characters together")
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
    """Several tasks, which are checked separately."""

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


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON Schema without titles and descriptions of classes, which cost tokens."""
    schema = model.model_json_schema()
    for field in schema["properties"].values():
        field.pop("title", None)
    del schema["title"]
    schema.pop("description", None)
    return schema


NOT_FOUND = "not_found"


def distinct(ids: Iterable[str]) -> list[str]:
    """Return distinct ids; different spellings of a UUID are one id."""
    return list({as_id(each) or each: each for each in ids}.values())


def find(scope: QueryScope, task_id: str) -> SubagentHandle | None:
    """Return the task with this id if it is a descendant of the calling query."""
    known = as_id(task_id)
    return None if known is None else scope.swarm.registry.get(known, scope)


async def report(
    scope: QueryScope,
    ids: Sequence[str],
    longest_partial: int,
    *,
    news: bool = False,
    reads: bool = True,
) -> dict[str, Any]:
    """Build the result of ``poll_subagent``.

    Args:
        news: if true, omit outputs that the caller already has.
        reads: true if the caller reads the outputs, so that finished tasks become received.
    """
    now = scope.swarm.registry.scheduler.now()
    views: dict[str, dict[str, Any] | None] = {}
    if longest_partial and (remote := scope.swarm.options.remote) is not None:
        found = [handle for each in ids if (handle := find(scope, each)) is not None]
        await remote.read_texts([each for each in found if each.spread])
    for each in ids:
        handle = find(scope, each)
        views[each] = None if handle is None else _view(scope, handle, now, longest_partial, news)
        if handle is not None and reads:
            _note_read(scope, handle, longest_partial)
    if scope.swarm.options.lookup is not None and None in views.values():
        await _look_up(scope, views, news=news, reads=reads)
    tasks = [
        view or {"task_id": each, "status": NOT_FOUND, "error": "no task of yours has this id"}
        for each, view in views.items()
    ]
    counts = {str(status): 0 for status in SubagentStatus} | {NOT_FOUND: 0}
    for view in tasks:
        counts[view["status"]] += 1
    return {"tasks": tasks, "summary": {"total": len(tasks), **counts}}


def own_tasks(scope: QueryScope) -> tuple[list[str], str | None]:
    """Return ids of at most ``MOST_TASKS`` of the caller's tasks, and a note on the other tasks.

    Tasks whose end the caller has not read have priority, then the latest tasks. The ids are in
    order of dispatch.
    """
    places = {task_id: place for place, task_id in enumerate(scope.dispatched)}
    children = scope.children

    def first_then_latest(task_id: UUID) -> tuple[bool, int]:
        child = children.get(task_id)
        return child is None or child.received, -places[task_id]

    ordered = sorted(places, key=first_then_latest)
    chosen, others = ordered[:MOST_TASKS], ordered[MOST_TASKS:]
    ids = [str(each) for each in sorted(chosen, key=places.__getitem__)]
    if not others:
        return ids, None
    under_way = sum(each in children and not children[each].status.is_final for each in others)
    return ids, (
        f"{len(others)} more of your tasks are not listed ({under_way} under way, "
        f"{len(others) - under_way} over): name their ids"
    )


async def _look_up(
    scope: QueryScope, views: dict[str, dict[str, Any] | None], *, news: bool, reads: bool
) -> None:
    """Add the tasks that the registry has removed, from stored records."""
    assert scope.swarm.options.lookup is not None
    gone = {task: each for each, view in views.items() if view is None and (task := as_id(each))}
    if not gone:
        return
    for task, view in (await scope.swarm.options.lookup(list(gone), scope.task_id)).items():
        views[gone[task]] = _shortened(
            scope, task, view, sent_before=news and scope.dispatched.get(task, False)
        )
        if reads and task in scope.dispatched:
            scope.dispatched[task] = True


def shown_usage(usage: Usage) -> dict[str, int]:
    """Return a task's tokens, the only part of the usage that a model needs."""
    return {"input": usage.input, "output": usage.output}


def shown(scope: QueryScope, task_id: UUID, output: str) -> str | dict[str, Any]:
    """Return a task's answer; of a long answer, the head, the tail and the path of its file."""
    if not is_long(output):
        return output
    return excerpt(output) | ({"file": answer_file(task_id)} if task_id in scope.dispatched else {})


def _shortened(
    scope: QueryScope, task_id: UUID, view: dict[str, Any], *, sent_before: bool
) -> dict[str, Any]:
    """Return a view without an already sent answer, or with the answer's part for the model."""
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
        unread = handle.written - handle.polled if news and is_own else handle.written
        if new := handle.partial_output[-min(unread, longest_partial) :] if unread else "":
            view["partial_output"] = new
    if handle.final_output is not None:
        view["final_output"] = handle.final_output
        if handle.stop_reason not in (None, FINAL_ANSWER):
            view["stop_reason"] = handle.stop_reason
    if handle.error is not None:
        view["error"] = handle.error
    if handle.status.is_final and handle.mailbox and handle.mailbox.unread and not handle.spread:
        view["unread_messages"] = len(handle.mailbox.unread)
    view["duration_ms"] = handle.duration_ms(now)
    view["token_usage"] = shown_usage(handle.token_usage)
    sent_before = news and is_own and handle.received
    return _shortened(scope, handle.task_id, view, sent_before=sent_before)


def _note_read(scope: QueryScope, handle: SubagentHandle, longest_partial: int) -> None:
    """Record that the caller has read the state of its own task."""
    if handle.parent is not scope:
        return
    handle.received = handle.received or handle.status.is_final
    if handle.task_id in scope.dispatched:
        scope.dispatched[handle.task_id] = handle.received
    if longest_partial:
        handle.polled = handle.written


async def checked_message(
    swarm: Swarm, query: Query, handle: SubagentHandle, text: str
) -> str | Skip | Refused:
    """Return a message to a task with the guards' changes, or return the guards' decision."""
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
    """Return a function that calls the plugins before a synchronous call of a sub-agent.

    This function returns the question with the plugins' changes, or the result of a refused or
    skipped call.
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
