"""The pages for tools, MCP servers, schedules and settings."""

from playwright.async_api import expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.fake_model import text


async def test_an_mcp_server_is_added_and_asked(console: Console) -> None:
    page = await console.open("mcp")
    await page.get_by_label("Name", exact=True).fill("shop")
    await page.get_by_label("URL").fill("https://mcp.invalid/mcp")
    await page.get_by_role("button", name="Add", exact=True).click()
    server = page.get_by_role("article", name="shop")
    await server.get_by_role("button", name="Test").click()
    await expect(server.get_by_role("alert")).to_be_visible()
    assert await violations(page) == []
    await server.get_by_role("button", name="Delete").click()
    await server.get_by_role("button", name="Delete").click()
    await expect(page.get_by_text("There is no MCP server yet.")).to_be_visible()
    console.provoked.update(("502", "503", "422"))


async def test_a_tool_is_tried_with_arguments_by_its_schema(console: Console) -> None:
    await console.define(
        {
            "type": "http",
            "name": "weather",
            "description": "Tells the weather.",
            "url": "https://api.example/{city}",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        }
    )
    console.model.script(text("It would call it."))
    page = await console.open("tools")
    await page.get_by_role("button", name="Try weather of clerk").click()
    await page.get_by_label("City").fill("Rome")
    await page.get_by_label("Days").fill("3")
    await page.get_by_role("button", name="Call it").click()
    log = page.get_by_role("log", name="Draft conversation")
    await expect(log).to_contain_text("It would call it.")
    (asked,) = console.model.requests
    assert '{"city":"Rome","days":3}' in asked["messages"][-1]["content"]
    assert asked["tools"][0]["function"]["name"] == "weather"
    assert await violations(page) == []


async def test_a_tool_of_an_agent_has_its_placeholders_and_is_tried_with_typed_arguments(
    console: Console,
) -> None:
    console.model.script(text("It would call it."))
    page = await console.open("agents/+new")
    await page.get_by_role("button", name="Add: HTTP request").click()
    card = page.get_by_role("group", name="Tool 1")
    await card.get_by_label("Name").fill("weather")
    await card.get_by_label("Description").fill("Tells the weather.")
    await card.get_by_label("URL").fill("https://api.example/{city}")
    field = card.get_by_role("group", name="Parameters").get_by_label("Field", exact=True)
    await expect(field).to_have_value("city")
    await card.get_by_role("button", name="Try this tool").click()
    await page.get_by_label("City", exact=True).fill("Rome")
    assert await violations(page) == []
    await page.get_by_role("button", name="Call it").click()
    log = page.get_by_role("log", name="Draft conversation")
    await expect(log).to_contain_text("It would call it.")
    (asked,) = console.model.requests
    assert '{"city":"Rome"}' in asked["messages"][-1]["content"]


async def test_a_schedule_is_changed_in_typed_fields_and_run_now(console: Console) -> None:
    await console.define()
    run = {"agent": "clerk", "input": "Good morning?"}
    made = {"name": "daily", "cron": "0 8 * * *", "run": run}
    (await console.server.client.post("/v1/schedules", json=made)).raise_for_status()
    page = await console.open("operations/schedules")
    await page.get_by_role("button", name="Edit").click()
    await page.get_by_label("Cron", exact=True).fill("0 9 * * *")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_text("0 9 * * *")).to_be_visible()
    stored = (await console.server.client.get("/v1/schedules/daily")).json()
    assert (stored["cron"], stored["run"]["input"]) == ("0 9 * * *", "Good morning?")
    console.model.script(text("Good morning."))
    await page.get_by_role("button", name="Run now").click()
    await expect(page.get_by_text("Good morning.").first).to_be_visible()


async def test_dates_follow_the_chosen_language_and_zone(console: Console) -> None:
    page = await console.open("settings")
    await expect(page.get_by_role("heading", name="Settings")).to_be_visible()
    assert await violations(page) == []
    await page.get_by_label("Time zone").select_option("Asia/Tokyo")
    await page.get_by_label("Language of dates").select_option("de")
    await expect(page.get_by_text("Now:")).to_contain_text("GMT+9")
    await page.reload()
    await expect(page.get_by_label("Time zone")).to_have_value("Asia/Tokyo")
    await expect(page.get_by_text("Now:")).to_contain_text("GMT+9")
    await page.set_viewport_size({"width": 320, "height": 700})
    wide = await page.evaluate("document.documentElement.scrollWidth")
    await page.set_viewport_size({"width": 1280, "height": 900})
    assert wide == 320
