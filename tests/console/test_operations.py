"""The page Operations in a real browser."""

import re

import pytest
from playwright.async_api import expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.fake_model import text

TABS = ("Scheduler", "Providers", "Keys", "Schedules", "Webhooks", "Audit")


async def test_a_key_is_made_shown_once_and_revoked(console: Console) -> None:
    page = await console.open("operations/keys")
    await page.get_by_label("Name").fill("chat product")
    await page.get_by_label("approve").check()
    await page.get_by_role("button", name="Create").click()
    await expect(page.get_by_text("It is shown only now")).to_be_visible()
    key = await page.locator(".state .value").inner_text()
    row = page.get_by_role("row").filter(has_text="chat product")
    await expect(row).to_contain_text("run, approve")
    found = await console.server.client.get(
        "/v1/runs", headers={"authorization": f"Bearer {key.strip()}"}
    )
    assert found.status_code == 200
    await row.get_by_role("button", name="Revoke").click()
    await row.get_by_role("group").get_by_role("button", name="Revoke").click()
    await expect(row).to_contain_text("revoked")
    await page.get_by_role("tab", name="Audit").click()
    await expect(page.get_by_role("row").filter(has_text="key.revoke")).to_be_visible()


async def test_a_schedule_is_made_and_paused(console: Console) -> None:
    await console.define()
    page = await console.open("operations/schedules")
    await page.get_by_label("Name").fill("mornings")
    await page.get_by_label("Cron").fill("nonsense")
    await page.get_by_label("Agent").fill("clerk")
    await page.get_by_label("Question").fill("What is new?")
    await page.get_by_role("button", name="Create").click()
    await expect(page.get_by_role("alert")).to_contain_text("/cron")
    await page.get_by_label("Cron").fill("0 8 * * 1-5")
    await page.get_by_role("button", name="Create").click()
    row = page.get_by_role("row").filter(has_text="mornings")
    await row.locator("summary").click()
    starts = row.get_by_role("list", name="Next starts of mornings").get_by_role("listitem")
    await expect(starts).to_have_count(5)
    await expect(starts.first).to_contain_text("08:00:00 UTC")
    assert await violations(page) == []
    await row.get_by_role("button", name="Pause").click()
    await expect(row).to_contain_text("paused")
    console.provoked.add("422")


@pytest.mark.deep
async def test_each_part_shows_what_there_is(console: Console) -> None:
    console.model.script(text("done"))
    await console.run()
    page = await console.open("operations")
    await expect(page.get_by_role("table", name="").first).to_be_visible()
    await expect(page.get_by_text("Runs at once")).to_be_visible()
    for name in TABS:
        await page.get_by_role("tab", name=name, exact=True).click()
        await expect(page.get_by_role("tabpanel", name=name)).to_be_visible()
        await expect(page.get_by_text(re.compile("Loading"))).to_have_count(0)
        assert await violations(page) == [], name


@pytest.mark.deep
async def test_settings_show_what_is_kept_and_a_user_s_data(console: Console) -> None:
    client = console.server.client
    (await client.post("/v1/sessions", json={"id": "s", "user": "ada"})).raise_for_status()
    sent = {"file": ("note.txt", b"Buy milk.", "text/plain")}
    file = await client.post("/v1/files", files=sent, data={"session_id": "s"})
    assert file.status_code == 201, file.text
    page = await console.open("settings")
    kept = page.locator("dt", has_text="Runs are kept").locator("xpath=following-sibling::dd[1]")
    await expect(kept).to_have_text("for ever")
    await expect(page.get_by_role("link", name="Limits")).to_be_visible()
    await page.get_by_label("Name of the user").fill("ada")
    await page.get_by_role("button", name="Look up").click()
    files = page.get_by_role("region", name="Files of ada")
    await expect(files.get_by_role("row").nth(1)).to_contain_text("note.txt")
    await page.get_by_label("New fact").fill("Prefers Italian.")
    await page.get_by_role("button", name="Add").click()
    fact = page.get_by_role("region", name="Facts about ada").get_by_role("row").nth(1)
    await expect(fact).to_contain_text("a person")
    await fact.get_by_label("Fact").fill("Prefers Greek.")
    await fact.get_by_role("button", name="Save").click()
    await expect(fact.get_by_role("button", name="Save")).to_have_count(0)
    stored = (await client.get("/v1/users/ada/facts")).json()["items"]
    assert [each["text"] for each in stored] == ["Prefers Greek."]
    assert await violations(page) == []
    await fact.get_by_role("button", name="Delete").click()
    await fact.get_by_role("group").get_by_role("button", name="Delete").click()
    await expect(page.get_by_text("There is none.")).to_be_visible()
    async with page.expect_download() as downloading:
        await page.get_by_role("button", name="Export").click()
    lines = (await (await downloading.value).path()).read_text().splitlines()
    assert '"type":"end"' in lines[-1].replace(" ", "")
    await page.get_by_role("button", name="Erase").click()
    await page.get_by_role("group").get_by_role("button", name="Erase").click()
    told = page.get_by_text(re.compile("is being erased|no data of this user"))
    await expect(told).to_be_visible()
    console.provoked.add("404")
