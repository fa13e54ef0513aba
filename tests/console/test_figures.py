"""The pages Health and Usage, with charts, in a real browser."""

import re
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.fake_model import calls, chunk, http_error, sse
from tests.waiting import until

REPORTED = {"prompt_tokens": 70, "completion_tokens": 30}
ANSWER = sse(chunk("Done.", finish_reason="stop"), {"choices": [], "usage": REPORTED})


async def runs_of_two_versions(console: Console) -> None:
    """Make two runs of each of two versions of ``clerk``; one of the second fails."""
    await console.define()
    client = console.server.client
    changed = {"description": "Helps.", "system_message": "You help well."}
    for version, answers in enumerate(((ANSWER, ANSWER), (ANSWER, http_error(400))), 1):
        for answer in answers:
            console.model.script(answer)
            run = {"agent": "clerk", "input": "?", "user": "ada", "metadata": {"plan": "pro"}}
            await client.post("/v1/runs?wait=30", json=run)
        if version == 1:
            (await client.put("/v1/agents/clerk", json=changed)).raise_for_status()

    async def totals() -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = (await client.get("/v1/metrics/totals")).json()["items"]
        return items

    await until(totals, lambda items: bool(items) and items[0]["runs"] == 4)


async def shows_no_fault(page: Page) -> None:
    """Check a page with its charts' tables: for axe-core, and on a narrow screen."""
    assert await violations(page) == []
    await page.set_viewport_size({"width": 320, "height": 800})
    assert await page.evaluate("document.documentElement.scrollWidth") <= 320
    await page.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.deep
async def test_health_says_what_fails_and_since_which_version(console: Console) -> None:
    await runs_of_two_versions(console)
    page = await console.open("health?span=1h")
    chart = page.get_by_role("figure").filter(has_text="clerk@2")
    await expect(page.get_by_role("img", name="Runs and failures")).to_be_visible()
    await expect(chart.first).to_contain_text("┆ clerk@2")
    await expect(page.locator(".uplot canvas").first).to_be_visible()
    await expect(page.get_by_text("25.0 %").first).to_be_visible()
    failures = page.get_by_role("region", name="What fails")
    await expect(failures.get_by_role("row").filter(has_text="HTTP 400")).to_contain_text("clerk")
    agents = page.get_by_role("region", name="Agents", exact=True)
    await expect(agents.get_by_role("row").filter(has_text="clerk")).to_contain_text("25.0 %")
    providers = page.get_by_role("region", name="Providers")
    await expect(providers.get_by_role("row").filter(has_text="default")).to_contain_text("25.0 %")
    values = page.get_by_text("Values", exact=True).first
    await values.focus()
    await page.keyboard.press("Enter")
    table = page.get_by_role("region", name="Values: Runs and failures")
    await expect(table.get_by_role("columnheader")).to_have_text(["Time", "runs", "failed"])
    cells = await table.locator("td.right").all_inner_texts()
    assert sum(int(each) for each in cells) == 5  # four runs, of which one failed
    await shows_no_fault(page)
    await page.get_by_role("combobox", name="Time").select_option("15m")
    await expect(page.get_by_role("img", name="Time of a run")).to_be_visible()
    await page.get_by_role("combobox", name="Time").select_option("7d")
    await expect(page).to_have_url(f"{console.address}#/health?span=7d")
    await expect(page.get_by_role("img", name="Time of a run")).to_be_visible()


