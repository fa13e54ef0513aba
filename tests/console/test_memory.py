"""The page Memory in a real browser: episodes, patterns with their evidence, reports."""

from typing import Any

import pytest
from playwright.async_api import BrowserContext, expect

from tests.api.test_episodes import create_episode
from tests.api.test_patterns import add, advice
from tests.console.accessibility import violations
from tests.console.conftest import Console, window
from tests.fake_model import calls, http_error, text
from tests.flows.test_episodes import judge
from tests.flows.test_learning import learned
from tests.waiting import until

CALCULATOR = {"type": "builtin", "name": "calculator"}
CLOCK = {"type": "builtin", "name": "current_time"}


@pytest.mark.deep
async def test_episodes_are_searched_and_their_score_is_explained(console: Console) -> None:
    await create_episode(console.server.client, task={"original_input": "Book a train to Rome"})
    await create_episode(console.server.client, task={"original_input": "Count the sheep"})
    page = await console.open("memory")
    await expect(page.get_by_role("link", name="Count the sheep")).to_be_visible()
    await page.get_by_label("Search for episodes like this").fill("a train to Rome")
    await page.get_by_role("button", name="Search").click()
    first = page.locator("ol.rows > li").first
    await expect(first).to_contain_text("Book a train to Rome")
    await first.get_by_text("Score").click()
    terms = await first.locator(".terms dd").all_inner_texts()
    total = await first.locator("summary").inner_text()
    assert sum(map(float, terms)) == pytest.approx(float(total.split()[-1]), abs=0.003)
    await expect(first.get_by_text("Measured: ")).to_contain_text("lexical")
    await first.get_by_role("link").click()
    await expect(page.get_by_role("heading", name="Book a train to Rome")).to_be_visible()
    assert await violations(page) == []


async def test_lessons_are_edited_pinned_and_removed(console: Console) -> None:
    client = console.server.client
    insights = {"insights": ["Ask for the date.", "Write in Italian."]}
    await create_episode(client, user="ada", reflection=insights)
    page = await console.open("memory/lessons")
    await expect(page.get_by_text("There is no such lesson.")).to_be_visible()
    await page.get_by_label("User").fill("ada")
    await page.get_by_label("User").press("Enter")
    other, row = page.locator("tbody tr").first, page.locator("tbody tr").nth(1)
    await row.get_by_label("Lesson").fill("Ask for the day.")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_role("button", name="Save")).to_have_count(0)
    await row.get_by_role("button", name="Pin").click()
    await expect(row.get_by_role("button", name="Unpin")).to_be_visible()
    assert await violations(page) == []
    await other.get_by_role("button", name="Remove").click()
    await other.get_by_role("group").get_by_role("button", name="Remove").click()
    await expect(page.locator("tbody tr")).to_have_count(1)
    await console.server.owner.execute(
        "UPDATE lessons SET for_all = true, agent = 'clerk' WHERE state = 'active'"
    )
    await page.get_by_label("User").fill("")
    await page.get_by_label("User").press("Enter")
    await expect(page.get_by_label("Lesson", exact=True)).to_have_value("Ask for the day.")
    await expect(page.get_by_text("All runs of clerk get it")).to_be_visible()
    found = (await client.get("/v1/lessons?user=ada")).json()["items"]
    assert [(each["text"], each["state"], each["pinned"]) for each in found] == [
        ("Ask for the day.", "active", True),
        ("Write in Italian.", "removed", False),
    ]


async def test_lessons_that_are_alike_are_one_row(console: Console) -> None:
    client = console.server.client
    for _ in range(3):
        await create_episode(client, user="ada", reflection={"insights": ["Name a reference."]})
    page = await console.open("memory/lessons?user=ada")
    row = page.locator("tbody tr")
    await expect(row).to_have_count(1)
    await expect(row).to_contain_text("and 2 more")
    await row.get_by_role("button", name="Remove").click()
    await row.get_by_role("group").get_by_role("button", name="Remove").click()
    await expect(page.get_by_text("There is no such lesson.")).to_be_visible()
    found = (await client.get("/v1/lessons?user=ada")).json()["items"]
    assert [each["state"] for each in found] == ["removed"] * 3


async def test_a_pattern_shows_how_its_evidence_grew(console: Console) -> None:
    client = console.server.client
    pattern = await add(client, name="ask first")
    path = f"/v1/patterns/{pattern['id']}"
    for good in (True, True, False, True):
        body = {"good": good, "baseline_rate": 0.4}
        (await client.post(f"{path}/applications", json=body)).raise_for_status()
    (await client.post(f"{path}/validate")).raise_for_status()
    history = (await client.get(f"{path}/evidence")).json()
    assert [each["given_good"] for each in history["points"]] == [1, 2, 2, 3]
    (await client.post(f"{path}/applications", json={"good": False, "arm": "without"}))
    history = (await client.get(f"{path}/evidence")).json()
    stored = (await client.get(path)).json()["evidence"]["p_value"]
    assert history["points"][-1]["others"] == 1
    assert stored is None, "five applications are needed"
    page = await console.open("memory/patterns")
    await page.get_by_role("link", name="ask first").click()
    await expect(page.get_by_role("cell", name="75 % (3 of 4)").first).to_be_visible()
    assert await violations(page) == []
    await page.get_by_role("button", name="Judge it now").click()
    await expect(page.get_by_role("status").filter(has_text="evidence")).to_be_visible()
    await page.get_by_role("button", name="Deprecate").click()
    await page.get_by_role("group").get_by_role("button", name="Deprecate").click()
    await expect(page.get_by_text("deprecated in the console")).to_be_visible()


