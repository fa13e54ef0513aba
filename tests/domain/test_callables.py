"""Every kind of callable as a tool, or an error that says why it is none."""

from __future__ import annotations

import asyncio
import functools
import math
from collections import ChainMap, UserDict, deque, namedtuple
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional, Union
from uuid import UUID

import numpy as np
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from bottega.agents import (
    AgentEvent,
    Part,
    ToolBase,
    ToolCall,
    ToolContext,
    ToolResult,
    ToolStatus,
    tool,
)
from bottega.agents.tools import FunctionTool
from tests.domain.scripted import agent, call
from tests.domain.test_tools import run
from tests.waiting import until


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1


@dataclass
class Point:
    x: int
    y: int = 0


@dataclass
class Line:
    start: Point
    more: list[Point] = field(default_factory=list)
    colour: Colour = Colour.RED


class Box(TypedDict):
    width: int
    label: NotRequired[str]
    corner: Point


class Crate(Box, total=False):
    weight: Decimal


class Parcel(TypedDict):
    box: Box


class Pair(NamedTuple):
    name: str
    number: int = 1


class Place(BaseModel):
    city: str
    since: date | None = None
    boxes: list[Pair] = []


class Strict(BaseModel, strict=True):
    on: date
    kind: Colour


Coordinates = namedtuple("Coordinates", "x y")


def double(number: int) -> int:
    return number * 2


async def double_later(number: int) -> int:
    await asyncio.sleep(0)
    return number * 2


class Doubler:
    def __init__(self, times: int = 2) -> None:
        self.times = times

    def __call__(self, number: int) -> int:
        return number * self.times

    def method(self, number: int) -> int:
        return number * self.times

    async def method_later(self, number: int) -> int:
        return number * self.times

    @classmethod
    def of_class(cls, number: int) -> int:
        return cls()(number)

    @staticmethod
    def of_none(number: int) -> int:
        return number * 2


class LaterDoubler:
    async def __call__(self, number: int) -> int:
        return number * 2


def scaled(number: int, factor: int) -> int:
    return number * factor


