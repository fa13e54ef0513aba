"""The page of the graphs: changes by keyboard and by mouse, versions, a dry run."""

import re
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.team import define_graph


async def stored(console: Console, name: str) -> dict[str, Any]:
    graph: dict[str, Any] = (await console.server.client.get(f"/v1/graphs/{name}")).json()
    return graph


async def opened(console: Console) -> Page:
    """Show a graph of three agents in a row, once it is drawn."""
    edges = ("first", "second"), ("second", "third")
    await define_graph(console.server.client, "chain", *edges)
    page = await console.open("graphs")
    await page.get_by_role("link", name="chain").click()
    await expect(page.locator(".canvas svg").first).to_be_visible()
    return page


async def connect(page: Page, source: str, target: str) -> None:
    """Connect two agents by keyboard alone."""
    await page.get_by_role("combobox", name="From", exact=True).focus()
    await page.keyboard.type(source)
    await page.keyboard.press("Tab")
    await page.keyboard.type(target)
    await page.keyboard.press("Tab")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")


@pytest.mark.deep
async def test_a_graph_is_made_and_changed_by_keyboard(console: Console) -> None:
    page = await opened(console)
    await connect(page, "third", "first")
    await expect(page.get_by_role("alert")).to_contain_text("third → first → second → third")
    await connect(page, "first", "third")
    await expect(page.get_by_text("Not saved: + first → third")).to_be_visible()
    await page.get_by_label("Add an agent").focus()
    await page.keyboard.type("fourth")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("A run of this graph is refused")).to_be_visible()
    await page.get_by_role("button", name="fourth earlier").press("Enter")
    await page.get_by_label("What passes from first to second").select_option("tool_results")
    await page.get_by_role("button", name="Remove second to third").press("Enter")
    await page.keyboard.press("Control+z")
    await page.get_by_role("button", name="Remove first to third").press("Enter")
    await page.get_by_role("button", name="Undo").press("Enter")
    await page.get_by_role("button", name="Save version 2").press("Enter")
    await expect(page.get_by_text("Version 2, stored")).to_be_visible()
    graph = await stored(console, "chain")
    assert [node["agent"] for node in graph["nodes"]] == ["first", "second", "fourth", "third"]
    assert {(e["source"], e["target"]): e["policy"] for e in graph["edges"]} == {
        ("first", "second"): "tool_results",
        ("second", "third"): "final_response_only",
        ("first", "third"): "final_response_only",
    }
    await page.get_by_role("tab", name="Versions").press("Enter")
    await expect(page.get_by_text("+ agent fourth")).to_be_visible()
    await page.get_by_role("button", name="Edit version 1").press("Enter")
    await page.get_by_role("button", name="Save version 3").press("Enter")
    await expect(page.get_by_text("Version 3, stored")).to_be_visible()
    assert len((await stored(console, "chain"))["edges"]) == 2


async def test_a_line_is_pulled_by_mouse_and_a_lost_update_is_refused(console: Console) -> None:
    page = await opened(console)
    box = await page.locator(".canvas").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    # The drawing shows at most 1.1 pixels a unit; its columns are 230 units wide.
    scale = min(1.1, (box["width"] - 48) / 628)
    centre = box["x"] + box["width"] / 2
    await page.mouse.move(centre - 230 * scale, middle)
    await page.mouse.down()
    await page.mouse.move(centre, middle + 60, steps=3)
    await page.mouse.move(centre + 230 * scale, middle, steps=3)
    await page.mouse.up()
    await expect(page.get_by_text("Not saved: + first → third")).to_be_visible()
    changed = {"source": "fourth", "target": "first"}
    await console.server.client.post("/v1/graphs/chain/edges", json=changed)
    await page.get_by_role("button", name="Save version 2").click()
    await page.get_by_role("button", name="Drop my changes and show it").click()
    await expect(page.get_by_text("Version 2, stored")).to_be_visible()
    await expect(page.get_by_role("button", name="Remove fourth to first")).to_be_visible()
    console.provoked.add("412")


@pytest.mark.deep
async def test_a_dry_run_shows_what_flows_and_the_page_is_accessible(console: Console) -> None:
    page = await opened(console)
    assert await violations(page) == []
    await page.get_by_role("tab", name="Try it").click()
    await page.get_by_label("Question").fill("Build it.")
    await page.get_by_role("button", name="Dry run").click()
    nodes = page.get_by_role("list", name="What became of each node")
    await expect(nodes.get_by_role("listitem").first).to_contain_text("completed")
    await page.get_by_text("received first v1").click()
    await expect(page.get_by_text("Shared context from first").first).to_be_visible()
    await expect(page.get_by_role("heading", name="The answer", exact=True)).to_be_visible()
    assert await violations(page) == []
    assert (await console.server.client.get("/v1/runs")).json()["items"] == []


