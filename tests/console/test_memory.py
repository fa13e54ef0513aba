"""The page Memory in a real browser: episodes, patterns with their evidence, reports."""

from typing import Any

import pytest
from playwright.async_api import expect

from tests.api.test_episodes import remember
from tests.api.test_patterns import add
from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.waiting import until


async def test_episodes_are_searched_and_their_score_is_explained(console: Console) -> None:
    await remember(console.server.client, task={"original_input": "Book a train to Rome"})
    await remember(console.server.client, task={"original_input": "Count the sheep"})
    page = await console.open("memory")
    await expect(page.get_by_role("link", name="Count the sheep")).to_be_visible()
    await page.get_by_label("Search for episodes like this").fill("a train to Rome")
    await page.get_by_role("button", name="Search").click()
    first = page.locator("ol.rows > li").first
    await expect(first).to_contain_text("Book a train to Rome")
    await first.get_by_text("Score").click()
    await expect(first.locator(".terms")).to_be_visible()
    await first.get_by_role("link").click()
    await expect(page.get_by_role("heading", name="Book a train to Rome")).to_be_visible()
    assert await violations(page) == []


@pytest.mark.parametrize("colours", ["light", "dark"])
async def test_a_pattern_shows_how_its_evidence_grew(console: Console, colours: Any) -> None:
    await console.page.emulate_media(color_scheme=colours)
    client = console.server.client
    pattern = await add(client, name="ask first")
    path = f"/v1/patterns/{pattern['id']}"
    for good in (True, True, False, True):
        body = {"good": good, "baseline_rate": 0.4}
        (await client.post(f"{path}/applications", json=body)).raise_for_status()
    (await client.post(f"{path}/validate")).raise_for_status()
    history = (await client.get(f"{path}/evidence")).json()
    assert [each["given_good"] for each in history["points"]] == [1, 2, 2, 3]
    stored = (await client.get(path)).json()["evidence"]["e_value"]
    assert history["points"][-1]["e_value"] == pytest.approx(stored)
    page = await console.open("memory/patterns")
    await page.get_by_role("link", name="ask first").click()
    await expect(page.get_by_role("img", name="The e-value over 4 judged")).to_be_visible()
    await page.get_by_text("As a table").click()
    await expect(page.get_by_role("cell", name="3 of 4", exact=True)).to_be_visible()
    assert await violations(page) == []
    await page.get_by_role("button", name="Judge it now").click()
    await expect(page.get_by_role("status").filter(has_text="evidence")).to_be_visible()
    await page.get_by_role("button", name="Deprecate").click()
    await page.get_by_role("group").get_by_role("button", name="Deprecate").click()
    await expect(page.get_by_text("deprecated in the console")).to_be_visible()


async def test_reports_are_made_and_read(console: Console) -> None:
    page = await console.open("memory/reports")
    await page.get_by_role("button", name="Run it now").click()
    await page.get_by_role("group").get_by_role("button", name="Run it now").click()
    await expect(page.get_by_text("What was done")).to_be_visible()

    async def ended() -> Any:
        found = await console.server.client.get("/v1/memory/reports")
        return found.json()["items"][0]

    await until(ended, lambda job: job["ended_at"] is not None)
    await expect(page.locator(".panel h3").first).to_be_visible()
    assert await violations(page) == []


async def test_a_run_shows_what_memory_gave_it(console: Console) -> None:
    run_id = await console.run()
    page = await console.open(f"memory/runs/{run_id}")
    await expect(page.get_by_text("No pattern fitted this run.")).to_be_visible()
    assert await violations(page) == []
