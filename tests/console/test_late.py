"""Answers that come late, or in another order than they were asked for."""

import asyncio
import json
from typing import Any

import pytest
from playwright.async_api import Page, Route, WebSocketRoute, expect

from tests.api.test_episodes import create_episode
from tests.console.conftest import Console, hold_clock
from tests.console.held import drawn, hold
from tests.console.test_compare import ended
from tests.fake_model import calls, gated, gated_within, text
from tests.flows.test_interrupts import CALCULATOR
from tests.waiting import until


@pytest.mark.deep
async def test_a_slow_answer_is_shown_though_it_is_asked_for_every_two_seconds(
    console: Console,
) -> None:
    page = console.page
    await hold_clock(page)
    first = asyncio.Event()
    asked: list[Route] = []

    async def slow(route: Route) -> None:
        asked.append(route)
        if len(asked) == 1:
            await first.wait()
            await route.continue_()

    await page.route("**/v1/scheduler", slow)
    await console.open("operations")
    await expect(page.get_by_text("Loading workers")).to_be_visible()
    await page.clock.run_for(2500)
    first.set()
    await expect(page.get_by_text("Runs at once")).to_be_visible()
    for route in asked[1:]:
        await route.abort()


@pytest.mark.deep
async def test_what_could_not_be_read_is_read_when_the_server_is_there_again(
    console: Console,
) -> None:
    await console.define()
    page = console.page
    away = True

    async def lost(route: Route) -> None:
        await (route.abort() if away else route.continue_())

    await page.route("**/v1/**", lost)
    await console.open("graphs")
    await expect(page.get_by_text("No connection")).to_be_visible()
    away = False
    await expect(page.get_by_text("There is no graph yet.")).to_be_visible()
    await expect(page.get_by_text("The server cannot be reached")).to_have_count(0)
    console.provoked.add("ERR_FAILED")


async def test_a_page_never_shows_what_another_choice_had(console: Console) -> None:
    console.model.script(text("done"))
    await ended(console, await console.run())
    page = await console.open("usage?by=day")
    await expect(page.get_by_role("region", name="Usage by day")).to_be_visible()
    watching = """() => {
        window.seen = [];
        const look = () => window.seen.push(document.body.innerText);
        new MutationObserver(look).observe(document.body, { subtree: true, childList: true });
    }"""
    await page.evaluate(watching)
    await page.get_by_role("combobox", name="By", exact=True).select_option("agent")
    usage = page.get_by_role("region", name="Usage by agent")
    await expect(usage.get_by_role("row").filter(has_text="clerk")).to_be_visible()
    assert not any("no agent" in each for each in await page.evaluate("window.seen"))


@pytest.mark.deep
async def test_a_refusal_of_the_last_key_says_nothing_of_the_present_one(
    console: Console,
) -> None:
    key = console.server.headers["Authorization"].removeprefix("Bearer ")
    await console.page.add_init_script("localStorage.clear()")
    held = await hold(console.page, "**/v1/usage?*")
    page = await console.open()
    await page.get_by_role("button", name="Enter a key").click()
    await page.get_by_label("Key", exact=True).fill(key)
    await page.get_by_role("button", name="Use it").click()
    await expect(page.get_by_text("Nothing has run yet.")).to_be_visible()
    await held.let_go()
    await expect(page.get_by_text("This server needs an API key")).to_be_hidden()
    console.provoked.add("401")


@pytest.mark.deep
async def test_a_late_answer_does_not_lead_away_from_another_page(console: Console) -> None:
    console.model.script(text("done"))
    run_id = await ended(console, await console.run())
    page = await console.open(f"runs/{run_id}")
    held = await hold(page, "**/retry", "POST")
    await page.get_by_role("button", name="Retry", exact=True).click()
    await page.get_by_role("navigation").get_by_role("link", name="Agents").click()
    await expect(page.get_by_role("heading", name="Agents")).to_be_visible()
    await held.let_go()
    await expect(page.get_by_role("heading", name="Agents")).to_be_visible()
    assert page.url.endswith("#/agents")


