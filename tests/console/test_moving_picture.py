"""The README's moving picture: a run whose sub-agents are watched live, then played back.

`UPDATE_PICTURES=1` films it; else the same is done without a camera.
"""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from playwright.async_api import BrowserContext, Locator, Page, ViewportSize, expect

from bottega.llm.demo_model.rules import Answer, decide, read
from bottega.settings import Settings
from tests.console.conftest import window
from tests.fake_model import FakeModel, text
from tests.flows.conftest import asking
from tests.flows.test_templates import EXAMPLES
from tests.service import Running, running
from tests.waiting import until

ROOT = Path(__file__).parents[2]
FILM = ROOT / "docs/pictures/live.gif"
MOST_BYTES = 1_000_000
SIZE: ViewportSize = {"width": 800, "height": 740}
LONGEST_MS, LAST_MS = 600, 3_000
QUESTION = "Research the market for cargo bicycles in 6 parts."
FOUND = {
    "market-researcher": "About two million cargo bicycles are on the roads of Europe, most of "
    "them in cities where half of all trips are shorter than five kilometres. I am fairly sure.",
    "market": "Sales grew by a fifth a year until 2023, and by a twentieth since. Families buy "
    "two of three. Firms buy the rest, and theirs is the part that still grows fast.",
    "technology": "Mid motors and belts are the standard. New are brakes that lock all wheels, "
    "and batteries that two makers share.",
    "risks": "Subsidies end in several countries. Some makers had to call bicycles back, and one "
    "of the largest went bankrupt.",
    "costs": "A bicycle costs 5,000 euros, a tenth of a van. Per parcel in a city centre that is "
    "half of the cost of a van, if a depot is within three kilometres.",
    "regulation": "A standard for cargo bicycles is in force. Loads above 250 kg need another "
    "class of vehicle in most countries.",
}
SUM = (
    "Families made the market for cargo bicycles, and firms make it grow: in cities a parcel costs "
    "half as much as by van. Uncertain are subsidies, and makers that may not last."
)


def _as_researchers(request: dict[str, Any]) -> Answer:
    """Answer the tasks with what was found, and lead as the demo model does."""
    asked, led = read(request), decide(request)
    if asked.is_task:
        return text(FOUND[asked.part])
    return led if led.calls else text(SUM)


class Camera:
    """Takes a frame of a page whenever it is asked to; without film it only looks."""

    def __init__(self, page: Page, *, has_film: bool) -> None:
        self.page, self.has_film = page, has_film
        self.frames: list[tuple[float, bytes]] = []

    async def film_until(self, there: Locator) -> None:
        """Take frames until something is there."""

        async def frame() -> bool:
            await self.frame()
            return await there.count() > 0

        await until(frame, within=60)

    async def frame(self) -> None:
        if self.has_film:
            top = self.page.locator(".playback, .run").first
            await top.evaluate("each => each.scrollIntoView()")
            self.frames.append((time.monotonic(), await self.page.screenshot()))

    def develop(self) -> bytes:
        """Return the frames as a GIF, each shown as long as it lasted."""
        times, shots = zip(*self.frames, strict=True)
        gaps = [
            round((b - a) * 1000) for a, b in zip(times, (*times[1:], times[-1] + 9), strict=True)
        ]
        images = [Image.open(BytesIO(shot)).convert("RGB") for shot in shots]
        palette = images[len(images) // 2].quantize(method=Image.Quantize.MAXCOVERAGE)
        first, *others = (
            each.quantize(palette=palette, dither=Image.Dither.NONE) for each in images
        )
        shown = [min(LONGEST_MS, gap) for gap in gaps[:-1]] + [LAST_MS]
        made = BytesIO()
        first.save(
            made, "GIF", save_all=True, append_images=others, duration=shown, loop=0, optimize=True
        )
        return made.getvalue()


@asynccontextmanager
async def _researching(settings: Settings, url: str) -> AsyncIterator[tuple[Running, str]]:
    """Serve the swarm of examples/research, and start a run of it; yield the run's id."""
    team = yaml.safe_load((EXAMPLES / "research/team.yaml").read_text())
    async with (
        FakeModel(_as_researchers, token_delay_s=0.1) as model,
        running(asking(model, settings), url, worker=True) as bottega,
    ):
        (await bottega.client.post("/v1/apply", json=team)).raise_for_status()
        wanted = {"agent": "research-lead", "input": QUESTION}
        begun = await bottega.client.post("/v1/runs", json=wanted)
        yield bottega, begun.json()["id"]


@pytest.mark.deep
async def test_sub_agents_are_watched_live_and_played_back(
    profile: BrowserContext, settings: Settings, database_url: str
) -> None:
    is_filmed = bool(os.environ.get("UPDATE_PICTURES"))
    async with (
        _researching(settings, database_url) as (bottega, run),
        window(profile) as (page, problems),
    ):
        await page.set_viewport_size(SIZE)
        await page.goto(f"http://127.0.0.1:{bottega.port}/console/#/runs/{run}")
        await page.locator("body").evaluate("each => each.style.paddingBottom = '100vh'")
        camera = Camera(page, has_film=is_filmed)
        tasks, status = (
            page.locator(".task-row[role=listitem]"),
            page.locator(".head [role=status]"),
        )
        await camera.film_until(tasks.filter(has_text="market").filter(has_text="streaming"))
        await tasks.filter(has_text="costs").get_by_role("button").click()
        await camera.film_until(page.get_by_role("button", name="Play back"))
        await tasks.first.get_by_role("button").click()
        await expect(page.get_by_text("Families made the market").last).to_be_visible()
        await camera.frame()
        await page.get_by_label("Speed").select_option("4")
        await page.get_by_role("button", name="Play back").click()
        await expect(status).to_have_text("Playback")
        await camera.film_until(page.locator(".head").get_by_text("completed"))
        await expect(tasks).to_have_count(7)
        await camera.frame()
        assert problems == []
    if is_filmed:
        FILM.write_bytes(camera.develop())


def test_the_readme_shows_it() -> None:
    assert FILM.stat().st_size < MOST_BYTES
    with Image.open(FILM) as film:
        assert (film.format, film.size) == ("GIF", (SIZE["width"], SIZE["height"]))
        assert getattr(film, "n_frames", 1) > 20
    assert str(FILM.relative_to(ROOT)) in (ROOT / "README.md").read_text()
