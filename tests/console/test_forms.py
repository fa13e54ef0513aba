"""Forms: what is in their fields after they were sent, undone, or refused."""

import re

import pytest
from playwright.async_api import Page, expect

from tests.console.conftest import Console


async def _as_json(console: Console, said: str) -> Page:
    """Show an agent as JSON, with this text in its editor."""
    await console.define()
    page = await console.open("agents/clerk")
    await page.get_by_role("tab", name="JSON").click()
    await page.get_by_label("The agent as JSON").fill(said)
    return page


async def test_undo_all_drops_a_text_that_is_no_json(console: Console) -> None:
    page = await _as_json(console, '{"system_message": "Other.", "model": ')
    await expect(page.get_by_text("This is no JSON yet")).to_be_visible()
    await page.get_by_role("button", name="Undo all").click()
    await expect(page.get_by_text("This is no JSON yet")).to_be_hidden()
    editor = page.get_by_label("The agent as JSON")
    await expect(editor).to_have_value(re.compile('"system_message": "You help."'))
    await expect(editor).to_have_attribute("spellcheck", "false")


@pytest.mark.deep
async def test_undo_all_drops_such_a_text_of_one_field(console: Console) -> None:
    await console.define()
    page = await console.open("agents/clerk")
    field = page.get_by_label("Metadata, as JSON")
    before = await field.input_value()
    await page.locator("summary", has_text="Other").click()
    await field.fill('{"large')
    await page.get_by_role("button", name="Undo all").click()
    await expect(field).to_have_value(before)
    await expect(page.get_by_role("button", name="Undo all")).to_be_hidden()


async def test_what_was_valid_before_is_not_stored_in_place_of_what_is_shown(
    console: Console,
) -> None:
    page = await _as_json(console, '{"system_message": "Other."}')
    await page.get_by_label("The agent as JSON").fill('{"system_message": "Newest."')
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_label("The agent as JSON")).to_be_focused()
    await page.get_by_label("The agent as JSON").fill('{"system_message": "Newest."}')
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_text("Version 2")).to_be_visible()
    now = (await console.server.client.get("/v1/agents/clerk")).json()
    assert (now["version"], now["system_message"]) == (2, "Newest.")
