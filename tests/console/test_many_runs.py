"""Runs taken along: as programs that start one like it, and many at once."""

import asyncio
import csv
import io
import os
import sys

import pytest
from playwright.async_api import Page, expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.fake_model import gated, http_error, text
from tests.waiting import until

QUESTION = 'It\'s "$HOME" `x` \\n\n🙂 and 2 * 3?'


async def copied(page: Page, name: str) -> str:
    group = page.get_by_role("group", name="Copy as")
    await group.get_by_role("button", name=f"{name}:").click()
    return str(await until(lambda: page.evaluate("window.kept"), bool))


async def executed(console: Console, *command: str, stdin: str = "") -> str:
    key = console.server.headers["Authorization"].removeprefix("Bearer ")
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "BOTTEGA_KEY": key},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate(stdin.encode())
    assert process.returncode == 0, command
    return out.decode()


async def test_a_run_is_copied_as_a_program_that_asks_the_same(console: Console) -> None:
    console.model.script(*[text("Six.")] * 4)
    await console.define()
    client = console.server.client
    body = {"agent": "clerk", "input": QUESTION, "user": "o'neil"}
    run = (await client.post("/v1/runs?wait=30", json=body)).json()["id"]
    page = await console.open(f"runs/{run}")
    await page.evaluate("navigator.clipboard.writeText = async (text) => { window.kept = text }")
    await page.get_by_role("button", name="Copy as").click()
    programs = (("curl", "bash"), ("Python", sys.executable), ("TypeScript", "node"))
    for name, interpreter in programs:
        program = await copied(page, name)
        module = ["--input-type=module"] if interpreter == "node" else []
        assert "Six." in await executed(console, interpreter, *module, "-", stdin=program)
        await page.evaluate("window.kept = null")
    made = (await client.get("/v1/runs?limit=4&view=full")).json()["items"]
    assert [(each["input"], each["user"]) for each in made] == [(QUESTION, "o'neil")] * 4


@pytest.mark.deep
async def test_many_runs_are_cancelled_retried_and_saved(console: Console) -> None:
    console.model.script(*[text("Yes.")] * 3)
    await console.define()
    client = console.server.client
    for question in ("one", "two"):
        body = {"agent": "clerk", "input": question}
        (await client.post("/v1/runs?wait=30", json=body)).raise_for_status()
    page = await console.open("runs")
    await page.get_by_label("Choose two").check()
    await page.get_by_role("button", name="Retry 1").press("Enter")
    await page.get_by_role("button", name="Retry 1").press("Enter")
    await expect(page.get_by_text("1 of 1 started again")).to_be_visible()
    await expect(page.get_by_role("row")).to_have_count(4)
    assert await violations(page) == []
    await page.set_viewport_size({"width": 320, "height": 800})
    assert await page.evaluate("document.documentElement.scrollWidth") <= 320
    await page.set_viewport_size({"width": 1280, "height": 900})
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Export").click()
    saved = await (await download.value).path()
    rows = list(csv.DictReader(io.StringIO(saved.read_text())))
    assert [each["question"] for each in rows] == ["two", "two", "one"]
    assert [each["answer"] for each in rows] == ["Yes."] * 3
    go_on = asyncio.Event()
    console.model.script(*[gated(go_on, text("Late."))] * 2)
    for _ in range(2):
        await client.post("/v1/runs", json={"agent": "clerk", "input": "long"})
    await expect(page.get_by_role("row")).to_have_count(6)
    await page.get_by_label("Choose all shown").check()
    await page.get_by_role("button", name="Cancel 2").click()
    await (
        page.get_by_role("group", name="Cancel them?")
        .get_by_role("button", name="Cancel 2")
        .click()
    )
    await expect(page.get_by_text("2 of 2 cancelled")).to_be_visible()
    await expect(page.get_by_role("cell", name="cancelled")).to_have_count(2)
    go_on.set()


@pytest.mark.deep
async def test_several_states_are_chosen_and_back_leads_to_the_same_place(console: Console) -> None:
    console.model.decide = lambda _: text("done")
    client = console.server.client
    await console.define()
    body = {"agent": "clerk", "input": "?"}
    await asyncio.gather(*(client.post("/v1/runs?wait=30", json=body) for _ in range(60)))
    console.model.script(http_error(400))
    failed = (await client.post("/v1/runs?wait=30", json=body)).json()
    page = await console.open("runs?status=failed")
    rows = page.locator("tbody tr")
    await expect(rows).to_have_count(1)
    await page.locator(".several summary").press("Enter")
    await page.get_by_role("checkbox", name="completed").check()
    await expect(rows).to_have_count(50)
    await expect(page.get_by_role("link", name="?", exact=True).first).to_be_visible()
    assert await violations(page) == []
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("checkbox", name="completed")).to_be_hidden()
    await page.get_by_role("button", name="Show more").click()
    await expect(rows).to_have_count(61)
    await rows.last.scroll_into_view_if_needed()
    top = await page.evaluate("scrollY")
    assert top > 500
    await rows.last.get_by_role("link").click()
    await expect(page.get_by_role("heading", name="clerk").first).to_be_visible()
    assert await page.evaluate("scrollY") == 0
    await page.go_back()
    await expect(rows).to_have_count(61)
    await page.wait_for_function(f"Math.abs(scrollY - {top}) < 2")
    assert "status=completed%2Cfailed" in page.url
    assert failed["id"] in (await rows.first.get_by_role("link").get_attribute("href") or "")