@pytest.mark.deep
async def test_what_is_typed_while_a_message_is_sent_stays(console: Console) -> None:
    never = asyncio.Event()
    console.model.script(gated(never, text("late")))
    run_id = await console.run()
    page = await console.open(f"runs/{run_id}")
    held = await hold(page, "**/messages", "POST")
    field = page.get_by_label("Tell clerk something")
    await field.fill("one")
    await page.get_by_role("button", name="Tell it").click()
    await field.fill("two")
    await held.let_go()
    await expect(page.get_by_text("not read yet")).to_be_visible()
    await expect(field).to_have_value("two")
    never.set()


async def test_a_refused_message_comes_back_before_what_was_typed_meanwhile(
    console: Console,
) -> None:
    await console.define()
    page = await console.open("chat?agent=clerk&session=refused")
    refused = asyncio.Event()

    async def refuse(route: Route) -> None:
        await refused.wait()
        await route.fulfill(status=429, json={"code": "quota", "detail": "not so many runs"})

    await page.route("**/v1/runs", refuse)
    await page.get_by_label("Message").fill("one")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("being sent")).to_be_visible()
    await page.get_by_label("Message").fill("two")
    refused.set()
    await expect(page.get_by_text("not so many runs")).to_be_visible()
    await expect(page.get_by_label("Message")).to_have_value("one\ntwo")
    console.provoked.add("429")


@pytest.mark.deep
async def test_the_hits_of_an_older_search_do_not_replace_those_of_a_newer_one(
    console: Console,
) -> None:
    await create_episode(console.server.client, task={"original_input": "Book a train to Rome"})
    page = await console.open("memory")
    await expect(page.get_by_role("link", name="Book a train to Rome")).to_be_visible()
    first = asyncio.Event()
    asked: list[Any] = []

    async def crossing(route: Route) -> None:
        asked.append(route.request)
        if len(asked) == 1:
            await first.wait()
            await route.continue_()
        else:
            await route.fulfill(json={"items": [], "by_meaning": True})

    await page.route("**/v1/episodes/search", crossing)
    field = page.get_by_label("Search for episodes like this")
    await field.fill("a train to Rome")
    await page.keyboard.press("Enter")
    await field.fill("nothing at all")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("No episode is like that.")).to_be_visible()
    first.set()
    response = await asked[0].response()
    await response.finished()
    await drawn(page)
    await expect(page.get_by_text("No episode is like that.")).to_be_visible()


@pytest.mark.deep
async def test_a_filter_that_is_typed_stays_when_the_page_is_drawn_again(
    console: Console,
) -> None:
    held = await hold(console.page, "**/v1/episodes?limit=1&*")
    page = await console.open("memory")
    await page.get_by_label("User").press_sequentially("ada")
    await held.let_go()
    await expect(page.get_by_role("button", name="Search")).to_be_enabled()
    await expect(page.get_by_label("User")).to_have_value("ada")
    await page.get_by_label("User").press("Enter")
    await expect(page).to_have_url(f"{console.address}#/memory?user=ada")


async def test_live_text_goes_on_once_after_a_lost_connection(console: Console) -> None:
    go_on = asyncio.Event()
    console.model.script(gated_within(go_on, text("Hello from the middle of it."), events=3))
    opened: list[WebSocketRoute] = []

    def between(socket: WebSocketRoute) -> None:
        opened.append(socket)
        socket.connect_to_server()

    await console.page.route_web_socket("**/ws?*", between)
    await console.define()
    page = await console.open("chat?agent=clerk&session=broken")
    await page.get_by_label("Message").fill("I am Ada.")
    await page.keyboard.press("Enter")
    live = page.locator("[aria-busy=true] pre")
    await expect(live).to_contain_text("Hello")
    before = await live.inner_text()
    await opened[0].close(code=1001)
    await until(lambda: len(opened), lambda number: number == 2)
    await drawn(page)
    await expect(live).to_have_text(before)
    go_on.set()
    await expect(page.get_by_text("Hello from the middle of it.")).to_have_count(1)
    await expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    await expect(page.get_by_text("Hello from the middle of it.")).to_have_count(1)


