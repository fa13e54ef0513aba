"""A run's page at each event of the run, and another way from one of its nodes."""

import os

from playwright.async_api import expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.flows.test_dag import DIAMOND, named, says
from tests.team import define_graph


async def test_it_moves_along_the_log_and_repeats_from_a_node(console: Console) -> None:
    client = console.server.client
    await define_graph(client, "g", *DIAMOND)
    console.model.decide = says()
    wanted = {"mode": "dag", "graph": "g", "input": "Which colour?"}
    run = (await client.post("/v1/runs?wait=30", json=wanted)).json()
    log = (await client.get(f"/v1/runs/{run['id']}/events", params={"limit": 200})).json()["items"]
    published = next(each["seq"] for each in log if each["type"] == "memory.published")
    page = await console.open(f"runs/{run['id']}?tab=graph")
    slider = page.get_by_label("Position: event")
    await slider.focus()
    await slider.press("Home")
    agents = page.locator(".agents")
    await expect(agents.get_by_text("d: not called")).to_be_visible()
    now = page.locator(".playback .now")
    await expect(now).to_contain_text("run.queued")
    forward = page.get_by_role("button", name="Next event")
    for _ in range(published - 1):
        await forward.press("Enter")
    await expect(now).to_contain_text("memory.published")
    await expect(now).to_contain_text("a's answer")
    await agents.get_by_role("button", name="a: completed").click()
    await expect(page.get_by_role("heading", name="a published")).to_be_visible()
    at = (await client.get(f"/v1/runs/{run['id']}/graph?seq={published}")).json()
    assert [bool(node["published"]) for node in at["nodes"]] == [True, False, False, False]
    await page.get_by_role("button", name="Event before").press("Enter")
    await expect(page.get_by_role("heading", name="a published")).to_be_hidden()
    assert await violations(page) == []
    if folder := os.environ.get("SCREENSHOTS"):
        await page.screenshot(path=f"{folder}/playback.png", full_page=True)
    await page.get_by_role("button", name="Show the end").click()
    await agents.get_by_role("button", name="b: completed").click()
    await page.get_by_role("button", name="Repeat from here").click()
    dialog = page.get_by_role("dialog")
    text = dialog.get_by_label("What b publishes")
    await expect(text).to_have_value("b's answer")
    await expect(text).to_be_disabled()
    await dialog.get_by_label("Publish my text, and do not ask b").check()
    await text.fill("My own b.")
    assert await violations(page) == []
    if folder:
        await page.screenshot(path=f"{folder}/dialog.png")
    console.model.requests.clear()
    await dialog.get_by_role("button", name="Repeat").press("Enter")
    await expect(page.locator(".head").get_by_text("repeats another run")).to_be_visible()
    await expect(page.locator(".head").get_by_text("completed")).to_be_visible()
    assert [named(request) for request in console.model.requests] == ["d"]
    assert "My own b." in str(console.model.requests[0]["messages"])
    await expect(page.get_by_text("d's answer").last).to_be_visible()
    await expect(page.get_by_role("button", name="Repeat from here")).to_be_visible()
    if folder:
        await page.screenshot(path=f"{folder}/fork.png", full_page=True)
