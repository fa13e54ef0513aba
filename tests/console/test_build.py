"""A developer with only a browser, who types no JSON, builds an agent with a tool and a graph."""

from typing import Any

from playwright.async_api import Page, expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.fake_model import calls, text


async def _read(console: Console, path: str) -> dict[str, Any]:
    found: dict[str, Any] = (await console.server.client.get(path)).json()
    return found


async def _make_agent(page: Page, name: str, prompt: str) -> None:
    """Make a plain agent, from the list of agents."""
    await page.get_by_role("navigation").get_by_role("link", name="Agents").click()
    await page.get_by_role("link", name="New agent").click()
    await page.get_by_label("Name", exact=True).fill(name)
    await page.get_by_label("System message").fill(prompt)
    await page.get_by_role("button", name="Create").click()
    await expect(page.get_by_role("heading", name=name)).to_be_visible()


async def _add_tool(page: Page) -> None:
    """Add a tool that sends an HTTP request, and that a person must approve."""
    await page.get_by_role("button", name="Add: HTTP request").click()
    tool = page.get_by_role("group", name="Tool 1")
    await tool.get_by_label("Name", exact=True).fill("refund")
    await tool.get_by_label("Description").fill("Pays money back.")
    await tool.get_by_label("Method").select_option("POST")
    await tool.get_by_label("URL").fill("https://shop.example.com/refunds/{order}")
    # The address has made the first field, a text.
    await tool.get_by_role("button", name="Add a field").first.click()
    field = tool.get_by_label("Field", exact=True).nth(1)
    await field.fill("amount")
    await field.press("Tab")
    await tool.get_by_role("combobox", name="Type", exact=True).nth(2).select_option("number")
    await tool.get_by_role("combobox", name="Approval", exact=True).select_option("always")


async def test_an_agent_with_a_tool_and_a_graph_are_built_without_json(console: Console) -> None:
    page = await console.open()
    await page.get_by_role("navigation").get_by_role("link", name="Agents").click()
    await page.get_by_role("link", name="New agent").click()
    await page.get_by_label("Name", exact=True).fill("support")
    await page.get_by_label("System message").fill("You help customers.")
    await _add_tool(page)
    await page.get_by_label("Answered by").select_option("demo")
    await page.get_by_label("Question").fill("Where is my money?")
    await page.get_by_role("button", name="Ask").click()
    log = page.get_by_role("log", name="Draft conversation")
    await expect(log.get_by_role("link", name="the whole run")).to_be_visible()
    await page.get_by_role("button", name="Create").click()
    await expect(page.get_by_role("heading", name="support")).to_be_visible()
    (tool,) = (await _read(console, "/v1/agents/support"))["tools"]
    assert (tool["type"], tool["name"], tool["method"]) == ("http", "refund", "POST")
    assert tool["approval"] == "always"
    assert tool["parameters"]["properties"] == {
        "order": {"type": "string"},
        "amount": {"type": "number"},
    }
    await _make_agent(page, "sorter", "Say whether it is about money.")
    await _make_agent(page, "writer", "Write a letter.")

    await page.get_by_role("navigation").get_by_role("link", name="Graphs").click()
    await page.get_by_label("Name of a new graph").fill("desk")
    await page.get_by_role("button", name="Create").click()
    for name in ("sorter", "support", "writer"):
        await page.get_by_label("Add an agent").fill(name)
        await page.get_by_role("button", name="Add", exact=True).click()
    for target in ("support", "writer"):
        await page.get_by_role("combobox", name="From", exact=True).select_option("sorter")
        await page.get_by_role("combobox", name="To", exact=True).select_option(target)
        await page.get_by_role("button", name="Connect").click()
    await page.get_by_label("What passes from sorter to support").focus()
    await page.get_by_label("It is taken").select_option("when")
    await page.get_by_label("With", exact=True).fill("money")
    await page.get_by_label("What passes from sorter to writer").focus()
    await page.get_by_label("It is taken").select_option("else")
    assert await violations(page) == []
    await page.get_by_role("button", name="Save version 2").click()
    await expect(page.get_by_text("Version 2, stored")).to_be_visible()
    graph = await _read(console, "/v1/graphs/desk")
    decides = {
        (each["target"], each.get("else", False)): each.get("when") for each in graph["edges"]
    }
    assert decides == {
        ("support", False): {"feature": "output", "op": "contains", "value": "money"},
        ("writer", True): None,
    }
    console.model.script(
        text("It is about money."),
        calls(("refund", {"order": "A1", "amount": 5})),
    )
    body = {"mode": "dag", "graph": "desk", "input": "I want my money."}
    run = (await console.server.client.post("/v1/runs?wait=30", json=body)).json()
    assert run["status"] == "waiting"
    page = await console.open("approvals")
    await expect(page.get_by_text("refund").first).to_be_visible()
