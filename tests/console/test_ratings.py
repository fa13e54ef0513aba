"""Answers rated one after the other by keyboard, in a real browser."""

from typing import Any

import pytest
from playwright.async_api import Request, expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.console.held import drawn, hold
from tests.fake_model import text


@pytest.mark.deep
async def test_answers_are_rated_by_keyboard(console: Console) -> None:
    await console.define()
    client = console.server.client
    for number in range(3):
        console.model.script(text(f"Answer {number}."))
        run = {"agent": "clerk", "input": f"Question {number}?"}
        done = (await client.post("/v1/runs?wait=30", json=run)).json()
        assert done["status"] == "completed"
    page = await console.open("ratings")
    await expect(page.get_by_text("Answer 2.")).to_be_visible()  # the newest first
    await expect(page.get_by_role("status")).to_have_text("1 of 3, 0 rated")
    assert await violations(page) == []
    await page.set_viewport_size({"width": 320, "height": 800})
    assert await page.evaluate("document.documentElement.scrollWidth") <= 320
    await page.set_viewport_size({"width": 1280, "height": 900})
    sent: list[Any] = []

    def note(request: Request) -> None:
        if request.method == "POST":
            sent.append(request.post_data_json)

    page.on("request", note)
    await page.keyboard.press("c")
    await expect(page.get_by_label("Comment")).to_be_focused()
    await page.keyboard.type("bag of words")  # no b rates it
    await page.keyboard.press("Enter")
    await page.keyboard.press("c")
    await page.keyboard.press("Escape")
    await page.keyboard.press("b")
    await expect(page.get_by_label("Comment")).to_be_focused()
    await page.keyboard.press("Escape")
    assert sent == []
    await page.keyboard.press("b")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("Answer 1.")).to_be_visible()
    await page.keyboard.press("k")
    await expect(page.get_by_text("Rated bad by key:")).to_contain_text(": bag of words.")
    await expect(page.get_by_label("Comment")).to_have_value("bag of words")
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await expect(page.get_by_text("Answer 0.")).to_be_visible()
    await page.keyboard.press("g")
    await expect(page.get_by_role("status")).to_have_text("3 of 3, 2 rated")
    await page.keyboard.press("k")
    await expect(page.get_by_text("Answer 1.")).to_be_visible()
    await page.keyboard.press("g")
    await expect(page.get_by_role("button", name="Show the next ones")).to_be_visible()
    items: list[dict[str, Any]] = (await client.get("/v1/runs")).json()["items"]
    rated = {each["question"]: each["outcome"]["value"] for each in items}
    assert sent[0] == {"outcome": "FAILURE", "comment": "bag of words"}
    assert rated == {"Question 0?": "SUCCESS", "Question 1?": "SUCCESS", "Question 2?": "FAILURE"}
    await page.get_by_role("button", name="Show the next ones").click()
    await expect(page.get_by_text("Every answer is rated.")).to_be_visible()


async def answers(console: Console, number: int) -> None:
    """Make answers that nobody has rated; the last one is shown first."""
    await console.define()
    for each in range(number):
        console.model.script(text(f"Answer {each}."))
        run = {"agent": "clerk", "input": f"Question {each}?", "user": f"user-{each}"}
        await console.server.client.post("/v1/runs?wait=30", json=run)


async def test_a_tab_that_is_looked_at_again_keeps_its_place(console: Console) -> None:
    await answers(console, 3)
    page = await console.open("ratings?user=user-0")
    await expect(page.get_by_role("status")).to_have_text("1 of 1, 0 rated")
    await page.get_by_label("User").fill("")
    await page.get_by_label("Question contains").fill("question 1")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("Answer 1.")).to_be_visible()
    await page.get_by_label("Question contains").fill("")
    await page.get_by_label("Since").fill("2999-01-01")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("No answer like that waits for a rating.")).to_be_visible()
    await page.get_by_label("Since").fill("2026-01-01")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("Answer 2.")).to_be_visible()
    await page.get_by_role("heading", name="Ratings").click()  # keys leave the field
    await page.keyboard.press("j")
    await expect(page.get_by_text("Answer 1.")).to_be_visible()
    await page.get_by_role("button", name="Good").click()
    await expect(page.get_by_text("Answer 0.")).to_be_visible()
    await expect(page.get_by_role("heading", name="Question")).to_be_focused()
    await page.get_by_label("Comment").fill("half of a")
    read: list[str] = []
    page.on("request", lambda request: read.append(request.url))
    await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    await drawn(page)
    assert [url for url in read if "rated=false" in url] == []
    await expect(page.get_by_label("Comment")).to_have_value("half of a")
    await expect(page.get_by_role("status")).to_have_text("3 of 3, 1 rated")


async def test_a_rating_that_comes_late_moves_nothing(console: Console) -> None:
    await answers(console, 3)
    page = await console.open("ratings")
    await expect(page.get_by_text("Answer 2.")).to_be_visible()
    held = await hold(page, "**/feedback", method="POST")
    await page.keyboard.press("g")
    await page.keyboard.press("j")
    await expect(page.get_by_text("Answer 1.")).to_be_visible()
    await page.get_by_label("Comment").fill("begun meanwhile")
    await held.let_go()
    await expect(page.get_by_role("status")).to_have_text("2 of 3, 1 rated")
    await expect(page.get_by_text("Answer 1.")).to_be_visible()
    await expect(page.get_by_label("Comment")).to_have_value("begun meanwhile")


async def test_runs_are_found_by_what_was_asked(console: Console) -> None:
    await console.define()
    client = console.server.client
    for asked in ("My refund is missing", "Where is my parcel?"):
        console.model.script(text("done"))
        await client.post("/v1/runs?wait=30", json={"agent": "clerk", "input": asked})
    page = await console.open("runs")
    await page.get_by_label("Question contains").fill("REFUND")
    await page.get_by_label("Question contains").press("Enter")
    await expect(page.get_by_role("link", name="My refund is missing")).to_be_visible()
    await expect(page.get_by_role("link", name="Where is my parcel?")).to_have_count(0)
    assert page.url.endswith("#/runs?q=REFUND")
    await page.get_by_text("More filters").click()
    await page.get_by_label("Rated by people").select_option("yes")
    await expect(page.get_by_text("No run is like that.")).to_be_visible()
    assert await violations(page) == []
    await page.get_by_role("button", name="Show all runs").click()
    await expect(page.get_by_role("link", name="Where is my parcel?")).to_be_visible()
