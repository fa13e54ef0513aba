"""Messages whose answer is lost while something else happens: none is lost or comes twice."""

import asyncio

import pytest
from playwright.async_api import Route, expect

from tests.console.conftest import Console
from tests.console.test_once import expect_lost_answer, losing, runs_of
from tests.fake_model import gated, text


async def _leave_and_return(console: Console) -> None:
    page = console.page
    await page.get_by_role("navigation").get_by_role("link", name="Agents").click()
    await expect(page.get_by_role("heading", name="Agents")).to_be_visible()
    await page.go_back()
    await expect(page.get_by_role("log")).to_be_visible()


async def test_a_message_is_sent_once_though_its_page_was_left(console: Console) -> None:
    console.model.script(text("Hello Ada."), text("Still Ada."))
    await console.define()
    page = await console.open("chat?agent=clerk&session=left")
    keys = await losing(page, "**/v1/runs")
    message = page.get_by_label("Message")
    await message.fill("I am Ada.")
    await message.press("Enter")
    await expect_lost_answer(page)
    await _leave_and_return(console)
    await expect(message).to_have_value("I am Ada.")
    await message.press("Enter")
    await expect(message).to_have_value("")
    await expect(page.locator(".said.assistant time")).to_be_visible()
    assert keys == [keys[0]] * 2
    assert await runs_of(console) == 1


@pytest.mark.deep
async def test_a_message_that_fails_after_its_page_was_left_is_kept(console: Console) -> None:
    await console.define()
    page = await console.open("chat?agent=clerk&session=failing")
    left = asyncio.Event()

    async def fail(route: Route) -> None:
        if route.request.method != "POST":
            await route.fallback()
            return
        await left.wait()
        await route.abort()

    await page.route("**/v1/runs", fail)
    message = page.get_by_label("Message")
    await message.fill("I am Ada.")
    await message.press("Enter")
    await expect(page.get_by_text("being sent")).to_be_visible()
    await _leave_and_return(console)
    await expect(message).to_have_value("")
    await message.fill("And you?")
    left.set()
    await expect(message).to_have_value("I am Ada.\nAnd you?")
    assert await runs_of(console) == 0


@pytest.mark.deep
async def test_a_message_to_a_run_that_ended_since_comes_once(console: Console) -> None:
    go_on = asyncio.Event()
    console.model.script(gated(go_on, text("one")), text("two"), text("three"))
    await console.define()
    page = await console.open("chat?agent=clerk&session=ended")
    message = page.get_by_label("Message")
    await message.fill("First.")
    await message.press("Enter")
    await console.model.received()
    await expect(page.get_by_role("button", name="Stop")).to_be_visible()
    await losing(page, "**/messages")
    await message.fill("Hurry.")
    await message.press("Enter")
    await expect_lost_answer(page)
    go_on.set()
    await expect(page.get_by_text("two")).to_be_visible()
    await expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    await message.press("Enter")
    await expect(message).to_have_value("")
    await expect(page.get_by_text("being sent")).to_be_hidden()
    await expect(page.get_by_text("Hurry.", exact=True)).to_have_count(1)
    assert await runs_of(console) == 1


@pytest.mark.deep
async def test_a_message_that_had_come_already_is_said_to_have(console: Console) -> None:
    console.model.script(text("Shall I?"), text("Done."))
    await console.define()
    page = await console.open("chat?agent=clerk&session=equal")
    await losing(page, "**/v1/runs")
    message = page.get_by_label("Message")
    await message.fill("Yes.")
    await message.press("Enter")
    await expect_lost_answer(page)
    await expect(page.locator(".said.assistant time")).to_be_visible()
    await message.press("Enter")
    said = page.get_by_text("This message had come already.")
    await expect(said).to_be_visible()
    await expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    await message.fill("Yes.")
    await message.press("Enter")
    await expect(page.get_by_text("Done.")).to_be_visible()
    await expect(said).to_be_hidden()
    assert await runs_of(console) == 2
