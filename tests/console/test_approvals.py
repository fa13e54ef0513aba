"""Approvals in a real browser, worked one after the other by keyboard."""

import re
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.console.held import hold
from tests.fake_model import calls, text
from tests.waiting import until

REFUND = {
    "type": "http",
    "name": "refund",
    "description": "Pay back an order.",
    "method": "POST",
    "url": "https://shop.example.com/refunds",
    "parameters": {
        "type": "object",
        "properties": {"order": {"type": "string"}, "amount": {"type": "number"}},
    },
    "approval": "always",
}


async def waiting(console: Console, question: str, order: str, amount: float, user: str) -> str:
    """Start a run that asks to pay an order back; return its id once it waits."""
    console.model.script(calls(("refund", {"order": order, "amount": amount})))
    client = console.server.client
    run = {"agent": "clerk", "input": question, "user": user}
    run_id = (await client.post("/v1/runs", json=run)).json()["id"]

    async def status() -> Any:
        return (await client.get(f"/v1/runs/{run_id}")).json()["status"]

    await until(status, lambda seen: seen == "waiting")
    return str(run_id)


async def decided(console: Console) -> set[tuple[str, str]]:
    """Return user and decision of what was decided."""
    found = (await console.server.client.get("/v1/interrupts?status=resolved")).json()["items"]
    return {(each["user"], each["resolution"]["decision"]) for each in found}


async def test_those_that_differ_are_found_and_denied_by_keyboard(console: Console) -> None:
    """Three of six are wrong: another amount, another customer's, and one that is repeated."""
    await console.define(REFUND)
    console.model.decide = lambda _: text("done")
    await waiting(console, "Refund order A-1, I paid 21.0.", "A-1", 21, "ada")
    await waiting(console, "Refund order A-2, I paid 22.", "A-2", 220, "bob")
    await waiting(console, "Refund order A-3, I paid 23.", "A-4", 23, "eve")
    await waiting(console, "Refund order A-5, I paid 24.", "A-5", 24, "dan")
    await waiting(console, "Refund order A-4, I paid 25.", "A-4", 25, "fay")
    await waiting(console, "Again: order A-1, I paid 21.", "A-1", 21, "ada")
    page = await console.open("approvals")
    chosen = page.locator(".inbox [aria-current=true]")
    seen = set()
    for _ in range(6):
        user = (await page.locator(".inbox .chosen p").inner_text()).split(" ·")[0]
        await expect(page.get_by_role("heading", name=f"Asked by {user}")).to_be_visible()
        await expect(page.locator(".inbox .said")).to_have_count(1)
        seen.add((user, *await page.locator(".fact").all_inner_texts()))
        await page.keyboard.press("j")
    signs = page.locator(".inbox li .status")
    await expect(signs).to_have_text(["1 warning"] * 2 + ["2 warnings"] + ["1 warning"] * 2)
    await expect(page.locator(".inbox li").filter(has_text="dan").locator(".status")).to_have_count(
        0
    )
    assert seen == {
        ("ada", "the same call for ada waits, too"),
        ("bob", "amount 220 is not in the user's messages"),
        (
            "eve",
            "order A-4 is not in the user's messages",
            "A-4 is in a call for fay, too",
        ),
        ("fay", "A-4 is in a call for eve, too"),
        ("dan",),
    }
    await expect(chosen).to_have_count(1)


