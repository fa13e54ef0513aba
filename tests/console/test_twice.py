"""Buttons that are pressed twice, and lists whose rows change."""

import asyncio

import pytest
from playwright.async_api import expect

from tests.console.conftest import Console
from tests.console.held import hold, shorten
from tests.console.test_chat_files import NOTES
from tests.console.test_compare import ended
from tests.fake_model import gated, text


async def test_a_changed_question_is_asked_once(console: Console) -> None:
    console.model.script(text("one"), text("two"), text("three"))
    run_id = await ended(console, await console.run())
    page = await console.open(f"runs/{run_id}")
    await page.get_by_role("button", name="Change and run").click()
    await page.get_by_label("Question").fill("Which?")
    held = await hold(page, "**/v1/runs", "POST")
    await page.get_by_role("button", name="Start").dblclick()
    await held.let_go()
    await expect(page.get_by_text("two").last).to_be_visible()
    assert len(held.requests) == 1


@pytest.mark.deep
async def test_a_message_with_a_file_is_sent_once(console: Console) -> None:
    console.model.script(text("It says one."))
    await console.define()
    page = await console.open("chat?agent=clerk&session=once")
    await page.locator("input[type=file]").set_input_files([NOTES])
    await expect(page.get_by_role("list", name="Files to send")).to_contain_text("bytes")
    await page.get_by_label("Message").fill("What does it say?")
    held = await hold(page, "**/v1/runs", "POST")
    await page.keyboard.press("Enter")
    await page.keyboard.press("Enter")
    await held.let_go()
    await expect(page.get_by_text("It says one.")).to_be_visible()
    assert len(held.requests) == 1
    await expect(page.get_by_role("list", name="Files to send")).to_be_hidden()


async def test_two_messages_at_once_are_both_shown_and_answered(console: Console) -> None:
    go_on = asyncio.Event()
    console.model.script(gated(go_on, text("To the first.")), text("To both."))
    await console.define()
    page = await console.open("chat?agent=clerk&session=both")
    held = await hold(page, "**/v1/runs", "POST")
    for said in ("First.", "Second."):
        await page.get_by_label("Message").fill(said)
        await page.keyboard.press("Enter")
    await held.let_go()
    await console.model.received()
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("not read yet")).to_be_visible()
    await expect(page.get_by_text("First.", exact=True)).to_be_visible()
    go_on.set()
    await expect(page.get_by_text("To both.")).to_be_visible()
    assert len(held.requests) == 1


async def test_a_button_that_cannot_act_says_why(console: Console) -> None:
    await console.define()
    wanted = {"name": "daily", "cron": "0 8 * * *", "run": {"agent": "clerk", "input": "?"}}
    (await console.server.client.post("/v1/schedules", json=wanted)).raise_for_status()
    page = await console.open("operations/schedules")
    await expect(page.get_by_role("button", name="Pause")).to_be_visible()
    (await console.server.client.delete("/v1/schedules/daily")).raise_for_status()
    await page.get_by_role("button", name="Pause").click()
    await expect(page.get_by_role("alert")).to_contain_text("daily")
    console.provoked.add("404")


@pytest.mark.deep
async def test_a_row_that_was_deleted_is_gone_from_a_list_of_several_pages(
    console: Console,
) -> None:
    await console.define()
    for name in ("first", "second", "third"):
        wanted = {"name": name, "cron": "0 8 * * *", "run": {"agent": "clerk", "input": "?"}}
        (await console.server.client.post("/v1/schedules", json=wanted)).raise_for_status()
    await shorten(console.page, 2)
    page = await console.open("operations/schedules")
    await page.get_by_role("button", name="Show more").click()
    for name in ("first", "second", "third"):
        await expect(page.get_by_role("row").filter(has_text=name)).to_have_count(1)
    row = page.get_by_role("row").filter(has_text="first")
    await row.get_by_role("button", name="Delete").click()
    await row.get_by_role("group").get_by_role("button", name="Delete").click()
    await expect(row).to_have_count(0)
    await expect(page.get_by_role("row").filter(has_text="third")).to_have_count(1)


@pytest.mark.deep
async def test_a_run_on_a_later_page_is_shown_as_it_is_now(console: Console) -> None:
    go_on = asyncio.Event()
    console.model.script(gated(go_on, text("slow")), text("done"), text("done"))
    first = await console.run()
    await console.model.received()
    for _ in range(2):
        answer = await console.server.client.post("/v1/runs", json={"agent": "clerk", "input": "?"})
        await ended(console, answer.json()["id"])
    await shorten(console.page, 2)
    page = await console.open("runs")
    await page.get_by_role("button", name="Show more").click()
    row = page.get_by_role("row").filter(has=page.locator(f'[title="{first}"]'))
    await expect(row).to_contain_text("running")
    go_on.set()
    await expect(row).to_contain_text("completed")


@pytest.mark.deep
async def test_the_state_of_a_provider_is_in_its_row_until_it_is_deleted(console: Console) -> None:
    wanted = {"name": "spare", "base_url": "https://api.example.com/v1", "dialect": "chat"}
    (await console.server.client.post("/v1/providers", json=wanted)).raise_for_status()
    page = await console.open("operations/providers")
    row = page.get_by_role("row").filter(has_text="spare")
    await expect(row).to_contain_text("0 under way")
    await row.get_by_role("button", name="Delete").click()
    await row.get_by_role("group").get_by_role("button", name="Delete").click()
    await expect(row).to_have_count(0)
