"""Pictures of the console, and Home's first minute.

`UPDATE_PICTURES=1` writes those of docs/pictures and of the folders in examples/.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from bottega.cli.scenarios import SOFTWARE
from bottega.llm.demo_model.rules import Answer, read
from tests.console.conftest import Console
from tests.fake_model import calls, text
from tests.flows.test_templates import EXAMPLES, template

PICTURES = Path(__file__).parents[2] / "docs/pictures"
MOST_BYTES = 150_000


async def test_an_empty_home_says_what_to_do(console: Console) -> None:
    page = await console.open()
    await expect(page.get_by_text("Nothing has run yet.")).to_be_visible()
    await expect(page.get_by_role("link", name="Write one")).to_be_visible()
    await expect(page.get_by_role("link", name="Ask an agent")).to_be_visible()
    await expect(page.get_by_role("button", name="Start the demo's team")).to_have_count(0)


@pytest.mark.deep
async def test_home_starts_the_team_of_the_demo_and_pictures_it(console: Console) -> None:
    client = console.server.client
    for agent in SOFTWARE.agents:
        (await client.post("/v1/agents", json=agent)).raise_for_status()
    (await client.post("/v1/graphs", json=SOFTWARE.graph)).raise_for_status()
    page = await console.open()
    await page.get_by_role("button", name="Start the demo's team").click()
    await expect(page.locator(".head").get_by_text("completed")).to_be_visible()
    await expect(page.locator(".task-row .name").get_by_text("implementer")).to_be_visible()
    await _picture(page, PICTURES / "timeline.png", 1280, 720, "[role=tablist]")
    await page.get_by_role("tab", name="Graph").click()
    await expect(page.locator(".graph .canvas svg").first).to_be_visible()
    await expect(page.get_by_text("Loading the graph")).to_have_count(0)
    await _picture(page, PICTURES / "run.png", 1280, 720, "[role=tablist]")
    await page.emulate_media(color_scheme="dark")
    await _picture(page, PICTURES / "phone.png", 390, 760)


async def test_the_support_chat_is_pictured_while_it_waits(console: Console) -> None:
    console.model.script(calls(("shop-cashier", {"query": "Refund 240 euros: a broken kettle."})))
    await _ask(console, "support")
    page = await console.open("approvals")
    await expect(page.get_by_role("button", name="Approve").first).to_be_visible()
    await _picture(page, EXAMPLES / "support/picture.png", 1280, 530)


async def test_the_letters_are_pictured(console: Console) -> None:
    console.model.decide = _as_a_shop
    batch = await _ask(console, "letters")
    page = await console.open(f"batches/{batch}")
    await expect(page.get_by_role("region", name="Runs").get_by_text("completed")).to_have_count(3)
    await _picture(page, EXAMPLES / "letters/picture.png", 1280, 440)


async def test_the_research_is_pictured(console: Console) -> None:
    run = await _ask(console, "research")
    page = await console.open(f"runs/{run}")
    await expect(page.locator(".head").get_by_text("completed")).to_be_visible()
    await _picture(page, EXAMPLES / "research/picture.png", 1280, 720, "[role=tablist]")


async def test_the_evaluator_is_pictured(console: Console) -> None:
    console.model.decide = _as_an_author
    run = await _ask(console, "evaluator")
    page = await console.open(f"runs/{run}")
    await expect(page.locator(".head").get_by_text("completed")).to_be_visible()
    drafts = page.locator(".task-row").filter(has_text="draft-writer")
    await drafts.last.get_by_role("button").click()
    await expect(page.get_by_text("Sunlight is a mix").last).to_be_visible()
    await _picture(page, EXAMPLES / "evaluator/picture.png", 1280, 720, "[role=tablist]")


async def test_the_coding_helper_is_pictured(console: Console) -> None:
    console.model.script(text(_EXPLANATION))
    run = await _ask(console, "coding")
    page = await console.open(f"runs/{run}")
    await expect(page.locator(".head").get_by_text("completed")).to_be_visible()
    await _picture(page, EXAMPLES / "coding/picture.png", 1280, 720)


_EXPLANATION = """The outer application strips the path and hands the rest to the inner one:

```python
app = Starlette(routes=[Mount("/docs", app=pages)])
```

A request for `/docs/start` reaches `pages` as `/start`; its `root_path` is `/docs`."""
_DRAFTS = (
    "Light from the sun has all colours. Air scatters blue most of all. So the sky is blue.",
    "Sunlight is a mix of all colours, as in a rainbow. Air throws blue around more than the rest.",
)


def _as_a_shop(request: dict[str, Any]) -> Answer:
    line = read(request).asked
    return text(f"Dear {line.split()[0]},\n\nthank you for your patience. {line}\n\nYour shop")


def _as_an_author(request: dict[str, Any]) -> Answer:
    """Write a draft, have it mended once, and be content."""
    is_second = _DRAFTS[0][:30] in str(request["messages"])
    if not read(request).system.startswith("You review"):
        return text(_DRAFTS["Name the rainbow" in str(request["messages"])])
    return text("Name the rainbow: a child knows it." if is_second else "DONE")


async def _ask(console: Console, name: str) -> str:
    """Store an example and ask its question, as its template does; return the id of what began."""
    client, made = console.server.client, template(name)
    (await client.post("/v1/apply", json=made["definitions"])).raise_for_status()
    if made["batch"]:
        items = [{"input": line} for line in made["ask"].split("\n")]
        begun = await client.post("/v1/batches", json={**made["run"], "items": items})
    else:
        begun = await client.post("/v1/runs", json={**made["run"], "input": made["ask"]})
    begun.raise_for_status()
    return str(begun.json()["id"])


async def _picture(
    page: Page, kept: Path, width: int, height: int, begins_at: str = "body"
) -> None:
    """Take a picture, which must be there in git already, of the page from an element on."""
    await page.set_viewport_size({"width": width, "height": height})
    await page.locator(begins_at).first.evaluate("each => each.scrollIntoView()")
    await page.evaluate("new Promise(requestAnimationFrame)")
    taken = await page.screenshot()
    assert len(taken) < MOST_BYTES
    _keep(kept, taken)


def _keep(file: Path, taken: bytes) -> None:
    if os.environ.get("UPDATE_PICTURES"):
        file.write_bytes(taken)
    assert file.stat().st_size < MOST_BYTES
