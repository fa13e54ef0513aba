"""The console in a real browser: runs live, decisions, playback, keyboard, accessibility."""

import asyncio

import pytest
from playwright.async_api import Page, Route, WebSocketRoute, expect

from tests.console.accessibility import is_installed, violations
from tests.console.conftest import Console
from tests.fake_model import calls, gated, gated_within, text
from tests.flows.test_interrupts import ASK, CALCULATOR
from tests.waiting import until

HOSTILE = "<img src=x onerror=\"document.title='broken in'\"> <script>document.title=1</script>"


@pytest.mark.deep
async def test_it_asks_for_a_key_and_then_shows_the_first_page(console: Console) -> None:
    await console.run()
    key = console.server.headers["Authorization"].removeprefix("Bearer ")
    await console.page.add_init_script("localStorage.clear()")
    page = await console.open()
    await page.get_by_role("button", name="Enter a key").click()
    await page.get_by_label("Key", exact=True).fill(key)
    await page.get_by_role("button", name="Use it").click()
    await expect(
        page.get_by_role("link", name="clerk").or_(page.get_by_text("clerk"))
    ).to_be_visible()
    await expect(page.get_by_text("This server needs an API key")).to_be_hidden()
    assert await page.evaluate("localStorage.getItem('bottega.key')") is None
    console.provoked.add("401 (Unauthorized)")


async def test_a_run_is_shown_live_to_its_end_and_played_back(console: Console) -> None:
    go_on = asyncio.Event()
    console.model.script(calls(("calculator", {"expression": "6*7"})), gated(go_on, text(HOSTILE)))
    run_id = await console.run({"type": "builtin", "name": "calculator"})
    page = await console.open(f"runs/{run_id}")
    head = page.locator(".head")
    await expect(head.get_by_text("running")).to_be_visible()
    await expect(page.get_by_role("tab", name="Tools 1")).to_be_visible()
    await page.get_by_role("tab", name="Tools 1").click()
    await expect(page.get_by_text("6*7")).to_be_visible()
    go_on.set()
    await expect(head.get_by_text("completed")).to_be_visible()
    await expect(page.get_by_text(HOSTILE).last).to_be_visible()
    await expect(page).to_have_title("● clerk: ? · Bottega")
    for name in ("Graph", "What flowed", "Events", "Timeline"):
        await page.get_by_role("tab", name=name).click()
    await page.get_by_label("Position: event").fill("4")
    await expect(head.get_by_text("running")).to_be_visible()
    await page.get_by_role("button", name="Show the end").click()
    await expect(head.get_by_text("completed")).to_be_visible()


async def test_a_lost_connection_goes_on_where_it_broke_off(console: Console) -> None:
    go_on = asyncio.Event()
    console.model.script(
        calls(("calculator", {"expression": "6*7"})), gated(go_on, text("It is 42."))
    )
    opened: list[WebSocketRoute] = []

    def between(socket: WebSocketRoute) -> None:
        opened.append(socket)
        socket.connect_to_server()

    await console.page.route_web_socket("**/ws?*", between)
    run_id = await console.run({"type": "builtin", "name": "calculator"})
    page = await console.open(f"runs/{run_id}")
    await expect(page.get_by_role("tab", name="Tools 1")).to_be_visible()
    await expect(page.get_by_text("Live", exact=True)).to_be_visible()
    await opened[0].close(code=1001)
    go_on.set()
    await expect(page.locator(".head").get_by_text("completed")).to_be_visible()
    await expect(page.get_by_text("It is 42.").last).to_be_visible()
    places = [int(socket.url.rpartition("after=")[2]) for socket in opened]
    assert places[0] == 0
    assert len(places) == 2
    assert places[1] > 0


