"""Changes that are not stored yet: what may not lose them."""

import pytest
from playwright.async_api import Page, expect

from tests.console.conftest import Console
from tests.console.held import hold
from tests.console.test_graphs import connect, opened, stored

_SHOWN_AGAIN = "document.dispatchEvent(new Event('visibilitychange'))"


async def _changed(console: Console) -> Page:
    """Show an agent whose system message was changed."""
    await console.define()
    page = await console.open("agents/clerk")
    await page.get_by_label("System Message").fill("You help, briefly.")
    return page


async def test_an_agent_that_somebody_else_stores_drops_no_change(console: Console) -> None:
    page = await _changed(console)
    theirs = {"system_message": "Somebody else's."}
    (await console.server.client.put("/v1/agents/clerk", json=theirs)).raise_for_status()
    async with page.expect_response("**/v1/agents/clerk") as read:
        await page.evaluate(_SHOWN_AGAIN)
    await (await read.value).finished()
    await expect(page.get_by_label("System Message")).to_have_value("You help, briefly.")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_text("Somebody stored another version")).to_be_visible()
    await page.get_by_role("button", name="Show theirs").click()
    await expect(page.get_by_label("System Message")).to_have_value("Somebody else's.")
    console.provoked.add("412")


@pytest.mark.deep
async def test_other_tabs_and_pages_drop_no_change_of_an_agent(console: Console) -> None:
    page = await _changed(console)
    await page.get_by_role("tab", name="Versions").click()
    await expect(page.get_by_text("Two versions compared")).to_be_visible()
    await page.get_by_role("tab", name="Settings").click()
    await expect(page.get_by_label("System Message")).to_have_value("You help, briefly.")
    await page.get_by_role("main").get_by_role("link", name="Chat", exact=True).click()
    await expect(page.get_by_role("heading", name="Chat")).to_be_visible()
    await page.go_back()
    await expect(page.get_by_label("System Message")).to_have_value("You help, briefly.")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_text("Version 2, stored")).to_be_visible()
    await page.get_by_role("navigation").get_by_role("link", name="Home").click()
    await console.open("agents/clerk")
    await expect(page.get_by_label("System Message")).to_have_value("You help, briefly.")
    await expect(page.get_by_role("button", name="Undo all")).to_be_hidden()


@pytest.mark.deep
async def test_what_is_typed_while_an_agent_is_stored_stays(console: Console) -> None:
    page = await _changed(console)
    held = await hold(page, "**/v1/agents/clerk", "PUT")
    await page.get_by_role("button", name="Save").click()
    await page.get_by_label("System Message").fill("You help, very briefly.")
    await held.let_go()
    await expect(page.get_by_text("Version 2, stored")).to_be_visible()
    await expect(page.get_by_label("System Message")).to_have_value("You help, very briefly.")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_text("Version 3")).to_be_visible()
    now = (await console.server.client.get("/v1/agents/clerk")).json()
    assert now["system_message"] == "You help, very briefly."


async def test_what_is_changed_while_a_graph_is_stored_stays(console: Console) -> None:
    page = await opened(console)
    await connect(page, "first", "third")
    held = await hold(page, "**/v1/graphs/chain", "PUT")
    await page.get_by_role("button", name="Save version 2").click()
    await page.get_by_role("button", name="Remove second to third").click()
    await held.let_go()
    await expect(page.get_by_text("Version 2, stored")).to_be_visible()
    await expect(page.get_by_text("Not saved: \N{MINUS SIGN} second → third")).to_be_visible()
    await page.get_by_role("button", name="Save version 3").click()
    await expect(page.get_by_text("Version 3, stored")).to_be_visible()
    edges = (await stored(console, "chain"))["edges"]
    assert {(each["source"], each["target"]) for each in edges} == {
        ("first", "second"),
        ("first", "third"),
    }


@pytest.mark.deep
async def test_what_is_undone_while_a_graph_is_stored_is_undone(console: Console) -> None:
    page = await opened(console)
    await connect(page, "first", "third")
    held = await hold(page, "**/v1/graphs/chain", "PUT")
    await page.get_by_role("button", name="Save version 2").click()
    await page.get_by_role("button", name="Undo").click()
    await held.let_go()
    await expect(page.get_by_text("Not saved: \N{MINUS SIGN} first → third")).to_be_visible()


@pytest.mark.deep
async def test_other_pages_drop_no_change_of_a_graph(console: Console) -> None:
    page = await opened(console)
    await page.get_by_label("Add an agent").fill("fourth")
    await page.keyboard.press("Enter")
    await page.get_by_role("link", name="Make them").click()
    await expect(page.get_by_role("heading", name="Agents")).to_be_visible()
    await page.go_back()
    await expect(page.get_by_text("Not saved: + agent fourth")).to_be_visible()
    await page.get_by_role("button", name="Undo").click()
    await expect(page.get_by_text("Not saved")).to_be_hidden()


@pytest.mark.deep
async def test_what_is_stored_after_its_page_was_left_is_not_kept(console: Console) -> None:
    page = await _changed(console)
    held = await hold(page, "**/v1/agents/clerk", "PUT")
    await page.get_by_role("button", name="Save").click()
    await page.get_by_role("navigation").get_by_role("link", name="Agents").click()
    await expect(page.get_by_role("link", name="clerk")).to_be_visible()
    await held.let_go()
    await page.get_by_role("link", name="clerk").click()
    await expect(page.get_by_text("Version 2, stored")).to_be_visible()
    await expect(page.get_by_role("button", name="Undo all")).to_be_hidden()

    await opened(console)
    await connect(page, "first", "third")
    held = await hold(page, "**/v1/graphs/chain", "PUT")
    await page.get_by_role("button", name="Save version 2").click()
    await page.get_by_role("navigation").get_by_role("link", name="Graphs").click()
    await expect(page.get_by_role("heading", name="Graphs")).to_be_visible()
    await held.let_go()
    await page.get_by_role("link", name="chain").click()
    await expect(page.get_by_text("Version 2, stored")).to_be_visible()
    await expect(page.get_by_text("Not saved")).to_be_hidden()


@pytest.mark.deep
async def test_seconds_that_are_typed_stay_when_the_graph_is_drawn_again(
    console: Console,
) -> None:
    held = await hold(console.page, "**/v1/agents?limit=200")
    page = await opened(console)
    field = page.get_by_label("Seconds until what first says expires")
    await field.press_sequentially("60")
    await held.let_go()
    await expect(field).to_have_value("60")
    await field.press("Tab")
    await expect(page.get_by_text("agent first: expires after 60 s")).to_be_visible()


async def test_a_chat_with_an_agent_begins_from_its_page(console: Console) -> None:
    await console.define()
    other = {"name": "another", "system_message": "You help."}
    (await console.server.client.post("/v1/agents", json=other)).raise_for_status()
    page = await console.open("agents/clerk")
    await page.get_by_role("main").get_by_role("link", name="Chat", exact=True).click()
    await expect(page.get_by_label("Agent")).to_have_value("clerk")
