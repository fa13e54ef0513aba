"""Conversations that two windows show, and that are read slowly or heard."""

import asyncio

import pytest
from playwright.async_api import expect

from tests.console.conftest import Console
from tests.console.held import hold
from tests.console.test_compare import ended
from tests.fake_model import gated, text


async def test_a_window_shows_what_is_said_in_another_one(console: Console) -> None:
    go_on = asyncio.Event()
    console.model.script(text("Hello Ada."), gated(go_on, text("Hello Bob.")))
    await console.define()
    where = "chat?agent=clerk&session=both"
    page = await console.open(where)
    await page.get_by_label("Message").fill("I am Ada.")
    await page.keyboard.press("Enter")
    await expect(page.locator(".said.assistant time")).to_be_visible()
    said = {"agent": "clerk", "session_id": "both", "input": "I am Bob."}
    await console.server.client.post("/v1/runs", json=said)
    await expect(page.get_by_text("I am Bob.")).to_be_visible()
    await expect(page.get_by_role("button", name="Stop")).to_be_visible()
    assert await page.locator(".said .spinner").evaluate("(element) => element.offsetWidth") == 12
    go_on.set()
    await expect(page.get_by_text("Hello Bob.")).to_be_visible()
    await expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    await expect(page.get_by_text("Hello Bob.")).to_have_count(1)


@pytest.mark.deep
async def test_a_window_shows_what_began_and_ended_between_two_readings(console: Console) -> None:
    console.model.script(text("Hello Ada."), text("Hello Bob."))
    await console.define()
    page = await console.open("chat?agent=clerk&session=short")
    await page.get_by_label("Message").fill("I am Ada.")
    await page.keyboard.press("Enter")
    await expect(page.locator(".said.assistant time")).to_be_visible()
    held = await hold(page, "**/v1/runs?*")
    said = {"agent": "clerk", "session_id": "short", "input": "I am Bob."}
    answer = await console.server.client.post("/v1/runs", json=said)
    await ended(console, answer.json()["id"])
    held.gate.set()
    await expect(page.get_by_text("Hello Bob.")).to_be_visible()
    await expect(page.get_by_text("Hello Bob.")).to_have_count(1)


@pytest.mark.deep
async def test_a_conversation_that_is_read_slowly_does_not_seem_empty(console: Console) -> None:
    console.model.script(text("Hello Ada."))
    await console.define()
    said = {"agent": "clerk", "session_id": "slow", "input": "I am Ada."}
    answer = await console.server.client.post("/v1/runs", json=said)
    await ended(console, answer.json()["id"])
    held = await hold(console.page, "**/messages?*")
    page = await console.open("chat?session=slow")
    await expect(page.get_by_text("Loading the conversation")).to_be_visible()
    await expect(page.get_by_text("Say something.")).to_be_hidden()
    await held.let_go()
    log = page.get_by_role("log", name="Conversation")
    await expect(log).to_contain_text("Hello Ada.")
    await expect(log).to_have_attribute("aria-live", "polite")


@pytest.mark.deep
async def test_a_message_whose_text_another_window_has_is_no_empty_one(console: Console) -> None:
    go_on = asyncio.Event()
    console.model.script(gated(go_on, text("one")), text("two"))
    await console.define()
    said = {"agent": "clerk", "session_id": "steered", "input": "?"}
    answer = await console.server.client.post("/v1/runs", json=said)
    await console.model.received()
    page = await console.open("chat?session=steered")
    more = f"/v1/runs/{answer.json()['id']}/messages"
    await console.server.client.post(more, json={"content": "Hurry."})
    added = page.locator(".said.user").filter(has_text="not read yet")
    await expect(added.locator(".text")).to_have_text("A message")
    go_on.set()
    await expect(page.get_by_text("Hurry.")).to_be_visible()
