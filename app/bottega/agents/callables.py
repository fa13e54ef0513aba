"""Callables as tools: schema and validation of the arguments, and results as JSON."""

import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
    Set,
    ValuesView,
)
from contextlib import aclosing, nullcontext, suppress
from functools import partial
from types import FrameType, MethodType, SimpleNamespace, UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import PydanticSerializationError, SchemaError, to_json, to_jsonable_python

from bottega.agents.context import ToolContext, current_context

Names = Mapping[str, Any]
"""Values by name, to resolve annotations that are strings."""
Fields = dict[str, tuple[Any, Any]]
"""Type and default of each argument; ``...``: no default."""

_NO_SCHEMA = (PydanticUserError, SchemaError, NameError, TypeError, AttributeError)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _Schema(GenerateJsonSchema):
    """Schema generator that omits the titles of fields, because titles only cost tokens."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {  # noqa: RUF012 (Pydantic's form)
        "skipped-choice",
        "non-serializable-default",
    }

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class ToolArguments:
    """The arguments of a tool.

    Args:
        what: description of the tool in error texts.
        known: local values by name. An annotation that is a string may use these names and the
            names of the tool's module.

    Attributes:
        schema: JSON Schema of the arguments; its type is ``object``.

    Raises:
        TypeError: a type has no JSON Schema; the error text names the argument.
    """

    def __init__(self, what: str, fields: Fields, known: Names) -> None:
        # Fields get neutral names, because an argument may have the name of a Pydantic method,
        # such as ``json``.
        self._names = {f"argument_{index}": name for index, name in enumerate(fields)}
        self._adapter: TypeAdapter[Any]
        try:
            self._adapter, self.schema = self._built(fields, known)
        except _NO_SCHEMA as error:
            for name, field in fields.items():
                try:
                    self._built({name: field}, known)
                except _NO_SCHEMA as cause:
                    text = f"{what}: the type of '{name}' has no form in JSON: {_first_line(cause)}"
                    raise TypeError(text) from cause
            raise TypeError(f"{what}: {_first_line(error)}") from error

    def _built(self, fields: Fields, known: Names) -> tuple[TypeAdapter[Any], dict[str, Any]]:
        definitions: dict[str, Any] = {
            field: (_named(hint, name), default)
            for field, (name, (hint, default)) in zip(self._names, fields.items(), strict=False)
        }
        config = ConfigDict(extra="forbid", defer_build=True)
        model = create_model("arguments", __config__=config, **definitions)
        model.model_rebuild(_types_namespace=known)
        adapter = TypeAdapter(model)
        return adapter, schema_of(adapter)

    def values(self, arguments: Names) -> dict[str, Any]:
        """Validate a call's arguments, convert the values to the declared types, and add defaults.

        Raises:
            pydantic.ValidationError: the arguments do not fit their types.
        """
        valid = valid_of(self._adapter, arguments)
        return {name: getattr(valid, field) for field, name in self._names.items()}


def schema_of(adapter: TypeAdapter[Any]) -> dict[str, Any]:
    """Return the JSON Schema of a type, without a title."""
    schema = adapter.json_schema(schema_generator=_Schema)
    return {key: value for key, value in schema.items() if key != "title"}


def valid_of(adapter: TypeAdapter[Any], arguments: Names) -> Any:
    """Validate arguments and convert them to a type.

    The arguments are validated as JSON text, so that strict types accept dates and similar values
    that are strings in JSON.

    Raises:
        pydantic.ValidationError: the arguments do not fit the type.
    """
    try:
        encoded = to_json(arguments, inf_nan_mode="constants")
    except PydanticSerializationError:  # not JSON: lone surrogates, or objects from hooks
        return adapter.validate_python(arguments)
    return adapter.validate_json(encoded)


class CallableArguments:
    """The arguments of a callable.

    A parameter that ``functools.partial`` has filled by name is not an argument for the model.

    Args:
        what: description of the tool in error texts.
        known: see :class:`ToolArguments`.

    Raises:
        TypeError: the callable's parameters are unknown, or a model cannot fill a parameter. The
            error text names the parameter.
    """

    def __init__(self, what: str, function: Callable[..., Any], known: Names) -> None:
        if not callable(function):
            raise TypeError(f"{what} needs a function, a class or another callable")
        fields: Fields = {}
        self._context: list[str] = []
        self._positional: list[str] = []
        hint_of = _Hints(what, function, known)
        for parameter in _parameters(what, function):
            name = parameter.name
            hint = hint_of(parameter)
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                self._positional.append(name)
            if is_context(hint):
                self._context.append(name)
                continue
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hint, default)
        self._arguments = ToolArguments(what, fields, {**hint_of.names, **known})
        self._function = function

    @property
    def schema(self) -> dict[str, Any]:
        return self._arguments.schema

    def call(self, arguments: Names) -> Callable[[], Any]:
        """Return a function without parameters that makes the call.

        Raises:
            pydantic.ValidationError: the arguments do not fit their types.
        """
        values = {**self._arguments.values(arguments), **context_for(self._context)}
        first = [values.pop(name) for name in self._positional]
        return partial(self._function, *first, **values)


def _parameters(what: str, function: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise TypeError(
            f"{what}: the parameters of {function!r} are unknown; wrap it in a function with types"
        ) from None
    filled = function.keywords if isinstance(function, partial) else {}
    for parameter in signature.parameters.values():
        if parameter.kind in _VARIADIC:
            raise TypeError(f"{what} cannot have {parameter}: write each parameter with its name")
        if parameter.name not in filled:
            yield parameter


class _Hints:
    def __init__(self, what: str, function: Callable[..., Any], known: Names) -> None:
        self._what = what
        self._known = known
        code = _code_of(function)
        try:
            self._hints: Names = getattr(code, "__annotations__", {})
        except NameError as error:  # from Python 3.14 on, types are evaluated here
            raise TypeError(_unknown(f"{what}: the type of a parameter", error)) from error
        self.names: Names = {**getattr(code, "__globals__", {}), **_captured(code)}

    def __call__(self, parameter: inspect.Parameter) -> Any:
        name = parameter.name
        annotation = self._hints.get(name, parameter.annotation)
        if annotation is parameter.empty:
            bound = "make the tool from a method of an object, as in tool(…)(thing.method)"
            hint = bound if name in ("self", "cls") else f"write a type, as in '{name}: str'"
            raise TypeError(f"{self._what}: the parameter '{name}' has no type; {hint}")
        hint = resolved(f"{self._what}: the type of '{name}'", annotation, self.names, self._known)
        return _or_none(hint) if parameter.default is None else hint


def names_near(target: Any, frame: FrameType) -> Names:
    """Return the local variables of ``frame`` if the tool is made in a function; else nothing."""
    code = target if inspect.isclass(target) else _code_of(target)
    return frame.f_locals if "<locals>" in getattr(code, "__qualname__", "") else {}


def _code_of(function: Any) -> Any:
    while True:
        if isinstance(function, partial):
            function = function.func
        elif isinstance(function, MethodType):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif inspect.isroutine(function):
            return function
        else:
            function = type(function).__call__


def _captured(code: Any) -> dict[str, Any]:
    found = {}
    names = code.__code__.co_freevars if inspect.isfunction(code) else ()
    for name, cell in zip(names, getattr(code, "__closure__", None) or (), strict=False):
        with suppress(ValueError):  # the variable has no value yet
            found[name] = cell.cell_contents
    return found


def resolved(what: str, written: Any, names: Names, known: Names) -> Any:
    """Return the type of an annotation. Evaluate each part that is a string.

    Args:
        what: description of the type in error texts.
        names: global values by name.
        known: local values by name.

    Raises:
        TypeError: ``written`` is not a type, or a name in ``written`` has no value yet.
    """
    holder = SimpleNamespace(__annotations__={"it": written})
    try:
        return get_type_hints(holder, dict(names), dict(known), include_extras=True)["it"]
    except NameError as error:
        raise TypeError(_unknown(what, error)) from error
    except (TypeError, SyntaxError, AttributeError) as error:
        raise TypeError(f"{what} is not a type: {_first_line(error)}") from error


def fields_of(what: str, cls: type[Any], known: Names) -> Fields:
    """Return a class's annotated public attributes, which are the arguments of the tool.

    Raises:
        TypeError: a name in a type has no value yet.
    """
    try:
        hints = get_type_hints(cls, localns=dict(known), include_extras=True)
    except NameError as error:
        raise TypeError(_unknown(f"{what}: the type of a field", error)) from error
    return {
        name: (hint, getattr(cls, name, ...))
        for name, hint in hints.items()
        if not name.startswith("_") and getattr(hint, "__origin__", hint) is not ClassVar
    }


def instances_of(what: str, cls: type[Any], known: Names) -> TypeAdapter[Any]:
    """Return Pydantic's adapter for a dataclass or model whose fields are a tool's arguments.

    Raises:
        TypeError: a field has no JSON Schema.
    """
    try:
        adapter = TypeAdapter(cls)
        adapter.rebuild(_types_namespace=known)
        schema_of(adapter)
    except _NO_SCHEMA as error:
        raise TypeError(f"{what}: {_first_line(error)}") from error
    return adapter


def refuse_arguments(what: str, function: Callable[..., Any], known: Names) -> list[str]:
    """Return the names of the parameters of ``execute`` that accept the context.

    Raises:
        TypeError: ``execute`` has a parameter that is not a :class:`ToolContext`.
    """
    found = []
    hint_of = _Hints(what, function, known)
    for parameter in list(_parameters(what, function))[1:]:
        if not is_context(hint_of(parameter)):
            raise TypeError(
                f"{what}: execute may have only self and a ToolContext, not '{parameter.name}'; "
                "the arguments of the tool are the fields of its class"
            )
        found.append(parameter.name)
    return found


def is_context(hint: Any) -> bool:
    """Return true for the types ``ToolContext`` and ``ToolContext | None``."""
    if get_origin(hint) is Annotated:
        return is_context(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return any(map(is_context, get_args(hint)))
    return hint is ToolContext


def context_for(parameters: Sequence[str]) -> dict[str, ToolContext]:
    """Return the current :class:`ToolContext` as the value of each parameter, by name."""
    if not parameters:
        return {}
    context = current_context.get() or ToolContext()  # called outside of a query
    return dict.fromkeys(parameters, context)


def _named(hint: Any, name: str) -> Any:
    if get_origin(hint) is Annotated:
        base, *about = get_args(hint)
        return Annotated[(base, Field(alias=name), *about)]
    return Annotated[hint, Field(alias=name)]


def _or_none(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        base, *about = get_args(hint)
        return Annotated[(Union[base, None], *about)]  # noqa: UP007 (base may be any object)
    return Union[hint, None]  # noqa: UP007


def _unknown(what: str, error: NameError) -> str:
    return f"{what} names '{error.name}', which is not defined before the tool is made"


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


_BASIC = (str, bool, int, type(None))


def as_json(value: Any) -> Any:
    """Convert a value to JSON's types.

    - Dataclasses, Pydantic models and other objects with public attributes become objects.
    - Named tuples, sets and iterators become lists.
    - Bytes become base64; dates, decimals, paths and similar values become texts.

    Raises:
        TypeError: JSON cannot represent a part of the value.
        ValueError: the value contains itself.
    """
    if type(value) in _BASIC:
        return value
    return to_jsonable_python(value, fallback=_plain, inf_nan_mode="null", bytes_mode="base64")


def _plain(value: Any) -> Any:
    kind: Any = type(value)
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        return dict(value)
    if callable(to_list := getattr(value, "tolist", None)):  # an array of numpy or ``array``
        return to_list()
    if isinstance(value, Iterator | Sequence | Set | ValuesView):
        return list(value)
    if kind.__str__ is not object.__str__ and not isinstance(value, type):
        return str(value)
    shown = getattr(value, "__dict__", {})
    public = {name: each for name, each in shown.items() if not name.startswith("_")}
    if callable(value) or not public:
        raise TypeError(
            f"the tool has run, but its result has a {kind.__name__}, which JSON cannot represent; "
            "return a dict, a list, a text, a number or a dataclass"
        )
    return public


def listed(function: Callable[[], Any]) -> Any:
    """Call a function and return its value; convert an iterator to a list.

    When the tool call is cancelled, the list ends with the items that were read so far.
    """
    value = function()
    if not isinstance(value, Iterator):
        return value
    context = current_context.get()
    found = []
    for each in value:
        if context is not None and context.cancel.is_cancelled:
            break
        found.append(each)
    return found


async def listed_async(values: AsyncIterator[Any]) -> list[Any]:
    """Return the items of an asynchronous iterator; close the iterator if it is a generator."""
    async with aclosing(values) if isinstance(values, AsyncGenerator) else nullcontext():
        return [each async for each in values]
