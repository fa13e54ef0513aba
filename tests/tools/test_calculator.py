"""The calculator, compared with Python's arithmetic and given hostile expressions."""

import contextlib
import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bottega.errors import InvalidInputError
from bottega.tools.builtin import CONSTANTS, FUNCTIONS, MAX_BITS, evaluate
from tests.tools.helpers import error_of, result_of
from tests.tools.test_builtin import made

NUMBERS = st.one_of(
    st.integers(0, 10**6).map(str),
    st.floats(0, 1e6).map(repr),
    st.sampled_from(["pi", "e", "1_000", "0x1f", "1e3"]),
)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(" ".join),
        st.tuples(inner, st.integers(-3, 3)).map(lambda pair: f"({pair[0]}) ** {pair[1]}"),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
        st.tuples(st.sampled_from(["abs", "floor", "ceil", "sin", "cos", "sqrt"]), inner).map(
            lambda pair: f"{pair[0]}({pair[1]})"
        ),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(
            lambda three: f"{three[0]}({three[1]}, {three[2]})"
        ),
    ),
    max_leaves=8,
)
PYTHON: dict[str, Any] = {
    "__builtins__": {},
    **CONSTANTS,
    **{name: getattr(math, name, None) for name in FUNCTIONS},
    "abs": abs,
    "min": min,
    "max": max,
}


@given(EXPRESSIONS)
def test_it_agrees_with_python(expression: str) -> None:
    assume(len(expression) <= 500)
    try:
        expected = eval(expression, dict(PYTHON))
    except (ArithmeticError, ValueError, TypeError):
        expected = None
    if isinstance(expected, complex) or expected is None or not math.isfinite(expected):
        with pytest.raises(InvalidInputError):
            evaluate(expression)
    else:
        value = evaluate(expression)
        assert (type(value), value) == (type(expected), expected)


@given(st.text(st.sampled_from("0123456789.+-*/%() ,eEjpisqrtlogrundmaxwJ_='\"[]"), max_size=60))
def test_any_text_is_a_number_or_a_clear_error(expression: str) -> None:
    with contextlib.suppress(InvalidInputError):
        assert math.isfinite(evaluate(expression))


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_whole_numbers_are_exact(left: int, right: int) -> None:
    assert evaluate(f"{left} * {right} * {left}") == left * right * left


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 ** 100", 2**100),
        ("2 ** 4000", 2**4000),
        ("1 ** 10 ** 300", 1),
        ("(-1) ** (10 ** 300)", 1),
        ("0 ** 10 ** 300", 0),
        ("2 ** -1", 0.5),
        ("round(2.567, 2)", 2.57),
        ("round(2.5)", 2),
        ("round(1234, -2)", 1200),
        ("log(8, 2)", 3.0),
        ("log(e)", 1.0),
        ("max(3)", 3),
        ("  1 + 1\n", 2),
    ],
)
def test_usual_expressions_are_evaluated(expression: str, value: float) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("9**9**9", "too large"),
        ("9**9**9**9**9", "too large"),
        ("(2**4000)*(2**4000)", "too large"),
        ("(2**4000)**2**30", "too large"),
        ("10.0**1000", "too large"),
        ("1e999", "too large"),
        ("round(5, -10**9)", "no value"),
        ("round(5, 10**9)", "no value"),
        ("round(5, 0.5)", "no value"),
        ("1" * 501, "longer than 500"),
        ("1/0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("sqrt(-1)", "sqrt() has no value"),
        ("(-8) ** 0.5", "not a real number"),
        ("log(0)", "log() has no value"),
        ("sqrt()", "does not accept 0"),
        ("min()", "does not accept 0"),
        ("2 ^ 3", "**"),
        ("1j", "not supported"),
        ("True", "not supported"),
        ("'a' * 9", "not supported"),
        ("[1] * 9", "not supported"),
        ("1 if 1 else 2", "not supported"),
        ("1 < 2", "not supported"),
        ("(x := 1)", "not supported"),
        ("lambda: 1", "not supported"),
        ("__import__('os')", "not supported"),
        ("().__class__", "not supported"),
        ("sqrt(*(1,))", "not supported"),
        ("round(number=1)", "not supported"),
        ("sqrt", "not supported"),
        ("1 << 99", "not supported"),
        ("~1", "not supported"),
        ("f'{1}'", "not supported"),
        ("", "cannot be evaluated"),
        ("1 +", "cannot be evaluated"),
        ("1; 2", "cannot be evaluated"),
        ("\x00", "cannot be evaluated"),
        ("\ud800", "cannot be evaluated"),
        ("(" * 400, "cannot be evaluated"),
    ],
)
def test_invalid_expressions_are_refused(expression: str, reason: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        evaluate(expression)
    assert reason in caught.value.detail


def test_the_largest_number_can_be_written() -> None:
    assert len(str(2**MAX_BITS)) < 4300


async def test_number_that_json_readers_would_round_is_given_as_text() -> None:
    tool = made("calculator")
    assert await result_of(tool, expression="2 ** 53") == 2**53
    assert await result_of(tool, expression="2 ** 64") == str(2**64)
    assert await result_of(tool, expression="1 / 4") == 0.25
    assert await error_of(tool, expression="1 / 0") == "division by zero"
    assert "expression" in await error_of(tool)
