"""Home asks for little while nothing changes, and shows at once what does."""

import time

from playwright.async_api import BrowserContext, Page, expect

from tests.console.conftest import Console, hold_clock, window
from tests.fake_model import http_error, text


async def test_home_at_rest_asks_little_and_sees_what_changes(console: Console) -> None:
    console.model.script(text("Yes."), http_error(400))
    await console.run()
    page = console.page
    await hold_clock(page)
    await console.open()
    await expect(page.get_by_role("cell", name="completed")).to_be_visible()
    await expect(page.get_by_text("No run has failed.")).to_be_visible()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for _ in range(6):
        before = len(asked)
        async with page.expect_response("**/v1/runs?limit=6&order=desc"):
            for _ in range(9):
                await page.clock.run_for(1000)
        assert len(asked) - before <= 4
    body = {"agent": "clerk", "input": "?"}
    (await console.server.client.post("/v1/runs?wait=30", json=body)).raise_for_status()
    await page.clock.run_for(6000)
    await expect(page.get_by_text("model answered HTTP 400").first).to_be_visible()


async def test_the_clock_that_a_test_moves_is_right_again_for_the_next(
    profile: BrowserContext,
) -> None:
    async with window(profile) as (page, _):
        await hold_clock(page)
        await page.clock.run_for(600_000)
        assert await ahead_ms(page) > 500_000
    async with window(profile) as (page, _):
        assert abs(await ahead_ms(page)) < 60_000


async def ahead_ms(page: Page) -> float:
    """Return how many milliseconds the page's clock is ahead."""
    await page.goto("data:text/html,x")
    return float(await page.evaluate("Date.now()")) - 1000 * time.time()
