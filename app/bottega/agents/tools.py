"""Tools that a model may call."""

import dataclasses
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, TypeAdapter, ValidationError

from bottega.agents.approval import EXPIRES_S, Interrupt
from bottega.agents.callables import (
    CallableArguments,
    Names,
    ToolArguments,
    as_json,
    context_for,
    fields_of,
    instances_of,
    is_context,
    listed,
    listed_async,
    names_near,
    refuse_arguments,
    schema_of,
    valid_of,
)
from bottega.agents.messages import (
    AgentUsage,
    StandardMessage,
    ToolCall,
    ToolResult,
    ToolStatus,
)
from bottega.agents.parts import Part
from bottega.agents.provider import ToolSchema
from bottega.agents.threads import run_in_thread
from bottega.errors import BottegaError, shortened
from bottega.graph.shared_memory import SharedMemoryGraph

DEFAULT_TIMEOUT_S = 60.0
WITHIN_RUN = frozenset(("current_time", "calculator", "read_shared_memory", "ask_user"))
"""Names of built-in tools that use nothing outside the run."""


class AgentState(Protocol):
    """An agent, as its tools and hooks see it; :class:`BaseAgent` explains the attributes."""

    agent_name: str
    agent_id: str | None
    conversation_history: list[StandardMessage]
    registered_tools: list["ToolBase"]
    memory_graph: SharedMemoryGraph | None
    usage: AgentUsage

    def register_tool(self, tool: "ToolBase | type[ToolBase]") -> None:
        """Add a tool; the next model call can use the tool."""


class ApprovalPort(Protocol):
    """A rule that says which calls of a tool a person must approve."""

    @property
    def confirm_above(self) -> Mapping[str, float] | None:
        """Thresholds by argument (see :class:`Approval`), or ``None`` for no thresholds."""

    def reason(self, arguments: Mapping[str, Any]) -> str | None:
        """Return the reason why a call needs an approval, or ``None`` if the call needs none."""


class ToolBase(ABC):
    """A tool. Subclasses set ``name`` and ``description``; :func:`tool` sets both from arguments.

    Attributes:
        timeout_s: time limit of one call in seconds, or ``None`` if only the run's deadline
            applies.
        idempotent: true if a call interrupted by a crash may be repeated.
        local: true if the tool has no effect outside the run, so calls do not wait until a
            step is stored.
        subagents: agents that the tool calls.
        approval: rule that says which calls a person must approve, or ``None`` for no call.
        expires_s: seconds within which people must decide.
    """

    name: str
    description: str
    timeout_s: float | None = DEFAULT_TIMEOUT_S
    idempotent: bool = False
    local: bool = False
    subagents: Sequence[AgentState] = ()
    approval: ApprovalPort | None = None
    expires_s: float = EXPIRES_S

    def interrupt(self, tool_call: ToolCall) -> Interrupt | None:
        """Return a request to people, or ``None``. The people's answer replaces :meth:`execute`."""
        return None

    def needed_approval(self, tool_call: ToolCall) -> Interrupt | None:
        """Return the approval that the call needs before execution, or ``None`` for no approval."""
        if self.approval is None:
            return None
        reason = self.approval.reason(tool_call.arguments)
        if reason is None:
            return None
        return Interrupt(
            kind="approval",
            reason=reason,
            confirm_above=self.approval.confirm_above,
            schema=self.schema.parameters,
            expires_s=self.expires_s,
        )

    @abstractmethod
    def create_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the arguments; its type must be ``object``."""

    @abstractmethod
    async def execute(self, tool_call: ToolCall) -> ToolResult:
        """Execute one call; the model reads any exception as an ERROR result."""

    def replayed(self, tool_call: ToolCall) -> None:  # noqa: B027 (most tools do not override this)
        """Repeat the call's changes of Python objects after its result was replayed."""

    @cached_property
    def schema(self) -> ToolSchema:
        """The tool's description for the model, cached."""
        return ToolSchema(self.name, self.description, self.create_schema())


def error_result(
    call: ToolCall, error: str, error_type: str | None = None, status: int | None = None
) -> ToolResult:
    """Return an ERROR answer to ``call``; a long text is shortened.

    Args:
        error_type: an error code, the name of an exception's class, or ``None`` if unknown.
        status: HTTP status from the server that refused the call.
    """
    return ToolResult(
        tool_call_id=call.id,
        tool_name=call.name,
        status=ToolStatus.ERROR,
        error=shortened(error),
        error_type=error_type,
        error_status=status,
    )


def raised(call: ToolCall, error: BaseException) -> ToolResult:
    name = type(error).__name__
    kind = error.code if isinstance(error, BottegaError) else name
    return error_result(call, f"{name}: {error}", kind)


def refused_arguments(call: ToolCall, error: ValidationError) -> ToolResult:
    return error_result(call, explain(error), "invalid_arguments")


def success_result(call: ToolCall, value: Any, parts: Sequence[Part] = ()) -> ToolResult:
    """Return a SUCCESS answer to ``call``, with ``value`` converted to JSON types.

    Args:
        parts: images and other content in addition to ``value``.

    Raises:
        TypeError: JSON cannot represent a part of ``value``.
        ValueError: ``value`` contains itself.
    """
    return ToolResult(
        tool_call_id=call.id, tool_name=call.name, result=as_json(value), parts=tuple(parts)
    )


def in_json(result: ToolResult) -> ToolResult:
    """Convert the value of a tool's ``ToolResult`` to JSON types.

    Raises:
        TypeError, ValueError: see :func:`success_result`.
    """
    value = as_json(result.result)
    return result if value is result.result else result.model_copy(update={"result": value})


