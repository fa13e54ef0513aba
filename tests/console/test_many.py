"""Lists that have more than one page, where something of a later page is wanted."""

import asyncio

import pytest
from playwright.async_api import Page, expect

from tests.console.conftest import Console
from tests.console.held import shorten
from tests.console.test_compare import ended
from tests.fake_model import calls, gated, text
from tests.flows.test_interrupts import CALCULATOR

HELPERS = ("aide", "bird", "carp")


async def _lead(console: Console) -> None:
    """Make the agent ``zed``, which has helpers whose names come before its own."""
    for name in HELPERS:
        helper = {"name": name, "description": name, "system_message": "You help."}
        (await console.server.client.post("/v1/agents", json=helper)).raise_for_status()
    lead = {"name": "zed", "system_message": "You lead.", "subagents": {"names": HELPERS}}
    (await console.server.client.post("/v1/agents", json=lead)).raise_for_status()


async def _led(console: Console) -> str:
    """Start a run of ``zed``; return its id."""
    answer = await console.server.client.post("/v1/runs", json={"agent": "zed", "input": "?"})
    return str(answer.json()["id"])


async def _runs_of_many(console: Console, end: asyncio.Event) -> tuple[str, str]:
    """Return two runs of four agents each; the second goes on until ``end``."""
    await _lead(console)
    asks = calls(*((name, {"query": "Well?"}) for name in HELPERS))
    console.model.script(asks, *(text("So.") for _ in HELPERS), text("It is red."))
    first = await ended(console, await _led(console))
    console.model.script(asks, *(text("So.") for _ in HELPERS), gated(end, text("It is blue.")))
    number = len(console.model.requests)
    second = await _led(console)
    await console.model.received(number + 5)
    return first, second


async def test_the_asked_agent_comes_first_though_it_is_on_a_later_page(console: Console) -> None:
    over = asyncio.Event()
    over.set()
    first, second = await _runs_of_many(console, over)
    await ended(console, second)
    await shorten(console.page, 1)
    page = await console.open(f"runs/{first}/compare?with={second}")
    heading = page.locator(".panel:has(.compared) h2")
    await expect(heading.first).to_have_text("zed")
    await expect(
        page.get_by_role("region", name="Difference of the answers of zed")
    ).to_be_visible()
    await expect(heading).to_have_count(4)


@pytest.mark.deep
async def test_agents_of_later_pages_are_shown_as_they_are_now(console: Console) -> None:
    end = asyncio.Event()
    first, second = await _runs_of_many(console, end)
    await shorten(console.page, 2)
    page = await console.open(f"runs/{first}/compare?with={second}")
    await expect(page.locator(".panel:has(.compared)")).to_have_count(4)
    await expect(page.get_by_role("region", name="After", exact=True)).to_contain_text("running")
    end.set()
    await expect(page.get_by_role("region", name="After", exact=True)).to_contain_text("completed")
    differs = page.get_by_role("region", name="Difference of the answers of zed")
    await expect(differs.locator("ins")).to_have_text("blue.")


@pytest.mark.deep
async def test_more_agents_of_two_runs_are_shown_when_asked_for(console: Console) -> None:
    console.model.script(*(text("So.") for _ in range(8)))
    over = asyncio.Event()
    over.set()
    await _lead(console)
    edges = [{"source": one, "target": "zed"} for one in HELPERS]
    graph = {"name": "star", "edges": edges}
    (await console.server.client.post("/v1/graphs", json=graph)).raise_for_status()
    wanted = {"graph": "star", "mode": "dag", "input": "?"}
    runs = []
    for _ in range(2):
        answer = await console.server.client.post("/v1/runs", json=wanted)
        runs.append(await ended(console, answer.json()["id"]))
    await shorten(console.page, 1)
    page = await console.open(f"runs/{runs[0]}/compare?with={runs[1]}")
    for number in range(1, 4):
        await expect(page.locator(".panel:has(.compared)")).to_have_count(number)
        await page.get_by_role("button", name="Show more agents").click()
    await expect(page.locator(".panel:has(.compared)")).to_have_count(4)
    await expect(page.get_by_role("button", name="Show more agents")).to_be_hidden()


async def _more(page: Page) -> None:
    await page.get_by_role("button", name="Show more").click()


@pytest.mark.deep
async def test_an_older_run_is_chosen_to_compare_with(console: Console) -> None:
    console.model.script(*(text("done") for _ in range(4)))
    runs = [await ended(console, await console.run())]
    for _ in range(3):
        answer = await console.server.client.post("/v1/runs", json={"agent": "clerk", "input": "?"})
        runs.append(await ended(console, answer.json()["id"]))
    await shorten(console.page, 2)
    page = await console.open(f"runs/{runs[3]}/compare")
    await expect(page.get_by_role("button", name=f"Compare with {runs[2]}")).to_be_visible()
    await _more(page)
    await page.get_by_role("button", name=f"Compare with {runs[0]}").click()
    await expect(page.get_by_role("region", name="Before", exact=True)).to_contain_text(runs[0])


async def test_a_conversation_begins_with_any_of_many_agents(console: Console) -> None:
    await _lead(console)
    await shorten(console.page, 2)
    page = await console.open("agents/zed")
    await page.get_by_role("main").get_by_role("link", name="Chat", exact=True).click()
    await expect(page.get_by_label("Agent", exact=True)).to_have_value("zed")
    await page.get_by_role("button", name="Start").click()
    await expect(page.get_by_role("heading", name="zed")).to_be_visible()


@pytest.mark.deep
async def test_an_older_conversation_goes_on(console: Console) -> None:
    await console.define()
    for name in ("old", "middle", "young"):
        console.model.script(text("Hello."))
        run = {"agent": "clerk", "input": name, "session_id": f"chat-{name}"}
        await console.server.client.post("/v1/runs?wait=30", json=run)
    await shorten(console.page, 2)
    page = await console.open("chat")
    await expect(page.get_by_role("link", name="young")).to_be_visible()
    await _more(page)
    await expect(page.get_by_role("link", name="old")).to_be_visible()


@pytest.mark.deep
async def test_all_who_wait_can_be_answered(console: Console) -> None:
    await console.define(CALCULATOR)
    for _ in range(3):
        console.model.script(calls(("calculator", {"expression": "9+9"})))
        await console.server.client.post("/v1/runs?wait=30", json={"agent": "clerk", "input": "?"})
    await shorten(console.page, 2)
    page = await console.open("approvals")
    waiting = page.locator(".inbox").get_by_role("link", name="calculator")
    await expect(waiting).to_have_count(2)
    await _more(page)
    await expect(waiting).to_have_count(3)


@pytest.mark.deep
async def test_all_messages_of_an_agent_can_be_read(console: Console) -> None:
    console.model.script(
        calls(("calculator", {"expression": "6*7"})), calls(("calculator", {})), text("It is 42.")
    )
    run_id = await console.run({"type": "builtin", "name": "calculator"})
    await shorten(console.page, 2)
    page = await console.open(f"runs/{run_id}")
    await page.get_by_role("tab", name="Messages").click()
    shown = page.get_by_role("tabpanel", name="messages")
    await _more(page)
    await _more(page)
    await expect(shown.get_by_text("It is 42.")).to_be_visible()