@pytest.mark.deep
async def test_keys_go_on_decide_and_edit(console: Console) -> None:
    await console.define(REFUND)
    console.model.decide = lambda _: text("done")
    for number, user in enumerate(("ada", "bob", "eve")):
        await waiting(console, f"Refund A-{number}, I paid 5.", f"A-{number}", 5, user)
    page = await console.open("approvals")
    await expect(page.get_by_role("button", name="Approve")).to_be_visible()
    assert await violations(page) == []
    await page.set_viewport_size({"width": 320, "height": 800})
    assert await page.evaluate("document.documentElement.scrollWidth") <= 320
    await page.set_viewport_size({"width": 1280, "height": 900})
    users = [await current(page)]
    await page.keyboard.press("j")
    users.append(await current(page, but=users))
    await page.keyboard.press("k")
    await expect(page.locator(".inbox .chosen")).to_contain_text(users[0])
    for place in (2, 0):  # anywhere in a row
        await page.locator(".inbox li").nth(place).click()
        await expect(page.locator(".inbox li").nth(place)).to_have_class("chosen")
    await takes_keys(page)
    await page.keyboard.press("a")
    await page.keyboard.press("a")  # an impatient one decides nothing more
    await expect(page.locator(".inbox .chosen")).to_contain_text(users[1])
    await takes_keys(page)
    comment = page.get_by_label("Comment")
    await page.keyboard.press("d")
    await expect(comment).to_be_focused()
    await page.keyboard.press("Escape")  # the way back
    await page.keyboard.press("c")
    await page.keyboard.type("paid already")
    await page.keyboard.press("Enter")  # it stays, and decides nothing
    await expect(comment).not_to_be_focused()
    await expect(page.get_by_text("The comment goes with your decision.")).to_be_visible()
    await page.keyboard.press("d")
    await expect(page.get_by_text("Enter denies the call")).to_be_visible()
    assert len(await decided(console)) == 1
    await page.keyboard.press("Enter")
    await until(lambda: decided(console), lambda found: len(found) == 2)
    client = console.server.client
    items = (await client.get("/v1/interrupts?status=resolved&order=desc")).json()["items"]
    assert {each["resolution"].get("comment") for each in items} == {None, "paid already"}
    last = await current(page, but=users)
    await takes_keys(page)
    await page.keyboard.press("e")
    edited = page.get_by_label("Order")
    await expect(edited).to_be_focused()
    await page.get_by_label("Amount").fill("4")
    await edited.press("End")
    await edited.press("a")  # a letter of the text, and no decision
    await page.locator("main").focus()
    await page.keyboard.press("e")  # what was typed stays
    await expect(edited).to_be_focused()
    await expect(edited).to_have_value("A-2a")
    await expect(page.get_by_label("Amount")).to_have_value("4")
    found = await decided(console)
    assert found == {(users[0], "approve"), (users[1], "deny")}
    assert last not in users


@pytest.mark.deep
async def test_what_a_colleague_decided_leaves_no_other_call_to_the_keys(console: Console) -> None:
    await console.define(REFUND)
    console.model.decide = lambda _: text("done")
    runs = [
        await waiting(console, f"Refund A-{number}, I paid 5.", f"A-{number}", 5, user)
        for number, user in enumerate(("ada", "bob", "eve"))
    ]
    page = await console.open("approvals")
    await takes_keys(page)
    await page.keyboard.press("j")
    await expect(page.get_by_role("heading", name="Asked by bob")).to_be_visible()
    await takes_keys(page)
    client = console.server.client
    found = (await client.get(f"/v1/interrupts?run_id={runs[1]}")).json()["items"][0]["id"]
    await client.post(f"/v1/interrupts/{found}/resolve", json={"decision": "deny"})
    await expect(page.get_by_text("This was decided elsewhere")).to_be_visible()
    await expect(page.get_by_role("heading", name="Asked by bob")).to_be_visible()
    await expect(page.get_by_role("button", name="Approve")).to_have_count(0)
    await page.keyboard.press("a")
    await page.keyboard.press("j")  # to the one that follows it
    await expect(page.get_by_role("heading", name="Asked by eve")).to_be_visible()
    assert await decided(console) == {("bob", "deny")}


@pytest.mark.deep
async def test_keys_wait_for_the_facts_and_the_focus_follows(console: Console) -> None:
    await console.define(REFUND)
    console.model.decide = lambda _: text("done")
    for number, user in enumerate(("ada", "bob")):
        await waiting(console, f"Refund A-{number}, I paid 5.", f"A-{number}", 5, user)
    held = await hold(console.page, "**/v1/runs/*/messages?*")
    page = await console.open("approvals")
    approve = page.get_by_role("button", name="Approve")
    await expect(approve).to_be_visible()
    await page.wait_for_timeout(600)  # longer than what another item takes until keys count
    assert await approve.get_attribute("aria-keyshortcuts") is None
    await page.keyboard.press("a")
    await expect(approve).to_be_disabled()
    await expect(page.get_by_text("Approve waits until what was said is checked.")).to_be_visible()
    await held.let_go()
    await takes_keys(page)
    await approve.click()
    await expect(page.get_by_role("heading", name="Asked by bob")).to_be_focused()
    assert await decided(console) == {("ada", "approve")}


@pytest.mark.deep
async def test_a_decision_that_comes_late_moves_nothing(console: Console) -> None:
    await console.define(REFUND)
    console.model.decide = lambda _: text("done")
    for number, user in enumerate(("ada", "bob", "eve")):
        await waiting(console, f"Refund A-{number}, I paid 5.", f"A-{number}", 5, user)
    page = await console.open("approvals")
    await takes_keys(page)
    held = await hold(page, "**/resolve", method="POST")
    await page.keyboard.press("a")
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await expect(page.get_by_role("heading", name="Asked by eve")).to_be_visible()
    await page.get_by_label("Comment").fill("begun meanwhile")
    await held.let_go()
    await expect(page.locator(".inbox li")).to_have_count(2)
    await expect(page.get_by_label("Comment")).to_have_value("begun meanwhile")
    await page.get_by_role("link", name="Home").click()
    await expect(page.locator(".inbox")).to_have_count(0)


