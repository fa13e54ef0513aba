"""Users' regular expressions: measured without compiling, and refused before they cost anything."""

import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import InvalidInputError
from bottega.json_schema.patterns import (
    check_patterns,
    compiled,
    is_supported,
    size_of,
)

UUID = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"


def check(*tools: list[str]) -> None:
    check_patterns(
        {
            str(tool): {f"/{tool}/{index}": pattern for index, pattern in enumerate(patterns)}
            for tool, patterns in enumerate(tools)
        }
    )


@pytest.mark.parametrize(
    "pattern",
    [
        *(UUID, r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z$", r"^[\w.+-]{1,64}@[a-z0-9.-]{1,190}$"),
        *(r"^\p{L}{1,40}$", "^(?i:[a-z]{1,10}-){1,99}$", "a{1000}", "[]{9}]{10}", "", "(|a)"),
        *(r"\{1000}{1000}", r"[\]{1000}]{1000}", "[[:alpha:]{99}]{99}", r"\x{41}{99}", "x|^$"),
    ],
)
def test_usual_patterns_are_accepted(pattern: str) -> None:
    check([pattern])


@pytest.mark.parametrize(
    "pattern",
    [
        *("a{1001}", "(a{101}){10}", "(?:(?:a{11}){10}){10}", "a{2}{501}", "(?P<n>a{101}){10}"),
        *("((a|b{101})c){10}", "(a{0101}){0000000000010}", "(a{ 101 }){ 9 , 10 }", "(a{1001,})?"),
        *(
            r"(\b{101}){10}",
            "(^{101}){10}",
            r"(\){101}){10}",
            "([^]a]{101}){10}",
            "(?i)(a{999}){2}",
        ),
        *("([[a]b]{101}){10}", "(){1001}", "a" * 1001, r"\w{900}", r"\w{450}", "[--a]{1001}"),
    ],
)
def test_pattern_that_grows_too_large_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check(["a"], ["a", pattern])
    assert (caught.value.code, caught.value.pointer) == ("pattern_too_large", "/1/1")


@pytest.mark.parametrize(
    "pattern", ["(?=a)", "(?<!a)b", r"(a)\1", r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"]
)
def test_a_pattern_of_other_engines_is_passed_over(pattern: str) -> None:
    check([pattern])
    assert not is_supported(pattern)
    assert is_supported(r"a\\1(?:b)(?P<c>d)")


@pytest.mark.parametrize("pattern", ["(", "[", "{3}", "a{,", "(?x) a", "\\"])
def test_unsupported_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidInputError, match="not supported") as caught:
        check([pattern])
    assert (caught.value.code, caught.value.pointer) == ("invalid", "/0/0")


@pytest.mark.parametrize(
    ("tools", "pointer"),
    [
        ([["a"] * 50] * 4, None),
        ([["a"], ["a"] * 51], "/1/50"),
        ([["a"] * 50] * 4 + [["b"]], "/4/0"),
        ([[r"\w{90}"] * 50] * 4, None),
        ([[rf"{number}z\w{{90}}" for number in range(10)]], "/0/8"),
    ],
)
def test_size_of_an_agents_patterns_is_bounded(tools: list[list[str]], pointer: str | None) -> None:
    if pointer is None:
        check(*tools)
        return
    began = time.process_time()
    with pytest.raises(InvalidInputError) as caught:
        check(*tools)
    assert (caught.value.code, caught.value.pointer) == ("pattern_too_large", pointer)
    assert time.process_time() - began < 0.05  # nothing was compiled


_LEAVES = st.sampled_from(["a", r"\w", r"\d", ".", "[^a-f]", r"[\w-]", "^", r"\b", "é", r"\p{L}"])


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counts = st.integers(1, 40)
    groups = st.sampled_from(["({})", "(?:{})", "(?i:{})"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        st.tuples(groups, inner, counts).map(
            lambda it: it[0].replace("{}", it[1]) + f"{{{it[2]}}}"
        ),
    )


@given(st.recursive(_LEAVES, _grown, max_leaves=8))
def test_pattern_measured_as_small_compiles(pattern: str) -> None:
    """Check the measure: the engine refuses beyond 10 MB."""
    size = size_of(pattern)
    if size.repeats <= 1000 and size.bytes <= 4_000_000:
        compiled(pattern)


@given(st.text("a1{},\\[]^-()|?*wpx:< ", max_size=40))
def test_measuring_any_pattern_ends(pattern: str) -> None:
    with suppress(InvalidInputError):
        check([pattern])
