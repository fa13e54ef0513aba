"""The console on bad connections: a server that restarts, two tabs, a slow network."""

import asyncio

import pytest
from playwright.async_api import BrowserContext, Page, expect

from tests.console.conftest import Console, heed, window
from tests.fake_model import FakeModel, calls, gated, text
from tests.flows.test_interrupts import CALCULATOR
from tests.flows.test_processes import environment
from tests.processes import command
from tests.service import client_of

SLOW = {
    "offline": False,
    "latency": 400,
    "downloadThroughput": 60_000,
    "uploadThroughput": 30_000,
}
"""Of a phone in a train: milliseconds, bytes per second."""


@pytest.mark.deep
async def test_a_run_goes_on_after_the_server_was_killed(
    profile: BrowserContext, database_url: str, guest_model: FakeModel
) -> None:
    go_on = asyncio.Event()
    asked = calls(("calculator", {"expression": "6*7"}))
    guest_model.script(asked, gated(go_on, text("lost")), text("It is 42."))
    with_model = environment(database_url, guest_model)
    async with window(profile) as (page, problems):
        async with command("serve", "--port", "0", **with_model) as server:
            run_id = await _run(server.port)
            await page.goto(f"http://127.0.0.1:{server.port}/console/#/runs/{run_id}")
            await expect(page.get_by_role("tab", name="Tools 1")).to_be_visible()
            await guest_model.received(2)
            server.kill()
            await server.process.wait()
            await expect(page.get_by_text("The server cannot be reached")).to_be_visible()
            await expect(page.get_by_text("Connecting…")).to_be_visible()
        async with command("serve", "--port", str(server.port), **with_model):
            status = page.locator(".head").get_by_text("completed")
            await expect(status).to_be_visible(timeout=60_000)  # its worker's lease ends first
            await expect(page.get_by_text("It is 42.").last).to_be_visible()
            await expect(page.get_by_text("The server cannot be reached")).to_be_hidden()
            await expect(page.get_by_text("Ended")).to_be_visible()
            attempt = page.locator(".figure", has_text="Taken up by a worker").locator("dd")
            await expect(attempt).to_contain_text("2 times")
    go_on.set()
    broken = ("ERR_CONNECTION", "ERR_EMPTY", "ERR_SOCKET", "WebSocket")
    assert [each for each in problems if not any(word in each for word in broken)] == []


async def _run(port: int | None) -> str:
    async with client_of(port) as client:
        agent = {
            "name": "clerk",
            "system_message": "You help.",
            "tools": [{"type": "builtin", "name": "calculator"}],
        }
        (await client.post("/v1/agents", json=agent)).raise_for_status()
        run = await client.post("/v1/runs", json={"agent": "clerk", "input": "?"})
        return str(run.json()["id"])


async def test_two_tabs_follow_a_run_and_one_decides(console: Console) -> None:
    console.model.script(calls(("calculator", {"expression": "9+9"})), text("It is 18."))
    run_id = await console.run(CALCULATOR)
    one = await console.open(f"runs/{run_id}")
    other = await one.context.new_page()
    heed(other, console.problems)
    await other.goto(one.url)
    for page in (one, other):
        await expect(page.get_by_role("button", name="Approve")).to_be_visible()
    await one.get_by_role("button", name="Approve").click()
    for page in (one, other):
        await expect(page.locator(".head").get_by_text("completed")).to_be_visible()
        await expect(page.get_by_role("button", name="Approve")).to_have_count(0)
        await expect(page.get_by_text("It is 18.").last).to_be_visible()


@pytest.mark.deep
async def test_a_tab_that_decides_too_late_says_so(console: Console) -> None:
    console.model.script(calls(("calculator", {"expression": "9+9"})), text("It is 18."))
    run_id = await console.run(CALCULATOR)
    page = await console.open("approvals")
    await expect(page.get_by_role("button", name="Deny")).to_be_visible()
    found = (await console.server.client.get("/v1/interrupts?status=pending")).json()["items"]
    approved = {"decision": "approve"}
    resolve = f"/v1/interrupts/{found[0]['id']}/resolve"
    (await console.server.client.post(resolve, json=approved)).raise_for_status()
    await page.get_by_role("button", name="Deny").click()
    await page.get_by_role("button", name="Deny now").click()
    await expect(page.get_by_role("alert").or_(page.get_by_text("Nobody waits"))).to_be_visible()
    await expect(page.get_by_text("Nobody waits for you.")).to_be_visible()
    await console.open(f"runs/{run_id}")
    await expect(page.get_by_text("It is 18.").last).to_be_visible()
    console.provoked.add("409")


@pytest.mark.deep
async def test_a_slow_network_delays_and_breaks_nothing(console: Console) -> None:
    go_on = asyncio.Event()
    console.model.script(gated(go_on, text("Hello Ada.")))
    await console.define()
    page = await console.open("chat")
    await page.get_by_label("Agent").select_option("clerk")
    await page.get_by_role("button", name="Start").click()
    await expect(page.get_by_text("Say something.")).to_be_visible()
    await _slow(page)
    await page.get_by_label("Message").fill("I am Ada.")
    await page.keyboard.press("Enter")
    await expect(page.locator(".said.user").get_by_text("I am Ada.")).to_be_visible(timeout=300)
    await expect(page.get_by_role("button", name="Stop")).to_be_visible()
    go_on.set()
    await expect(page.get_by_text("Hello Ada.")).to_be_visible()
    await expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    await expect(page.get_by_text("I am Ada.")).to_have_count(1)
    assert len(console.model.requests) == 1
    await page.get_by_role("link", name="Runs").click()
    await expect(page.get_by_text("Loading")).to_be_visible()
    await page.get_by_role("table").get_by_role("link").first.click()
    await expect(page.locator(".head").get_by_text("completed")).to_be_visible()


async def _slow(page: Page) -> None:
    browser = await page.context.new_cdp_session(page)
    await browser.send("Network.enable")
    await browser.send("Network.emulateNetworkConditions", SLOW)