async def test_earlier_turns_of_a_session_count(console: Console) -> None:
    await console.define(REFUND)
    console.model.script(text("Which amount?"))
    run = {"agent": "clerk", "user": "ada", "session_id": "s"}
    client = console.server.client
    await client.post("/v1/runs?wait=30", json={**run, "input": "Refund A-1, I paid 21."})
    console.model.script(calls(("refund", {"order": "A-1", "amount": 21})))
    await client.post("/v1/runs", json={**run, "input": "Do it, please."})
    page = await console.open("approvals")
    await expect(page.locator(".inbox .said")).to_have_count(3)
    await takes_keys(page)
    await expect(page.locator(".fact")).to_have_count(0)
    await page.get_by_role("button", name="Deny").click()
    await expect(page.get_by_label("Comment")).to_be_focused()
    await page.keyboard.press("Escape")
    await page.get_by_role("button", name="Deny", exact=True).click()
    await page.get_by_role("button", name="Deny now").click()
    await expect(page.get_by_text("Nobody waits for you.")).to_be_visible()


async def test_what_was_looked_up_stands_beside_the_call(console: Console) -> None:
    """Check that the run's page warns too; an amount that was looked up is no grave doubt."""
    order = {"type": "client", "name": "order", "description": "Reads an order."}
    await console.define(REFUND, {**order, "parameters": {"type": "object"}})
    client = console.server.client
    console.model.script(calls(("order", {"id": "A-1"})))
    body = {"agent": "clerk", "input": "Refund A-1, please.", "user": "ada"}
    run = (await client.post("/v1/runs?wait=30", json=body)).json()["id"]
    asked = (await client.get(f"/v1/interrupts?run_id={run}")).json()["items"][0]["id"]
    console.model.script(calls(("refund", {"order": "A-1", "amount": 79})))
    found = {"result": {"customer": "Ada Byron", "price": 79.0}}
    (await client.post(f"/v1/interrupts/{asked}/resolve", json=found)).raise_for_status()
    missing = "amount 79 is not in the user's messages, but in the result of order"
    page = await console.open("approvals")
    looked_up = page.get_by_role("group", name="Result of order")
    await expect(looked_up).to_contain_text("A-1")
    await expect(looked_up.locator("dd")).to_have_text(["79", "Ada Byron"])
    await expect(page.locator(".fact")).to_have_text([missing])
    assert await violations(page) == []
    await console.open(f"runs/{run}")
    await expect(page.locator(".fact")).to_have_text([missing])
    await page.get_by_role("button", name="Approve").click()
    await expect(page.get_by_role("button", name="Approve")).to_be_hidden()
    await expect(page.get_by_role("dialog")).to_have_count(0)


async def test_only_the_runs_user_may_answer_what_is_asked_of_them(console: Console) -> None:
    page = await console.open("interrupts")  # the API's word leads there, too
    asked: dict[str, Any] = {
        "id": "1",
        "kind": "question",
        "tool": "own",
        "question": "All right?",
        "who": "user",
        "user": "ada",
        "run_id": "r",
        "session_id": None,
        "status": "pending",
        "arguments": {},
        "created_at": "2026-01-01T00:00:00Z",
        "expires_at": None,
    }
    page_of = {"items": [asked], "next_cursor": None}
    await page.route("**/v1/interrupts?*", lambda route: route.fulfill(json=page_of))
    nothing: dict[str, Any] = {"items": [], "next_cursor": None}
    await page.route("**/v1/runs/r/*", lambda route: route.fulfill(json=nothing))
    await page.reload()
    await expect(page.get_by_text("Only the run's user may answer this.")).to_be_visible()
    await expect(page.get_by_role("button", name="Send")).to_have_count(0)


async def takes_keys(page: Page) -> None:
    """Wait until keys decide on what is shown."""
    approve = page.get_by_role("button", name="Approve")
    await expect(approve).to_have_attribute("aria-keyshortcuts", "a")


async def current(page: Page, but: list[str] = []) -> str:  # noqa: B006 (it stays as it is)
    """Return the user of the chosen one, once it is none of ``but``."""

    async def user() -> str:
        return (await page.locator(".inbox .chosen p").inner_text()).split(" ·")[0]

    return await until(user, lambda name: name not in but)


