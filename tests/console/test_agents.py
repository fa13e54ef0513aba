"""The page Agents in a real browser: make, change, compare, try."""

from typing import Any

import pytest
from playwright.async_api import expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.fake_model import text


@pytest.mark.deep
async def test_an_agent_is_made_changed_and_compared(console: Console) -> None:
    page = await console.open("agents")
    await page.get_by_role("link", name="New agent").click()
    await page.get_by_label("Name").fill("guide")
    await page.get_by_label("System Message").fill("You know cities.")
    await page.get_by_role("button", name="Add: Built in").click()
    card = page.get_by_role("group", name="Tool 1")
    await card.get_by_label("Name").select_option("calculator")
    await page.locator("summary", has_text="How it answers").click()
    await page.get_by_label("Max iterations").fill("7")
    await page.get_by_role("button", name="Add: HTTP request").click()
    card = page.get_by_role("group", name="Tool 2")
    await card.get_by_label("Name").fill("look_up")
    await card.get_by_label("Description").fill("Looks up.")
    await card.get_by_label("URL").fill("ftp://nowhere")
    await page.get_by_role("button", name="Create").click()
    await expect(card.locator(".field.wrong")).to_contain_text("http")
    await page.get_by_role("button", name="Remove tool 2").click()
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

    console.provoked.update(("422", "412"))


@pytest.mark.deep
async def test_a_draft_is_tried_before_it_is_stored(console: Console) -> None:
    await console.define()
    page = await console.open("agents/clerk")
    await page.get_by_label("System message").fill("You are a draft.")
    await page.get_by_label("Question").fill("What is 2 + 3?")
    model = page.get_by_label("Answered by")
    await expect(model).to_have_value("real")  # a real model is connected
    await model.select_option("demo")
    await page.get_by_role("button", name="Add: Built in").click()
    await page.get_by_role("group", name="Tool 1").get_by_label("Name").select_option("calculator")
    await page.get_by_role("button", name="Ask").click()
    log = page.get_by_role("log", name="Draft conversation")
    await expect(log.get_by_role("link", name="the whole run")).to_be_visible()
    await expect(log).to_contain_text("calls calculator")
    assert console.model.requests == []
    console.model.script(text("I am a draft."))
    await model.select_option("real")
    await page.get_by_label("Question").fill("Who are you?")
    await page.get_by_label("Question").press("Tab")
    await page.keyboard.press("Enter")
    await expect(log).to_contain_text("I am a draft.")
    await expect(log.locator(".author")).to_have_text(["You", "clerk"] * 2)
    (asked,) = console.model.requests
    assert asked["messages"][0]["content"] == "You are a draft."
    assert [each["role"] for each in asked["messages"]][-3:] == ["user", "assistant", "user"]
    assert (await console.server.client.get("/v1/agents/clerk")).json()["version"] == 1
    assert (await console.server.client.get("/v1/runs")).json()["items"] == []
    assert await violations(page) == []
    await page.get_by_label("System message").fill("")
    await page.get_by_label("Question").fill("And now?")
    await page.get_by_role("button", name="Ask").click()
    await expect(page.locator(".field.wrong").first).to_contain_text("at least 1 character")
    console.provoked.add("422")


@pytest.mark.deep
async def test_a_version_has_a_note_and_is_restored(console: Console) -> None:
    await console.define()
    page = await console.open("agents/clerk")
    await page.get_by_label("System message").fill("You help, briefly.")
    await page.get_by_text("What differs from version 1").click()
    await expect(page.locator(".diff .added")).to_contain_text("briefly")
    await page.get_by_label("Note on this version").fill("Shorter answers")
    await page.get_by_role("button", name="Save").click()
    await page.get_by_role("tab", name="Versions").click()
    await expect(page.get_by_text("Shorter answers", exact=True)).to_be_visible()
    await page.get_by_role("button", name="Restore").click()
    await page.get_by_role("button", name="Restore").click()
    await expect(page.get_by_text("Version 3, stored")).to_be_visible()
    now = (await console.server.client.get("/v1/agents/clerk")).json()
    assert now["system_message"] == "You help."
    assert await violations(page) == []