@pytest.mark.deep
async def test_the_late_answer_of_one_run_is_not_shown_on_another(console: Console) -> None:
    console.model.script(text("It is red."), text("It is blue."))
    first = await ended(console, await console.run())
    again = {"agent": "clerk", "input": "And now?"}
    answer = await console.server.client.post("/v1/runs", json=again)
    second = await ended(console, answer.json()["id"])
    held = await hold(console.page, f"**/v1/runs/{first}")
    page = await console.open(f"runs/{first}")
    await expect(page.get_by_text("Loading the run")).to_be_visible()
    await console.open(f"runs/{second}")
    await expect(page.get_by_text("It is blue.").last).to_be_visible()
    await held.let_go()
    await expect(page.get_by_text("And now?").last).to_be_visible()
    await expect(page.get_by_text("It is red.")).to_have_count(0)


async def _synthetic(page: Page, run_id: str, *events: tuple[str, str, dict[str, Any]]) -> None:
    """Show these events of a run in place of its own: type, task, data."""
    clock = "2026-01-01T00:00:00Z"
    began = [("run.started", None, {"attempt": 1}), *events]
    frames = [
        {"run_id": run_id, "seq": seq, "type": kind, "task_id": task, "at": clock, "data": data}
        | {"agent": task and f"agent-{task}", "parent_task_id": None, "depth": 1}
        for seq, (kind, task, data) in enumerate(began, start=1)
    ]

    def between(socket: WebSocketRoute) -> None:
        for frame in frames:
            socket.send(json.dumps(frame))

    await page.route_web_socket("**/ws?*", between)


@pytest.mark.deep
async def test_details_of_one_task_are_not_asked_for_or_shown_with_another(
    console: Console,
) -> None:
    never = asyncio.Event()
    console.model.script(gated(never, text("late")))
    run_id = await console.run()
    page = console.page
    call = {"model": "m", "provider": "p", "attempt": 1}
    starts = [("llm.started", task, {"call": n, **call}) for task, n in (("a", 1), ("a", 2))]
    await _synthetic(page, run_id, *starts, ("llm.started", "b", {"call": 1, **call}))
    prompts: list[str] = []
    prompt: dict[str, Any] = {"version": None, "model": "m", "params": {}, "shortened": None}

    async def answer(route: Route) -> None:
        prompts.append(route.request.url)
        await route.fulfill(json={**prompt, "messages": [], "more": False, "tools": []})

    await page.route("**/prompt?*", answer)
    over = {"code": "final", "detail": "the task is over"}
    await page.route("**/cancel", lambda route: route.fulfill(status=409, json=over))
    await console.open(f"runs/{run_id}?task=a")
    await page.get_by_role("button", name="Cancel task").click()
    await expect(page.get_by_text("the task is over")).to_be_visible()
    await page.get_by_role("tab", name="Prompt").click()
    await page.get_by_label("Model call").select_option("1")
    await page.get_by_label("Model call").select_option("2")
    await page.get_by_role("button", name="agent-b").first.click()
    await expect(page.get_by_role("heading", name="agent-b")).to_be_visible()
    await expect(page.get_by_label("Model call")).to_have_value("1")
    await expect(page.get_by_text("the task is over")).to_be_hidden()
    assert [each for each in prompts if "task_id=b" in each and "call=2" in each] == []
    console.provoked.add("409")
    never.set()


@pytest.mark.deep
async def test_the_page_of_what_memory_gave_follows_the_run_to_its_end(console: Console) -> None:
    go_on = asyncio.Event()
    console.model.script(gated(go_on, text("done")))
    run_id = await console.run()
    await console.model.received()
    page = await console.open(f"memory/runs/{run_id}")
    await expect(page.locator(".head").get_by_text("running")).to_be_visible()
    go_on.set()
    await expect(page.locator(".head").get_by_text("completed")).to_be_visible()


async def test_a_decision_that_was_taken_cannot_be_taken_again(console: Console) -> None:
    console.model.script(calls(("calculator", {"expression": "9+9"})), text("It is 18."))
    await console.run(CALCULATOR)
    page = await console.open("approvals")
    await expect(page.get_by_role("button", name="Approve")).to_be_visible()
    held = await hold(page, "**/v1/interrupts?*")
    async with page.expect_response("**/resolve") as taken:
        await page.get_by_role("button", name="Approve").click()
    await (await taken.value).finished()
    await drawn(page)
    await expect(page.get_by_role("button", name="Approve")).to_be_disabled()
    await held.let_go()
    await expect(page.get_by_text("Nobody waits for you.")).to_be_visible()