def explain(error: ValidationError) -> str:
    """Return an error text for the model about a call's wrong arguments."""
    problems = (
        f"{'.'.join(map(str, item['loc'])) or 'arguments'}: {item['msg']}"
        for item in error.errors(include_url=False, include_context=False, include_input=False)
    )
    return f"invalid arguments: {'; '.join(problems)}"


async def _answer(call: ToolCall, function: Callable[[], Any], *, is_async: bool) -> ToolResult:
    """Call a function, in a thread if it is not async; return its value as the answer."""
    value = function() if is_async else await run_in_thread(partial(listed, function))
    if inspect.isawaitable(value):
        value = await value
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, AsyncIterator):
        value = await listed_async(value)
    elif isinstance(value, Iterator):
        value = await run_in_thread(partial(listed, lambda: value))
    return _answering(call, value)


def _answering(call: ToolCall, value: Any) -> ToolResult:
    if isinstance(value, Part):
        value = [value]
    if not isinstance(value, list | tuple) or not any(isinstance(each, Part) for each in value):
        return success_result(call, value)
    said = [each for each in value if not isinstance(each, Part)]
    parts = [each for each in value if isinstance(each, Part)]
    texts = [part.text for part in parts if part.text is not None]
    shown = [part for part in parts if part.text is None]
    body = [*said, *texts]
    return success_result(call, body[0] if len(body) == 1 else body or "", shown)


class FunctionTool(ToolBase):
    """A function, or another callable, as a tool; calling the tool object calls the function.

    Args:
        known: values by name; annotations that are strings may use these names.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        description: str,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        idempotent: bool = False,
        known: Names | None = None,
    ) -> None:
        self.name = name
        self.description = description
        self.timeout_s = timeout_s
        self.idempotent = idempotent
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)
        self._arguments = CallableArguments(f"the tool '{name}'", function, known or {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def create_schema(self) -> dict[str, Any]:
        return self._arguments.schema

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            function = self._arguments.call(tool_call.arguments)
        except ValidationError as error:
            return refused_arguments(tool_call, error)
        return await _answer(tool_call, function, is_async=self._is_async)


class ClassTool(ToolBase):
    """Base of the classes that :func:`tool` makes from a class with typed fields.

    The constructor accepts the arguments of the decorated class. Each call copies the instance,
    sets the fields on the copy and runs ``execute``. For a dataclass or Pydantic model, each call
    makes a new instance from the arguments.
    """

    _target: ClassVar[type[Any]]
    _takes: ClassVar[Sequence[str]]
    _fields: ClassVar[ToolArguments | TypeAdapter[Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._is_async = inspect.iscoroutinefunction(self._target.execute)
        if isinstance(self._fields, ToolArguments):
            self._prototype = self._target(*args, **kwargs)

    def create_schema(self) -> dict[str, Any]:
        fields = self._fields
        return fields.schema if isinstance(fields, ToolArguments) else schema_of(fields)

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            instance = self._instance(tool_call.arguments)
        except ValidationError as error:
            return refused_arguments(tool_call, error)
        execute = partial(instance.execute, **context_for(self._takes))
        return await _answer(tool_call, execute, is_async=self._is_async)

    def _instance(self, arguments: Mapping[str, Any]) -> Any:
        if not isinstance(self._fields, ToolArguments):
            return valid_of(self._fields, arguments)
        instance = copy(self._prototype)
        for name, value in self._fields.values(arguments).items():
            setattr(instance, name, value)
        return instance


def tool(
    name: str,
    description: str,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    idempotent: bool = False,
) -> Callable[[Any], Any]:
    """Make a tool from a function, or from a class with typed fields and an ``execute(self)``.

    The parameters (or fields) are the tool's arguments. Their types, defaults and
    ``pydantic.Field`` descriptions form the schema; Pydantic checks the arguments of each call. A
    parameter of type :class:`ToolContext` (of the function or of ``execute``) receives the call's
    context.

    Returns:
        A :class:`FunctionTool` for a function, a :class:`ToolBase` subclass for a class.

    Raises:
        TypeError: the type of a parameter is missing or has no JSON Schema, a callable's parameters
            are unknown or variadic, or a class has no ``execute``. The error text describes the
            problem.
    """

    def decorate(target: Any) -> Any:
        known = names_near(target, sys._getframe(1))
        if not inspect.isclass(target):
            return FunctionTool(
                target,
                name=name,
                description=description,
                timeout_s=timeout_s,
                idempotent=idempotent,
                known=known,
            )
        about = {
            "name": name,
            "description": description,
            "timeout_s": timeout_s,
            "idempotent": idempotent,
            "_target": target,
            "__doc__": target.__doc__,
            "__module__": target.__module__,
            "__qualname__": target.__qualname__,
        }
        about |= _class_arguments(name, target, known)
        return type(target.__name__, (ClassTool,), about)

    return decorate


def _class_arguments(name: str, target: type[Any], known: Names) -> dict[str, Any]:
    what = f"the tool '{name}'"
    if not callable(getattr(target, "execute", None)):
        raise TypeError(f"{what}: {target.__name__} needs a method execute(self) to be a tool")
    takes = refuse_arguments(what, target.execute, known)
    fields = fields_of(what, target, known)
    if any(is_context(hint) for hint, _ in fields.values()):
        raise TypeError(
            f"{target.__name__} cannot have a field of type ToolContext: "
            "declare execute(self, context: ToolContext) instead"
        )
    if dataclasses.is_dataclass(target) or issubclass(target, BaseModel):
        return {"_takes": takes, "_fields": instances_of(what, target, known)}
    return {"_takes": takes, "_fields": ToolArguments(what, fields, known)}
