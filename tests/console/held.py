"""Requests of a page that a test changes: they wait until it lets them go, or ask for less."""

import asyncio
import re
from dataclasses import dataclass, field

from playwright.async_api import Page, Request, Route

_DRAWN = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"


async def drawn(page: Page) -> None:
    """Wait until the page has drawn what it knows, and what follows from that."""
    for _ in range(3):
        await page.evaluate(_DRAWN)


@dataclass(slots=True)
class HeldRequests:
    """Requests in the order in which the page sent them."""

    page: Page
    requests: list[Request] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def let_go(self) -> None:
        """Let all go on, those to come too; return when the page has drawn the answers."""
        self.gate.set()
        for request in self.requests:
            response = await request.response()
            assert response is not None
            await response.finished()
        await drawn(self.page)


async def hold(page: Page, pattern: str, method: str = "GET") -> HeldRequests:
    """Hold a page's requests to addresses of this pattern."""
    held = HeldRequests(page)

    async def wait(route: Route) -> None:
        if route.request.method == method:
            held.requests.append(route.request)
            await held.gate.wait()
        await route.fallback()

    await page.route(pattern, wait)
    return held


async def shorten(page: Page, rows: int) -> None:
    """Let a page's lists have so few rows a page."""

    async def fewer(route: Route) -> None:
        await route.continue_(url=re.sub(r"\blimit=\d+", f"limit={rows}", route.request.url))

    await page.route("**/v1/**limit=*", fewer)
