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
    """Return what axe-core finds wrong in light and in dark; nothing if it is not installed.

    In dark colours only the contrast is checked, since nothing else depends on them.
    """
    if not is_installed():
        return []
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(AXE.read_text())
    found: list[Any] = await page.evaluate(_RUN, {})
    await page.emulate_media(color_scheme="dark")
    found += await page.evaluate(_RUN, {"runOnly": ["color-contrast"]})
    await page.emulate_media(color_scheme="light")
    return found


_RUN = """async (options) =>
    (await axe.run(options)).violations.map((each) => [each.id, each.nodes[0].html])"""