RICH: dict[str, Any] = {
    "description": "Everything.",
    "system_message": "You help.\n\nA lot.",
    "model": ["default/a", "b"],
    "params": {"temperature": 0.5, "stop": ["\n\n", "END"], "tool_choice": "none"},
    "output_schema": {
        "type": "object",
        "properties": {
            "a": {"type": "string", "enum": ["x"]},
            "b": {"type": "object", "properties": {}},
        },
        "required": ["a"],
        "additionalProperties": False,
    },
    "tools": [
        {
            "type": "http",
            "name": "pay",
            "description": "Pays.",
            "method": "POST",
            "url": "https://bank.example/{sum}",
            "headers": {"X-A": "b"},
            "parameters": {
                "type": "object",
                "properties": {"sum": {"type": "number"}},
                "required": ["sum"],
            },
            "approval": {"when": {"feature": "arguments.sum", "op": "gt", "value": 5}},
        },
        {"type": "client", "name": "locate", "description": "Says where."},
        {"type": "builtin", "name": "calculator"},
    ],
    "tool_policy": [{"tool_name": "calculator", "min_calls": 2}],
    "exit_on_success": ["pay"],
    "subagents": {"mode": "async", "names": ["clerk"], "limits": {"max_concurrent": 3}},
    "approval": {"when": {"not": {"feature": "arguments.sum", "op": "lt", "value": 5}}},
    "success_check": [{"type": "contains", "value": "x"}, {"type": "equals", "value": {"a": [1]}}],
    "memory_scope": "session",
    "metadata": {"team": "a", "list": [1, None]},
    "expose": ["mcp"],
    "input_schema": {"type": "object", "$defs": {"a": {}}, "anyOf": [{"required": ["a"]}]},
}


@pytest.mark.deep
async def test_a_definition_comes_back_from_the_form_as_it_was(console: Console) -> None:
    """Check it of one with all that a definition may have: a change and its undoing leave it so."""
    await console.define()
    made = await console.server.client.post("/v1/agents", json={"name": "rich"} | RICH)
    assert made.status_code == 201, made.text
    page = await console.open("agents/rich")
    save = page.get_by_role("button", name="Save")
    await expect(page.get_by_label("Max iterations")).to_have_value("15")
    await expect(save).to_be_disabled()
    for _ in range(2):
        await page.get_by_role("tab", name="JSON").click()
        await page.get_by_role("tab", name="Form").click()
    for odd in ("[5]", '{"tools": [null], "system_message": 5, "params": "x"}', "null"):
        await page.get_by_role("tab", name="JSON").click()
        await page.get_by_label("The agent as JSON").fill(odd)
        await page.get_by_role("tab", name="Form").click()
        await expect(page.get_by_label("Max iterations")).to_be_attached()
        await page.get_by_role("button", name="Undo all").click()
    await page.locator("summary", has_text="How it answers").click()
    await page.get_by_label("Max iterations").fill("16")
    await expect(save).to_be_enabled()
    await page.get_by_label("Max iterations").fill("15")
    await page.get_by_label("System message").fill("Other.")
    await save.click()
    await expect(page.get_by_text("Version 2, stored")).to_be_visible()
    one, two = [
        (await console.server.client.get(f"/v1/agents/rich/versions/{number}")).json()
        for number in (1, 2)
    ]
    differs = {name for name in one if one[name] != two[name]}
    assert differs == {"system_message", "version", "created_at"}
    assert await violations(page) == []
    await page.set_viewport_size({"width": 320, "height": 700})
    wide = await page.evaluate("document.documentElement.scrollWidth")
    await page.set_viewport_size({"width": 1280, "height": 900})
    assert wide == 320


async def test_the_difference_of_two_texts(console: Console) -> None:
    page = await console.open("agents")
    found: Any = await page.evaluate(
        """async () => {
            const { lineDiff } = await import("/console/js/parts/line_diff.js");
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
