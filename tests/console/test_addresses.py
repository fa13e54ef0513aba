"""Addresses of requests in a real browser: whatever a link says, it stays one word."""

from functools import partial
from urllib.parse import quote, unquote

import pytest
from playwright.async_api import Request, expect

from tests.console.conftest import Console
from tests.waiting import until

NAMES = ["../keys?x=1&scope=tenant"]
MORE = [
    *("..", "größe #日本", "../keys", "?x=1", ".", "a/b", "%2e%2e", "..%2Fkeys", "a#b"),
    *("two words", "..\\keys", "%"),
]
KINDS = {
    "runs/{}": "runs",
    "runs/{}/compare/{}": "runs",
    "agents/{}": "agents",
    "graphs/{}": "graphs",
    "memory/episodes/{}": "episodes",
    "memory/patterns/{}": "patterns",
    "memory/reports/{}": "memory/reports",
}


def any_of(sent: list[str], prefix: str) -> bool:
    return any(address.startswith(prefix) for address in sent)


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(each, marks=pytest.mark.deep) for each in MORE)]
)
async def test_a_link_s_word_stays_one_word_of_an_address(console: Console, name: str) -> None:
    sent: list[str] = []

    def add_address(request: Request) -> None:
        address = request.url.partition("/v1/")[2]
        if request.url.partition("/v1/")[0].endswith(str(console.server.port)):
            sent.append(address)

    page = console.page
    page.on("request", add_address)
    usual = {
        "info",
        "sessions",
        "agents",
        "runs",
        "interrupts",
        "graphs",
        "mcp-servers",
        "providers",
        "openapi.json",
        "ws-tickets",
    }
    for place, kind in KINDS.items():
        await console.open("agents")
        await expect(page.get_by_role("heading", name="Agents", exact=True)).to_be_visible()
        sent.clear()
        await console.open(place.replace("{}", quote(name, safe="")))
        prefix = f"{kind}/"
        await until(partial(any_of, sent, prefix))
        words = len(kind.split("/"))
        for address in sent:
            path = address.partition("?")[0].split("/")
            if "/".join(path[:words]) == kind and len(path) > words:
                shown = unquote(path[words])
                assert shown == name or (shown.replace("%2E", ".") == name and name in (".", ".."))
            else:
                assert path[0] in usual, address
        assert not [each for each in sent if "keys" in each.partition("?")[0].split("/")]
    page.remove_listener("request", add_address)
    await page.goto("about:blank")  # nothing is sent any more
    console.provoked.add("")
