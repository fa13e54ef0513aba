"""Reads that fail at first: they are repeated, and the page says so."""

import asyncio
from collections.abc import Callable, Sized

import pytest
from playwright.async_api import Page, Route, expect

from tests.console.conftest import Console, hold_clock
from tests.console.held import drawn, hold
from tests.fake_model import gated, text
from tests.waiting import until

UNREAD = "It is tried again."


async def _failing(page: Page, pattern: str, fails: Callable[[int], bool]) -> list[Route]:
    """Answer a page's reads with an error while ``fails(number)``; return those that were asked."""
    asked: list[Route] = []

    async def answer(route: Route) -> None:
        asked.append(route)
        if fails(len(asked)):
            await route.fulfill(status=503, json={"code": "unavailable", "detail": "not now"})
        else:
            await route.continue_()

    await page.route(pattern, answer)
    return asked


async def _number(asked: Sized, number: int) -> None:
    """Wait until so many were asked."""
    await until(lambda: len(asked), lambda seen: seen >= number)


async def _asked(console: Console, session: str) -> asyncio.Event:
    """Say something in a conversation; return what lets the model answer "Hello Ada."."""
    go_on = asyncio.Event()
    console.model.script(gated(go_on, text("Hello Ada.")))
    await console.define()
    page = await console.open(f"chat?agent=clerk&session={session}")
    await page.get_by_label("Message").fill("I am Ada.")
    await page.keyboard.press("Enter")
    await console.model.received()
    await expect(page.locator(".said.user time")).to_be_visible()
    return go_on


async def test_an_answer_that_the_server_fails_to_read_stays_and_is_read_again(
    console: Console,
) -> None:
    go_on = await _asked(console, "failing")
    page = console.page
    await hold_clock(page)
    asked = await _failing(page, "**/messages?*", lambda number: number <= 2)
    go_on.set()
    await expect(page.get_by_text(UNREAD)).to_be_visible()
    await expect(page.get_by_text("Hello Ada.")).to_be_visible()
    await expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    for number in (2, 3):
        await page.clock.run_for(2500)
        await _number(asked, number)
    await expect(page.locator(".said.assistant time")).to_be_visible()
    await expect(page.get_by_text("Hello Ada.")).to_have_count(1)
    await expect(page.get_by_text(UNREAD)).to_be_hidden()
    console.provoked.add("503")


@pytest.mark.deep
async def test_an_answer_that_cannot_be_read_at_all_stays_until_it_is_asked_for(
    console: Console,
) -> None:
    go_on = await _asked(console, "given-up")
    page = console.page
    await hold_clock(page)
    fails = True
    asked = await _failing(page, "**/messages?*", lambda _: fails)
    go_on.set()
    await expect(page.get_by_text(UNREAD)).to_be_visible()
    for number in range(2, 7):
        await page.clock.run_for(16_000)
        await _number(asked, number)
    again = page.get_by_role("button", name="Try again")
    await expect(again).to_be_visible()
    await page.clock.run_for(60_000)
    await drawn(page)
    assert len(asked) == 6
    await expect(page.get_by_text("Hello Ada.")).to_be_visible()
    fails = False
    await again.click()
    await expect(page.locator(".said.assistant time")).to_be_visible()
    await expect(page.get_by_text("Hello Ada.")).to_have_count(1)
    console.provoked.add("503")


@pytest.mark.deep
async def test_an_answer_that_was_read_early_is_shown_once(console: Console) -> None:
    console.model.script(text("Hello Ada."))
    await console.define()
    page = await console.open("chat?agent=clerk&session=early")
    held = await hold(page, "**/messages?*")
    ends = await hold(page, "**/v1/runs?*")
    await page.get_by_label("Message").fill("I am Ada.")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("Hello Ada.")).to_be_visible()
    await until(lambda: len(ends.requests), lambda number: number > 0)
    await held.let_go()
    await expect(page.locator(".said.assistant time")).to_be_visible()
    await expect(page.get_by_text("Hello Ada.")).to_have_count(1)
    await ends.let_go()
    await expect(page.get_by_text("Hello Ada.")).to_have_count(1)


@pytest.mark.deep
async def test_the_end_of_a_run_is_read_again(console: Console) -> None:
    go_on = asyncio.Event()
    console.model.script(gated(go_on, text("done")))
    run_id = await console.run()
    await console.model.received()
    page = await console.open(f"runs/{run_id}")
    await expect(page.get_by_role("button", name="Cancel run")).to_be_visible()
    await hold_clock(page)
    fails = True
    asked = await _failing(page, f"**/v1/runs/{run_id}", lambda _: fails)
    go_on.set()
    await expect(page.get_by_text(UNREAD)).to_be_visible()
    await expect(page.get_by_role("button", name="Retry", exact=True)).to_be_visible()
    await expect(page.get_by_role("button", name="Retry from the last step")).to_be_hidden()
    fails = False
    number = len(asked)
    await page.clock.run_for(2500)
    await _number(asked, number + 1)
    await expect(page.get_by_text(UNREAD)).to_be_hidden()
    await expect(page.get_by_role("button", name="Retry from the last step")).to_be_hidden()
    console.provoked.add("503")


async def test_an_answer_that_breaks_off_is_read_again(console: Console) -> None:
    await console.define()
    page = console.page
    broken = """() => {
        const read = Response.prototype.text;
        let isFirst = true;
        Response.prototype.text = function () {
            if (!isFirst || !this.url.includes("/v1/graphs")) return read.call(this);
            isFirst = false;
            return Promise.reject(new TypeError("network error"));
        };
    }"""
    await page.add_init_script(f"({broken})()")
    await console.open("graphs")
    await expect(page.get_by_text("There is no graph yet.")).to_be_visible()
