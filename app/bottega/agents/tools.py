"""Tools that a model may call."""

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from types import UnionType
from typing import Any, ClassVar, Protocol, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from bottega.agents.callers.context import ToolContext, current_context
from bottega.agents.messages import (
    AgentUsage,
    StandardMessage,
    ToolCall,
    ToolResult,
    ToolStatus,
)
from bottega.agents.parts import Part
from bottega.agents.people.interrupts import EXPIRES_S, Interrupt
from bottega.agents.provider import ToolSchema
from bottega.agents.threads import run_in_thread
from bottega.errors import BottegaError, shortened
from bottega.graph.shared_memory import SharedMemoryGraph

DEFAULT_TIMEOUT_S = 60.0


class AgentState(Protocol):
    """The state of an agent, as its tools and hooks see it; :class:`BaseAgent` explains it."""

    agent_name: str
    agent_id: str | None
    conversation_history: list[StandardMessage]
    registered_tools: list["ToolBase"]
    memory_graph: SharedMemoryGraph | None
    usage: AgentUsage

    def register_tool(self, tool: "ToolBase | type[ToolBase]") -> None:
        """Add a tool; the next model call has it."""


class ApprovalPort(Protocol):
    """A rule that says which calls of a tool a person must approve."""

    def reason(self, arguments: Mapping[str, Any]) -> str | None:
        """Return why a call needs an approval; ``None``: it needs none."""


class ToolBase(ABC):
    """A tool. Subclasses set ``name`` and ``description``; :func:`tool` sets them from arguments.

    Attributes:
        timeout_s: limit of one call in seconds; ``None``: only the run's deadline applies.
        idempotent: true if a call interrupted by a crash may be repeated.
        local: true if it has no effect outside the run; then no step is stored before a call.
        subagents: agents that it calls.
        approval: which calls a person must approve; ``None``: none.
        expires_s: seconds that people have to decide.
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
        """Return what people do in place of :meth:`execute`; ``None``: nothing."""
        return None

    def needed_approval(self, tool_call: ToolCall) -> Interrupt | None:
        """Return the approval that the call needs first; ``None``: none."""
        if self.approval is None:
            return None
        reason = self.approval.reason(tool_call.arguments)
        if reason is None:
            return None
        return Interrupt(
            kind="approval",
            reason=reason,
            schema=self.schema.parameters,
            expires_s=self.expires_s,
        )

    @abstractmethod
    def create_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the arguments, an object."""

    @abstractmethod
    async def execute(self, tool_call: ToolCall) -> ToolResult:
        """Execute one call; the model reads any exception as an ERROR result."""

    def replayed(self, tool_call: ToolCall) -> None:  # noqa: B027 (most tools need nothing)
        """Repeat the call's effects in memory after its result was replayed from the journal."""

    @cached_property
    def schema(self) -> ToolSchema:
        """The tool's description for the model, cached."""
        return ToolSchema(self.name, self.description, self.create_schema())


def error_result(
    call: ToolCall, error: str, error_type: str | None = None, status: int | None = None
) -> ToolResult:
    """Return an ERROR answer to ``call``, with a long text shortened.

    Args:
        error_type: a code, or the class of an exception; ``None``: nothing is known.
        status: of HTTP, from the server that refused the call.
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
    """Return an ERROR answer about an exception of the tool."""
    name = type(error).__name__
    kind = error.code if isinstance(error, BottegaError) else name
    return error_result(call, f"{name}: {error}", kind)


def refused_arguments(call: ToolCall, error: ValidationError) -> ToolResult:
    """Return an ERROR answer about arguments that are not those of the tool."""
    return error_result(call, explain(error), "invalid_arguments")


def success_result(call: ToolCall, value: Any, parts: Sequence[Part] = ()) -> ToolResult:
    """Return a SUCCESS answer to ``call``; ``value`` is converted to JSON types.

    Args:
        parts: images and other content beside it.

    Raises:
        ValueError: ``value`` contains itself.
    """
    if type(value) not in (str, bool, int, type(None)):
        value = to_jsonable_python(value, fallback=str, inf_nan_mode="null", bytes_mode="base64")
    return ToolResult(tool_call_id=call.id, tool_name=call.name, result=value, parts=tuple(parts))


class _Schema(GenerateJsonSchema):
    """Schema generator without titles of fields, which only cost tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "title"}


def explain(error: ValidationError) -> str:
    """Return an error text about a call's arguments, for the model."""
    problems = (
        f"{'.'.join(map(str, item['loc'])) or 'arguments'}: {item['msg']}"
        for item in error.errors(include_url=False, include_context=False, include_input=False)
    )
    return f"invalid arguments: {'; '.join(problems)}"


async def _answer(call: ToolCall, function: Callable[[], Any], *, is_async: bool) -> ToolResult:
    """Call an async function here, any other in a thread; return its value as the answer."""
    value = function() if is_async else await run_in_thread(function)
    if inspect.isawaitable(value):
        value = await value
    if isinstance(value, ToolResult):
        return value
    return _answering(call, value)


