"""The first five minutes in the browser: connect a model, choose a template, ask, and watch."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.async_api import BrowserContext, Page, expect

from bottega.settings import Settings
from tests.console.accessibility import violations
from tests.console.conftest import Console, window
from tests.fake_model import FakeModel, Reply, calls, text
from tests.service import Running, running

KEY = "sk-local-0123456789"


@pytest.fixture
async def bottega(settings: Settings, database_url: str) -> AsyncIterator[Running]:
    """An empty installation of one user: no keys, the embedded database, the demo model."""
    folder = Path(parse_qs(urlsplit(database_url).query)["host"][0]).parent
    own = {"data_dir": folder, "openai_api_key": None}
    async with running(settings.model_copy(update=own), database_url, worker=True) as server:
        yield server
    (folder / "secrets.key").unlink(missing_ok=True)


@pytest.fixture
async def page(profile: BrowserContext, bottega: Running) -> AsyncIterator[Page]:
    async with window(profile) as (page, problems):
        await page.goto(f"http://127.0.0.1:{bottega.port}/console/")
        yield page
    assert problems == []


@pytest.mark.deep
async def test_a_model_is_connected_and_an_agent_answers_from_it_without_a_restart(
    page: Page, bottega: Running
) -> None:
    client = bottega.client
    agent = {"name": "helper", "system_message": "You help."}
    assert (await client.post("/v1/agents", json=agent)).status_code == 201
    async with FakeModel() as model:
        banner = page.get_by_role("complementary", name="Model")
        await expect(banner).to_contain_text("The demo model answers")
        assert await violations(page) == []
        await banner.get_by_role("button", name="Connect a model", exact=True).click()
        dialog = page.get_by_role("dialog", name="Connect a model")
        await dialog.get_by_role("button", name="OpenAI-compatible", exact=True).click()
        await expect(dialog.get_by_label("Address", exact=True)).to_be_focused()

        await dialog.get_by_label("Address", exact=True).fill("http://127.0.0.1:9/v1")
        await dialog.get_by_label("Key", exact=True).fill(KEY)
        await dialog.get_by_role("button", name="Test", exact=True).click()
        await expect(dialog.get_by_text("cannot connect to 127.0.0.1")).to_be_visible()
        await expect(dialog.get_by_role("button", name="Save")).to_have_count(0)

        await dialog.get_by_label("Address", exact=True).fill(model.base_url)
        await dialog.get_by_role("button", name="Test", exact=True).click()
        await expect(dialog.get_by_text("It answers, in")).to_be_visible()
        assert await violations(page) == []
        await page.set_viewport_size({"width": 320, "height": 800})
        wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert not await page.evaluate(wide)
        await page.set_viewport_size({"width": 1280, "height": 900})
        await dialog.get_by_label("Price of input").fill("2")
        await dialog.get_by_role("button", name="Save", exact=True).click()
        await expect(dialog).to_be_visible()  # a price has both parts
        await dialog.get_by_label("Price of output").fill("10.5")
        await dialog.get_by_role("button", name="Save", exact=True).click()
        await expect(dialog).to_have_count(0)
        await expect(page.get_by_text("answers from now on")).to_be_visible()
        assert await violations(page) == []
        await expect(banner).to_have_count(0)
        info = (await client.get("/v1/info")).json()
        assert info["demo_model"] is False
        assert info["model"].startswith("models/")

        model.script(text("From the local server."))
        started = await client.post("/v1/runs", json={"agent": "helper", "input": "Hello?"})
        await page.goto(f"http://127.0.0.1:{bottega.port}/console/#/runs/{started.json()['id']}")
        await expect(page.get_by_text("From the local server.").first).to_be_visible()
        assert model.headers[-1]["authorization"] == f"Bearer {KEY}"
        run = (await client.get(f"/v1/runs/{started.json()['id']}")).json()
        assert run["usage"]["cost"]["complete"]
        assert float(run["usage"]["cost"]["amount"]) > 0
        await page.goto(f"http://127.0.0.1:{bottega.port}/console/#/operations/providers")
        row = page.get_by_role("region", name="Providers").get_by_role("row").last
        await expect(row).to_contain_text(f"{info['model'].partition('/')[2]}: 2 in, 10.5 out")
        await row.get_by_role("link", name="Set prices").click()
        await expect(page.get_by_label("Output", exact=True)).to_have_value("10.5")
    names = [each["name"] for each in (await client.get("/v1/secrets")).json()["items"]]
    assert names == ["MODELS_KEY"]


@pytest.mark.deep
async def test_the_wizard_needs_no_mouse_and_leaves_nothing_behind(
    page: Page, bottega: Running
) -> None:
    await (
        page.get_by_role("complementary", name="Model")
        .get_by_role("button", name="Connect a model")
        .focus()
    )
    await page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Connect a model")
    tile = dialog.get_by_role("button", name="Ollama", exact=True)
    await tile.focus()
    await page.keyboard.press("Enter")
    await expect(tile).to_have_attribute("aria-pressed", "true")
    address = dialog.get_by_label("Address", exact=True)
    await expect(address).to_have_value("http://127.0.0.1:11434/v1")
    await expect(dialog.get_by_label("Key", exact=True)).to_be_focused()
    await page.keyboard.type(KEY)
    await address.fill("http://127.0.0.1:9/v1")
    await page.keyboard.press("Enter")
    await expect(dialog.get_by_text("cannot connect")).to_be_visible()
    assert len((await bottega.client.get("/v1/secrets")).json()["items"]) == 1
    async with page.expect_response(lambda found: found.request.method == "DELETE"):
        await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
    button = page.get_by_role("complementary", name="Model").get_by_role(
        "button", name="Connect a model"
    )
    await expect(button).to_be_focused()
    assert (await bottega.client.get("/v1/secrets")).json()["items"] == []


@pytest.mark.parametrize("name", ["support", "letters"])
async def test_a_template_is_stored_asked_and_watched(
    page: Page, bottega: Running, name: str
) -> None:
    await expect(page.locator("[data-template]")).to_have_count(5)
    assert await violations(page) == []
    await page.locator(f"[data-template={name}]").click()
    dialog = page.get_by_role("dialog")
    assert await violations(page) == []
    await dialog.get_by_role("button", name="Ask", exact=True).click()
    where = "batches" if name == "letters" else "runs"
    await expect(page).to_have_url(re.compile(f"#/{where}/"))
    if name == "support":
        await expect(page.locator(".head").get_by_text("waiting")).to_be_visible()
    else:
        await expect(page.get_by_text("completed").first).to_be_visible(timeout=30_000)
    names = [each["name"] for each in (await bottega.client.get("/v1/agents")).json()["items"]]
    assert (
        names == {"support": ["shop-cashier", "shop-support"], "letters": ["letter-writer"]}[name]
    )


@pytest.mark.deep
async def test_a_template_keeps_what_somebody_changed(page: Page, bottega: Running) -> None:
    own = {"name": "letter-writer", "system_message": "Mine."}
    assert (await bottega.client.post("/v1/agents", json=own)).status_code == 201
    await page.locator("[data-template=letters]").click()
    await page.get_by_role("dialog").get_by_role("button", name="Ask", exact=True).click()
    await expect(page).to_have_url(re.compile("#/batches/"))
    kept = (await bottega.client.get("/v1/agents/letter-writer")).json()
    assert (kept["version"], kept["system_message"]) == (1, "Mine.")


@pytest.mark.deep
async def test_the_list_says_what_is_next_until_it_is_hidden(page: Page, bottega: Running) -> None:
    steps = page.locator(".steps li")
    await expect(steps).to_have_count(3)
    await expect(page.locator(".steps").get_by_text("Next.")).to_have_count(3)
    agent = {"name": "helper", "system_message": "You help."}
    await bottega.client.post("/v1/agents", json=agent)
    await page.reload()
    await expect(steps.filter(has_text="Define an agent").get_by_text("Done.")).to_be_visible()
    await page.get_by_role("button", name="Hide this list").click()
    await page.reload()
    again = page.get_by_role("button", name="Set up and templates")
    await expect(again).to_be_visible()
    await expect(page.locator("[data-template]")).to_have_count(0)
    await again.click()
    await expect(page.locator("[data-template]")).to_have_count(5)


async def test_with_a_real_model_there_is_no_banner(console: Console) -> None:
    page = await console.open()
    await expect(page.get_by_role("heading", name="Home")).to_be_visible()
    await expect(page.get_by_text("Connect a model").first).to_be_visible()  # as done, in the list
    await expect(page.get_by_role("complementary", name="Model")).to_have_count(0)
    await expect(page.locator(".steps li")).to_have_count(3)


async def test_the_list_makes_room_once_all_is_done(console: Console) -> None:
    console.model.decide = lambda _: text("An answer.")
    await console.run()
    page = await console.open()
    again = page.get_by_role("button", name="Set up and templates")
    await expect(again).to_be_visible()
    await expect(page.locator(".steps li")).to_have_count(0)
    await again.click()
    await expect(page.locator(".steps").get_by_text("Done.")).to_have_count(3)


@pytest.mark.deep
async def test_a_secret_has_versions_and_is_never_shown(page: Page) -> None:
    await page.get_by_role("link", name="Operations").click()
    await page.get_by_role("tab", name="Secrets").click()
    row = page.get_by_role("row").filter(has_text="API_KEY")
    for version in ("1", "2"):
        await page.get_by_label("Name").fill("API_KEY")
        await page.get_by_label("Hosts").fill("api.example.com")
        await page.get_by_label("Value").fill("hush-hush-hush")
        await page.get_by_role("button", name="Save").click()
        await expect(row.get_by_role("cell").nth(2)).to_have_text(version)
    await expect(page.get_by_text("hush-hush")).to_have_count(0)
    assert await violations(page) == []


@pytest.mark.deep
async def test_from_nothing_to_a_graph_that_is_watched_in_one_go(
    page: Page, bottega: Running
) -> None:
    """Connect a model, make an agent with a tool and an approval, a graph of three, and run it."""

    def decide(request: dict[str, Any]) -> Reply:
        if "You sort." in str(request["messages"]):
            return text("complaint")
        asked = request.get("tools") and request["messages"][-1]["role"] != "tool"
        return calls(("weather", {"city": "Rome"})) if asked else text("It is sunny in Rome.")

    async with FakeModel() as model:
        model.decide = decide
        await page.get_by_role("button", name="Choose one").click()
        dialog = page.get_by_role("dialog", name="Connect a model")
        await dialog.get_by_role("button", name="OpenAI-compatible", exact=True).click()
        await dialog.get_by_label("Address", exact=True).fill(model.base_url)
        await dialog.get_by_label("Key", exact=True).fill(KEY)
        await dialog.get_by_role("button", name="Test", exact=True).click()
        await dialog.get_by_role("button", name="Save", exact=True).click()
        await expect(page.get_by_text("answers from now on")).to_be_visible()

        await page.get_by_role("link", name="Write one").click()
        await expect(page.get_by_text("answers from now on")).to_have_count(0)
        await page.get_by_label("Name", exact=True).fill("weather")
        await page.get_by_label("System message").fill("You say the weather.")
        await page.get_by_role("button", name="Add: HTTP request").click()
        tool = page.get_by_role("group", name="Tool 1")
        await tool.get_by_label("Name", exact=True).fill("weather")
        await tool.get_by_label("Description", exact=True).first.fill("Says the weather.")
        await tool.get_by_label("URL").fill("https://example.com/weather/{city}")
        parameters = tool.get_by_role("group", name="Parameters")
        await expect(parameters.get_by_role("textbox", name="Field")).to_have_value("city")
        await tool.get_by_role("combobox", name="Approval").select_option("always")
        await page.get_by_role("button", name="Create").click()
        await expect(page.get_by_role("heading", name="weather")).to_be_visible()

        await page.get_by_role("link", name="Graphs").click()
        await page.get_by_label("Name of a new graph").fill("desk")
        await page.get_by_role("button", name="Create").click()
        for name in ("sorter", "weather", "answerer"):
            await page.get_by_label("Add an agent").fill(name)
            await page.get_by_label("Add an agent").press("Enter")
        for name, instructions in (("sorter", "You sort."), ("answerer", "You answer.")):
            await page.get_by_role("button", name=name, exact=True).click()
            form = page.get_by_role("form", name=f"New agent {name}")
            await form.get_by_label("Instructions").fill(instructions)
            await form.get_by_role("button", name="Create").click()
            await expect(form).to_have_count(0)
        for target, kind in (("weather", "when"), ("answerer", "else")):
            await page.get_by_role("combobox", name="From", exact=True).select_option("sorter")
            await page.get_by_role("combobox", name="To", exact=True).select_option(target)
            await page.get_by_role("button", name="Connect", exact=True).click()
            await page.get_by_role("button", name=f"When sorter to {target} is taken").click()
            await page.get_by_label("It is taken").select_option(kind)
        await page.get_by_role("button", name="When sorter to weather is taken").click()
        await page.get_by_label("With").fill("complaint")
        await page.get_by_role("button", name="Save version").click()
        await expect(page.get_by_text("Version 2, stored")).to_be_visible()
        assert await violations(page) == []
        await page.get_by_role("tab", name="Try it").click()
        await page.get_by_label("Question").fill("Is it warm?")
        await page.get_by_role("button", name="Start a run").click()
        await page.get_by_role("button", name="Approve").click()
        await expect(page.locator(".head").get_by_text("Ended")).to_be_visible()
        await expect(page.get_by_text("It is sunny in Rome.").first).to_be_visible()
