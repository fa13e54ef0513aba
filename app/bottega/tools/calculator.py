"""Arithmetic for models, evaluated from the syntax tree, never executed. Pure."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from bottega.errors import InvalidInputError

Number = int | float

LONGEST_EXPRESSION = 500
MAX_BITS = 4096
"""Limit of whole numbers: about 1,200 digits."""

_MOST_PLACES = 300


def evaluate(expression: str) -> Number:
    """Evaluate an arithmetic expression, exactly for whole numbers.

    Allowed: numbers, ``+ - * / // % **``, parentheses, ``FUNCTIONS``, ``pi``, ``e``.

    Raises:
        InvalidInputError: the expression is not allowed, or has no value.
    """
    text = expression.strip()
    if len(text) > LONGEST_EXPRESSION:
        raise InvalidInputError(f"the expression is longer than {LONGEST_EXPRESSION} characters")
    if "^" in text:
        raise InvalidInputError("'^' is not understood: write powers with **")
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise InvalidInputError(f"this is no expression that can be evaluated: {reason}") from None
    except ZeroDivisionError:
        raise InvalidInputError("division by zero") from None
    except OverflowError:
        raise InvalidInputError("a number in it is too large") from None
    except (RecursionError, MemoryError):
        raise InvalidInputError("the expression is nested too deeply") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=number) if type(number) in (int, float):
            return _bounded(number)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return _called(name, [_value(argument) for argument in arguments])
    raise InvalidInputError(
        f"'{ast.unparse(node)[:60]}' is not understood: use numbers, + - * / // % **, parentheses, "
        f"{', '.join(CONSTANTS)} and {', '.join(FUNCTIONS)}"
    )


def _called(name: str, arguments: list[Number]) -> Number:
    try:
        return _bounded(FUNCTIONS[name](*arguments))
    except TypeError:
        raise InvalidInputError(f"{name}() does not take {len(arguments)} such values") from None
    except ValueError:
        raise InvalidInputError(f"{name}() has no value there") from None


def _bounded(number: Any) -> Number:
    """Return a result, or raise if it is not real, not finite or too large."""
    if isinstance(number, int):
        if number.bit_length() > MAX_BITS:
            raise OverflowError
        return number
    if isinstance(number, complex):
        raise InvalidInputError("the result is no real number")
    result = float(number)
    if not math.isfinite(result):
        raise OverflowError
    return result


def _power(base: Number, exponent: Number) -> Any:
    # A lower bound of the result's size avoids computing a power that is too large.
    if (
        isinstance(base, int)
        and isinstance(exponent, int)
        and (abs(base).bit_length() - 1) * exponent > MAX_BITS
    ):
        raise OverflowError
    return base**exponent


def _round(number: Number, places: Number = 0) -> Number:
    if not isinstance(places, int) or abs(places) > _MOST_PLACES:
        raise ValueError
    return round(number, places) if places else round(number)


def _log(number: Number, base: Number = math.e) -> float:
    return math.log(number) if base == math.e else math.log(number, base)


CONSTANTS: Mapping[str, float] = {"pi": math.pi, "e": math.e}

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "sqrt": math.sqrt,
    "abs": abs,
    "round": _round,
    "min": lambda first, *others: min((first, *others)),
    "max": lambda first, *others: max((first, *others)),
    "floor": math.floor,
    "ceil": math.ceil,
    "log": _log,
    "sin": math.sin,
    "cos": math.cos,
}

_UNARY: Mapping[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}

_BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
