"""Answers in words and figures: did a version help, did memory help, what does an agent cost."""

import csv
import re
from typing import Any

import pytest
from playwright.async_api import expect

from tests.api.test_patterns import add
from tests.console.conftest import Console
from tests.console.test_figures import ANSWER, shows_no_fault
from tests.waiting import until


async def judged_versions(console: Console) -> None:
    """Make two versions of ``clerk``: two bad answers of the first, three good of the second."""
    await console.define()
    client = console.server.client
    for outcome, number in (("FAILURE", 2), ("SUCCESS", 3)):
        for _ in range(number):
            console.model.script(ANSWER)
            run = {"agent": "clerk", "input": "?", "memory": "off"}
            done = (await client.post("/v1/runs?wait=30", json=run)).json()
            said = {"outcome": outcome}
            (await client.post(f"/v1/runs/{done['id']}/feedback", json=said)).raise_for_status()
        if outcome == "FAILURE":
            better = {"description": "Helps.", "system_message": "You help.", "memory": "off"}
            (await client.put("/v1/agents/clerk", json=better)).raise_for_status()

    async def totals() -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = (await client.get("/v1/metrics/totals")).json()["items"]
        return items

    await until(totals, lambda items: bool(items) and items[0]["runs"] == 5)


@pytest.mark.deep
async def test_an_agent_s_page_tells_its_cost_and_whether_a_version_helped(
    console: Console,
) -> None:
    await judged_versions(console)
    page = await console.open("agents/clerk")
    await page.get_by_role("link", name="Figures").click()
    await expect(page.get_by_text("clerk ran 5 times at a cost that is not known")).to_be_visible()
    told = page.get_by_text("Version 2 cannot be told from version 1 yet: 100 % (3 of 3)")
    await expect(told).to_contain_text("against 0 % (0 of 2). That is +100 points")
    await expect(told).to_contain_text("A run of version 2 costs")
    rows = page.get_by_role("region", name="Figures by version of clerk").get_by_role("row")
    await expect(rows.nth(1)).to_contain_text("100 % (3 of 3)")
    await expect(page.get_by_text("Memory of clerk is off: no pattern has judged")).to_be_visible()
    days = page.get_by_role("region", name="Good runs by day")
    await expect(days.get_by_role("columnheader")).to_have_text(["Day (UTC)", "By people"])
    await expect(days.get_by_role("row").nth(1)).to_contain_text("60 % (3 of 5)")
    await shows_no_fault(page)
    await expect(told).to_contain_text("Nobody drew lots between the versions")
    await page.get_by_role("link", name="Runs that are not good").first.click()
    await expect(page.get_by_role("row").filter(has_text="bad by people (key:")).to_have_count(2)
    await expect(page.get_by_label("Outcome")).to_have_value("PARTIAL,FAILURE")
    await page.go_back()
    judges = page.get_by_role("combobox", name="Judged by")
    await judges.select_option("checks")
    await expect(page.get_by_text("By checks alone: Version 2 has no judged run")).to_be_visible()
    await expect(page).to_have_url(re.compile("judged_by=check"))
    await judges.select_option("people")
    await expect(page.get_by_text("By people alone: Version 2 cannot be told")).to_be_visible()
    await page.get_by_role("combobox", name="Compare").select_option("version 1")
    await page.get_by_role("combobox", name="with", exact=True).select_option("version 2")
    chosen = page.get_by_text("Version 1 cannot be told from version 2 yet")
    await expect(chosen).to_be_visible()
    await expect(page).to_have_url(re.compile("versions=1%2C2"))
    for box, choice in (("Judged by", "all"), ("Time", "last 24 hours")):
        await page.get_by_role("combobox", name=box).select_option(choice)
        await expect(page).to_have_url(re.compile("versions=1%2C2"))
        await expect(chosen).to_be_visible()
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Export comparison of versions").click()
    (line,) = csv.DictReader((await (await download.value).path()).read_text().splitlines())
    counts = ("version", "compared_with", "good", "judged", "good_of_other", "judged_of_other")
    assert [line[name] for name in counts] == ["1", "2", "0", "2", "3", "3"]
    assert (line["agent"], line["judged_by"], line["difference"]) == ("clerk", "all", "-1")
    assert -1 <= float(line["low_95"]) < 0 < float(line["high_95"]) < 1
    assert (line["verdict"], line["from"] < line["to"]) == ("not known yet", True)
    await page.reload()
    await expect(chosen).to_be_visible()
    await page.get_by_role("link", name="Runs that are not good").first.click()
    await page.go_back()
    await expect(chosen).to_be_visible()
    await page.get_by_role("combobox", name="with", exact=True).select_option("version 1")
    await expect(page.get_by_text("Version 2 cannot be told from version 1 yet")).to_be_visible()


async def test_memory_s_page_tells_whether_it_helped(console: Console) -> None:
    pattern = await add(console.server.client, name="ask first")
    await console.server.owner.execute(
        """
        INSERT INTO pattern_applications (tenant_id, pattern_id, version, arm, at, good)
        SELECT p.tenant_id, p.id, 1, arm, now(), place <= good
        FROM patterns p, (VALUES ('trial', 27), ('control', 12)) AS v(arm, good),
            generate_series(1, 30) AS place
        WHERE p.id = $1
    """,
        pattern["id"],
    )
    page = await console.open("memory")
    await page.get_by_role("tab", name="Did it help?").click()
    told = page.get_by_text("Memory helped: with what it learned the share of good runs changed by")
    await expect(told).to_contain_text("+50 points, with 95 % certainty between +2")
    row = page.get_by_role("region", name="Good runs by pattern").get_by_role("row").nth(1)
    await expect(row).to_contain_text("ask first, version 1, on trial")
    await expect(row).to_contain_text(
        re.compile(r"90 % \(27 of 30\)\s*40 % \(12 of 30\)\s*\+50 points")
    )
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Export all effect of memory").click()
    lines = (await (await download.value).path()).read_text().splitlines()
    assert lines[0].startswith("judged_by,compared,good_with,runs_with,good_without,runs_without")
    assert [each.split(",")[-10:-7] for each in lines[1:]] == [["27", "30", "12"]] * 2
    assert [each.split(",")[-3] for each in lines[1:]] == ["it helped"] * 2
    await page.get_by_role("combobox", name="Judged by").select_option("people")
    await expect(page.get_by_text("It is not known yet if memory helped")).to_be_visible()
    await page.get_by_role("combobox", name="Judged by").select_option("all")
    await expect(page.get_by_text("No run of this time is judged.")).to_be_visible()
    await shows_no_fault(page)
