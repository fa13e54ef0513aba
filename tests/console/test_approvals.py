"""Approvals in a real browser, worked one after the other by keyboard."""

from typing import Any

from playwright.async_api import Page, expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
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
MENTIONS = [
    # a text, a value, and whether the text has it
    ("I paid 20 EUR.", 20, True),
    ("I paid 20.00 EUR.", 20, True),
    ("I paid 20,50 EUR", 20.5, True),
    ("I paid 1,234.50", 1234.5, True),
    ("I paid 1 234,50", 1234.5, True),
    ("I paid 20.50 EUR", 20, False),
    ("I paid 120 EUR", 20, False),
    ("I paid 20 EUR.", 200, False),
    ("order a-17, please", "A-17", True),
    ("order A-171", "A-17", False),
    ("", "A-17", False),
]


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
    await waiting(console, "Refund order A-1, I paid 21.", "A-1", 21, "ada")
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
    assert seen == {
        ("ada", "the same call for ada waits, too"),
        ("bob", "amount 220 is not in the conversation"),
        ("eve", "order A-4 is not in the conversation", "A-4 is in a call for fay, too"),
        ("fay", "A-4 is in a call for eve, too"),
        ("dan",),
    }
    await expect(chosen).to_have_count(1)


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
    await page.keyboard.press("a")
    await expect(page.locator(".inbox .chosen")).to_contain_text(users[1])
    await page.keyboard.press("d")
    await until(lambda: decided(console), lambda found: len(found) == 2)
    last = await current(page, but=users)
    await page.keyboard.press("e")
    await expect(page.get_by_label("Arguments")).to_be_focused()
    await page.get_by_label("Arguments").press("a")  # a letter of the text, and no decision
    await expect(page.get_by_label("Arguments")).to_be_visible()
    found = await decided(console)
    assert found == {(users[0], "approve"), (users[1], "deny")}
    assert last not in users


async def current(page: Page, but: list[str] = []) -> str:  # noqa: B006 (it stays as it is)
    """Return the user of the chosen one, once it is none of ``but``."""

    async def user() -> str:
        return (await page.locator(".inbox .chosen p").inner_text()).split(" ·")[0]

    return await until(user, lambda name: name not in but)


async def test_a_value_is_found_in_the_forms_that_people_write(console: Console) -> None:
    page = await console.open("approvals")
    for said, value, has in MENTIONS:
        found = await page.evaluate(
            "async ([said, value]) => (await import('./js/parts/approval_facts.js'))"
            ".mentions(said, value)",
            [said, value],
        )
        assert found is has, (said, value)