async def scaled_later(number: int, factor: int) -> int:
    return number * factor


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Logged:
    """A decorator that is an object."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def positional(number: int, /, factor: int = 2) -> int:
    return number * factor


KINDS: dict[str, Any] = {
    "function": double,
    "coroutine": double_later,
    "object": Doubler(),
    "object, async": LaterDoubler(),
    "method": Doubler().method,
    "method, async": Doubler().method_later,
    "class method": Doubler.of_class,
    "static method": Doubler.of_none,
    "partial by name": functools.partial(scaled, factor=2),
    "partial by place": functools.partial(positional, factor=2),
    "partial of a partial": functools.partial(functools.partial(scaled), factor=2),
    "partial, async": functools.partial(scaled_later, factor=2),
    "partial of a method": functools.partial(Doubler().method),
    "partial of an object": functools.partial(LaterDoubler()),
    "wrapped": logged(double),
    "wrapped coroutine": logged(double_later),
    "wrapped twice": logged(logged(double)),
    "wrapped by an object": Logged(double_later),
    "cached": functools.cache(double),
    "by place only": functools.partial(positional),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_every_callable_is_a_tool(kind: str) -> None:
    made = tool("double", "Doubles.")(KINDS[kind])
    result = await run(made, number="21")
    assert (result.result, result.error) == (42, None)
    properties = made.create_schema()["properties"]
    assert properties["number"] == {"type": "integer"}
    assert set(properties) <= {"number", "factor"}
    assert (await run(made, number="many")).status is ToolStatus.ERROR


def test_arguments_that_a_partial_has_filled_are_not_the_models() -> None:
    made = tool("scale", "-")(functools.partial(scaled, factor=2))
    assert list(made.create_schema()["properties"]) == ["number"]
    assert list(tool("x", "-")(functools.partial(scaled, 3)).create_schema()["properties"]) == [
        "factor"
    ]


async def test_a_partial_s_context_and_places_are_filled() -> None:
    def who(number: int, context: ToolContext, /, *, unit: str = "m") -> str:
        return f"{number} {unit} for {context.agent}"

    assert (await run(tool("who", "-")(who), number=2)).result == "2 m for BaseAgent"
    cm = functools.partial(who, 3, unit="cm")
    assert (await run(tool("who", "-")(cm))).result == "3 cm for BaseAgent"


class Variadic:
    def __call__(self, *numbers: int) -> int:
        return sum(numbers)


class Untyped:
    def __call__(self, number) -> int:  # type: ignore[no-untyped-def]
        return int(number)

    def method(self, number: int, unit="m") -> int:  # type: ignore[no-untyped-def]
        return number


class Opaque:
    pass


def keywords(**named: int) -> int:
    return sum(named.values())


def of_later(when: Later) -> int:  # type: ignore[name-defined]  # noqa: F821
    return 0


def of_opaque(number: int, thing: Opaque) -> int:
    return number


def of_callback(number: int, callback: Callable[[], int]) -> int:
    return number


def of_number(number: 3) -> int:  # type: ignore[valid-type]
    return 0


REFUSED: dict[str, tuple[Any, str]] = {
    "no type": (lambda number: number, "'number' has no type"),
    "no type, with a default": (Untyped().method, "'unit' has no type"),
    "no type, of an object": (Untyped(), "'number' has no type"),
    "no type, partial": (functools.partial(lambda a, b: a, b=1), "'a' has no type"),
    "self": (Doubler.method, "'self' has no type; make the tool from a method of an object"),
    "variadic": (Variadic(), r"\*numbers"),
    "keywords": (keywords, r"\*\*named"),
    "built-in": (math.sqrt, "'x' has no type"),
    "built-in without a signature": (max, "the parameters of"),
    "a name without a value": (of_later, "'when' names 'Later'"),
    "a class without a schema": (of_opaque, "'thing'"),
    "a function as an argument": (of_callback, "'callback'"),
    "no type at all": (of_number, "'number'"),
    "no callable": (3, "callable"),
    "a class without execute": (Opaque, "execute"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_tool_is_refused_at_once_with_the_reason(kind: str) -> None:
    target, said = REFUSED[kind]
    with pytest.raises(TypeError, match=said) as caught:
        tool("odd", "-")(target)
    assert "odd" in str(caught.value)


def test_execute_takes_no_arguments_of_its_own() -> None:
    class Search:
        text: str

        def execute(self, limit: int) -> str:
            return self.text

    with pytest.raises(TypeError, match="'limit'"):
        tool("search", "-")(Search)


def test_a_field_without_a_schema_is_refused_at_once() -> None:
    class Search:
        thing: Opaque

        def execute(self) -> str:
            return ""

    with pytest.raises(TypeError, match="'thing'"):
        tool("search", "-")(Search)

    @dataclass
    class Find:
        thing: Opaque

        def execute(self) -> str:
            return ""

    with pytest.raises(TypeError, match="Opaque"):
        tool("find", "-")(Find)


def echoing(hint: Any) -> FunctionTool:
    """Make a tool that returns its argument and the argument's type."""

    def echo(value: Any) -> list[Any]:
        return [type(value).__name__, value]

    echo.__annotations__["value"] = hint
    made = tool("echo", "-")(echo)
    assert isinstance(made, FunctionTool)
    return made


