"""A large run: the page holds only what can be seen of it."""

from typing import Any

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


async def test_a_thousand_tasks_have_one_picture_of_their_progress(console: Console) -> None:
    page = console.page
    await benchmark.watched(page, console.address)
    frames = [*benchmark.events(1000, pieces=0)]
    failed = next(each for each in frames if each["type"] == "subagent.completed")
    failed["type"] = "subagent.failed"
    failed["data"] |= {"error": {"code": "model_unavailable", "message": "HTTP 503"}}
    # Twelve of the waves of 50 tasks, and 50 tasks that are dispatched, 20 of which have begun.
    first = 3 + 12 * 50 * benchmark.EVENTS_OF_TASK + 50 + 20
    await _feed(page, frames[:first])
    bar = page.get_by_role("progressbar", name="Dispatched tasks")
    await expect(bar).to_have_attribute("aria-valuenow", "600")
    await expect(bar).to_have_attribute("aria-valuemax", "650")
    text = "599 done · 1 failed · 20 running · 30 waiting"
    await expect(bar).to_have_attribute("aria-valuetext", f"600 of 650 are over: {text}")
    shown = page.locator(".progress")
    await expect(shown).to_contain_text(f"600 of 650 tasks are over · {text} · about ")
    await _feed(page, frames[first:])
    await expect(shown).to_contain_text("1,000 of 1,000 tasks are over · 999 done · 1 failed")
    await expect(bar).to_have_attribute("aria-valuenow", "1000")
    assert await _elements(page) < MOST_ELEMENTS


async def _feed(page: Page, frames: list[dict[str, Any]]) -> None:
    await page.evaluate("frames => feed(frames.map((each) => JSON.stringify(each)))", frames)


async def _elements(page: Page) -> int:
    return int(await page.evaluate("document.querySelectorAll('*').length"))
