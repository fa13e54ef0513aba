"""Error signatures: the kind of a failure."""

import json
import unicodedata
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.memory.text.signature import LONGEST_SIGNATURE, failure_signature

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=80)
WORDS = st.lists(st.sampled_from(["no", "answer", "from", "it", "can't", "after", "in"]))


QUOTES = "\"'`«»\u2018\u2019\u201c\u201d\uff02\uff07\uff40"
HEX = st.text("0123456789abcdef", min_size=8, max_size=40)
ABOUT = {
    "numbers": st.one_of(
        st.integers().map(str),
        st.integers(0).map("{:,}".format),
        st.floats(0, 1e6).map("{:.2f}".format),
        st.text("٠١٢٣٤٥٦٧٨٩", min_size=1, max_size=5),
    ),
    "ids": st.one_of(
        st.uuids().map(str),
        HEX,
        HEX.map(str.upper),
        st.integers(0, 10**6).map("req_{}".format),
        st.from_regex("[A-Za-z]{0,9}[0-9][A-Za-z0-9]{0,9}", fullmatch=True),
    ),
    "durations": st.tuples(
        st.integers(0, 10**5), st.sampled_from(["s", " s", "ms", " ms", " seconds", " minuti", "h"])
    ).map(lambda pair: f"{pair[0]}{pair[1]}"),
    "times": st.datetimes().flatmap(
        lambda at: st.sampled_from([at.isoformat(), at.isoformat(" "), at.isoformat() + "Z"])
    ),
    "paths": st.from_regex(r"(~|\.\.?)?(/[a-z0-9_.-]{0,7}[a-zA-Z0-9]){1,4}/?", fullmatch=True),
    "hosts": st.one_of(
        st.from_regex(r"[a-z]{1,9}(\.[a-z0-9-]{1,5}[a-z]){1,3}(:[0-9]{2,5})?", fullmatch=True),
        st.ip_addresses().map(str).filter(lambda address: address[-1] != ":"),
        st.just("localhost"),
    ),
    "URLs": st.from_regex(
        r"https?://[a-z.]{1,9}(/[a-z0-9]{0,5}){0,3}(\?q=[0-9]{1,4})?", fullmatch=True
    ),
    "long quoted texts": st.text(
        st.characters(exclude_categories=["Cs", "Cc"], exclude_characters=QUOTES), min_size=50
    )
    .filter(lambda text: len(unicodedata.normalize("NFKC", text).strip()) > 45)
    .flatmap(
        lambda text: st.sampled_from([f'"{text}"', f"'{text}'", f"\u201c{text}\u201d", f"«{text}»"])
    ),
}


@pytest.mark.parametrize("sort", ABOUT)
@given(data=st.data())
def test_details_of_an_error_make_no_difference(sort: str, data: st.DataObject) -> None:
    before, after = (" ".join(data.draw(WORDS)) for _ in range(2))
    one, other = (
        failure_signature("TimeoutError", f"{before} {data.draw(ABOUT[sort])}, {after}", "fetch")
        for _ in range(2)
    )
    assert one == other


def test_braces_in_a_quoted_text_make_no_difference() -> None:
    plain, braces = (f'refused "{"x" * 50}{more}" here' for more in ("", "{}"))
    assert failure_signature("E", plain) == failure_signature("E", braces)


QUOTED = {
    "numbers": st.integers().map(str),
    "ids": st.uuids().map(str) | HEX,
    "times": st.datetimes().map(lambda at: at.isoformat()),
    "paths": ABOUT["paths"],
}


@pytest.mark.parametrize("sort", QUOTED)
@given(data=st.data())
def test_quoted_details_and_those_in_json_make_no_difference(
    sort: str, data: st.DataObject
) -> None:
    first, second = (
        (
            failure_signature("E", f'no "{detail}" in it', "fetch"),
            failure_signature("E", json.dumps({"error": {"code": "gone", "id": detail}}), "fetch"),
        )
        for detail in (data.draw(QUOTED[sort]) for _ in range(2))
    )
    assert first == second


NAMES = st.sampled_from(["card_declined", "no_such_user", "timeout", "Not Found"])
KIND: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(["TimeoutError", "KeyError", "model_error"]),
    "tool": st.sampled_from(["fetch", "pay", "ask_it"]),
    "status": st.none() | st.integers(100, 599),
    "code": NAMES,
}


@given(st.fixed_dictionaries(KIND), st.fixed_dictionaries(KIND), st.booleans())
def test_what_tells_makes_a_difference(
    one: dict[str, Any], other: dict[str, Any], as_json: bool
) -> None:
    def signature(kind: dict[str, Any]) -> str:
        message = json.dumps({"code": kind["code"]}) if as_json else f"it said '{kind['code']}'"
        return failure_signature(kind["type"], message, kind["tool"], kind["status"])

    assert (signature(one) == signature(other)) == (one == other)


@given(ANY_TEXT, ANY_TEXT, st.none() | ANY_TEXT)
def test_any_texts_give_a_short_signature_that_can_be_stored_and_read(
    error_type: str, message: str, tool: str | None
) -> None:
    signature = failure_signature(error_type, message, tool)
    assert 0 < len(signature) <= LONGEST_SIGNATURE
    assert signature.isprintable()
    assert signature.encode()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("TimeoutError", "timed out after 30 s", "fetch"),
            "timeout_error @fetch: timed out after #",
        ),
        (("builtins.KeyError", "'user_7'"), "key_error: <text>"),
        (("ValueError", "ValueError: not a number: 12x"), "value_error: not a number: #"),
        (("model_error", "no answer\n\n from 10.0.0.7:443"), "model_error: no answer from <name>"),
        (("E", f"run {UUID(int=7)} can't read /tmp/a.txt"), "e: run # can't read <path>"),
        (("E", "found [1, 2, 3] at 2026-11-21 10:00:00"), "e: found [#] at #"),
        (("E", "error:404 from https://a.b/c?d=1: gone"), "e: error:# from <url> gone"),
        (("", ""), "error"),
        (("E", "no column 'amount' in 'a/b'"), "e: no column 'amount' in <text>"),
        (
            ("tool_error", "the server answered 404 Not Found", "get"),
            "tool_error 404 @get: the server answered # not found",
        ),
        (
            ("E", 'said {"error": {"code": "card_declined", "at": 17, "id": "x7"}} twice'),
            "e: said at, code=card_declined, id=<text> twice",
        ),
    ],
)
def test_signature_is_readable(arguments: Any, expected: str) -> None:
    assert failure_signature(*arguments) == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("TimeoutError", "x", None), ("ConnectionError", "x", None)),
        (("E", "connection refused", None), ("E", "connection reset", None)),
        (("E", "x", "fetch"), ("E", "x", "search")),
        (("E", "x", "fetch"), ("E", "x", None)),
        (("E", "3 failed", None), ("E", "none failed", None)),
    ],
)
def test_different_kinds_have_different_signatures(
    one: tuple[str, str, str | None], other: tuple[str, str, str | None]
) -> None:
    assert failure_signature(*one) != failure_signature(*other)
