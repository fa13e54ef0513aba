"""Runs as stories in a real browser: what was asked, how it ended, and why in one sentence."""

import asyncio
import re
from typing import Any

import pytest
from playwright.async_api import Locator, Page, expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.fake_model import calls, gated, http_error, text
from tests.flows.test_interrupts import CALCULATOR
from tests.waiting import until

SCHEMA = "Invalid schema for function 'refund'"


async def asked(console: Console, question: str, **more: Any) -> str:
    """Start a run of the agent ``clerk``, wait for its end, and return its id."""
    body = {"agent": "clerk", "input": question, "user": "ada", **more}
    client = console.server.client
    run = (await client.post("/v1/runs", json=body)).json()["id"]
    over = ("completed", "failed", "timeout")
    await until(lambda: client.get(f"/v1/runs/{run}"), lambda got: got.json()["status"] in over)
    return str(run)


def diagnosis(page: Page) -> Locator:
    return page.locator(".diagnosis")


async def fits(page: Page) -> None:
    """Check a narrow page for what sticks out, and a wide one for accessibility."""
    size = page.viewport_size
    await page.set_viewport_size({"width": 320, "height": 800})
    assert await page.evaluate("document.documentElement.scrollWidth") <= 320
    await page.set_viewport_size(size or {"width": 1280, "height": 900})
    assert await violations(page) == []


@pytest.mark.deep
async def test_a_schema_that_the_model_refuses_is_named_everywhere(console: Console) -> None:
    await console.define()
    console.model.script(text("Rome."), *[http_error(400, message=SCHEMA) for _ in range(3)])
    await asked(console, "What is the capital of Italy?")
    failed = [await asked(console, f"Refund order A-{number}.") for number in (1, 2)]
    page = await console.open("runs")
    row = page.get_by_role("row").filter(has_text="Refund order A-2.")
    await expect(row).to_contain_text(f"model answered HTTP 400: {SCHEMA}")
    await expect(row).to_contain_text("ada")
    lines = "(shown) => shown.clientHeight / parseFloat(getComputedStyle(shown).lineHeight)"
    assert await row.locator(".why").evaluate(lines) < 1.5
    assert SCHEMA in str(await row.locator(".why").get_attribute("title"))
    await fits(page)
    await page.get_by_role("link", name="Refund order A-2.").click()
    sentence = re.compile(r"Failed after .*: default/\S+ answered HTTP 400: Invalid schema")
    await expect(diagnosis(page)).to_contain_text(sentence)
    await expect(diagnosis(page)).to_contain_text("1 other run failed alike")
    await expect(diagnosis(page)).to_contain_text("then use Change and run")
    await expect(page).to_have_title("✕ clerk: Refund order A-2. · Bottega")
    await fits(page)
    await page.get_by_role("link", name="Home").click()
    group = page.get_by_role("listitem").filter(has_text="HTTP 400")
    await expect(group).to_contain_text("2 runs since")
    await expect(group.get_by_role("link")).to_have_attribute("href", f"#/runs/{failed[1]}")
    await expect(page).to_have_title("Bottega")


@pytest.mark.deep
async def test_a_slow_model_is_named(console: Console) -> None:
    never = asyncio.Event()
    await console.define()
    console.model.script(gated(never, text("late")))
    run = await asked(console, "Hurry.", timeout_s=2)
    page = await console.open(f"runs/{run}")
    await expect(diagnosis(page)).to_contain_text(
        re.compile(r"Out of time after [23]\.\d s: .* of it in a call of ")
    )
    never.set()


