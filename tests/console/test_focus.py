"""Focus after a button has acted, which people see or hear."""

import pytest
from playwright.async_api import Page, expect

from tests.console.conftest import Console
from tests.console.held import hold


async def filled(console: Console) -> Page:
    """Open the schedules, and fill the form of a new one."""
    page = await console.open("operations/schedules")
    await page.get_by_label("Name").fill("mornings")
    await page.get_by_label("Cron").fill("0 8 * * *")
    await page.get_by_label("Agent").fill("clerk")
    await page.get_by_label("Question").fill("?")
    return page


async def test_a_button_at_work_keeps_the_focus_and_acts_once(console: Console) -> None:
    await console.define()
    page = await filled(console)
    held = await hold(page, "**/v1/schedules", "POST")
    make = page.get_by_role("button", name="Create")
    await make.press("Enter")
    await expect(make).to_be_disabled()
    await expect(make).to_be_focused()
    await make.press("Enter")
    await page.get_by_label("Agent").press("Enter")
    await make.focus()
    await held.let_go()
    await expect(make).to_be_enabled()
    await expect(make).to_be_focused()
    assert len(held.requests) == 1
    pause = page.get_by_role("row").filter(has_text="mornings").get_by_role("button", name="Pause")
    changes = await hold(page, "**/v1/schedules/mornings", "PATCH")
    await pause.press("Enter")
    await expect(pause).to_be_focused()
    await pause.press("Enter")
    await changes.let_go()
    await expect(page.get_by_role("button", name="Go on")).to_be_focused()
    assert len(changes.requests) == 1


async def test_a_question_has_the_focus_while_it_is_asked(console: Console) -> None:
    await console.define()
    page = await console.open("agents/clerk")
    delete = page.get_by_role("button", name="Delete")
    await delete.press("Enter")
    asks = page.get_by_role("group", name="Runs under way keep it.")
    await expect(asks).to_be_focused()
    await page.keyboard.press("Tab")
    await expect(asks.get_by_role("button", name="Delete")).to_be_focused()
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(asks).to_be_hidden()
    await expect(delete).to_be_focused()


@pytest.mark.deep
async def test_what_was_made_is_said_and_the_form_is_empty_for_the_next(console: Console) -> None:
    await console.define()
    page = await filled(console)
    name = page.get_by_label("Name")
    held = await hold(page, "**/v1/schedules", "POST")
    await page.get_by_role("button", name="Create").click()
    await held.let_go()
    said = page.get_by_role("status").filter(has_text="mornings")
    await expect(said).to_be_visible()
    for field in ("Name", "Cron", "Agent", "Question"):
        await expect(page.get_by_label(field)).to_have_value("")
    await name.fill("evenings")
    await expect(said).to_be_hidden()


@pytest.mark.deep
async def test_what_is_typed_while_a_form_is_sent_stays(console: Console) -> None:
    await console.define()
    page = await filled(console)
    held = await hold(page, "**/v1/schedules", "POST")
    await page.get_by_role("button", name="Create").click()
    await page.get_by_label("Name").fill("evenings")
    await held.let_go()
    await expect(page.get_by_role("row").filter(has_text="mornings")).to_be_visible()
    await expect(page.get_by_label("Name")).to_have_value("evenings")


_IS_HIDDEN = """() => {
    const at = document.activeElement;
    if (!at.closest("main form")) return null;
    const { left, top, height } = at.getBoundingClientRect();
    const shown = (part) => document.elementFromPoint(left + 5, top + part * height);
    const found = [0.15, 0.5, 0.85].map(shown);
    return found.some((each) => each && (at.contains(each) || each.contains(at))) ? null : at.id;
}"""


async def test_no_bar_covers_what_has_the_focus(console: Console) -> None:
    await console.define()
    page = console.page
    await page.set_viewport_size({"width": 390, "height": 640})
    await console.open("agents/clerk")
    await page.get_by_label("Description").focus()
    covered = []
    for key in ("Tab", "Shift+Tab"):
        for _ in range(40):
            await page.keyboard.press(key)
            covered.append(await page.evaluate(_IS_HIDDEN))
    assert [each for each in covered if each] == []
