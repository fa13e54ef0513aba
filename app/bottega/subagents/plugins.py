"""Plugins for sub-agents' tasks, called before a dispatch and after a task's end.

A plugin is any object that has one of these functions or both, async or not::

    before_dispatch(ctx: PluginContext, params: DispatchParams)
        -> None | DispatchParams | {"prompt"?, "priority"?, "metadata"?}
         | Skip | {"skip": True, "result": "…"} | Refused
    after_subagent_complete(ctx: PluginContext, outcome: TaskOutcome) -> None

A plugin fails if it raises an error, returns an invalid value, or takes longer than ``TIMEOUT_S``
seconds. Bottega then logs the error and skips the plugin. A plugin with ``guard = True`` is a
guard: if a guard fails, Bottega refuses the task. Bottega calls guards after all other plugins. If
a guard changes the task, Bottega calls all other guards again. Bottega also calls the guards for
each message to a task. For each call of a synchronous sub-agent, Bottega calls all plugins: then
``prompt`` is the query, and changes of ``priority`` and ``metadata`` have no effect.
"""

import asyncio
import copy
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from bottega.agents.threads import run_in_thread
from bottega.json_schema.values import WHOLE
from bottega.subagents.handle import DispatchParams, SubagentStatus

TIMEOUT_S = 5.0
"""Time limit of one call of a plugin, in seconds."""
MAX_PROMPT = 10_000
MAX_METADATA = 16_384
"""Limit of a task's metadata, in characters of JSON."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PluginContext:
    """The query that dispatches a task, in the form that plugins receive.

    Attributes:
        parent_id: id of the dispatching task; for the root, id of the run.
        depth: depth of the dispatched task; 0 for the root's tasks.
        agent: name of the dispatching agent.
    """

    run_id: UUID
    tenant_id: UUID | None
    parent_id: UUID
    depth: int
    agent: str


@dataclass(frozen=True, slots=True)
class SubagentPlugin:
    """The functions of an installed plugin.

    Attributes:
        name: name of the plugin's entry point, for the log.
    """

    name: str
    before_dispatch: Callable[..., Any] | None
    after_subagent_complete: Callable[..., Any] | None
    guard: bool


@dataclass(frozen=True, slots=True)
class Skip:
    """Decision to skip the task; the model gets ``result`` as the task's result."""

    result: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Decision to refuse the task; ``detail`` is the reason, which the model reads."""

    detail: str


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """A task's outcome, in the form that plugins receive; ``status`` is a final status."""

    task_id: UUID
    status: SubagentStatus
    output: str | None
    error: str | None
    duration_ms: int


async def before_dispatch(
    plugins: Sequence[object], ctx: PluginContext, request: DispatchParams
) -> DispatchParams | Skip | Refused:
    """Call all plugins, guards last; stop when a plugin skips or refuses the task."""
    for plugin in plugins:
        if not is_guard(plugin):
            answer = await _asked(plugin, ctx, request)
            if not isinstance(answer, DispatchParams):
                return answer
            request = answer
    return await guarded(plugins, ctx, request)


async def guarded(
    plugins: Sequence[object], ctx: PluginContext, request: DispatchParams
) -> DispatchParams | Skip | Refused:
    """Call the guards until each guard has accepted the request with all changes."""
    guards = [plugin for plugin in plugins if is_guard(plugin)]
    guards_left = list(guards)
    for _ in range(3 * len(guards)):
        if not guards_left:
            break
        guard = guards_left.pop(0)
        answer = await _asked(guard, ctx, request)
        if not isinstance(answer, DispatchParams):
            return answer
        if answer != request:
            request = answer
            guards_left = [each for each in guards if each is not guard]
    if guards_left:
        return Refused("the guards of this service keep changing the task: use other words")
    return request


async def _asked(
    plugin: object, ctx: PluginContext, request: DispatchParams
) -> DispatchParams | Skip | Refused:
    """Call one plugin and log its failure; after a failure of a guard, refuse the task."""
    function = getattr(plugin, "before_dispatch", None)
    if function is None:
        return request
    try:
        own = replace(request, metadata=copy.deepcopy(dict(request.metadata)))
        return _understood(await bounded(function, ctx, own, timeout_s=TIMEOUT_S), request)
    except Exception as error:
        _log(plugin, "before_dispatch", ctx, error)
        if not is_guard(plugin):
            return request
        return Refused(
            "a guard of this service could not check the task, so it was not dispatched; "
            "try again later, or continue without this task"
        )