async def test_a_person_approves_and_answers_in_the_run(console: Console) -> None:
    asked = calls(("calculator", {"expression": "9+9"}), ("ask_user", {"question": "Which one?"}))
    console.model.script(asked, text("All done."))
    run_id = await console.run(CALCULATOR, ASK)
    page = await console.open(f"runs/{run_id}")
    await expect(page.locator(".head").get_by_text("waiting")).to_be_visible()
    await expect(page.locator(".task-row").get_by_text("waiting", exact=True)).to_be_visible()
    await page.get_by_role("button", name="Edit arguments").click()
    await page.get_by_label("Expression").fill("1+1")
    await page.get_by_role("button", name="Cancel the changes").click()
    await expect(page.get_by_text("9+9", exact=True)).to_be_visible()
    await page.get_by_role("button", name="Edit arguments").click()
    await page.get_by_label("Expression").fill("20+1")
    await page.get_by_role("button", name="Approve").click()
    await expect(page.get_by_role("button", name="Approve")).to_be_hidden()  # it moves the others
    await expect(page.locator(".head").get_by_text("waiting")).to_be_visible()
    await page.get_by_label("Answer").fill("the red one")
    await page.get_by_role("button", name="Send").click()
    await expect(page.locator(".head").get_by_text("completed")).to_be_visible()
    await expect(page.get_by_text("All done.").last).to_be_visible()
    said = console.model.requests[-1]["messages"]
    assert "21" in str(said)
    assert "the red one" in str(said)


@pytest.mark.deep
async def test_a_person_denies_on_the_page_of_decisions(console: Console) -> None:
    console.model.script(calls(("calculator", {"expression": "9+9"})), text("Then not."))
    run_id = await console.run(CALCULATOR)
    page = await console.open("approvals")
    await page.get_by_label("Comment").fill("too dear")
    await page.get_by_role("button", name="Deny").click()
    await page.get_by_role("button", name="Deny now").click()
    await expect(page.get_by_text("Nobody waits for you.")).to_be_visible()
    await until(lambda: _status(console, run_id), lambda status: status == "completed")
    assert "too dear" in str(console.model.requests[-1]["messages"])


@pytest.mark.deep
async def test_a_conversation_goes_on_over_runs_and_decisions(console: Console) -> None:
    console.model.script(
        text("Hello Ada."), calls(("calculator", {"expression": "9+9"})), text("It is 18.")
    )
    await console.define(CALCULATOR)
    page = await _begin(console, "I am Ada.")
    await expect(page.get_by_text("Hello Ada.")).to_be_visible()
    await expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    await page.get_by_label("Message").fill("What is 9+9?")
    await page.get_by_role("button", name="Send").click()
    await page.get_by_role("button", name="Approve").click()
    await expect(page.get_by_text("It is 18.")).to_be_visible()
    await expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    assert "I am Ada." in str(console.model.requests[-1]["messages"])
    await page.reload()
    for said in ("I am Ada.", "What is 9+9?", "It is 18."):
        await expect(page.get_by_text(said)).to_have_count(1)
    await page.get_by_text("step").click()
    await expect(page.get_by_text("18", exact=True)).to_be_visible()


@pytest.mark.deep
async def test_an_answer_is_shown_though_the_page_learnt_late_of_the_session(
    console: Console,
) -> None:
    go_on, sent = asyncio.Event(), asyncio.Event()
    console.model.script(gated(go_on, text("Hello Ada.")))
    await console.define()

    async def late(route: Route) -> None:
        await sent.wait()
        await route.continue_()

    await console.page.route("**/v1/runs?session_id=*", late)
    page = await _begin(console, "I am Ada.")
    await console.model.received()
    sent.set()
    await expect(page.locator(".said.user time")).to_be_visible()  # read from the session
    go_on.set()
    await expect(page.get_by_text("Hello Ada.")).to_be_visible()
    await expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    await expect(page.get_by_text("Hello Ada.")).to_be_visible()


@pytest.mark.deep
async def test_a_message_may_be_sent_while_the_last_answer_is_read_again(
    console: Console,
) -> None:
    go_on, read = asyncio.Event(), asyncio.Event()
    console.model.script(text("Hello Ada."), gated(go_on, text("Once more, hello.")))
    await console.define()

    async def late(route: Route) -> None:
        await read.wait()
        await route.continue_()

    await console.page.route("**/messages?*", late)
    page = await _begin(console, "I am Ada.")
    await expect(page.get_by_text("Hello Ada.")).to_be_visible()
    await expect(page.locator(".head").get_by_text("completed")).to_be_visible()
    await page.get_by_label("Message").fill("Again.")
    await page.keyboard.press("Enter")
    await console.model.received(2)
    read.set()
    await expect(page.locator(".said.user time").first).to_be_visible()  # the first was read again
    go_on.set()
    await expect(page.get_by_text("Once more, hello.")).to_be_visible()
    await expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    for said in ("I am Ada.", "Hello Ada.", "Again.", "Once more, hello."):
        await expect(page.get_by_text(said)).to_have_count(1)


