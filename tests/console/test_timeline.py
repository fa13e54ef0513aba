"""A run's timeline and what follows a run: long waits, many tasks, another question."""

import pytest
from playwright.async_api import expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.fake_model import http_error, text


@pytest.mark.deep
async def test_tasks_are_found_by_state_and_name(console: Console) -> None:
    page = await console.open()
    await page.evaluate(
        """async () => {
            const { render } = await import("preact");
            const { html } = await import("/console/js/html.js");
            const { Timeline } = await import("/console/js/run/timeline.js");
            const tasks = new Map();
            for (let i = 0; i < 12; i++) tasks.set(`t${i}`, {
                key: `t${i}`, agent: i % 2 ? "writer" : "reader", title: `part ${i}`, parent: null,
                status: i === 3 ? "failed" : "completed", spans: [], startedAt: 0, endedAt: 5,
            });
            const tree = () => [...tasks.values()].map((task) => ({ task, depth: 0 }));
            const state = { tasks, tree, last: 1, queuedAt: 0, startedAt: 0 };
            document.body.innerHTML = "";
            render(html`<${Timeline} state=${state} now=${10} />`, document.body);
        }"""
    )
    rows = page.get_by_role("listitem")
    await expect(rows).to_have_count(12)
    await page.get_by_label("Status").select_option("failed")
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text("part 3")
    await page.get_by_label("Status").select_option("")
    await page.get_by_label("Task or agent").fill("READER")
    await expect(page.get_by_text("6 of 12 tasks")).to_be_visible()


async def test_another_question_starts_a_new_run(console: Console) -> None:
    console.model.script(text("One."), text("Two."))
    run_id = await console.run()
    page = await console.open(f"runs/{run_id}")
    await expect(page.get_by_text("One.").first).to_be_visible()
    await page.get_by_role("button", name="Change and run").click()
    await page.get_by_label("Question").fill("And then?")
    await page.get_by_role("button", name="Start").click()
    await expect(page.get_by_text("Two.").first).to_be_visible()
    assert run_id not in page.url
    assert "And then?" in str(console.model.requests[-1]["messages"])


async def test_a_retry_is_striped_and_a_playback_jumps_to_it(console: Console) -> None:
    console.model.script(http_error(500, message="long " * 30), text("Done."))
    page = await console.open(f"runs/{await console.run()}")
    await expect(page.locator(".answer")).to_contain_text("Done.")
    row = page.locator(".timeline .windowed .task-row")
    await expect(row).to_contain_text("1 failed try: model answered HTTP 500")
    await expect(row.locator(".bar.failed, .bar.retry")).to_have_count(2)
    assert "HTTP 500" in str(await row.locator(".bar.retry").get_attribute("title"))
    jump = page.get_by_label("Jump to")
    failure = jump.locator("optgroup[label=Failures] option")
    await expect(failure).to_contain_text("clerk: model answered HTTP 500")
    await jump.select_option(await failure.get_attribute("value"))
    await expect(page.locator(".playback .now")).to_contain_text("llm.failed")
    assert await violations(page) == []
    await page.set_viewport_size({"width": 320, "height": 800})
    assert await page.evaluate("document.documentElement.scrollWidth") <= 320
