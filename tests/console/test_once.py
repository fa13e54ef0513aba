"""Requests whose answer is lost: pressing again does not do it twice."""

import asyncio

import pytest
from playwright.async_api import Page, Route, expect

from tests.console.conftest import Console
from tests.console.test_compare import ended
from tests.fake_model import gated, text


async def losing(page: Page, pattern: str, answers: int = 1) -> list[str | None]:
    """Lose the first answers of a page's POSTs, which the server takes; return all their keys."""
    keys: list[str | None] = []

    async def pass_on(route: Route) -> None:
        if route.request.method != "POST":
            await route.fallback()
            return
        keys.append(await route.request.header_value("idempotency-key"))
        if len(keys) > answers:
            await route.continue_()
            return
        await route.fetch()
        await route.abort()

    await page.route(pattern, pass_on)
    return keys


async def expect_lost_answer(page: Page) -> None:
    """Wait until the page says that an answer did not come."""
    said = page.get_by_role("alert").filter(has_text="cannot be reached").last
    await expect(said).to_be_visible()


async def runs_of(console: Console) -> int:
    """Return how many runs there are, and forget what the lost answers were reported as."""
    console.provoked.add("ERR_FAILED")
    found = await console.server.client.get("/v1/runs")
    return len(found.json()["items"])


async def test_a_message_whose_answer_was_lost_is_sent_once(console: Console) -> None:
    console.model.script(text("Hello Ada."), text("Still Ada."))
    await console.define()
    page = await console.open("chat?agent=clerk&session=lost")
    await losing(page, "**/v1/runs")
    message = page.get_by_label("Message")
    await message.fill("I am Ada.")
    await message.press("Enter")
    await expect_lost_answer(page)
    await expect(message).to_have_value("I am Ada.")
    await message.press("Enter")
    await expect(page.locator(".said.assistant time")).to_be_visible()
    await expect(page.get_by_text("Hello Ada.")).to_have_count(1)
    assert await runs_of(console) == 1
    await message.fill("I am Ada.")
    await message.press("Enter")
    await expect(page.get_by_text("Still Ada.")).to_be_visible()
    assert await runs_of(console) == 2


@pytest.mark.deep
async def test_a_changed_message_is_another_one(console: Console) -> None:
    console.model.script(text("one"), text("two"))
    await console.define()
    page = await console.open("chat?agent=clerk&session=changed")
    keys = await losing(page, "**/v1/runs", answers=2)
    message = page.get_by_label("Message")
    for said in ("yes", "yes, please", "yes"):
        await message.fill(said)
        await message.press("Enter")
        await expect(page.get_by_text("being sent")).to_be_hidden()
        await expect(message).to_have_value("" if len(keys) == 3 else said)
    assert len(set(keys)) == 3
    await expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    await runs_of(console)


@pytest.mark.deep
async def test_a_message_to_a_run_whose_answer_was_lost_comes_once(console: Console) -> None:
    go_on = asyncio.Event()
    console.model.script(gated(go_on, text("one")), text("two"), text("three"))
    run_id = await console.run()
    await console.model.received()
    page = await console.open(f"runs/{run_id}")
    await losing(page, "**/messages")
    await page.get_by_label("Tell clerk something").fill("Hurry.")
    await page.get_by_role("button", name="Tell it").click()
    await expect_lost_answer(page)
    await page.get_by_role("button", name="Tell it").click()
    await expect(page.get_by_label("Tell clerk something")).to_have_value("")
    await expect(page.get_by_text("not read yet")).to_have_count(1)
    go_on.set()
    await expect(page.get_by_text("read by clerk")).to_have_count(1)
    await runs_of(console)


@pytest.mark.deep
async def test_a_run_whose_start_was_lost_is_started_once(console: Console) -> None:
    console.model.script(*(text("done") for _ in range(8)))
    first = await ended(console, await console.run())
    page = await console.open(f"runs/{first}")
    keys = await losing(page, "**/retry")
    again = page.get_by_role("button", name="Retry", exact=True)
    await again.click()
    await expect_lost_answer(page)
    await again.click()
    await expect(page).not_to_have_url(f"{console.address}#/runs/{first}")
    assert len(set(keys)) == 1
    assert await runs_of(console) == 2
    await console.open("agents/clerk")
    keys = await losing(page, "**/draft-runs")
    await page.get_by_label("Question").fill("Which?")
    ask = page.get_by_role("button", name="Ask")
    await ask.click()
    await expect_lost_answer(page)
    await ask.click()
    await expect(page.get_by_role("log", name="Draft conversation")).to_contain_text("Which?")
    assert len(keys) == 2
    assert len(set(keys)) == 1
    assert await runs_of(console) == 2
    drafts = (await console.server.client.get("/v1/runs?draft=true")).json()["items"]
    assert len(drafts) == 1


@pytest.mark.deep
async def test_a_message_whose_run_was_found_meanwhile_is_not_sent_to_it(
    console: Console,
) -> None:
    go_on = asyncio.Event()
    console.model.script(gated(go_on, text("Hello Ada.")))
    await console.define()
    page = await console.open("chat?agent=clerk&session=found")
    await losing(page, "**/v1/runs")
    message = page.get_by_label("Message")
    await message.fill("I am Ada.")
    await message.press("Enter")
    await expect(message).to_have_value("I am Ada.")
    await console.model.received()
    await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    await expect(page.get_by_role("button", name="Stop")).to_be_visible()
    await message.press("Enter")
    await expect(message).to_have_value("")
    go_on.set()
    await expect(page.locator(".said.assistant time")).to_be_visible()
    await expect(page.get_by_text("I am Ada.")).to_have_count(1)
    assert await runs_of(console) == 1