@pytest.mark.deep
async def test_reports_are_made_and_read(console: Console) -> None:
    page = await console.open("memory/reports")
    await page.get_by_role("button", name="Run it now").click()
    await page.get_by_role("group").get_by_role("button", name="Run it now").click()
    await expect(page.get_by_text("What was done")).to_be_visible()

    async def ended() -> Any:
        found = await console.server.client.get("/v1/memory/reports")
        return found.json()["items"][0]

    await until(ended, lambda job: job["ended_at"] is not None)
    await expect(page.locator(".panel h3").first).to_be_visible()
    assert await violations(page) == []


@pytest.mark.deep
async def test_the_search_and_the_list_are_narrowed_by_outcome(console: Console) -> None:
    client = console.server.client
    await create_episode(client, task={"original_input": "Book a train"}, outcome="FAILURE")
    await create_episode(client, task={"original_input": "Book a ferry"}, outcome="CANCELLED")
    page = await console.open("memory")
    for outcome in ("FAILURE", "CANCELLED"):
        await page.get_by_label("Outcome").select_option(outcome)
        await expect(page.get_by_role("link", name="Book a")).to_have_count(1)
    await page.get_by_label("Search for episodes like this").fill("book a journey")
    await page.get_by_label("That ended in").select_option("FAILURE")
    await page.get_by_role("button", name="Search").click()
    await expect(page.locator("ol.rows > li")).to_have_count(1)
    await expect(page.locator("ol.rows > li")).to_contain_text("Book a train")


@pytest.mark.deep
async def test_episodes_of_all_users_are_shown_and_narrowed_to_one(
    console: Console, profile: BrowserContext
) -> None:
    client = console.server.client
    for user, task in (("ann", "Book a train"), ("bob", "Book a ferry"), (None, "Book a hall")):
        await create_episode(client, task={"original_input": task}, user=user)
    page = await console.open("memory")
    await expect(page.get_by_role("link", name="Book a")).to_have_count(3)
    await page.get_by_label("User").fill("ann")
    await page.get_by_label("User").press("Tab")
    await expect(page.get_by_role("link", name="Book a")).to_have_count(1)
    await page.get_by_label("Search for episodes like this").fill("book a ferry")
    await page.get_by_role("button", name="Search").click()
    await expect(page.locator("ol.rows > li")).to_have_count(1)
    await expect(page.locator("ol.rows > li")).to_contain_text("Book a train")
    body = {"name": "reader", "scopes": ["read"]}
    key = (await client.post("/v1/keys", json=body)).json()["key"]
    async with window(profile, key) as (other, _):
        await other.goto(f"{console.address}#/memory")
        await expect(other.get_by_role("link", name="Book a hall")).to_be_visible()
        await expect(other.get_by_role("link", name="Book a")).to_have_count(1)
        await expect(
            other.get_by_text("To see all, use a key with the scope admin")
        ).to_be_visible()


@pytest.mark.deep
async def test_an_episode_tells_what_failed_and_what_cured_it(console: Console) -> None:
    await console.define(CALCULATOR, CLOCK)
    console.model.script(
        calls(("calculator", {"expression": "1 / 0"})), calls(("current_time", {})), text("Late.")
    )
    client = console.server.client
    run = (await client.post("/v1/runs", json={"agent": "clerk", "input": "How late?"})).json()
    await learned(console.server, run["id"], "done")
    await judge(client, run["id"], outcome="PARTIAL", comment="Too short.")
    page = await console.open("memory")
    await page.get_by_role("link", name="How late?").click()
    steps = page.locator("ol.steps > li")
    await expect(steps.filter(has_text="calculator")).to_contain_text("1 / 0")
    await expect(page.locator("ol.steps > li.failed")).to_have_count(1)
    await expect(page.locator("ol.steps > li.failed")).to_contain_text("zero")
    await expect(page.get_by_text("Judged by")).to_be_visible()
    await expect(page.get_by_text(": Too short.")).to_be_visible()
    await expect(page.get_by_text("then current_time went well")).to_be_visible()
    assert await violations(page) == []
    await page.get_by_role("link", name="what it was given and learnt").click()
    await expect(page.get_by_text("then current_time went well")).to_be_visible()
    await expect(page.get_by_role("heading", name="Insights")).to_be_visible()
    assert await violations(page) == []


async def test_a_failed_run_shows_its_error(console: Console) -> None:
    console.model.script(http_error(400))
    run_id = await console.run()
    await learned(console.server, run_id, "done")
    episode = (await console.server.client.get("/v1/episodes")).json()["items"][0]
    page = await console.open(f"memory/episodes/{episode['id']}")
    await expect(page.locator("p.note.bad")).to_contain_text(episode["result"]["error"]["code"])
    await create_episode(console.server.client, result={"error": {"type": "TimeoutError"}})
    imported = (await console.server.client.get("/v1/episodes?order=desc")).json()["items"][0]
    page = await console.open(f"memory/episodes/{imported['id']}")
    await expect(page.locator("p.note.bad")).to_contain_text("TimeoutError")


@pytest.mark.deep
async def test_a_pattern_shows_others_like_it(console: Console) -> None:
    pattern = await add(console.server.client, name="ask first")
    other = advice("ask them")
    await add(console.server.client, name="ask first of all", content=other)
    page = await console.open(f"memory/patterns/{pattern['id']}")
    await expect(page.get_by_role("link", name="ask first of all")).to_be_visible()


async def test_a_run_shows_what_memory_gave_it(console: Console) -> None:
    run_id = await console.run()
    page = await console.open(f"memory/runs/{run_id}")
    await expect(page.get_by_text("No pattern fitted this run.")).to_be_visible()
    assert await violations(page) == []