@pytest.mark.deep
async def test_a_large_amount_is_confirmed_in_a_dialog(console: Console) -> None:
    rule = {"always": True, "confirm_above": {"arguments.amount": 1000}}
    await console.define({**REFUND, "approval": rule})
    run = await waiting(console, "Refund A-1, I paid 5000.", "A-1", 5000, "ada")
    asked = (await console.server.client.get(f"/v1/interrupts?run_id={run}")).json()["items"]
    assert asked[0]["confirm_above"] == {"arguments.amount": 1000}
    page = await console.open("approvals")
    await takes_keys(page)
    await page.keyboard.press("a")
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("amount 5000 is above 1000")
    await expect(dialog.get_by_role("button", name="Back")).to_be_focused()
    assert await violations(page) == []
    await page.keyboard.press("Enter")
    await expect(dialog).to_have_count(0)
    await page.get_by_role("button", name="Approve").click()
    await dialog.get_by_role("button", name="Approve it").click()
    await expect(page.get_by_text("Nobody waits for you.")).to_be_visible()


@pytest.mark.deep
async def test_calls_for_programs_have_their_own_tab(console: Console) -> None:
    tool = {"type": "client", "name": "locate", "description": "Says where the user is."}
    await console.define(REFUND, {**tool, "parameters": {"type": "object"}})
    await waiting(console, "Refund A-1, I paid 20.", "A-1", 20, "ada")
    console.model.script(calls(("locate", {})))
    body = {"agent": "clerk", "input": "Where?"}
    assert (await console.server.client.post("/v1/runs?wait=30", json=body)).status_code == 202
    page = await console.open("approvals")
    await expect(page.locator(".inbox li")).to_have_count(1)
    await expect(page.locator(".inbox li")).to_contain_text("refund")
    await page.get_by_role("tab", name="For people 1").press("ArrowRight")
    await expect(page.locator(".inbox li")).to_contain_text("locate")
    assert await violations(page) == []
    for path in ("", "agents"):
        await console.open(path)
        await expect(page).to_have_title(re.compile(r"^\(2\) "))


@pytest.mark.deep
async def test_a_doubtful_amount_is_confirmed_and_all_decisions_are_listed(
    console: Console,
) -> None:
    await console.define(REFUND)
    console.model.decide = lambda _: text("done")
    await waiting(console, "Refund A-1, I paid 21.", "A-1", 210, "ada")
    await waiting(console, "Refund A-2, I paid 22.", "A-2", 22, "bob")
    await waiting(console, "Refund A-3, I paid 23.", "A-3", 23, "eve")
    last = (await console.server.client.get("/v1/interrupts?user=eve")).json()["items"][0]["id"]
    newest = f"/v1/interrupts/{last}/resolve"  # it is decided first
    await console.server.client.post(newest, json={"decision": "deny"})
    page = await console.open("approvals")
    await expect(page.get_by_text("amount 210 is not in the user's messages")).to_be_visible()
    await takes_keys(page)
    await page.keyboard.press("a")
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("clerk calls refund at once")
    for shown in ("order", "A-1", "210", "The user wrote:", "Refund A-1, I paid 21."):
        await expect(dialog).to_contain_text(shown)
    assert await violations(page) == []
    await page.keyboard.press("Enter")  # the way back has the focus
    await expect(dialog).to_have_count(0)
    await page.get_by_label("Comment").fill("21 was paid.")
    await page.get_by_role("button", name="Deny").click()
    await page.get_by_role("button", name="Deny now").click()
    await expect(page.get_by_role("heading", name="Asked by bob")).to_be_visible()
    answered = page.get_by_role("status").filter(has_text="After your decision on refund for ada")
    await expect(answered).to_contain_text("clerk answers: done")
    await takes_keys(page)
    await page.keyboard.press("a")
    await expect(page.get_by_text("Nobody waits for you.")).to_be_visible()
    badge = page.get_by_role("navigation").locator(".badge")
    await expect(badge).to_have_count(0, timeout=5000)  # before it is read again by itself
    await page.get_by_role("tab", name="Decided").click()
    listed = page.get_by_role("main").get_by_role("listitem")
    await expect(listed).to_have_count(3)
    for place, user in enumerate(("bob", "ada", "eve")):
        await expect(listed.nth(place)).to_contain_text(f"for {user}:")
    assert await violations(page) == []
    await page.get_by_label("User").fill("ada")
    await page.get_by_label("User").press("Enter")
    await expect(listed).to_have_count(1)
    await expect(listed).to_contain_text("refund for ada: denied")
    await expect(listed).to_contain_text("by a test's")
    await expect(listed).to_contain_text("Why: 21 was paid.")
    await listed.get_by_role("link", name="the run").click()
    sentence = page.locator(".diagnosis")
    await expect(sentence).to_contain_text(re.compile("refund was denied by .*: .21 was paid"))
    await expect(sentence).not_to_contain_text("failed")
