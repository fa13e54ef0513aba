"""The list of conversations in a real browser: found by words, agent, user and state."""

import asyncio

import pytest
from playwright.async_api import expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.fake_model import calls, gated, http_error, text
from tests.flows.test_interrupts import CALCULATOR

SAID = {"ada": "My refund is missing", "bob": "Where is my parcel?", "eve": "A refund, again?"}


@pytest.mark.deep
async def test_a_customer_s_conversation_is_found_and_goes_on(console: Console) -> None:
    await console.define()
    client = console.server.client
    for user, asked in SAID.items():
        console.model.script(http_error(400) if user == "eve" else text(f"Hello {user}."))
        run = {"agent": "clerk", "input": asked, "user": user, "session_id": f"chat-{user}"}
        await client.post("/v1/runs?wait=30", json=run)
    page = await console.open("chat")
    panel = page.locator(".panel").filter(has=page.get_by_role("heading", name="Conversations"))
    await expect(panel.get_by_role("listitem")).to_have_count(3)
    await expect(panel.get_by_role("listitem").first).to_contain_text("A refund, again?")
    assert await violations(page) == []
    await page.set_viewport_size({"width": 320, "height": 800})
    assert await page.evaluate("document.documentElement.scrollWidth") <= 320
    await page.set_viewport_size({"width": 1280, "height": 900})
    one_field = page.get_by_label("Name, words or date")
    for typed, number in (
        ("Refund", 2),
        ("missing ADA", 1),
        ("eve refund today", 1),
        ("bob", 1),
        ("parcel hello", 1),
    ):
        await one_field.fill(typed)  # it is found while one types
        await expect(panel.get_by_role("listitem")).to_have_count(number)
    await one_field.fill("refund yesterday")
    await one_field.press("Enter")
    await expect(page.get_by_text("No conversation is like that.")).to_be_visible()
    await one_field.fill("refund")
    await one_field.press("Enter")
    await expect(panel.get_by_role("listitem")).to_have_count(2)
    await page.get_by_label("State").select_option("failed")
    await expect(panel.get_by_role("listitem")).to_have_count(1)
    await expect(panel.get_by_role("listitem")).to_contain_text("clerk · eve")
    await page.get_by_label("State").select_option("")
    await page.get_by_label("User").fill("ada")
    await page.get_by_label("User").press("Enter")
    found = panel.get_by_role("listitem")
    await expect(found).to_have_count(1)
    await expect(found).to_contain_text("Hello ada.")
    await found.get_by_role("link").click()
    await expect(page.get_by_text("My refund is missing")).to_be_visible()


async def test_each_message_has_its_author_and_a_failed_call_is_red(console: Console) -> None:
    await console.define(CALCULATOR | {"approval": "never"})
    console.model.script(calls(("calculator", {"expression": "1/0"})), text("I cannot."))
    run = {"agent": "clerk", "input": "What is 1/0?", "session_id": "one", "user": "ada"}
    await console.server.client.post("/v1/runs?wait=30", json=run)
    page = await console.open("chat?session=one")
    await expect(page.locator(".chat > .said > .author")).to_have_text(["ada", "clerk"])
    steps = page.locator(".tool-said")
    await expect(steps.locator("summary .bad-text")).to_have_text("✕ calculator did not work")
    await steps.locator("summary").click()
    await expect(steps.locator("p.bad-text")).to_have_text("✕ calculator did not work")
    assert await violations(page) == []
    answer = page.locator(".said.assistant").last
    await answer.get_by_text("Rate it").click()
    await answer.get_by_label("Comment").fill("No help.")
    assert await violations(page) == []
    await answer.get_by_role("button", name="Bad").click()
    await expect(answer.get_by_role("button", name="Bad", pressed=True)).to_be_visible()
    (run,) = (await console.server.client.get("/v1/runs?session_id=one")).json()["items"]
    assert (run["outcome"]["value"], run["outcome"]["source"]) == ("FAILURE", "feedback")
    go_on = asyncio.Event()
    console.model.script(gated(go_on, text("Not that either.")))
    await page.get_by_label("Message").fill("And 2/0?")
    await page.keyboard.press("Enter")
    await expect(page.locator(".chat > .said > .author")).to_have_text(["ada", "clerk"] * 2)
    go_on.set()
    await expect(page.locator(".chat > .said.assistant > .small > time")).to_have_count(2)


async def test_a_conversation_is_renamed_forked_and_deleted(console: Console) -> None:
    await console.define()
    client = console.server.client
    page = await console.open("chat")
    await expect(page.get_by_text("No conversation is like that.")).to_be_visible()
    console.model.script(text("Hello **ada**."), text("It goes on."))
    run = {"agent": "clerk", "input": "A first question", "session_id": "one"}
    await client.post("/v1/runs?wait=30", json=run)
    await page.reload()
    item = page.get_by_role("listitem").filter(has_text="clerk")
    await expect(item).to_contain_text("new")
    await item.get_by_role("button", name="Rename").press("Enter")
    await expect(page.get_by_label("Title", exact=True)).to_be_focused()
    assert await violations(page) == []
    await page.keyboard.type("About money")
    await page.keyboard.press("Enter")
    await item.get_by_role("link", name="About money").click()
    await expect(page.locator(".said.assistant strong")).to_have_text("ada")
    await console.open("chat")
    await expect(item).not_to_contain_text("new")
    await item.get_by_role("button", name="Fork").click()
    await expect(page.locator(".said.assistant strong")).to_have_text("ada")
    await page.get_by_label("Message").fill("And now?")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("It goes on.")).to_be_visible()
    await console.open("chat")
    await expect(item).to_have_count(2)
    first = item.filter(has_text="Hello")
    await first.get_by_role("button", name="Delete").click()
    await first.get_by_role("button", name="Delete").click()
    await expect(item).to_have_count(1)
    assert (await client.get("/v1/sessions/one")).status_code == 404
