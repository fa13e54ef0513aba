"""The list of conversations in a real browser: found by words, agent, user and state."""

from playwright.async_api import expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.fake_model import http_error, text

SAID = {"ada": "My refund is missing", "bob": "Where is my parcel?", "eve": "A refund, again?"}


async def test_a_customer_s_conversation_is_found_and_goes_on(console: Console) -> None:
    await console.define()
    client = console.server.client
    for user, asked in SAID.items():
        console.model.script(http_error(400) if user == "eve" else text(f"Hello {user}."))
        run = {"agent": "clerk", "input": asked, "user": user, "session_id": f"chat-{user}"}
        await client.post("/v1/runs?wait=30", json=run)
    page = await console.open("chat")
    panel = page.locator(".panel").filter(has=page.get_by_role("heading", name="Conversations"))
    await expect(panel.get_by_role("listitem")).to_have_count(3)
    await expect(panel.get_by_role("listitem").first).to_contain_text("A refund, again?")
    assert await violations(page) == []
    await page.set_viewport_size({"width": 320, "height": 800})
    assert await page.evaluate("document.documentElement.scrollWidth") <= 320
    await page.set_viewport_size({"width": 1280, "height": 900})
    await page.get_by_label("Title or question contains").fill("Refund")
    await page.get_by_label("Title or question contains").press("Enter")
    await expect(panel.get_by_role("listitem")).to_have_count(2)
    await page.get_by_label("State").select_option("failed")
    await expect(panel.get_by_role("listitem")).to_have_count(1)
    await expect(panel.get_by_role("listitem")).to_contain_text("clerk · eve")
    await page.get_by_label("State").select_option("")
    await page.get_by_label("User").fill("ada")
    await page.get_by_label("User").press("Enter")
    found = panel.get_by_role("listitem")
    await expect(found).to_have_count(1)
    await expect(found).to_contain_text("Hello ada.")
    await found.get_by_role("link").click()
    await expect(page.get_by_text("My refund is missing")).to_be_visible()
