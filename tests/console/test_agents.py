"""The page Agents in a real browser: make, change, compare, try."""

from typing import Any

from playwright.async_api import expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.fake_model import text


async def test_an_agent_is_made_changed_compared_and_tried(console: Console) -> None:
    console.model.script(text("Rome is the capital."))
    page = await console.open("agents")
    await page.get_by_role("link", name="New agent").click()
    await page.get_by_label("Name").fill("guide")
    await page.get_by_label("System Message").fill("You know cities.")
    await page.get_by_role("button", name="a calculator").click()
    await page.get_by_label("Max Iterations").fill("7")
    await page.get_by_label("Tool Policy").fill('[{"rule": 1}]')
    await page.get_by_role("button", name="Create").click()
    await expect(page.locator(".field.wrong").first).to_contain_text("/tool_policy/0")
    await page.get_by_label("Tool Policy").fill("[]")
    await page.get_by_role("button", name="Create").click()
    await expect(page.get_by_role("heading", name="guide")).to_be_visible()
    stored = (await console.server.client.get("/v1/agents/guide")).json()
    assert (stored["max_iterations"], stored["tools"][0]["name"]) == (7, "calculator")

    await page.get_by_label("System Message").fill("You know cities.\nBe brief.")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_text("Version 2")).to_be_visible()
    await page.get_by_role("tab", name="Versions").click()
    await expect(page.locator(".diff .added").filter(has_text="Be brief.")).to_be_visible()
    changed = {"system_message": "Somebody else's."}
    (await console.server.client.put("/v1/agents/guide", json=changed)).raise_for_status()
    await page.get_by_role("button", name="Edit from version 1").click()
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_text("Somebody stored another version")).to_be_visible()
    await page.get_by_role("button", name="Show theirs").click()
    await expect(page.get_by_label("System Message")).to_have_value("Somebody else's.")

    await page.get_by_role("tab", name="Try it").click()
    await page.get_by_label("Question").fill("What is Rome?")
    await page.get_by_role("button", name="Start a run").click()
    await expect(page.get_by_text("Rome is the capital.").first).to_be_visible()
    console.provoked.update(("422", "412"))


async def test_the_difference_of_two_texts(console: Console) -> None:
    page = await console.open("agents")
    found: Any = await page.evaluate(
        """async () => {
            const { lineDiff } = await import("/console/js/parts/diff.js");
            const many = (word) => Array.from({ length: 500 }, (_, i) => word + i).join("\\n");
            const signs = (a, b) => lineDiff(a, b).map((each) => each.kind[0] + each.line);
            return [signs("a\\nb\\nc", "a\\nx\\nc\\nd"), signs("", "a"), signs("a", "a"),
                    lineDiff(many("a"), many("b")).length];
        }"""
    )
    assert found == [["sa", "rb", "ax", "sc", "ad"], ["r", "aa"], ["sa"], 1000]


async def test_the_page_of_agents_is_accessible(console: Console) -> None:
    await console.define()
    page = await console.open("agents")
    await expect(page.get_by_role("link", name="clerk")).to_be_visible()
    assert await violations(page) == []
    await page.get_by_role("link", name="clerk").click()
    await expect(page.get_by_label("System Message")).to_have_value("You help.")
    assert await violations(page) == []
    await page.get_by_role("tab", name="JSON").click()
    await expect(page.get_by_label("The agent as JSON")).to_be_visible()
    assert await violations(page) == []
