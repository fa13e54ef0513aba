"""Tasks of people with the console alone; the tests count clicks, keys and texts."""

from dataclasses import dataclass

import pytest
from playwright.async_api import Locator, Page, expect

from tests.console.conftest import Console
from tests.console.test_approvals import REFUND, decided, takes_keys, waiting
from tests.fake_model import http_error, text


@dataclass(slots=True)
class Hand:
    """Person who acts on a page; each act is counted."""

    page: Page
    acts: int = 0

    async def click(self, what: Locator) -> None:
        self.acts += 1
        await what.click()

    async def press(self, key: str) -> None:
        self.acts += 1
        await self.page.keyboard.press(key)

    async def enter(self, field: Locator, said: str) -> None:
        self.acts += 1
        await field.fill(said)
        await field.press("Enter")


@pytest.mark.deep
async def test_why_runs_fail_is_on_the_first_page(console: Console) -> None:
    """Calls that an open breaker holds back have the same cause as those that were sent."""
    agent = {"name": "clerk", "system_message": "You help.", "model_patience_s": 1}
    client = console.server.client
    (await client.post("/v1/agents", json=agent)).raise_for_status()
    console.model.decide = lambda _: http_error(500)
    for number in range(6):
        run = {"agent": "clerk", "input": f"Question {number}?"}
        done = (await client.post("/v1/runs?wait=30", json=run)).json()
        assert done["status"] == "failed"
        assert "HTTP 500" in done["error"]["message"]
    hand = Hand(await console.open())
    cause = hand.page.get_by_role("listitem").filter(has_text="model answered HTTP 500")
    await expect(cause).to_contain_text("6 runs since")
    await hand.click(cause.get_by_role("link"))
    await expect(hand.page.locator(".diagnosis")).to_contain_text("HTTP 500")
    await expect(hand.page.locator(".diagnosis")).to_contain_text("5 other runs failed alike")
    assert hand.acts == 1


@pytest.mark.deep
async def test_three_wrong_approvals_among_23_are_denied(console: Console) -> None:
    await console.define(REFUND)
    console.model.decide = lambda _: text("done")
    wrong = {"u4": ("A-4", 990), "u11": ("A-12", 111), "u17": ("A-16", 116)}
    for number in range(23):
        user, order, amount = f"u{number}", f"A-{number}", 100 + number
        asked = f"Refund {order}, I paid {amount}."
        order, amount = wrong.get(user, (order, amount))
        await waiting(console, asked, order, amount, user)
    hand = Hand(await console.open("approvals"))
    for _ in range(23):
        await takes_keys(hand.page)
        heading = hand.page.get_by_role("heading", name="Asked by")
        user = (await heading.inner_text()).removeprefix("Asked by ")
        facts = await hand.page.locator(".fact").all_inner_texts()
        differs = any("is not in the user's messages" in each for each in facts)
        await hand.press("d" if differs else "a")
        if differs:
            await hand.press("Enter")  # without a comment
        elif user in ("u12", "u16"):  # another call names the same order
            await hand.click(hand.page.get_by_role("button", name="Approve it"))
        await expect(hand.page.get_by_role("heading", name=f"Asked by {user}")).to_have_count(0)
    await expect(hand.page.get_by_text("Nobody waits for you.")).to_be_visible()
    await expect(hand.page.get_by_role("listitem").filter(has_text=": approved")).to_have_count(9)
    await expect(hand.page.get_by_role("listitem").filter(has_text=": denied")).to_have_count(1)
    assert {user for user, decision in await decided(console) if decision == "deny"} == set(wrong)
    assert hand.acts == 28


@pytest.mark.deep
async def test_twenty_answers_are_rated_by_keyboard(console: Console) -> None:
    """Check that a good one takes a key, and a bad one two, as its reason is asked for."""
    await console.define()
    client = console.server.client
    console.model.decide = lambda _: text("An answer.")
    for number in range(20):
        run = {"agent": "clerk", "input": f"Question {number}?"}
        (await client.post("/v1/runs?wait=30", json=run)).raise_for_status()
    hand = Hand(await console.open("ratings"))
    for number in range(20):
        await expect(hand.page.get_by_role("status")).to_contain_text(f"{number + 1} of 20")
        await hand.press("b" if number % 5 == 0 else "g")
        if number % 5 == 0:
            await hand.press("Enter")  # without a comment
        await expect(hand.page.get_by_role("status")).to_contain_text(f"{number + 1} rated")
    found = (await client.get("/v1/runs?rated=true&limit=100")).json()["items"]
    outcomes = [each["outcome"]["value"] for each in found]
    assert (outcomes.count("FAILURE"), outcomes.count("SUCCESS")) == (4, 16)
    assert hand.acts == 24


async def test_a_customer_s_conversation_is_found_with_two_acts(console: Console) -> None:
    await console.define()
    console.model.decide = lambda _: text("I look into it.")
    for user, asked in (("ada", "My REFUND is missing"), ("bob", "A refund?"), ("eve", "Hello")):
        run = {"agent": "clerk", "input": asked, "user": user, "session_id": f"chat-{user}"}
        await console.server.client.post("/v1/runs?wait=30", json=run)
    hand = Hand(await console.open("chat"))
    await hand.enter(hand.page.get_by_label("Name, words or date"), "ada refund")
    await hand.click(hand.page.get_by_role("link", name="My REFUND is missing"))
    await expect(hand.page.get_by_text("I look into it.")).to_be_visible()
    assert hand.acts == 2
