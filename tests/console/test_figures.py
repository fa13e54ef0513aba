"""The pages Health and Usage, with charts, in a real browser."""

import csv
import re
from functools import partial
from operator import eq

import pytest
from playwright.async_api import Page, expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.fake_model import calls, chunk, http_error, sse
from tests.waiting import until

REPORTED = {"prompt_tokens": 70, "completion_tokens": 30}
ANSWER = sse(chunk("Done.", finish_reason="stop"), {"choices": [], "usage": REPORTED})


async def runs_of_two_versions(console: Console) -> None:
    """Make two runs of each of two versions of ``clerk``; one of the second fails.

    Those of the first version are as if ten minutes older.
    """
    await console.define()
    client = console.server.client

    async def counted() -> int:
        items = (await client.get("/v1/metrics/totals")).json()["items"]
        return items[0]["runs"] if items else 0

    changed = {"description": "Helps.", "system_message": "You help well."}
    for version, answers in enumerate(((ANSWER, ANSWER), (ANSWER, http_error(400))), 1):
        for answer in answers:
            console.model.script(answer)
            run = {"agent": "clerk", "input": "?", "user": "ada", "metadata": {"plan": "pro"}}
            await client.post("/v1/runs?wait=30", json=run)
        await until(counted, partial(eq, 2 * version))
        if version == 1:
            (made,) = (await client.get("/v1/runs?limit=1")).json()["items"]
            for change in (
                "runs SET created_at = created_at - interval '10 minutes' WHERE true",
                "metric_rollups SET at = at - interval '10 minutes' WHERE span = 'minute'",
            ):
                of_tenant = "tenant_id = (SELECT r.tenant_id FROM runs r WHERE r.id = $1)"
                await console.server.owner.execute(f"UPDATE {change} AND {of_tenant}", made["id"])
            (await client.put("/v1/agents/clerk", json=changed)).raise_for_status()


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
    await expect(page.get_by_text("In the last 7 days clerk ran 4 times")).to_be_visible()
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
    assert lines[0].startswith("name,runs,failed,judged_by,good,judged,cost_of_a_run_usd")
    assert {each.split(",")[0] for each in lines[1:]} == {"clerk@1", "clerk@2"}
    await page.get_by_role("combobox", name="Lines by").select_option("agent")
    await expect(page).to_have_url(f"{console.address}#/health?agent=clerk&by=agent")
    await expect(page.get_by_role("img", name="Tokens by agent")).to_be_visible()
    await page.get_by_role("link", name="clerk@2", exact=True).click()
    await expect(page).to_have_url(re.compile("status=completed%2Cfailed%2Ctimeout%2Ccancelled"))
    await expect(page.get_by_text("2 runs, 1 failed;")).to_be_visible()


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


async def saved(page: Page, what: str) -> list[list[str]]:
    """Press the button that exports something; return the lines of the file."""
    async with page.expect_download() as download:
        await page.get_by_role("button", name=f"Export all {what}", exact=True).click()
    text = (await (await download.value).path()).read_text()
    return list(csv.reader(text.splitlines()))


@pytest.mark.deep
async def test_what_went_badly_is_the_same_on_all_pages_and_in_files(console: Console) -> None:
    await runs_of_two_versions(console)
    client = console.server.client
    done = (await client.get("/v1/runs?status=completed")).json()["items"]
    for run, outcome in zip(done, ("FAILURE", "PARTIAL", "FAILURE"), strict=True):
        said = {"outcome": outcome, "comment": "Too short."}
        (await client.post(f"/v1/runs/{run['id']}/feedback", json=said)).raise_for_status()
    page = await console.open("health")
    table = page.get_by_role("region", name="What went badly or partly")
    await expect(table.get_by_role("row")).to_have_count(4)  # the head, two reasons, the total
    reason = table.get_by_role("row").filter(has_text="Too short.")
    await expect(reason).to_contain_text(re.compile(r"2 bad by people \(key:.*, 1 partly by"))
    await expect(table.get_by_role("row").last).to_contain_text("Total4")
    await expect(table.get_by_role("row").last).to_contain_text("1 bad by status")
    await reason.get_by_role("button").click()
    await expect(table.get_by_role("row").filter(has_text="└")).to_have_count(3)
    await shows_no_fault(page)
    await table.get_by_role("row").last.get_by_role("link", name="4", exact=True).click()
    choice = page.get_by_role("combobox", name="Outcome")
    await expect(choice).to_have_value("PARTIAL,FAILURE")
    for address, words in (("FAILURE,PARTIAL", "not good"), ("FAILURE, SUCCESS", "good or bad")):
        await console.open(f"runs?outcome={address}")
        await expect(choice.locator("option:checked")).to_contain_text(words)
    await console.open("health")
    names, *rows = await saved(page, "what went badly or partly")
    assert names[:6] == ["reason", "agent", "version", "outcome", "judged_by", "judged_by_name"]
    assert {row[4] for row in rows} == {"people", "status"}
    assert [row[7] for row in rows] == ["1"] * 4
    assert len(await saved(page, "what fails")) == 2

    await page.get_by_role("combobox", name="Agent").select_option("clerk")
    days = page.get_by_role("region", name="Good runs by day")
    await expect(days.get_by_role("columnheader").last).to_have_text("By status")
    names, *rows = await saved(page, "outcomes over time")
    assert names == ["agent", "day", "judged_by", "good", "partly", "bad"]
    assert {(row[2], row[4], row[5]) for row in rows} == {
        ("people", "1", "2"),
        ("status", "0", "1"),
    }

    await page.get_by_role("combobox", name="Time").select_option("from … to …")
    for label, time in (("From", "2026-01-01T00:00"), ("to", "2026-02-01T00:00")):
        await page.get_by_label(label, exact=True).fill(time)
        await page.keyboard.press("Tab")
    await expect(page).to_have_url(re.compile("from=2026-01-01T00%3A00&to=2026-02-01T00%3A00"))
    await expect(page.get_by_text("It did not run from")).to_be_visible()
    await page.get_by_role("link", name="Usage", exact=True).click()
    await expect(page.get_by_text("No run like that has used tokens")).to_be_visible()

    await page.goto(f"{console.address}#/runs?judged_by=status&version=2")
    row = page.get_by_role("region", name="Runs").get_by_role("row").nth(1)
    await expect(row).to_contain_text("bad by status")
    (names, told) = await saved(page, "runs")
    found = dict(zip(names, told, strict=True))
    assert (found["outcome"], found["judged_by"], found["version"]) == ("bad", "status", "2")
    assert found["memory"] == "no pattern"
    await page.goto(f"{console.address}#/usage?agent=clerk")
    names, told = await saved(page, "usage")
    found = dict(zip(names, told, strict=True))
    assert (found["agent"], found["runs"], found["currency"]) == ("clerk", "4", "USD")
    assert found["from"] < found["to"]
    assert found["only_agent"] == "clerk"