TODAY = date(2026, 11, 27)
ID = UUID(int=7)
ARGUMENTS: list[tuple[Any, Any, str, Any]] = [
    (Point, {"x": "1"}, "Point", {"x": 1, "y": 0}),
    (
        Line,
        {"start": {"x": 1}, "more": [{"x": 2, "y": 3}], "colour": "blue"},
        "Line",
        {"start": {"x": 1, "y": 0}, "more": [{"x": 2, "y": 3}], "colour": "blue"},
    ),
    (Box, {"width": 1, "corner": {"x": 1}}, "dict", {"width": 1, "corner": {"x": 1, "y": 0}}),
    (
        Crate,
        {"width": 1, "corner": {"x": 1}, "weight": "1.50"},
        "dict",
        {"width": 1, "corner": {"x": 1, "y": 0}, "weight": "1.50"},
    ),
    (
        list[Parcel],
        [{"box": {"width": 1, "corner": {"x": 1}}}],
        "list",
        [{"box": {"width": 1, "corner": {"x": 1, "y": 0}}}],
    ),
    (Pair, ["a", 2], "Pair", ["a", 2]),
    (Pair, {"name": "a"}, "Pair", ["a", 1]),
    (Coordinates, [1, "b"], "Coordinates", [1, "b"]),
    (dict[str, Pair], {"one": ["a"]}, "dict", {"one": ["a", 1]}),
    (
        Place,
        {"city": "Rome", "since": "2026-11-27"},
        "Place",
        {"city": "Rome", "since": "2026-11-27", "boxes": []},
    ),
    (Strict, {"on": "2026-11-27", "kind": "red"}, "Strict", {"on": "2026-11-27", "kind": "red"}),
    (Colour, "red", "Colour", "red"),
    (Level, 1, "Level", 1),
    (Literal["a", 1], "a", "str", "a"),
    (date, "2026-11-27", "date", "2026-11-27"),
    (datetime, "2026-11-27T10:00:00Z", "datetime", "2026-11-27T10:00:00Z"),
    (timedelta, "PT5M", "timedelta", "PT5M"),
    (Decimal, "1.10", "Decimal", "1.10"),
    (set[int], [1, 1], "set", [1]),
    (frozenset[str], ["a"], "frozenset", ["a"]),
    (tuple[int, str], [1, "a"], "tuple", [1, "a"]),
    (deque[int], [1], "deque", [1]),
    (Path, "/a/b", type(Path()).__name__, "/a/b"),
    (UUID, str(ID), "UUID", str(ID)),
    (bytes, "abc", "bytes", "YWJj"),
    (Optional[Point], None, "NoneType", None),  # noqa: UP045
    (Union[int, Point], {"x": 1}, "Point", {"x": 1, "y": 0}),  # noqa: UP007
    (Annotated[int, Field(ge=1, description="how many")], 2, "int", 2),
    (Mapping[str, list[Colour]], {"a": ["red"]}, "dict", {"a": ["red"]}),
    ("Point | None", {"x": 1}, "Point", {"x": 1, "y": 0}),
]


@pytest.mark.parametrize(("hint", "sent", "kind", "back"), ARGUMENTS, ids=str)
async def test_an_argument_becomes_its_type_and_a_result_json(
    hint: Any, sent: Any, kind: str, back: Any
) -> None:
    result = await run(echoing(hint), value=sent)
    assert result.error is None
    assert result.result == [kind, back]


@pytest.mark.parametrize(
    ("hint", "sent", "said"),
    [
        (Point, {"y": 1}, "value.x: Field required"),
        (Box, {"width": "wide", "corner": {"x": 1}}, "value.width"),
        (Crate, {"width": 1, "corner": {"x": 1}, "colour": 1}, "value.colour"),
        (Line, {"start": {"x": "far"}}, "value.start.x"),
        (Pair, [], "value.0"),
    ],
)
async def test_an_argument_that_does_not_fit_names_its_place(
    hint: Any, sent: Any, said: str
) -> None:
    assert said in str((await run(echoing(hint), value=sent)).error)


async def test_a_default_of_none_allows_null() -> None:
    @tool("find", "-")
    def find(
        text: Annotated[str, Field(description="what")] = None,  # type: ignore[assignment]  # noqa: RUF013
        most: int = None,  # type: ignore[assignment]  # noqa: RUF013
    ) -> list[Any]:
        return [text, most]

    assert (await run(find, text=None, most=None)).result == [None, None]
    assert (await run(find)).result == [None, None]
    assert find.create_schema()["properties"]["text"]["description"] == "what"


