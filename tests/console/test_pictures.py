"""Pictures of the console, and Home's first minute. `UPDATE_PICTURES=1` writes docs/pictures."""

import os
from pathlib import Path

from playwright.async_api import Page, expect

from bottega.cli.scenarios import SOFTWARE
from tests.console.conftest import Console

PICTURES = Path(__file__).parents[2] / "docs/pictures"
MOST_BYTES = 150_000


async def test_an_empty_home_says_what_to_do(console: Console) -> None:
    page = await console.open()
    await expect(page.get_by_text("Nothing has run yet.")).to_be_visible()
    await expect(
        page.get_by_text(f"curl -s http://127.0.0.1:{console.server.port}")
    ).to_be_visible()
    await expect(page.get_by_role("button", name="Copy the commands")).to_be_visible()
    await expect(page.get_by_text("bottega demo --keep", exact=True)).to_be_visible()
    await expect(page.get_by_role("button", name="Start the demo's team")).to_have_count(0)


async def test_home_starts_the_team_of_the_demo_and_pictures_it(console: Console) -> None:
    client = console.server.client
    for agent in SOFTWARE.agents:
        (await client.post("/v1/agents", json=agent)).raise_for_status()
    (await client.post("/v1/graphs", json=SOFTWARE.graph)).raise_for_status()
    page = await console.open()
    await page.get_by_role("button", name="Start the demo's team").click()
    await expect(page.locator(".head").get_by_text("completed")).to_be_visible()
    await expect(page.locator(".task-row .name").get_by_text("implementer")).to_be_visible()
    await _picture(page, "timeline", 1280, 720, "[role=tablist]")
    await page.get_by_role("tab", name="Graph").click()
    await expect(page.locator(".graph .canvas svg").first).to_be_visible()
    await expect(page.get_by_text("Loading the graph")).to_have_count(0)
    await _picture(page, "run", 1280, 720, "[role=tablist]")
    await page.emulate_media(color_scheme="dark")
    await _picture(page, "phone", 390, 760)


async def _picture(page: Page, name: str, width: int, height: int, begins_at: str = "body") -> None:
    """Take a picture, which must be there in git already, of the page from an element on."""
    await page.set_viewport_size({"width": width, "height": height})
    await page.locator(begins_at).first.evaluate("each => each.scrollIntoView()")
    await page.evaluate("new Promise(requestAnimationFrame)")
    taken = await page.screenshot()
    assert len(taken) < MOST_BYTES
    kept = PICTURES / f"{name}.png"
    if os.environ.get("UPDATE_PICTURES"):
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(taken)
    assert kept.stat().st_size < MOST_BYTES