async def after_complete(
    plugins: Sequence[object], ctx: PluginContext, outcome: TaskOutcome
) -> None:
    """Report a task's end to all plugins in order; log the plugins' errors."""
    for plugin in plugins:
        function = getattr(plugin, "after_subagent_complete", None)
        if function is None:
            continue
        try:
            await bounded(function, ctx, outcome, timeout_s=TIMEOUT_S)
        except Exception as error:
            _log(plugin, "after_subagent_complete", ctx, error)


def sees_dispatches(plugin: object) -> bool:
    return getattr(plugin, "before_dispatch", None) is not None


def is_guard(plugin: object) -> bool:
    return getattr(plugin, "guard", False) is True


def _log(plugin: object, function: str, ctx: PluginContext, error: Exception) -> None:
    if isinstance(plugin, SubagentPlugin):
        name = plugin.name
    else:
        name = getattr(plugin, "__name__", type(plugin).__name__)
    text = "plugin '%s' failed in %s, run %s: %r"
    logger.warning(text, name, function, ctx.run_id, error, exc_info=error)


async def bounded(function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """Call a plugin's function with a time limit.

    The function runs in a separate asyncio task, because a function may ignore its cancellation.

    Raises:
        TimeoutError: the function takes longer than ``timeout_s``.
        Exception: any error that the function raises.
    """
    task = asyncio.ensure_future(_called(partial(function, *arguments), function))
    try:
        await asyncio.wait([task], timeout=timeout_s)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_look_at)
    if not task.done():
        raise TimeoutError(f"the plugin took longer than {timeout_s:g} s")
    if task.cancelled():
        raise RuntimeError("the plugin cancelled itself")
    return task.result()


def _look_at(task: "asyncio.Task[Any]") -> None:
    """Retrieve an abandoned task's exception; otherwise asyncio would log it."""
    if not task.cancelled():
        task.exception()


async def _called(call: Callable[[], Any], function: Callable[..., Any]) -> Any:
    try:
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (an object with an async __call__)
        )
        value = call() if is_async else await run_in_thread(call)
        return await value if inspect.isawaitable(value) else value
    except SystemExit as error:  # SystemExit would stop the event loop
        raise RuntimeError(f"SystemExit: {error}") from None


def checked_metadata(value: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy of metadata, which must be JSON of at most ``MAX_METADATA`` characters."""
    try:
        encoded = json.dumps(value, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"metadata must be valid JSON: {error}") from None
    if len(encoded) > MAX_METADATA:
        raise ValueError(f"metadata may have at most {MAX_METADATA} characters as JSON")
    copied: dict[str, Any] = json.loads(encoded)
    return copied


class _Said(BaseModel):
    """Valid fields of a plugin's answer; ``None``: no change."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)] | None = None
    priority: Annotated[int, Field(ge=1, le=10), WHOLE] | None = None
    metadata: Annotated[dict[str, Any], AfterValidator(checked_metadata)] | None = None
    skip: Literal[True] | None = None
    result: Annotated[str, Field(max_length=100_000)] | None = None


def _understood(answer: object, request: DispatchParams) -> DispatchParams | Skip | Refused:
    """Apply a plugin's answer to the request.

    Raises:
        TypeError, ValueError: the answer is invalid, or changes a parameter that plugins may not
            change.
    """
    if answer is None or answer == request:
        return request
    if isinstance(answer, Refused):
        return Refused(str(answer.detail))
    if isinstance(answer, Skip):
        answer = {"skip": True, "result": answer.result}
    elif isinstance(answer, DispatchParams):
        answer = {field.name: getattr(answer, field.name) for field in fields(answer)}
    if not isinstance(answer, Mapping):
        raise TypeError(f"it returned {type(answer).__name__}")
    own = {field.name: getattr(request, field.name) for field in fields(request)}
    try:
        valid = _Said.model_validate(
            {name: value for name, value in answer.items() if name not in own or value != own[name]}
        )
    except ValidationError as error:  # omit the input: it may be a prompt
        raise ValueError(str(error.errors(include_input=False, include_url=False))) from None
    if valid.skip:
        return Skip(valid.result or "")
    if valid.result is not None:
        raise ValueError("'result' is allowed only with 'skip'")
    changes = {
        name: value
        for name in ("prompt", "priority", "metadata")
        if (value := getattr(valid, name)) is not None
    }
    return replace(request, **changes)