async def test_a_default_without_json_is_left_out_of_the_schema() -> None:
    nothing: Any = object()

    @tool("find", "-")
    def find(most: int = nothing) -> bool:
        return most is nothing

    assert (await run(find)).result is True
    assert find.create_schema()["properties"]["most"] == {"type": "integer"}


async def test_types_of_the_function_around_are_known() -> None:
    """Annotations in this module are texts; they name local classes."""

    @dataclass
    class Inner:
        number: int

    @dataclass
    class Outer:
        inner: Inner
        others: list[Inner] = field(default_factory=list)

    class Typed(TypedDict):
        inner: Inner

    @tool("take", "-")
    def take(outer: Outer, typed: Typed, context: ToolContext | None = None) -> int:
        return outer.inner.number + typed["inner"].number

    inner = {"number": 1}
    assert (await run(take, outer={"inner": inner}, typed={"inner": inner})).result == 2

    @tool("search", "-")
    class Search:
        outer: Outer

        async def execute(self, context: ToolContext) -> int:
            return self.outer.inner.number

    assert (await run(Search, outer={"inner": inner})).result == 1

    @tool("find", "-")
    @dataclass
    class Find:
        outer: Outer

        def execute(self) -> int:
            return self.outer.inner.number

    assert (await run(Find, outer={"inner": inner})).result == 1


async def test_types_that_the_body_uses_are_known_elsewhere() -> None:
    def made() -> Callable[..., Any]:
        @dataclass
        class Inner:
            number: int

        def take(inner: Inner) -> bool:
            return isinstance(inner, Inner)

        return take

    assert (await run(tool("take", "-")(made()), inner={"number": 1})).result is True


async def test_a_field_s_own_alias_and_rules_stay() -> None:
    @tool("find", "-")
    def find(
        text: str = Field(alias="the text", min_length=2),
        most: Annotated[int, Field(alias="limit")] = 3,
    ) -> list[Any]:
        return [text, most]

    assert (await run(find, **{"the text": "ab", "limit": 1})).result == ["ab", 1]
    assert (await run(find, **{"the text": "a"})).status is ToolStatus.ERROR


async def test_arguments_that_json_cannot_hold_are_checked_too() -> None:
    @tool("show", "-")
    def show(value: str | None) -> str:
        return type(value).__name__

    it = agent(call("show", value="x"), "done", tools=[show])
    it.on(AgentEvent.BEFORE_TOOL_EXECUTION).transform(
        lambda asked, status: asked.model_copy(update={"arguments": {"value": object()}})
    )
    (refused,) = (await it.execute_query_async("go")).tool_results
    assert refused.error_type == "invalid_arguments"
    assert (await run(show, value="\ud800")).result == "str"


async def test_a_tool_of_one_s_own_may_return_any_value() -> None:
    class Own(ToolBase):
        name, description = "own", "-"

        def create_schema(self) -> dict[str, Any]:
            return {"type": "object"}

        async def execute(self, tool_call: ToolCall) -> ToolResult:
            given = Line(Point(1)) if tool_call.arguments else object()
            return ToolResult(tool_call_id="-", tool_name="-", result={"line": given})

    fine = await run(Own(), fine=True)
    shown = {"start": {"x": 1, "y": 0}, "more": [], "colour": "red"}
    assert (fine.result, fine.text[:9]) == ({"line": shown}, '{"line":{')
    assert "JSON cannot represent" in str((await run(Own())).error)


