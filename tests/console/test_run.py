"""Details of an agent on the page of a run, in a real browser."""

import asyncio

import pytest
from playwright.async_api import expect

from tests import swarm
from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.console.test_compare import HOSTILE
from tests.fake_model import calls, gated, http_error, text
from tests.flows.test_dag import DIAMOND, says
from tests.team import define_graph


@pytest.mark.deep
async def test_it_shows_the_prompt_of_each_model_call(console: Console) -> None:
    console.model.script(calls(("calculator", {"expression": "6*7"})), text("It is 42."))
    run_id = await console.run({"type": "builtin", "name": "calculator"})
    page = await console.open(f"runs/{run_id}")
    await expect(page.locator(".head").get_by_text("completed")).to_be_visible()
    await page.get_by_role("tab", name="Model calls 2").click()
    await page.get_by_role("button", name="Prompt of call 2").press("Enter")
    prompt = page.get_by_role("tabpanel", name="prompt")
    for words in ("its own instructions", "You help.", "the question", "result of calculator"):
        await expect(prompt.get_by_text(words)).to_be_visible()
    await prompt.get_by_text("Tools and sub-agents").click()
    await expect(prompt.get_by_text("builtin")).to_be_visible()
    assert await violations(page) == []
    await prompt.get_by_label("Model call").select_option("1")
    await expect(prompt.get_by_text("result of calculator")).to_be_hidden()
    await expect(prompt.get_by_text("You help.")).to_be_visible()


async def test_a_message_is_sent_to_a_run_under_way(console: Console) -> None:
    # As with plain HTTP from another machine.
    secure_only = "delete Crypto.prototype.randomUUID; delete Navigator.prototype.clipboard"
    await console.page.add_init_script(secure_only)
    go_on = asyncio.Event()
    console.model.script(gated(go_on, text("It is red.")), text("Es ist rot."))
    run_id = await console.run()
    await console.model.received(1)
    page = await console.open(f"runs/{run_id}")
    box = page.get_by_label("Tell clerk something")
    await box.fill(f"In German, please. {HOSTILE}")
    await box.press("Enter")
    await expect(box).to_have_value("")
    await expect(page.get_by_text("In German, please.")).to_be_visible()
    await expect(page.get_by_text("not read yet")).to_be_visible()
    assert await violations(page) == []
    await page.get_by_label("Copy id").click()
    await expect(page.get_by_label("Copy id")).to_have_text("Copied")
    go_on.set()
    await expect(page.get_by_text("read by clerk")).to_be_visible()
    await expect(page.locator(".head").get_by_text("completed")).to_be_visible()
    await expect(page.get_by_text("Es ist rot.").last).to_be_visible()
    await expect(box).to_be_hidden()
    said = console.model.requests[-1]["messages"][-1]["content"]
    assert said == f"In German, please. {HOSTILE}"
    await expect(page).to_have_title("● clerk: ? · Bottega")


async def test_it_shows_who_received_which_version(console: Console) -> None:
    client = console.server.client
    await define_graph(client, "g", *DIAMOND)
    console.model.decide = says()
    wanted = {"mode": "dag", "graph": "g", "input": "?"}
    run = (await client.post("/v1/runs?wait=30", json=wanted)).json()
    page = await console.open(f"runs/{run['id']}?tab=flows")
    rows = page.get_by_label("Publications", exact=True).get_by_role("listitem")
    for source, receivers in (("a", "b, c"), ("b", "d"), ("d", "nobody")):
        row = rows.filter(has=page.get_by_text(source, exact=True))
        await expect(row).to_contain_text("version 1")
        await expect(row).to_contain_text(f"received by {receivers}")
    await expect(page.get_by_label("What flowed", exact=True)).to_be_visible()
    assert await violations(page) == []
    await expect(page.get_by_label("Tell")).to_be_hidden()


async def test_the_progress_of_tasks_is_that_of_the_api(console: Console) -> None:
    client, gate = console.server.client, asyncio.Event()
    names = [f"task {number}" for number in range(12)]
    held = {name: [swarm.held(gate, text("found"))] for name in names[4:]}
    await swarm.coordinator(client)
    console.model.decide = swarm.plays(
        {
            "root": [swarm.dispatches(*names), swarm.awaits(), text("done")],
            names[0]: [lambda request: http_error(400)],
            **held,
        }
    )
    run_id = await swarm.start(client)
    page = await console.open(f"runs/{run_id}")
    shown = page.locator(".progress")
    counts = "3 done · 1 failed · 5 running · 3 waiting"
    await expect(shown).to_contain_text(f"4 of 12 tasks are over · {counts}")
    assert await violations(page) == []
    tasks = (await client.get(f"/v1/runs/{run_id}")).json()["tasks"]
    assert " · ".join(f"{tasks[part]} {part}" for part in counts.split()[1::3]) == counts
    gate.set()
    await expect(shown).to_contain_text("12 of 12 tasks are over · 11 done · 1 failed")
