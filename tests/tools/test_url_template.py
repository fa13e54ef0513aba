"""Arguments fill the gaps of a URL and change nothing else of it."""

from urllib.parse import unquote, unquote_to_bytes

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import InvalidInputError
from bottega.tools.egress import checked_url
from bottega.tools.http import UrlTemplate

TEMPLATE = UrlTemplate.parse("https://api.example.com:8443/v1/{a}/x-{b}.json?fixed=1&q={q}")
HOSTILE = st.one_of(
    st.text(st.characters(codec="utf-8")),
    st.text(st.sampled_from("/\\.%2eE?#&=:@[]{}; +\r\n\x00a")),
    st.sampled_from(["..", ".", "", "../..", "%2e%2e", "//evil.example", "@evil.example", "a/b"]),
)


@given(HOSTILE, HOSTILE, HOSTILE, st.dictionaries(HOSTILE, HOSTILE, max_size=3))
def test_origin_and_structure_stay_with_any_arguments(
    a: str, b: str, q: str, extra: dict[str, str]
) -> None:
    try:
        filled = TEMPLATE.fill({"a": a, "b": b, "q": q}, extra)
        url = checked_url(filled)
    except InvalidInputError:
        return
    assert str(url) == filled  # not normalised on the way
    assert (url.scheme, url.host, url.port) == ("https", "api.example.com", 8443)
    path, _, query = url.raw_path.decode("ascii").partition("?")
    empty, version, first, second = path.split("/")
    assert (empty, version, unquote(first)) == ("", "v1", a)
    assert unquote(second) == f"x-{b}.json"
    assert not {first, second} & {"", ".", ".."}
    pairs = [pair.split("=") for pair in query.split("&")]
    assert [[unquote(part) for part in pair] for pair in pairs] == [
        ["fixed", "1"],
        ["q", q],
        *(list(pair) for pair in extra.items()),
    ]


@given(HOSTILE)
def test_value_is_read_as_one_value_of_the_query(q: str) -> None:
    filled = TEMPLATE.fill({"a": "a", "b": "b", "q": q}, {})
    assert dict(httpx2.URL(filled).params) == {"fixed": "1", "q": q}
    assert unquote_to_bytes(filled.rpartition("=")[2]) == q.encode()


@pytest.mark.parametrize(
    ("text", "arguments", "extra", "filled"),
    [
        ("http://a.example", {}, {}, "http://a.example/"),
        ("http://a.example?q={q}", {"q": 1}, {}, "http://a.example/?q=1"),
        ("http://a.example/{x}", {"x": "a b/ü"}, {}, "http://a.example/a%20b%2F%C3%BC"),
        ("http://a.example/{x}", {"x": 1.5}, {}, "http://a.example/1.5"),
        ("http://a.example/{x}", {"x": True}, {}, "http://a.example/true"),
        ("http://a.example/{x}:{y}", {"x": 1, "y": 2}, {}, "http://a.example/1:2"),
        ("http://a.example/a%20b/", {}, {}, "http://a.example/a%20b/"),
        ("http://[::1]:80/{x}", {"x": 1}, {}, "http://[::1]:80/1"),
        ("http://a.example/?q={q}&r=1", {}, {}, "http://a.example/?r=1"),
        ("http://a.example/?q={q}&r=1", {"q": None}, {}, "http://a.example/?r=1"),
        ("http://a.example/?q={q}", {"q": []}, {}, "http://a.example/"),
        ("http://a.example/?q={q}", {"q": ["a", "&"]}, {}, "http://a.example/?q=a&q=%26"),
        ("http://a.example/?q={q}", {"q": {"a": 1}}, {}, "http://a.example/?q=%7B%22a%22%3A1%7D"),
        ("http://a.example/?q={x}-{y}", {"x": 1}, {}, "http://a.example/"),
        ("http://a.example/?q={x}-{y}", {"x": 1, "y": ""}, {}, "http://a.example/?q=1-"),
        ("http://a.example/?wsdl&a=b=c", {}, {}, "http://a.example/?wsdl&a=b=c"),
        ("http://a.example/", {}, {"a&b": "=", "c": [1, 2]}, "http://a.example/?a%26b=%3D&c=1&c=2"),
    ],
)
def test_template_is_filled(
    text: str, arguments: dict[str, object], extra: dict[str, object], filled: str
) -> None:
    assert UrlTemplate.parse(text).fill(arguments, extra) == filled


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "must not be empty"),
        (None, "must not be empty"),
        (".", "cannot be a part"),
        ("..", "cannot be a part"),
        ("a/../b", "cannot be a part"),
        ("..\\b", "cannot be a part"),
        ("a\nb", "cannot be a part"),
        ("a\x00", "cannot be a part"),
        ("\ud800", "cannot be a part"),
        (float("nan"), "cannot be written"),
    ],
)
def test_values_that_a_path_cannot_hold_are_refused(value: object, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        UrlTemplate.parse("http://a.example/{x}").fill({"x": value}, {})


def test_lone_surrogates_and_fixed_keys_are_refused_in_a_query() -> None:
    template = UrlTemplate.parse("http://a.example/?key=fixed&q={q}")
    with pytest.raises(InvalidInputError, match="surrogates"):
        template.fill({"q": "\ud800"}, {})
    with pytest.raises(InvalidInputError, match="the tool's URL already sets 'key'"):
        template.fill({}, {"key": "mine"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a.example/{x}",
        "ftp://a.example/",
        "{scheme}://a.example/",
        "http{s}://a.example/",
        "https://{host}/",
        "https://{sub}.example.com/",
        "https://a.example:{port}/",
        "https://a.example{path}",
        "https://user@a.example/",
        "https://{user}:p@a.example/",
        "https:///{x}",
        "https://a.example\\{x}",
        "https://a.example/#{x}",
        "https://a.example/{x",
        "https://a.example/x}",
        "https://a.example/{}",
        "https://a.example/{a b}",
        "https://a.example/{{x}}",
        "https://a.example/a b",
        "https://a.example/ü",
        "https://a.example/%zz",
        "https://a.example/a/../b",
        "https://a.example/./b",
        "https://a.example/%2E%2e/b",
        "https://a.example/?{key}=1",
        "https://a.example/?a=1&&b=2",
        "https://a.example/?=1",
        "https://a.example/\n",
        "https://127.1/",
        "https://a.example:99999/",
        "https://a.example/" + "a" * 2000,
    ],
)
def test_unsafe_template_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        UrlTemplate.parse(text)