def _answering(call: ToolCall, value: Any) -> ToolResult:
    """Return a function's value as an answer; it may be a part, or a list with parts."""
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
    """A function as a tool; calling it calls the function."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        description: str,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        idempotent: bool = False,
    ) -> None:
        self.name = name
        self.description = description
        self.timeout_s = timeout_s
        self.idempotent = idempotent
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)
        self._names, self._model = _arguments_of(function)
        self._takes = _context_parameters(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def create_schema(self) -> dict[str, Any]:
        return _parameters(self._model.model_json_schema(schema_generator=_Schema))

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            valid = self._model.model_validate(tool_call.arguments)
        except ValidationError as error:
            return refused_arguments(tool_call, error)
        values = {name: getattr(valid, field) for field, name in self._names.items()}
        values |= _context_for(self._takes)
        return await _answer(tool_call, partial(self._function, **values), is_async=self._is_async)


class ClassTool(ToolBase):
    """Base of the classes that :func:`tool` makes from a class with typed fields.

    The constructor is the class's own. A call sets the fields on a copy and runs ``execute``; for
    a dataclass or Pydantic model it creates a new instance from the arguments instead.
    """

    _target: ClassVar[type[Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        target = self._target
        self._is_async = inspect.iscoroutinefunction(target.execute)
        self._takes = _context_parameters(target.execute)
        self._names: dict[str, str] | None = None
        if dataclasses.is_dataclass(target) or issubclass(target, BaseModel):
            self._adapter: TypeAdapter[Any] = TypeAdapter(target)
        else:
            self._prototype = target(*args, **kwargs)
            self._names, model = _model_of(target.__name__, _fields_of(target))
            self._adapter = TypeAdapter(model)

    def create_schema(self) -> dict[str, Any]:
        return _parameters(self._adapter.json_schema(schema_generator=_Schema))

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            valid = self._adapter.validate_python(tool_call.arguments)
        except ValidationError as error:
            return refused_arguments(tool_call, error)
        if self._names is not None:
            fields, valid = valid, copy(self._prototype)
            for field, name in self._names.items():
                setattr(valid, name, getattr(fields, field))
        execute = partial(valid.execute, **_context_for(self._takes))
        return await _answer(tool_call, execute, is_async=self._is_async)


def tool(
    name: str,
    description: str,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    idempotent: bool = False,
) -> Callable[[Any], Any]:
    """Make a tool from a function, or from a class with typed fields and an ``execute(self)``.

    The parameters (or fields) are the tool's arguments. Their types, defaults and
    ``pydantic.Field`` descriptions form the schema; Pydantic checks the arguments of each call. A
    parameter of type :class:`ToolContext`, of the function or of ``execute``, gets the call's.

    Returns:
        A :class:`FunctionTool` for a function, a :class:`ToolBase` subclass for a class.

    Raises:
        TypeError: positional-only or variadic parameters, or a class without ``execute``.
    """

    def decorate(target: Any) -> Any:
        if not inspect.isclass(target):
            return FunctionTool(
                target,
                name=name,
                description=description,
                timeout_s=timeout_s,
                idempotent=idempotent,
            )
        if not callable(getattr(target, "execute", None)):
            raise TypeError(f"{target.__name__} needs a method execute(self) to be a tool")
        if any(map(_is_context, get_type_hints(target).values())):
            raise TypeError(
                f"{target.__name__} cannot have a field of type ToolContext: let execute take it, "
                "as in execute(self, context: ToolContext)"
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
        return type(target.__name__, (ClassTool,), about)

    return decorate


_UNFILLABLE = (
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
    inspect.Parameter.POSITIONAL_ONLY,
)

Fields = dict[str, tuple[Any, Any]]
"""Type and default (``...``: none) by argument."""


def _arguments_of(function: Callable[..., Any]) -> tuple[dict[str, str], type[BaseModel]]:
    hints = get_type_hints(function, include_extras=True)
    fields: Fields = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in _UNFILLABLE:
            raise TypeError(f"a tool takes named parameters only, not {parameter}")
        if _is_context(hints.get(parameter.name)):
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints.get(parameter.name, Any), default)
    return _model_of(getattr(function, "__name__", "tool"), fields)


def _is_context(hint: Any) -> bool:
    """Return true for the type :class:`ToolContext`, optional or not."""
    if get_origin(hint) in (Union, UnionType):
        return any(map(_is_context, get_args(hint)))
    return hint is ToolContext


def _context_parameters(function: Callable[..., Any]) -> list[str]:
    hints = get_type_hints(function)
    return [name for name, hint in hints.items() if name != "return" and _is_context(hint)]


def _context_for(parameters: Sequence[str]) -> dict[str, ToolContext]:
    """Return the arguments for a function's parameters that take the context."""
    if not parameters:
        return {}
    context = current_context.get() or ToolContext()  # called outside of a query
    return dict.fromkeys(parameters, context)


def _fields_of(cls: type[Any]) -> Fields:
    hints = get_type_hints(cls, include_extras=True)
    return {
        name: (hint, getattr(cls, name, ...))
        for name, hint in hints.items()
        if not name.startswith("_") and getattr(hint, "__origin__", hint) is not ClassVar
    }


def _model_of(title: str, fields: Fields) -> tuple[dict[str, str], type[BaseModel]]:
    """Return the argument names by field name, and a Pydantic model of the arguments.

    The fields have neutral names, so an argument may have the name of a Pydantic method, such as
    ``json`` or ``copy``.
    """
    names = {f"argument_{index}": name for index, name in enumerate(fields)}
    config = ConfigDict(
        extra="forbid",
        alias_generator=names.__getitem__,
        arbitrary_types_allowed=True,
        validate_default=False,
    )
    definitions: dict[str, Any] = dict(zip(names, fields.values(), strict=True))
    return names, create_model(title, __config__=config, **definitions)
