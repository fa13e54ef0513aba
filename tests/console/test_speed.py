"""A large run: the page holds only what can be seen of it."""

from playwright.async_api import Page, expect

from benchmarks import console as benchmark
from tests.console.conftest import Console

TASKS = 300
MOST_ELEMENTS = 1200


async def test_a_large_run_has_few_elements_in_its_page(console: Console) -> None:
    page = console.page
    await benchmark.watched(page, console.address, "events")
    seen = await benchmark.live(page, TASKS, 0.5)
    assert seen.fps > 0
    await expect(page.locator(".figure", has_text="Tasks")).to_contain_text(f"{TASKS + 1}")
    await expect(page.get_by_role("button", name="subagent.completed").last).to_be_visible()
    for name, label in (("Timeline", "Tasks"), ("Events", "Events"), ("What flowed",) * 2):
        await page.get_by_role("tab", name=name).click()
        rows = page.get_by_label(label, exact=True).get_by_role("listitem")
        await expect(rows.first).to_be_attached()
        assert await _elements(page) < MOST_ELEMENTS
        assert (await benchmark.scrolled(page, label, 0.3)).fps > 0
        assert await _elements(page) < MOST_ELEMENTS
        await rows.first.get_by_role("button").click()
    await expect(page.get_by_text("known known").last).to_be_visible()
    await page.get_by_role("tab", name="Graph").click()
    await expect(page.get_by_role("button", name="agent-7")).to_be_visible()
    assert await _elements(page) < MOST_ELEMENTS


async def _elements(page: Page) -> int:
    return int(await page.evaluate("document.querySelectorAll('*').length"))
