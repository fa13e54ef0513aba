"""A real browser on a real server: Chromium, driven by Playwright.

Without Chromium the tests are skipped, unless `JUDGES=required`.
"""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright

from tests.fake_model import FakeModel
from tests.flows.conftest import guest, guest_model, shared, shared_model, shared_url
from tests.service import Running

__all__ = ["guest", "guest_model", "shared", "shared_model", "shared_url"]

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        if os.environ.get("JUDGES") == "required":
            pytest.fail("there is no Chromium: install Debian's package chromium")
        pytest.skip("there is no Chromium: install Debian's package chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=[*_OPTIONS])
        yield browser
        await browser.close()


@dataclass(frozen=True, slots=True)
class Console:
    """A page of the console of one tenant.

    Attributes:
        problems: what the page reported: errors of scripts, and of the console.
    """

    page: Page
    server: Running
    model: FakeModel
    problems: list[str] = field(default_factory=list)

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
    browser: Browser, guest: Running, guest_model: FakeModel
) -> AsyncIterator[Console]:
    """The console with the tenant's key; at the end it must have reported no problem."""
    key = guest.headers["Authorization"].removeprefix("Bearer ")
    async with window(browser, key) as (page, problems):
        yield Console(page, guest, guest_model, problems)
        await page.context.close()
        assert not problems


@asynccontextmanager
async def window(browser: Browser, key: str = "") -> AsyncIterator[tuple[Page, list[str]]]:
    """Open an empty page in a browser that keeps the key; yield it and what it reports."""
    context = await browser.new_context(viewport={"width": 1280, "height": 900})
    if key:
        await context.add_init_script(f"localStorage.setItem('bottega.key', '{key}')")
    context.set_default_timeout(20_000)
    problems: list[str] = []
    page = await context.new_page()
    heed(page, problems)
    yield page, problems
    await context.close()


def heed(page: Page, problems: list[str]) -> None:
    """Collect errors of a page's scripts and of its console."""
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda said: problems.append(said.text) if said.type == "error" else None,
    )