async def test_a_condition_is_edited_and_a_skipped_node_says_why(console: Console) -> None:
    page = await opened(console)
    await page.get_by_label("What passes from first to second").focus()
    await page.get_by_label("It is taken").select_option("when")
    await page.get_by_label("Comparison").select_option("eq")
    await page.get_by_label("With").fill("no")
    await expect(page.get_by_text('if output eq "no"').first).to_be_visible()
    await page.get_by_role("button", name="Save version 2").press("Enter")
    await expect(page.get_by_text("Version 2, stored")).to_be_visible()
    graph = await stored(console, "chain")
    assert graph["edges"][0]["when"]["value"] == "no"
    body = {"mode": "dag", "graph": "chain", "input": "x"}
    run = (await console.server.client.post("/v1/runs?wait=30", json=body)).json()
    assert run["stop_reason"] == "no_output"
    page = await console.open(f"runs/{run['id']}")
    told = 'second and third were skipped: first → second is taken only if output eq "no"; '
    await expect(page.get_by_text(told)).to_be_visible()
    await expect(page.locator(".head")).to_contain_text(re.compile(r"version 2.*model default/"))
    await page.get_by_role("tab", name="Graph").click()
    await expect(page.get_by_text("the condition on first does not hold")).to_be_visible()
    await expect(page.locator(".canvas .edge.untaken")).to_have_count(2)
    await expect(page.locator(".canvas .edge-label")).to_have_text('output eq "no"')
    await expect(page.get_by_role("button", name="second: skipped")).to_be_visible()


@pytest.mark.deep
async def test_nodes_that_are_no_agents_are_set_in_typed_fields(console: Console) -> None:
    page = await opened(console)
    await page.get_by_label("Kind of node").select_option("human")
    await page.get_by_label("Name of the node").fill("review")
    await page.keyboard.press("Enter")
    await page.get_by_role("button", name="Save version 2").click()
    problem = page.get_by_role("listitem").filter(has_text="review")
    await problem.get_by_role("button", name="review").first.click()
    await expect(page.locator(".field.wrong").first).to_contain_text("at least 1 character")
    await page.get_by_label("Ask", exact=True).fill("Is it good?")
    await page.get_by_role("button", name="Add a field").click()
    await page.get_by_label("Field", exact=True).fill("good")
    await page.get_by_role("combobox", name="Type", exact=True).select_option("boolean")
    await connect(page, "third", "review")
    await page.get_by_label("Kind of node").select_option("tool")
    await page.get_by_label("Name of the node").fill("count")
    await page.keyboard.press("Enter")
    await page.get_by_role("button", name="Set tool").click()
    await page.get_by_role("combobox", name="Name", exact=True).select_option("calculator")
    await page.get_by_role("button", name="Add an argument").click()
    argument = page.get_by_role("textbox", name="Name", exact=True)
    await argument.fill("expression")
    await argument.press("Tab")
    await page.get_by_label("Value", exact=True).fill("2 + 3")
    await page.get_by_text("When it runs, repeats, fails").click()
    await page.get_by_label("Join").select_option("all")
    await connect(page, "review", "count")
    assert await violations(page) == []
    await page.get_by_role("button", name="Save version 2").click()
    await expect(page.get_by_text("Version 2, stored")).to_be_visible()
    nodes = {each["name"]: each for each in (await stored(console, "chain"))["nodes"]}
    review, count = nodes["review"], nodes["count"]
    assert review["ask"] == "Is it good?"
    assert review["schema"]["properties"] == {"good": {"type": "boolean"}}
    assert (count["tool"]["name"], count["join"]) == ("calculator", "all")
    assert count["arguments"] == {"expression": "2 + 3"}
    console.provoked.add("422")


@pytest.mark.deep
async def test_a_node_s_agent_is_edited_beside_the_graph(console: Console) -> None:
    page = await opened(console)
    client = console.server.client
    before = (await client.get("/v1/agents/second")).json()["version"]
    await page.get_by_role("button", name="second", exact=True).press("Enter")
    await page.get_by_role("button", name="Instructions, model and tools").press("Enter")
    form = page.get_by_role("form", name="Agent second")
    prompt = form.get_by_label("System message", exact=True)
    await prompt.fill("You answer in one word.")
    assert await violations(page) == []
    await page.get_by_role("button", name="first", exact=True).press("Enter")
    await page.get_by_role("button", name="second", exact=True).press("Enter")
    await page.get_by_role("button", name="Instructions, model and tools").press("Enter")
    await expect(prompt).to_have_value("You answer in one word.")  # it is not lost
    await form.get_by_role("button", name="Save second").press("Enter")
    await expect(form).to_contain_text(f"Version {before + 1} of second")
    stored = (await client.get("/v1/agents/second")).json()
    assert (stored["version"], stored["system_message"]) == (before + 1, "You answer in one word.")
    await page.set_viewport_size({"width": 320, "height": 800})
    assert await page.evaluate("document.documentElement.scrollWidth") <= 320
    await page.set_viewport_size({"width": 1280, "height": 900})


