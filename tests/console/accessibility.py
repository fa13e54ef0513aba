"""The judge of pages: axe-core, as a browser runs it."""

import os
from pathlib import Path
from typing import Any

from playwright.async_api import Page

AXE = Path(__file__).parents[1] / "contract/node/node_modules/axe-core/axe.min.js"


def is_installed() -> bool:
    """Return true if axe-core is there; with ``JUDGES=required`` it must be."""
    assert AXE.exists() or os.environ.get("JUDGES") != "required"
    return AXE.exists()


async def violations(page: Page) -> list[Any]:
    """Return what axe-core finds wrong on a page; nothing if it is not installed."""
    if not is_installed():
        return []
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(AXE.read_text())
    found: list[Any] = await page.evaluate(
        "async () => (await axe.run()).violations.map((each) => [each.id, each.nodes[0].html])"
    )
    return found