@pytest.mark.deep
async def test_one_agent_is_answered_and_drawn_by_version_in_one_place(console: Console) -> None:
    await runs_of_two_versions(console)
    page = await console.open("health")
    await page.get_by_role("combobox", name="Agent").select_option("clerk")
    await expect(page.get_by_text("In the last 30 days clerk ran 4 times")).to_be_visible()
    await expect(page.get_by_role("heading", name="Did a version help?")).to_be_visible()
    await expect(page.get_by_role("heading", name="Did memory help?")).to_be_visible()
    runs = page.get_by_role("figure").filter(
        has=page.get_by_role("img", name="Runs by version", exact=False)
    )
    await expect(runs.locator(".legend")).to_contain_text("clerk@1")
    await expect(runs.locator(".legend")).to_contain_text("clerk@2")
    await shows_no_fault(page)
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Export all versions of clerk").click()
    lines = (await (await download.value).path()).read_text().splitlines()
    assert lines[0].startswith("name,runs,failed,good,judged,cost_of_a_run_usd")
    assert {each.split(",")[0] for each in lines[1:]} == {"clerk@1", "clerk@2"}
    await page.get_by_role("combobox", name="Lines by").select_option("agent")
    await expect(page).to_have_url(f"{console.address}#/health?agent=clerk&by=agent")
    await expect(page.get_by_role("img", name="Tokens by agent")).to_be_visible()


async def test_a_price_that_is_missing_is_set_from_where_it_is_missing(console: Console) -> None:
    client = console.server.client
    console.model.script(ANSWER)
    page = await console.open(f"runs/{await console.run()}")
    await page.get_by_role("link", name="Set the price of gpt-5-mini").click()
    await expect(page.get_by_text("This page cannot set the price")).to_be_visible()

    own = {"name": "own", "dialect": "chat", "base_url": "https://models.example.com/v1"}
    (await client.post("/v1/providers", json=own)).raise_for_status()
    await page.reload()
    prices = page.get_by_role("group", name="gpt-5-mini")
    await prices.get_by_label("Input").fill("2")
    await prices.get_by_label("Output").fill("10")
    assert await violations(page) == []
    await page.locator("form", has=prices).get_by_role("button", name="Save").click()
    await expect(prices).to_have_count(0)
    stored = (await client.get("/v1/providers/own")).json()
    assert stored["prices"] == {"gpt-5-mini": {"input": 2, "output": 10, "cached": None}}
    assert (stored["version"], stored["base_url"]) == (2, own["base_url"])


@pytest.mark.deep
async def test_usage_says_what_each_agent_costs(console: Console) -> None:
    await runs_of_two_versions(console)
    page = await console.open("usage")
    usage = page.get_by_role("region", name="Usage by agent")
    await expect(usage.get_by_role("row").filter(has_text="clerk")).to_contain_text("210")
    await expect(usage.get_by_role("row").last).to_contain_text(re.compile(r"Total\s*210"))
    await expect(page.get_by_role("img", name="Tokens")).to_be_visible()
    await expect(page.get_by_text("Counted are all runs that are over")).to_be_visible()
    await page.get_by_role("combobox", name="By", exact=True).select_option("metadata")
    await page.get_by_label("Key of the metadata").fill("plan")
    await page.keyboard.press("Tab")
    by_key = page.get_by_role("region", name="Usage by metadata")
    await expect(by_key.get_by_role("row").filter(has_text="pro")).to_contain_text("210")
    await shows_no_fault(page)
    await page.get_by_label("User", exact=True).fill("bob")
    await page.keyboard.press("Tab")
    await expect(page.get_by_text("No run like that has used tokens")).to_be_visible()


async def test_a_run_that_used_all_its_calls_names_the_tool_that_kept_failing(
    console: Console,
) -> None:
    client = console.server.client
    agent = {"name": "clerk", "system_message": "You help.", "max_iterations": 2}
    tools = [{"type": "builtin", "name": "calculator"}]
    (await client.post("/v1/agents", json=agent | {"tools": tools})).raise_for_status()
    console.model.decide = lambda _: calls(("calculator", {"expression": "1 / 0"}))
    run = (await client.post("/v1/runs?wait=30", json={"agent": "clerk", "input": "?"})).json()
    assert run["error"]["code"] == "max_iterations"
    page = await console.open("health")
    failures = page.get_by_role("region", name="What fails")
    await expect(failures).to_contain_text("In the newest run the tool calculator failed")
