"""Batches, and what runs wait for, in a real browser."""

from typing import Any

import pytest
from playwright.async_api import expect

from tests import swarm
from tests.console.accessibility import violations
from tests.console.conftest import Console, hold_clock
from tests.console.held import drawn
from tests.fake_model import Reply, calls, http_error, text


@pytest.mark.deep
async def test_a_batch_is_watched_retried_and_leads_to_its_items(console: Console) -> None:
    def decide(request: dict[str, Any]) -> Reply:
        is_bad = str(request["messages"][-1]["content"]) == "bad"
        return http_error(400) if is_bad else text("seen")

    console.model.decide = decide
    await console.define()
    items = [{"input": "bad"}, {"input": "a"}, {"input": "b"}]
    body = {"agent": "clerk", "items": items}
    (await console.server.client.post("/v1/batches", json=body)).raise_for_status()
    page = await console.open("batches")
    row = page.get_by_role("row").filter(has_text="clerk")
    await expect(row).to_contain_text("3 of 3")
    await expect(row.get_by_role("cell").nth(4)).to_have_text("2")
    assert await violations(page) == []
    console.model.decide = lambda request: text("good")
    await row.get_by_role("button", name="Retry").click()
    await row.get_by_role("group").get_by_role("button", name="Retry").click()
    await expect(row.get_by_role("cell").nth(4)).to_have_text("3")
    await expect(row.get_by_role("button", name="Retry")).to_have_count(0)
    await row.get_by_role("link").click()
    begun = page.get_by_role("region", name="Runs").get_by_role("row")
    await expect(begun).to_have_count(5)  # with the head, and the item that failed first
    assert await violations(page) == []


async def test_what_has_ended_is_not_read_again(console: Console) -> None:
    console.model.decide = lambda request: text("seen")
    await console.define()
    body = {"agent": "clerk", "items": [{"input": "a"}]}
    made = (await console.server.client.post("/v1/batches", json=body)).json()
    page = await console.open("batches")
    row = page.get_by_role("row").filter(has_text="clerk")
    await expect(row).to_contain_text("completed")
    await hold_clock(page)
    read: list[str] = []
    page.on("request", lambda request: read.append(request.url))
    for path, rows in (("batches", 1), (f"batches/{made['id']}", 2)):
        await console.open(path)
        await page.reload()
        await expect(row).to_have_count(rows)
        await drawn(page)
        read.clear()
        await page.clock.run_for(30_000)
        assert any("/v1/interrupts" in url for url in read)  # other parts of the page go on
        assert [url for url in read if "/v1/batches" in url or "parent_run_id" in url] == []


async def test_a_batch_is_cancelled(console: Console) -> None:
    console.model.decide = swarm.never
    await console.define()
    body = {"agent": "clerk", "items": [{"input": str(n)} for n in range(3)]}
    (await console.server.client.post("/v1/batches", json=body)).raise_for_status()
    page = await console.open("batches")
    row = page.get_by_role("row").filter(has_text="clerk")
    await expect(row).to_contain_text("running")
    await row.get_by_role("button", name="Cancel").click()
    await row.get_by_role("group").get_by_role("button", name="Cancel").click()
    await expect(row).to_contain_text("cancelled")
    await expect(row.get_by_role("button", name="Cancel")).to_have_count(0)


async def test_a_waiting_run_says_what_it_waits_for(console: Console) -> None:
    console.model.decide = lambda request: calls(("ask_user", {"question": "Which one?"}))
    run_id = await console.run({"type": "builtin", "name": "ask_user"})
    page = await console.open("runs")
    row = page.get_by_role("row").filter(has_text="clerk")
    await expect(row).to_contain_text("waiting for a person")
    await console.open(f"runs/{run_id}")
    await expect(page.locator(".head")).to_contain_text("waiting for a person")