COVERED = """() => {
  const boxes = (selector) => [...document.querySelectorAll(selector)]
    .map((each) => each.getBoundingClientRect());
  const nodes = boxes(".canvas .node rect");
  return boxes(".canvas .edge-label").map((label) => nodes.some((node) =>
    label.left < node.right && node.left < label.right
      && label.top < node.bottom && node.top < label.bottom));
}"""


async def test_labels_of_edges_are_in_sight(console: Console) -> None:
    page = await opened(console)
    await connect(page, "first", "third")
    await page.get_by_label("What passes from first to third").select_option("full_history")
    await page.get_by_label("What passes from first to second").select_option("tool_results")
    await expect(page.locator(".canvas .edge-label")).to_have_text(["tool results", "full history"])
    assert await page.evaluate(COVERED) == [False, False]


async def test_a_drawing_that_was_moved_is_shown_whole_again(console: Console) -> None:
    page = await opened(console)
    whole = page.get_by_role("button", name="Show all")
    await expect(whole).to_have_count(0)
    await page.locator(".canvas").hover()
    await page.mouse.wheel(0, -100)
    await expect(page.locator(".canvas .overview .window")).to_have_count(1)
    assert await violations(page) == []
    await whole.press("Enter")
    await expect(whole).to_have_count(0)


async def test_an_agent_that_somebody_else_changed_is_read_again_in_the_graph_s_panel(
    console: Console,
) -> None:
    await console.define()
    client = console.server.client
    graph = {"name": "one", "nodes": [{"agent": "clerk"}], "edges": []}
    (await client.post("/v1/graphs", json=graph)).raise_for_status()
    page = await console.open("graphs/one")
    await page.get_by_role("button", name="clerk", exact=True).first.click()
    await page.get_by_role("button", name="Instructions, model and tools").click()
    form = page.get_by_role("form", name="Agent clerk")
    message = form.get_by_label("System message")
    await message.fill("Mine.")
    theirs = {"system_message": "Theirs."}
    (await client.put("/v1/agents/clerk", json=theirs)).raise_for_status()
    await form.get_by_role("button", name="Save clerk").click()
    await form.get_by_role("button", name="Show theirs, and drop this change").click()
    await expect(message).to_have_value("Theirs.")
    await expect(form.get_by_text("Version 2 of clerk.")).to_be_visible()
    await message.fill("Both.")
    await form.get_by_role("button", name="Save clerk").click()
    await expect(form.get_by_text("Version 3 of clerk.")).to_be_visible()
    console.provoked.add("412 (Precondition Failed)")


async def test_a_run_shows_the_nodes_of_graphs_in_its_graph(console: Console) -> None:
    client = console.server.client
    await opened(console)
    never = {"feature": "output", "op": "eq", "value": "no"}
    tool = {"type": "builtin", "name": "calculator"}
    turn = {
        "name": "turn",
        "nodes": [
            "first",
            {"name": "sum", "type": "tool", "tool": tool, "arguments": {"expression": "1 + 1"}},
            "second",
        ],
        "edges": [
            {"source": "first", "target": "sum"},
            {"source": "first", "target": "second", "when": never},
        ],
        "output": "first",
    }
    loop = {"until": never, "max": 2, "on_max": "continue"}
    nodes = [{"name": "improve", "type": "graph", "graph": "turn", "loop": loop}]
    for graph in (turn, {"name": "outer", "nodes": nodes}):
        assert (await client.post("/v1/graphs", json=graph)).status_code == 201
    body = {"mode": "dag", "graph": "outer", "input": "x"}
    run = (await client.post("/v1/runs?wait=30", json=body)).json()
    page = await console.open(f"runs/{run['id']}?tab=graph")
    await expect(
        page.get_by_role("button", name=re.compile("improve.first . 2: completed"))
    ).to_be_visible()
    await expect(
        page.get_by_role("button", name=re.compile("improve.sum . 2: completed"))
    ).to_be_visible()
    skipped = page.get_by_role("listitem").filter(has_text="improve/second: skipped")
    await expect(skipped).to_contain_text("the condition on first does not hold")
    # The edges of the nested graph are drawn, also those that pass nothing on.
    await expect(page.locator(".graph svg g.edge:not(.call)")).to_have_count(3)