async def test_generators_give_lists() -> None:
    def count(to: int) -> Iterator[int]:
        yield from range(to)

    async def count_later(to: int) -> AsyncIterator[Point]:
        for number in range(to):
            await asyncio.sleep(0)
            yield Point(number)

    def delayed(to: int) -> Awaitable[Iterator[int]]:
        async def later() -> Iterator[int]:
            return iter(range(to))

        return later()

    def mapped(to: int) -> Iterator[str]:
        return map(str, range(to))

    class Counter:
        async def __call__(self, to: int) -> AsyncIterator[int]:
            return count_later_numbers(to)

    async def count_later_numbers(to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number

    def parts(to: int) -> Iterator[Any]:
        yield "seen"
        yield Part("image", url="https://example.com/a.png")

    wanted: list[tuple[Any, Any]] = [
        (count, [0, 1]),
        (count_later, [{"x": 0, "y": 0}, {"x": 1, "y": 0}]),
        (delayed, [0, 1]),
        (mapped, ["0", "1"]),
        (Counter(), [0, 1]),
        (functools.partial(count), [0, 1]),
    ]
    for function, items in wanted:
        result = await run(tool("count", "-")(function), to=2)
        assert (result.result, result.error) == (items, None)
    result = await run(tool("parts", "-")(parts), to=2)
    assert (result.result, result.parts[0].type) == ("seen", "image")


async def test_a_generator_that_fails_or_never_ends_is_closed() -> None:
    closed: list[str] = []

    def endless() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append("thread")

    async def failing() -> AsyncIterator[int]:
        try:
            yield 1
            raise OSError("torn")
        finally:
            closed.append("loop")

    result = await run(tool("endless", "-", timeout_s=0.05)(endless))
    assert (result.status, result.error_type) == (ToolStatus.ERROR, "timeout")
    assert (await run(tool("failing", "-")(failing))).error == "OSError: torn"
    await until(lambda: sorted(closed) == ["loop", "thread"])


class Plain:
    def __init__(self) -> None:
        self.name = "plain"
        self._hidden = 1


class Money:
    def __str__(self) -> str:
        return "1 EUR"


RESULTS: list[tuple[Any, Any]] = [
    (Line(Point(1)), {"start": {"x": 1, "y": 0}, "more": [], "colour": "red"}),
    (Place(city="Rome"), {"city": "Rome", "since": None, "boxes": []}),
    (Pair("a"), ["a", 1]),
    ({"pair": Coordinates(1, Point(2))}, {"pair": [1, {"x": 2, "y": 0}]}),
    ([Colour.RED, Level.LOW], ["red", 1]),
    ({TODAY: Decimal("1.10"), Colour.RED: ID}, {"2026-11-27": "1.10", "red": str(ID)}),
    ({1}, [1]),
    (PurePosixPath("/a"), "/a"),
    (b"abc", "YWJj"),
    (memoryview(b"abc"), "YWJj"),
    (range(2), [0, 1]),
    (MappingProxyType({"a": Point(1)}), {"a": {"x": 1, "y": 0}}),
    (ChainMap({"a": 1}), {"a": 1}),
    (UserDict({"a": {1}}), {"a": [1]}),
    ({"a": 1}.keys(), ["a"]),
    ({"a": 1}.values(), [1]),
    ([map(str, [1])], [["1"]]),
    (Fraction(1, 3), "1/3"),
    (ValueError("torn"), "torn"),
    (Plain(), {"name": "plain"}),
    (SimpleNamespace(a=Money()), {"a": "1 EUR"}),
    (float("nan"), None),
    (np.array([[1, 2]]), [[1, 2]]),
    ({"a": np.int64(1)}, {"a": 1}),
]


@pytest.mark.parametrize(("value", "shown"), RESULTS)
async def test_a_result_is_json_and_never_how_python_shows_it(value: Any, shown: Any) -> None:
    def give() -> Any:
        return value

    result = await run(tool("give", "-")(give))
    assert (result.result, result.error) == (shown, None)


def looped() -> Any:
    one: dict[str, Any] = {}
    one["self"] = one
    return one


def looped_object() -> Any:
    one = Plain()
    one.name = one  # type: ignore[assignment]
    return one


@pytest.mark.parametrize(
    "value", [object(), Plain, double, lambda: 1, looped(), looped_object(), {"a": [object()]}]
)
async def test_a_result_without_a_form_in_json_says_so(value: Any) -> None:
    def give() -> Any:
        return [value]

    result: ToolResult = await run(tool("give", "-")(give))
    assert result.status is ToolStatus.ERROR
    assert " at 0x" not in str(result.error)
