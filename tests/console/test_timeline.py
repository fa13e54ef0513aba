"""A run's timeline and what follows a run: long waits, many tasks, another question."""

from typing import Any

import pytest
from playwright.async_api import expect

from tests.console.conftest import Console
from tests.fake_model import text


async def test_long_times_without_work_take_little_room(console: Console) -> None:
    page = await console.open()
    found: Any = await page.evaluate(
        """async () => {
            const { axis, idleTimes } = await import("/console/js/run/scale.js");
            const span = (kind, from, to) => ({ kind, from, to });
            const asked = { spans: [span("model", 0, 1000), span("person", 1000, 90000)] };
            const after = { spans: [span("tool", 90000, null)] };
            const idle = idleTimes([asked, after], 0, 91000);
            const place = axis(0, 91000, idle);
            const even = axis(0, 91000, []);
            return {
                idle,
                places: [0, 1000, 90000, 91000].map(place),
                ordered: [0, 500, 1000, 45000, 90000, 90500, 91000].map(place),
                even: even(45500),
                short: idleTimes([{ spans: [span("model", 0, 9), span("tool", 50, 99)] }], 0, 99),
                none: idleTimes([{ spans: [span("queue", 0, 60000)] }], 0, 60000),
            };
        }"""
    )
    assert found["idle"] == [{"from": 1000, "to": 90000}]
    assert found["short"] == found["none"] == []
    assert found["even"] == 0.5
    begin, idle_from, idle_to, end = found["places"]
    assert (begin, end) == (0, 1)
    assert 0.05 < idle_to - idle_from < 0.1
    assert found["ordered"] == sorted(found["ordered"])


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
