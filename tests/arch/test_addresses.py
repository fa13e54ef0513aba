"""Rules about the addresses of requests: no value in one is put there as it is."""

import re
from collections.abc import Iterator

import pytest

from tests.arch.sources import PACKAGE, text_of

_SENDERS = (
    *("get", "post", "call", "fetchBlob", "useData", "usePages", "postOnce", "withQuery"),
    *("fetch", "WebSocket", "EventSource", "start"),
)
_MADE = re.compile(
    rf"""(?x)
    # an address of the API in a template without the tag `url`, with a value in it
    (?<![\w$])`[^`\s]*/v1/[^`\s]*\$\{{
    # an address that goes on after its text ends
    | ["'`]/v1[^"'`]*["'`]\s*\+
    # a request to an address that a template or a sum makes
    | \b(?:{"|".join(_SENDERS)})\(\s*(?:"[A-Z]+",\s*)?(?:`|[\w.]+\s*\+)
    | \bpath=\$\{{`
    # an address that is made of another one; `at` is a JSON pointer
    | `\$\{{(?!at\}})\w+\}}[/?&][^`]*`
    # a value encoded by hand
    | \bencodeURI(?:Component)?\(
    """
)
_ALLOWED = {
    ("api.js", "encodeURIComponent("),  # the tag itself
    ("api.js", "fetch(ROOT +"),  # the path below which a proxy serves it
    ("live.js", "WebSocket(`"),  # its address begins with the page's own host
}


def made_by_hand(text: str) -> Iterator[str]:
    for found in _MADE.finditer(re.sub(r"/\*.*?\*/|(?m:^\s*//.*$)", "", text, flags=re.DOTALL)):
        yield found.group()


def test_the_console_makes_addresses_with_one_tag() -> None:
    found = [
        (path.name, made)
        for path in (PACKAGE / "console" / "js").rglob("*.js")
        for made in made_by_hand(text_of(path))
        if not any(path.name == name and made.startswith(start) for name, start in _ALLOWED)
    ]
    assert not found, "tag the whole address with `url` of api.js, or use withQuery"


@pytest.mark.parametrize(
    "text",
    [
        "useData(`/v1/runs/${id}`)",
        "get(`/v1/runs?agent=${name}`)",
        'call("PUT", `/v1/graphs/${name}`, draft)',
        'get("/v1/runs/" + id)',
        "get(base + id)",
        "get(`${base}/messages`)",
        "const path = `/v1/agents/${agent.name}`;",
        "const more = `${base}?limit=5`;",
        "<${Pages} path=${`/v1/runs?agent=${name}`} />",
        "new WebSocket(`${host}/v1/runs/${id}/ws`)",
        "url`/v1/runs/${encodeURIComponent(id)}`",
    ],
)
def test_the_rule_finds_an_address_made_by_hand(text: str) -> None:
    assert list(made_by_hand(text))


@pytest.mark.parametrize(
    "text",
    [
        "useData(url`/v1/runs/${id}`)",
        'call("DELETE", url`/v1/graphs/${name}`, undefined)',
        'get("/v1/info")',
        'withQuery("/v1/runs", { status })',
        "html`<p>${count}/${all}</p>`",
    ],
)
def test_the_rule_lets_other_texts_be(text: str) -> None:
    assert not list(made_by_hand(text))