async def test_a_tool_that_fails_is_named_though_the_run_completed(console: Console) -> None:
    await console.define(CALCULATOR | {"approval": "never"})
    console.model.script(calls(("calculator", {"expression": "1/0"})), text("I cannot."))
    page = await console.open(f"runs/{await asked(console, 'What is 1/0?')}")
    await expect(diagnosis(page)).to_contain_text("Completed after")
    red = diagnosis(page).locator(".bad-text")
    await expect(red).to_contain_text("But the tool calculator failed once: ")
    await expect(page.locator(".task-name .bad-text")).to_contain_text("calculator failed: ")
    await expect(page.locator(".track .bar.broken")).to_have_count(1)
    await page.get_by_role("tab", name="Tools 1, 1 failed").click()
    await expect(page.locator(".tool .status.bad")).to_contain_text("failed")
    assert await violations(page) == []


async def test_a_version_that_broke_is_named(console: Console) -> None:
    await console.define()
    console.model.script(text("Rome."), *[http_error(400, message="no") for _ in range(2)])
    await asked(console, "What is the capital of Italy?")
    changed = {"system_message": "You hinder."}
    (await console.server.client.put("/v1/agents/clerk", json=changed)).raise_for_status()
    await asked(console, "And of France?")
    page = await console.open(f"runs/{await asked(console, 'And of Spain?')}")
    told = re.compile(
        r"Since version 2 of clerk, stored .*, 2 of its 2 runs failed; of the 1 before it 0"
    )
    await expect(diagnosis(page)).to_contain_text(told)
    await diagnosis(page).get_by_role("link", name="What changed").click()
    await expect(page.get_by_role("tab", name="Versions")).to_have_attribute(
        "aria-selected", "true"
    )


async def test_only_the_end_of_a_run_is_announced(console: Console) -> None:
    go_on = asyncio.Event()
    await console.define()
    console.model.script(gated(go_on, text("Rome.")))
    body = {"agent": "clerk", "input": "What is the capital of Italy?"}
    run = (await console.server.client.post("/v1/runs", json=body)).json()["id"]
    page = await console.open(f"runs/{run}")
    sentence = diagnosis(page).get_by_role("status")
    await expect(sentence).to_contain_text("Works for")
    await expect(sentence).to_have_attribute("aria-live", "off")
    go_on.set()
    await expect(sentence).to_contain_text("Completed after")
    await expect(sentence).to_have_attribute("aria-live", "polite")


async def test_an_answer_is_rated_with_a_comment(console: Console) -> None:
    await console.define()
    console.model.script(text("Rome."))
    run = await asked(console, "What is the capital of Italy?")
    page = await console.open(f"runs/{run}")
    await page.get_by_label("Comment").fill("Short and right.")
    good = page.get_by_role("button", name="Good")
    await good.click()
    await expect(good).to_have_attribute("aria-pressed", "true")
    seen = (await console.server.client.get(f"/v1/runs/{run}")).json()
    why = "Short and right."
    assert seen["outcome"] == {"value": "SUCCESS", "source": "feedback", "reason": why}
    await page.reload()
    said = page.get_by_text("Rated good by key:")
    await expect(said).to_contain_text("Short and right.")
    await expect(said).to_contain_text("Another rating replaces this one")
    comment = page.get_by_label("Comment")
    await expect(comment).to_have_value("Short and right.")
    await page.get_by_role("button", name="Bad").click()
    await expect(comment).to_be_focused()
    await comment.fill("Too short.")
    await comment.press("Enter")
    await expect(page.get_by_text("Rated bad by key:")).to_contain_text("Too short.")
    await expect(good).to_have_attribute("aria-pressed", "false")
    page = await console.open("runs")
    await expect(page.get_by_role("row").filter(has_text="Italy")).to_contain_text(
        "bad by people (key:"
    )


@pytest.mark.deep
async def test_a_model_that_fails_again_and_again_is_named_with_its_status(
    console: Console,
) -> None:
    await console.define()
    console.model.decide = lambda _: http_error(500)
    page = await console.open(f"runs/{await asked(console, 'Are you there?')}")
    sentence = re.compile(r"Failed after .*: default/\S+ answered HTTP 500 \w+")
    await expect(diagnosis(page)).to_contain_text(sentence, timeout=60_000)
    await expect(diagnosis(page).get_by_role("link", name="Health")).to_be_visible()
