"""Roles in the console: each sees what it may do, and no page asks for more than that."""

import re
from dataclasses import dataclass

import pytest
from playwright.async_api import BrowserContext, Page, Response, expect

from bottega.tenants.keys import ROLES
from tests.console.conftest import Console, window
from tests.console.held import drawn
from tests.fake_model import calls, text
from tests.flows.test_interrupts import CALCULATOR
from tests.waiting import until

PAGES = {
    "viewer": (
        "Home",
        "Runs",
        "Batches",
        "Approvals",
        "Agents",
        "Graphs",
        "Tools",
        "MCP",
        "Memory",
        "Health",
        "Usage",
        "Operations",
        "Settings",
    ),
    "approver": ("Home", "Runs", "Batches", "Approvals", "Settings"),
}
ALL = (
    *("Home", "Runs", "Batches", "Approvals", "Ratings", "Chat", "Agents", "Graphs"),
    *("Tools", "MCP", "Memory", "Health", "Usage", "Operations", "Settings"),
)
PAGES |= dict.fromkeys(("runner", "builder", "admin"), ALL)
GATE = ("viewer", "approver")
BUTTONS = {
    # by the page's address; roles that see the button
    ("agents/clerk", "Delete"): ("builder", "admin"),
    ("agents/clerk", "Save"): ("builder", "admin"),
    ("graphs", "Create"): ("builder", "admin"),
    ("operations/secrets", "Save"): ("builder", "admin"),
    ("operations/providers", "Connect a model"): ("builder", "admin"),
    ("operations/webhooks", "Make the next one"): ("admin",),
    ("memory/reports", "Run it now"): ("admin",),
    ("runs/OVER", "Retry"): ("runner", "builder", "admin"),
    ("runs/OVER", "Change and run"): ("runner", "builder", "admin"),
    ("runs/WAITS", "Cancel run"): ("runner", "builder", "admin"),
    ("runs/WAITS", "Approve"): ("approver", "admin"),
    ("approvals", "Approve"): ("approver", "admin"),
}
BELOW = (
    *("runs/OVER", "runs/WAITS", "runs/OVER/compare", "agents/clerk", "graphs/pair", "chat"),
    *("memory/runs/OVER", "operations/keys", "operations/audit", "agents/+new"),
)


@dataclass(frozen=True, slots=True)
class Scene:
    """Ids of a run that is over and of one that waits for an approval."""

    over: str
    waits: str

    def path(self, named: str) -> str:
        return named.replace("OVER", self.over).replace("WAITS", self.waits)


async def scene_of(console: Console) -> Scene:
    call = calls(("calculator", {"expression": "9+9"}))
    console.model.script(text("done"))
    client = console.server.client
    over = await console.run(CALCULATOR)
    await until(lambda: status(console, over), lambda seen: seen == "completed")
    console.model.script(call)
    waits = (await client.post("/v1/runs", json={"agent": "clerk", "input": "?"})).json()["id"]
    await until(lambda: status(console, waits), lambda seen: seen == "waiting")
    await client.post("/v1/graphs", json={"name": "pair", "nodes": ["clerk"]})
    return Scene(over, waits)


async def status(console: Console, run_id: str) -> str:
    return str((await console.server.client.get(f"/v1/runs/{run_id}")).json()["status"])


@pytest.mark.deep
@pytest.mark.parametrize(
    "role", [pytest.param(role, marks=() if role in GATE else pytest.mark.deep) for role in ROLES]
)
async def test_a_role_sees_what_it_may_do_and_asks_for_nothing_else(
    console: Console, profile: BrowserContext, role: str
) -> None:
    scene = await scene_of(console)
    made = await console.server.client.post("/v1/keys", json={"name": role, "role": role})
    refused: list[str] = []

    def note(answer: Response) -> None:
        if answer.status == 403:
            refused.append(f"{answer.url} on {page.url}")

    async with window(profile, made.json()["key"]) as (page, _):
        page.on("response", note)
        await page.goto(f"{console.address}#/")
        links = page.get_by_role("navigation", name="Pages").get_by_role("link")
        await expect(page.get_by_role("banner")).to_contain_text(role)
        await expect(links.filter(has_text="Approvals")).to_have_text("Approvals 1")
        await expect(page).to_have_title("(1) Bottega")
        names = [re.sub(r" \d+$", "", each) for each in await links.all_inner_texts()]
        assert tuple(names) == PAGES[role]
        for number in range(await links.count()):
            await links.nth(number).click()
            await all_parts(page)
        for path in BELOW:
            await page.goto(f"{console.address}#/{scene.path(path)}")
            await all_parts(page)
        for (path, name), roles in BUTTONS.items():
            await page.goto(f"{console.address}#/{scene.path(path)}")
            await settled(page)
            button = page.locator("main").get_by_role("button", name=name, exact=True)
            await expect(button.first).to_be_visible(visible=role in roles)
    assert refused == []


async def all_parts(page: Page) -> None:
    """Show each tab of a page, also those within a tab."""
    await settled(page)
    tabs, number = page.locator("main [role=tab]:visible"), 0
    while number < await tabs.count():
        await tabs.nth(number).click()
        await settled(page)
        number += 1


async def settled(page: Page) -> None:
    """Wait until a page has read what it shows."""
    await drawn(page)
    await expect(page.get_by_text(re.compile("^Loading"))).to_have_count(0)
    await drawn(page)


async def test_a_page_that_one_may_not_see_asks_for_nothing(
    console: Console, profile: BrowserContext
) -> None:
    made = await console.server.client.post("/v1/keys", json={"name": "x", "role": "approver"})
    async with window(profile, made.json()["key"]) as (page, _):
        await page.goto(f"{console.address}#/agents")
        await expect(page.get_by_role("heading", name="You may not see this page")).to_be_visible()
        await page.get_by_role("link", name="Go to the first page").click()
        await expect(page.get_by_role("heading", name="Home")).to_be_visible()
