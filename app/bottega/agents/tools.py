"""Tools: what a model may call (spec page 1, A5)."""

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from bottega.agents.messages import ToolCall, ToolResult, ToolStatus
from bottega.agents.provider import ToolSchema
from bottega.agents.threads import run_in_thread
from bottega.errors import shortened

if TYPE_CHECKING:
    from bottega.agents.base import BaseAgent

DEFAULT_TIMEOUT_S = 60.0


class ToolBase(ABC):
    """A tool. Subclasses set ``name`` and ``description``, or take them from :func:`tool`.

    Attributes:
        timeout_s: seconds one call may take; ``None``: as long as the run may.
        idempotent: whether a call that a crash interrupted may simply be made again.
        local: it acts on nothing outside the run, so nothing needs to be written down before it.
        subagents: agents that it asks.
    """

    name: str
    description: str
    timeout_s: float | None = DEFAULT_TIMEOUT_S
    idempotent: bool = False
    local: bool = False
    subagents: "Sequence[BaseAgent]" = ()

    @abstractmethod
    def create_schema(self) -> dict[str, Any]:
        """JSON Schema of the arguments, an object."""

    @abstractmethod
    async def execute(self, tool_call: ToolCall) -> ToolResult:
        """Carry out one call. Whatever it raises, the model reads as an ERROR result."""

    def replayed(self, tool_call: ToolCall) -> None:  # noqa: B027 (most change nothing)
        """A record answered the call, in its place: make good what it changed in memory."""

    @cached_property
    def schema(self) -> ToolSchema:
        """The tool as the model sees it; built once."""
        return ToolSchema(self.name, self.description, self.create_schema())


def error_result(call: ToolCall, error: str) -> ToolResult:
    """An ERROR answer to ``call``; what is too long to be of use is cut off."""
    return ToolResult(
        tool_call_id=call.id,
        tool_name=call.name,
        status=ToolStatus.ERROR,
        error=shortened(error),
    )


def success_result(call: ToolCall, value: Any) -> ToolResult:
    """A SUCCESS answer to ``call``; ``value`` is turned into what JSON can hold.

    Raises:
        ValueError: it holds itself.
    """
    if type(value) not in (str, bool, int, type(None)):
        value = to_jsonable_python(value, fallback=str, inf_nan_mode="null", bytes_mode="base64")
    return ToolResult(tool_call_id=call.id, tool_name=call.name, result=value)


class _Schema(GenerateJsonSchema):
    """Leaves out titles that only repeat a field's name: they cost tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "title"}


def explain(error: ValidationError) -> str:
    """What is wrong with a call's arguments, for the model to mend."""
    problems = (
        f"{'.'.join(map(str, item['loc'])) or 'arguments'}: {item['msg']}"
        for item in error.errors(include_url=False, include_context=False, include_input=False)
    )
    return f"invalid arguments: {'; '.join(problems)}"


async def _answer(call: ToolCall, function: Callable[[], Any], *, is_async: bool) -> ToolResult:
    """Call an async function here and any other in a thread; make its value the answer."""
    value = function() if is_async else await run_in_thread(function)
    if inspect.isawaitable(value):
        value = await value
    if isinstance(value, ToolResult):
        return value
    return success_result(call, value)


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def create_schema(self) -> dict[str, Any]:
        return _parameters(self._model.model_json_schema(schema_generator=_Schema))

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            valid = self._model.model_validate(tool_call.arguments)
        except ValidationError as error:
            return error_result(tool_call, explain(error))
        values = {name: getattr(valid, field) for field, name in self._names.items()}
        return await _answer(tool_call, partial(self._function, **values), is_async=self._is_async)


class ClassTool(ToolBase):
    """Base of the classes that :func:`tool` makes of a class with typed fields.

    Its constructor is the class's own. A call sets the fields on a copy and runs its ``execute``;
    a dataclass or Pydantic model is made anew from the arguments instead.
    """

    _target: ClassVar[type[Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        target = self._target
        self._is_async = inspect.iscoroutinefunction(target.execute)
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
            return error_result(tool_call, explain(error))
        if self._names is not None:
            fields, valid = valid, copy(self._prototype)
            for field, name in self._names.items():
                setattr(valid, name, getattr(fields, field))
        return await _answer(tool_call, valid.execute, is_async=self._is_async)


def tool(
    name: str,
    description: str,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    idempotent: bool = False,
) -> Callable[[Any], Any]:
    """Make a tool of a function, or of a class with typed fields and an ``execute(self)``.

    The parameters (or fields) are the tool's arguments: their types, defaults and
    ``pydantic.Field`` descriptions make its schema, and Pydantic checks them at each call.

    Returns:
        for a function a :class:`FunctionTool`; for a class a :class:`ToolBase` subclass.

    Raises:
        TypeError: parameters a model cannot fill, or a class without ``execute``.
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
"""Per argument: type and default, ``...`` if it has none."""


def _arguments_of(function: Callable[..., Any]) -> tuple[dict[str, str], type[BaseModel]]:
    hints = get_type_hints(function, include_extras=True)
    fields: Fields = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in _UNFILLABLE:
            raise TypeError(f"a tool takes named parameters only, not {parameter}")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints.get(parameter.name, Any), default)
    return _model_of(getattr(function, "__name__", "tool"), fields)


def _fields_of(cls: type[Any]) -> Fields:
    hints = get_type_hints(cls, include_extras=True)
    return {
        name: (hint, getattr(cls, name, ...))
        for name, hint in hints.items()
        if not name.startswith("_") and getattr(hint, "__origin__", hint) is not ClassVar
    }


def _model_of(title: str, fields: Fields) -> tuple[dict[str, str], type[BaseModel]]:
    """A model of the arguments, and which of its fields is which argument.

    The fields have names of their own, so that an argument may be called ``json`` or ``copy``
    like a method of Pydantic's.
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
