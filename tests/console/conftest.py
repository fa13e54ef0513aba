"""A real browser on a real server: Chromium, driven by Playwright.

Without Chromium the tests are skipped, unless `JUDGES=required`.
"""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

import pytest
from playwright.async_api import BrowserContext, Page, async_playwright, expect

from tests.fake_model import FakeModel
from tests.flows.conftest import guest, guest_model, shared, shared_model, shared_url
from tests.judges import needed
from tests.service import Running

__all__ = ["guest", "guest_model", "shared", "shared_model", "shared_url"]

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
expect.set_options(timeout=20_000)
"""Milliseconds; the default of 5,000 is too short on a busy machine."""

_OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@pytest.fixture(scope="package")
async def profile() -> AsyncIterator[BrowserContext]:
    """A browser's profile, kept for all tests of this process.

    The first page of a profile takes 1.5 s of a core, and the others 0.3 s while it stays open.
    """
    needed(CHROMIUM, "there is no Chromium: install Debian's package chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=[*_OPTIONS])
        profile = await browser.new_context(viewport={"width": 1280, "height": 900})
        profile.set_default_timeout(20_000)
        await profile.new_page()
        yield profile
        await browser.close()


@dataclass(frozen=True, slots=True)
class Console:
    """A page of the console of one tenant.

    Attributes:
        problems: what the page reported: errors of scripts, and of the console.
        provoked: parts of the texts of problems that the test makes itself.
    """

    page: Page
    server: Running
    model: FakeModel
    problems: list[str] = field(default_factory=list)
    provoked: set[str] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.port}/console/"

    async def open(self, path: str = "") -> Page:
        """Show a page, such as ``runs/ID``."""
        await self.page.goto(f"{self.address}#/{path}")
        return self.page

    async def define(self, *tools: Any) -> None:
        """Make the agent ``clerk``."""
        agent = {"name": "clerk", "system_message": "You help.", "tools": tools}
        (await self.server.client.post("/v1/agents", json=agent)).raise_for_status()

    async def run(self, *tools: Any) -> str:
        """Make the agent ``clerk``, start a run of it, and return the run's id."""
        await self.define(*tools)
        wanted = {"agent": "clerk", "input": "?"}
        run = await self.server.client.post("/v1/runs", json=wanted)
        assert run.status_code == 202, run.text
        return str(run.json()["id"])


@pytest.fixture
async def console(
    profile: BrowserContext, guest: Running, guest_model: FakeModel
) -> AsyncIterator[Console]:
    """The console with the tenant's key; at the end it must have reported no problem."""
    key = guest.headers["Authorization"].removeprefix("Bearer ")
    async with window(profile, key) as (page, problems):
        console = Console(page, guest, guest_model, problems)
        yield console
    assert [each for each in problems if not any(part in each for part in console.provoked)] == []


@asynccontextmanager
async def window(profile: BrowserContext, key: str = "") -> AsyncIterator[tuple[Page, list[str]]]:
    """Open an empty page that keeps the key; yield it and what it reports.

    At the end, close the pages that were opened meanwhile, and forget what they kept.
    """
    blank, *_ = profile.pages
    before = set(profile.pages)
    problems: list[str] = []
    page = await profile.new_page()
    if key:
        await page.add_init_script(f"localStorage.setItem('bottega.key', '{key}')")
    heed(page, problems)
    try:
        yield page, problems
    finally:
        for each in set(profile.pages) - before:
            await _forget(each, blank)


_HELD: WeakSet[Page] = WeakSet()


async def hold_clock(page: Page) -> None:
    """Let a test move the page's clock; :func:`window` sets it right again for the next pages.

    The clock is one of the whole profile, for good.
    """
    await page.clock.install()
    _HELD.add(page)


async def _forget(page: Page, blank: Page) -> None:
    """Close a page; what it kept is gone for the next one of its server."""
    if page in _HELD:
        await page.clock.set_system_time(datetime.now(UTC))
        await page.clock.resume()
    where = urlsplit(page.url)
    await page.close()
    session = await blank.context.new_cdp_session(blank)
    kept = {"origin": f"{where.scheme}://{where.netloc}", "storageTypes": "all"}
    await session.send("Storage.clearDataForOrigin", kept)
    await session.detach()


def heed(page: Page, problems: list[str]) -> None:
    """Collect errors of a page's scripts and of its console."""
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda said: problems.append(said.text) if said.type == "error" else None,
    )
