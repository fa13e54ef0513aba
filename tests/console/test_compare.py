"""Two runs side by side in a real browser."""

import pytest
from playwright.async_api import expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.fake_model import calls, text
from tests.waiting import until

HOSTILE = "<img src=x onerror=\"document.title='broken in'\">"


async def ended(console: Console, run_id: str) -> str:
    path = f"/v1/runs/{run_id}"
    await until(lambda: console.server.client.get(path), lambda run: run.json()["ended_at"])
    return run_id


async def two_runs(console: Console) -> tuple[str, str]:
    console.model.script(text("It is red.\nThe end."))
    first = await ended(console, await console.run())
    console.model.script(
        calls(("calculator", {"expression": "6*7"})), text(f"It is blue. {HOSTILE}\nThe end.")
    )
    wanted = {"from": "start"}
    answer = await console.server.client.post(f"/v1/runs/{first}/retry", json=wanted)
    return first, await ended(console, answer.json()["id"])


async def test_a_run_is_compared_with_the_one_that_it_repeats(console: Console) -> None:
    first, second = await two_runs(console)
    page = await console.open(f"runs/{second}")
    await page.get_by_role("link", name="compare", exact=True).click()
    await expect(page.get_by_role("heading", name="Compare two runs")).to_be_visible()
    differs = page.get_by_role("region", name="Difference of the answers of clerk")
    await expect(differs.locator("del")).to_have_text("red.")
    await expect(differs.locator("ins")).to_have_text(f"blue. {HOSTILE}")
    await expect(differs.get_by_text("The end.")).to_have_count(2)
    calls_made = page.get_by_role("region", name="Figures of the runs").get_by_role(
        "row", name="Model calls"
    )
    await expect(calls_made).to_contain_text("+100 %")
    for name, run_id in (("Before", first), ("After", second)):
        await expect(page.get_by_role("region", name=name, exact=True)).to_contain_text(run_id)
    talk = page.get_by_role("region", name="What clerk was told, called and said")
    await expect(talk.locator("ins").filter(has_text='expression: "6*7"')).to_be_visible()
    assert await violations(page) == []
    await page.get_by_role("button", name="Swap").click()
    await expect(page.get_by_role("region", name="Before", exact=True)).to_contain_text(second)


@pytest.mark.deep
async def test_the_other_run_is_chosen_by_keyboard(console: Console) -> None:
    first, second = await two_runs(console)
    page = await console.open(f"runs/{first}")
    await page.get_by_role("link", name="Compare", exact=True).press("Enter")
    await expect(page.get_by_text("repeats this run")).to_be_visible()
    assert await violations(page) == []
    await page.get_by_role("button", name=f"Compare with {second}").press("Enter")
    await expect(page.get_by_role("region", name="After", exact=True)).to_contain_text(second)
    assert await violations(page) == []
    await page.get_by_role("button", name="Choose another run").press("Enter")
    await page.get_by_label("Id of a run").fill(second)
    await page.get_by_label("Id of a run").press("Enter")
    await expect(page.get_by_role("region", name="After", exact=True)).to_contain_text(second)
    unknown = "00000000-0000-0000-0000-000000000000"
    await console.open(f"runs/{first}/compare?with={unknown}")
    await expect(page.get_by_text(f"there is no run {unknown}")).to_be_visible()
    console.provoked.add("404 (Not Found)")