async def test_a_page_that_is_opened_in_the_middle_shows_the_text_that_comes(
    console: Console,
) -> None:
    go_on = asyncio.Event()
    console.model.script(gated_within(go_on, text("Hello from the middle of it."), events=3))
    await console.define()
    page = await _begin(console, "I am Ada.")
    await console.model.received()
    await page.reload()
    await expect(page.get_by_text("I am Ada.")).to_have_count(1)
    await expect(page.get_by_text("thinks")).to_be_visible()
    await expect(page.get_by_text("Hello")).to_be_visible()
    go_on.set()
    await expect(page.get_by_text("Hello from the middle of it.")).to_have_count(1)
    await expect(page.get_by_text("thinks")).to_be_hidden()
    await expect(page.get_by_text("Hello from the middle of it.")).to_have_count(1)


async def test_a_message_reaches_a_run_under_way(console: Console) -> None:
    go_on = asyncio.Event()
    console.model.script(gated(go_on, text("A red one.")), text("A blue one."))
    await console.define()
    page = await _begin(console, "Find a lamp.")
    await expect(page.get_by_role("button", name="Stop")).to_be_visible()
    await console.model.received()  # else its first call has the next message
    await page.get_by_label("Message").fill("Blue, please.")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("not read yet")).to_be_visible()
    go_on.set()
    await expect(page.get_by_text("A blue one.")).to_be_visible()
    await expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    for said in ("Find a lamp.", "Blue, please.", "A blue one."):
        await expect(page.get_by_text(said)).to_have_count(1)
    assert "Blue, please." in str(console.model.requests[-1]["messages"])


@pytest.mark.deep
async def test_a_run_is_cancelled_and_run_again_by_keyboard(console: Console) -> None:
    never = asyncio.Event()
    console.model.script(gated(never, text("late")), text("again"))
    await console.run()
    page = await console.open("runs")
    await page.get_by_role("link", name="?", exact=True).focus()
    await page.keyboard.press("Enter")
    await page.get_by_role("button", name="Cancel run").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator(".head").get_by_text("cancelled")).to_be_visible()
    await page.get_by_role("button", name="Retry", exact=True).focus()
    await page.keyboard.press("Enter")
    await expect(page.locator(".head").get_by_text("completed")).to_be_visible()
    await expect(page.get_by_text("retry of")).to_be_visible()
    await page.get_by_role("tab", name="Timeline").focus()
    await page.keyboard.press("ArrowRight")
    await expect(page.get_by_role("tab", name="Graph")).to_be_focused()
    await expect(page.get_by_role("tab", name="Graph")).to_have_attribute("aria-selected", "true")
    never.set()


async def test_no_page_has_a_violation_of_accessibility(console: Console) -> None:
    if not is_installed():
        pytest.skip("axe-core is not installed: run npm ci --prefix tests/contract/node")
    console.model.script(
        calls(("calculator", {"expression": "9+9"}), ("ask_user", {"question": "Which one?"}))
    )
    run_id = await console.run(CALCULATOR, ASK)
    await until(lambda: _status(console, run_id), lambda status: status == "waiting")
    page = console.page
    shown = {
        "": page.get_by_text("waiting", exact=True),
        "runs": page.get_by_role("link", name="?", exact=True),
        "approvals": page.get_by_role("button", name="Approve"),
        "chat": page.get_by_label("Agent"),
        "nowhere": page.get_by_role("heading", name="There is no such page"),
        f"runs/{run_id}": page.get_by_role("button", name="Approve"),
    }
    for path, expected in shown.items():
        await console.open(path)
        await expect(expected).to_be_visible()
        assert await violations(page) == [], path
    for name in ("Graph", "What flowed", "Events"):
        await page.get_by_role("tab", name=name).click()
        assert await violations(page) == [], name


async def _begin(console: Console, question: str) -> Page:
    """Begin a conversation with the clerk."""
    page = await console.open("chat")
    await page.get_by_label("Agent").select_option("clerk")
    await page.get_by_role("button", name="Start").click()
    await page.get_by_label("Message").fill(question)
    await page.keyboard.press("Enter")
    return page


async def _status(console: Console, run_id: str) -> str:
    return str((await console.server.client.get(f"/v1/runs/{run_id}")).json()["status"])
