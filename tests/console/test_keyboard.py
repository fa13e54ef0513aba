"""The console's main paths by keyboard alone: the focus is moved by keys, never by a script."""

import pytest
from playwright.async_api import Locator, Page, expect

from tests.console.conftest import Console
from tests.fake_model import calls, text
from tests.flows.test_interrupts import ASK, CALCULATOR

MOST_KEYS = 80


@pytest.mark.deep
async def test_a_person_finds_a_run_and_decides_by_keyboard(console: Console) -> None:
    asked = calls(("calculator", {"expression": "9+9"}), ("ask_user", {"question": "Which one?"}))
    console.model.script(asked, text("All done."), text("again"))
    await console.run(CALCULATOR, ASK)
    page = await console.open()
    await reach(page, page.get_by_role("link", name="Skip to the page"))
    await page.keyboard.press("Enter")
    await expect(page.locator("main")).to_be_focused()
    await reach(page, page.get_by_role("link", name="Runs", exact=True), key="Shift+Tab")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    await expect(page.locator("main")).to_be_focused()
    await reach(page, page.get_by_role("link", name="?", exact=True))
    await page.keyboard.press("Enter")
    await reach(page, page.get_by_role("button", name="Edit arguments"))
    await page.keyboard.press("Enter")
    await reach(page, page.get_by_role("button", name="Approve"))
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("button", name="Approve")).to_have_count(0)
    await reach(page, page.get_by_label("Answer"))
    await page.keyboard.type("the red one")
    await reach(page, page.get_by_role("button", name="Send"))
    await page.keyboard.press("Enter")
    await expect(page.locator(".head").get_by_text("completed")).to_be_visible()
    await reach(page, page.get_by_role("slider"))
    await page.keyboard.press("Home")
    await expect(page.locator(".head").get_by_text("queued")).to_be_visible()
    await reach(page, page.get_by_role("button", name="Show the end"))
    await page.keyboard.press("Enter")
    await reach(page, page.get_by_role("tab", name="Timeline"))
    for name in ("Graph", "What flowed", "Events"):
        await page.keyboard.press("ArrowRight")
        await expect(page.get_by_role("tab", name=name)).to_be_focused()
    await reach(page, page.get_by_label("Events", exact=True))
    await reach(page, page.get_by_role("button", name="run.queued"))
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="1 run.queued")).to_be_visible()
    assert "the red one" in str(console.model.requests[-1]["messages"])


async def test_dialogs_and_conversations_work_by_keyboard(console: Console) -> None:
    console.model.script(calls(("calculator", {"expression": "9+9"})), text("It is 18."))
    await console.define(CALCULATOR)
    page = await console.open()
    await reach(page, page.get_by_role("button", name="Key ✓"))
    await page.keyboard.press("Enter")
    await expect(page.get_by_label("Key", exact=True)).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_have_count(0)
    await expect(page.get_by_role("button", name="Key ✓")).to_be_focused()
    await reach(page, page.get_by_role("link", name="Chat", exact=True), key="Shift+Tab")
    await page.keyboard.press("Enter")
    await reach(page, page.get_by_label("Agent"))
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("Say something.")).to_be_visible()
    await reach(page, page.get_by_label("Message"))
    await page.keyboard.type("What is 9+9?")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("button", name="Approve")).to_be_visible()
    await reach(page, page.get_by_role("button", name="Approve"), key="Shift+Tab")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("It is 18.")).to_be_visible()
    await expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    await reach(page, page.get_by_label("Message"))


async def reach(page: Page, wanted: Locator, *, key: str = "Tab") -> None:
    """Press a key until the element has the focus."""
    await expect(wanted).to_be_attached()
    for _ in range(MOST_KEYS):
        if await wanted.evaluate("(it) => it === document.activeElement"):
            return
        await page.keyboard.press(key)
    raise AssertionError(f"{key} does not lead to {wanted}")
