"""Long names, narrow screens, and texts that are written from right to left."""

import pytest
from playwright.async_api import Locator, Page, expect

from tests.console.conftest import Console
from tests.console.test_compare import ended
from tests.fake_model import text
from tests.waiting import until

LONG = "a" * 64
WORD = "x" * 300
_TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_FIRST_AND_LAST = """(element) => {
    const text = element.firstChild;
    const left = (from) => {
        const range = document.createRange();
        range.setStart(text, from);
        range.setEnd(text, from + 1);
        return range.getBoundingClientRect().left;
    };
    return [left(0), left(text.length - 1)];
}"""


async def _long(console: Console) -> str:
    """Return a finished run whose names and texts are as long as can be, without a space."""
    console.model.script(text(WORD))
    agent = {"name": LONG, "description": WORD, "system_message": WORD}
    (await console.server.client.post("/v1/agents", json=agent)).raise_for_status()
    wanted = {"agent": LONG, "input": WORD, "session_id": "s" * 128, "user": "u" * 128}
    answer = await console.server.client.post("/v1/runs", json=wanted)
    assert answer.status_code == 202, answer.text
    return await ended(console, answer.json()["id"])


async def _fits(page: Page) -> None:
    """Check that the page need not be moved sideways; a browser may need a moment for its width."""
    await until(lambda: page.evaluate(_TOO_WIDE), lambda extra: extra == 0, within=5)


@pytest.mark.parametrize("width", [390, 1280])
async def test_no_long_name_widens_a_page(console: Console, width: int) -> None:
    run_id = await _long(console)
    page = console.page
    await page.set_viewport_size({"width": width, "height": 800})
    heading = page.get_by_role("heading", level=1)
    for path in (f"runs/{run_id}", f"chat?session={'s' * 128}", f"agents/{LONG}"):
        await console.open(path)
        await expect(heading).to_have_text(LONG)
        await expect(page.get_by_text("Loading")).to_have_count(0)
        await _fits(page)
    await console.open(f"runs/{run_id}/compare?with={run_id}")
    await expect(page.get_by_role("heading", name=LONG)).to_be_visible()
    await _fits(page)
    await console.open("chat")
    await expect(page.get_by_role("combobox", name="Agent")).to_be_visible()
    await _fits(page)


async def test_a_long_name_does_not_push_the_status_of_its_run_away(console: Console) -> None:
    await _long(console)
    await console.page.set_viewport_size({"width": 1280, "height": 800})
    page = await console.open("runs")
    made = page.get_by_role("row").nth(1).get_by_role("time")
    await expect(made).to_be_in_viewport(ratio=1)


async def test_the_chosen_tab_is_in_sight_on_a_narrow_screen(console: Console) -> None:
    await console.page.set_viewport_size({"width": 390, "height": 800})
    page = await console.open("operations/audit")
    chosen = page.get_by_role("tab", name="Audit")
    await expect(chosen).to_be_in_viewport(ratio=1)
    await chosen.press("ArrowRight")
    await expect(page.get_by_role("tab", name="Scheduler")).to_be_focused()
    await expect(page.get_by_text("Runs at once")).to_be_visible()
    await expect(page.get_by_role("tab", name="Scheduler")).to_be_in_viewport(ratio=1)


async def _is_from_right_to_left(shown: Locator) -> bool:
    first, last = await shown.evaluate(_FIRST_AND_LAST)
    return bool(first > last)


async def test_a_text_begins_on_the_side_of_its_language(console: Console) -> None:
    said = "שלום!"
    console.model.script(text(said))
    await console.define()
    page = await console.open("chat?agent=clerk&session=hebrew")
    await page.get_by_label("Message").fill(said)
    direction = "(element) => getComputedStyle(element).unicodeBidi"
    assert await page.get_by_label("Message").evaluate(direction) == "plaintext"
    await page.keyboard.press("Enter")
    await expect(page.locator(".said.assistant time")).to_be_visible()
    for shown in (page.locator(".said.user .text"), page.locator(".said.assistant .text")):
        assert await _is_from_right_to_left(shown)


async def test_all_limits_have_a_name(console: Console) -> None:
    page = await console.open("operations/scheduler")
    rows = page.get_by_role("region", name="Limits").get_by_role("row")
    await expect(rows.first).to_be_visible()
    found = (await console.server.client.get("/v1/scheduler")).json()["quotas"]
    await expect(rows).to_have_count(1 + len(found))
    for number in range(1, 1 + len(found)):
        await expect(rows.nth(number).get_by_role("cell").first).not_to_be_empty()
    await expect(rows.filter(has_text="bytes")).to_have_count(1)


async def test_a_schedule_whose_question_is_not_listed_names_its_agent(console: Console) -> None:
    await console.define()
    wanted = {"name": "daily", "cron": "0 8 * * *", "run": {"agent": "clerk", "input": "?"}}
    (await console.server.client.post("/v1/schedules", json=wanted)).raise_for_status()
    page = await console.open("operations/schedules")
    row = page.get_by_role("row").filter(has_text="daily")
    await expect(row.get_by_role("cell").nth(2)).to_have_text("clerk")
