"""Text that was typed into a conversation, while something else happens."""

import pytest
from playwright.async_api import expect

from tests.console.conftest import Console
from tests.fake_model import text


async def test_it_stays_while_another_page_is_shown(console: Console) -> None:
    await console.define()
    page = await console.open("chat?agent=clerk&session=typed")
    await page.get_by_label("Message").fill("I am A")
    await page.get_by_role("navigation").get_by_role("link", name="Runs").click()
    await expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    await page.go_back()
    await expect(page.get_by_label("Message")).to_have_value("I am A")
    await console.open("chat?agent=clerk&session=another")
    await expect(page.get_by_role("button", name="session's id: another")).to_be_visible()
    await expect(page.get_by_label("Message")).to_have_value("")


@pytest.mark.deep
async def test_it_stays_when_its_key_is_revoked_and_another_is_entered(console: Console) -> None:
    console.model.script(text("Hello Ada."))
    await console.define()
    made = await console.server.client.post("/v1/keys", json={"name": "short", "scopes": ["run"]})
    short = made.json()
    key = console.server.headers["Authorization"].removeprefix("Bearer ")
    page = console.page
    await page.add_init_script(f"localStorage.setItem('bottega.key', '{short['key']}')")
    await console.open("chat?agent=clerk&session=revoked")
    await expect(page.get_by_text("Say something.")).to_be_visible()
    (await console.server.client.delete(f"/v1/keys/{short['id']}")).raise_for_status()
    await page.get_by_label("Message").fill("I am Ada.")
    await page.keyboard.press("Enter")
    await page.get_by_role("button", name="Enter a key").click()
    await page.get_by_label("Key", exact=True).fill(key)
    await page.get_by_role("button", name="Use it").click()
    await expect(page.get_by_label("Message")).to_have_value("I am Ada.")
    await page.get_by_label("Message").press("Enter")
    await expect(page.get_by_text("Hello Ada.")).to_be_visible()
    console.provoked.add("401")


async def test_an_address_that_was_cut_off_shows_a_page(console: Console) -> None:
    page = await console.open("agents/%E0%A4%A")
    await expect(page.get_by_role("main").get_by_role("alert")).to_be_visible()
    console.provoked.add("422")


async def test_what_could_not_be_read_is_not_shown_as_nothing(console: Console) -> None:
    await console.page.add_init_script("localStorage.clear()")
    page = await console.open()
    await expect(page.get_by_role("button", name="Enter a key")).to_be_visible()
    for name in ("Tokens today", "Cost today", "Workers"):
        figure = page.locator(".figure").filter(has_text=name)
        await expect(figure.get_by_role("definition")).to_have_text("\N{EN DASH}")
    console.provoked.add("401")
