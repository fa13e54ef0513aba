"""Home asks for little while nothing changes, and shows at once what does."""

import re
import time
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.async_api import BrowserContext, Page, Route, expect

from bottega.engine import waiting
from tests.console.accessibility import violations
from tests.console.conftest import Console, hold_clock, window
from tests.fake_model import http_error, text
from tests.waiting import until


async def test_home_at_rest_asks_little_and_sees_what_changes(console: Console) -> None:
    console.model.script(text("Yes."), http_error(400))
    await console.run()
    page = console.page
    await hold_clock(page)
    await console.open()
    await expect(page.get_by_role("cell", name="completed")).to_be_visible()
    await expect(page.get_by_text("No run has failed.")).to_be_visible()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for _ in range(6):
        before = len(asked)
        async with page.expect_response("**/v1/runs?limit=6&order=desc"):
            for _ in range(9):
                await page.clock.run_for(1000)
        assert len(asked) - before <= 4, asked[before:]
    body = {"agent": "clerk", "input": "?"}
    (await console.server.client.post("/v1/runs?wait=30", json=body)).raise_for_status()
    await page.clock.run_for(6000)
    await expect(page.get_by_text("model answered HTTP 400").first).to_be_visible()


async def test_runs_that_wait_for_a_model_are_seen_wherever_an_operator_looks(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "SUSPENDED_AFTER_S", 0.1)
    console.model.decide = lambda _: http_error(503, {"retry-after": "120"})
    client = console.server.client
    patient = {"name": "clerk", "system_message": "You help.", "model_patience_s": 600}
    (await client.post("/v1/agents", json=patient)).raise_for_status()
    body = {"agent": "clerk", "input": "Write the letter."}
    runs = [(await client.post("/v1/runs", json=body)).json()["id"] for _ in range(6)]
    waits = "/v1/runs?waiting_for=model"
    await until(lambda: client.get(waits), lambda got: len(got.json()["items"]) == 6)
    page = await console.open()
    figure = page.locator(".figure", has_text="Waiting for a model").get_by_role("link")
    await expect(figure).to_have_text("6")
    told = page.get_by_role("alert").filter(has_text="6 runs wait for a model")
    await expect(told).to_contain_text("6 of clerk (model answered HTTP 503)")
    assert await violations(page) == []
    await figure.click()
    await expect(page.get_by_role("row").filter(has_text="for a model")).to_have_count(6)
    await expect(page.get_by_label("Waits for")).to_have_value("model")
    held = re.compile(r"gpt-5-mini keeps failing since \d\d:\d\d: calls are held back until")
    await until(lambda: client.get("/v1/provider-health"), lambda got: '"open_since":"' in got.text)
    page = await console.open("health")
    await expect(told).to_be_visible()
    server = page.get_by_role("region", name="Providers").get_by_role("row").nth(1)
    await expect(server).to_contain_text(held)
    why = re.compile(r"clerk with gpt-5-mini: answered HTTP 503 \w+ times, \d\d:\d\d to \d\d:\d\d")
    await expect(server).to_contain_text(why)
    page = await console.open("operations/scheduler")
    row = page.get_by_role("region", name="Waiting runs").get_by_role("row").nth(1)
    await expect(row).to_contain_text(re.compile("a model.*clerk.*6.*model answered HTTP 503"))
    page = await console.open("operations/providers")
    await expect(page.get_by_role("row").filter(has_text="default")).to_contain_text(held)
    for each in runs:
        (await client.post(f"/v1/runs/{each}/cancel")).raise_for_status()


async def test_home_counts_all_queued_runs_below_the_limit_too(console: Console) -> None:
    page = console.page

    async def with_queue(route: Route) -> None:
        answer = await route.fetch()
        since = (datetime.now(UTC) - timedelta(minutes=1)).isoformat()
        runs = [
            {"priority": priority, "queued": queued, "oldest_at": since}
            for priority, queued in ((5, 40), (8, 3))
        ]
        await route.fulfill(response=answer, json={**await answer.json(), "runs": runs})

    await page.route("**/v1/scheduler", with_queue)
    await console.open()
    queued = page.locator(".figure", has_text="Queued").get_by_role("link")
    await expect(queued).to_have_text("43")
    await expect(page.get_by_role("alert")).to_contain_text("43 runs wait in the queue")


async def test_an_agent_that_went_badly_is_named_with_its_version(console: Console) -> None:
    console.model.script(text("Yes."))
    await console.define()
    client = console.server.client
    run = (await client.post("/v1/runs?wait=30", json={"agent": "clerk", "input": "?"})).json()
    assert run["version"] == 1
    bad = {"outcome": "FAILURE", "comment": "It names no date."}
    (await client.post(f"/v1/runs/{run['id']}/feedback", json=bad)).raise_for_status()
    page = await console.open()
    told = page.get_by_text(re.compile(r"clerk version 1 is bad, by people \(key:.*\): It names"))
    await expect(told).to_be_visible()
    page = await console.open("health")
    badly = page.get_by_role("region", name="What went badly")
    for words in ("It names no date.", "clerk@1", "people"):
        await expect(badly.get_by_role("row").nth(1)).to_contain_text(words)
    await badly.get_by_role("row").nth(1).get_by_role("button").click()
    await badly.get_by_role("row").filter(has_text="└").get_by_role("link", name="1").click()
    await expect(page.get_by_label("Reason contains")).to_have_value("It names no date.")
    await expect(page.get_by_label("Judged by")).to_have_value("feedback")
    await expect(page.get_by_role("combobox", name="Time")).to_have_value("7d")
    await expect(page.get_by_text("1 run, 0 failed;")).to_be_visible()
    cell = page.get_by_role("row").nth(1).get_by_title("It names no date.")
    await expect(cell).to_contain_text("bad by people (key:")
    await page.get_by_role("link", name="?", exact=True).click()
    await expect(
        page.get_by_text(re.compile(r"It is bad, by people \(key:.*\): It names no date\."))
    ).to_be_visible()


async def test_what_is_slow_now_is_named_and_many_failures_have_no_exact_number(
    console: Console,
) -> None:
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    minutes = [now - timedelta(minutes=place) for place in (9, 8, 7, 6, 5, 4)]

    async def series(route: Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        values = [9] * 6 if query["metric"] == ["runs"] else [0.04] * 4 + [20.0] * 2
        points = [
            {"at": at.isoformat(), "value": value}
            for at, value in zip(minutes, values, strict=True)
        ]
        key = "office-large" if query["by"] == ["model"] else "clerk"
        await route.fulfill(json={"series": [{"key": key, "points": points}]})

    async def failed(route: Route) -> None:
        answer = await route.fetch()
        page = await answer.json()
        await route.fulfill(json=page | {"items": page["items"] * 25, "next_cursor": "more"})

    async def with_busy_worker(route: Route) -> None:
        state = await (await route.fetch()).json()
        state["workers"][0]["pool"]["runs"] = 3
        await route.fulfill(json=state)

    async def servers(route: Route) -> None:
        state = await (await route.fetch()).json()
        oldest = (datetime.now(UTC) - timedelta(seconds=30)).isoformat()
        state["items"][0]["calls"] |= {"under_way": 3, "oldest_at": oldest}
        state["items"][0]["recent"] |= {"calls": 100, "failed": 0, "duration_p50_ms": 40}
        await route.fulfill(json=state)

    await console.page.route("**/v1/scheduler", with_busy_worker)
    await console.page.route("**/v1/provider-health", servers)
    console.model.script(http_error(400), http_error(400))
    await console.define()
    for _ in range(2):
        body = {"agent": "clerk", "input": "?"}
        (await console.server.client.post("/v1/runs?wait=30", json=body)).raise_for_status()
    await console.page.route("**/v1/metrics/series?*", series)
    await console.page.route("**/v1/runs?status=failed&*", failed)
    page = await console.open()
    slow = page.get_by_role("alert").filter(has_text="Slow now")
    told = re.compile(
        r"Calls of office-large take 20\.0 s to begin an answer since \d\d:\d\d \(40 ms before\)\."
        r"\s*Runs of clerk take 20\.0 s since \d\d:\d\d \(40 ms before\)\."
    )
    await expect(slow).to_contain_text(told)
    stuck = re.compile(
        r"3 calls of the model server default are under way, the oldest since .*\s+.*40 ms"
    )
    await expect(slow).to_contain_text(stuck)
    await expect(page.get_by_text("at least 50 runs since")).to_be_visible()
    assert await violations(page) == []
    await slow.get_by_role("link", name="clerk").click()
    await expect(page.get_by_role("heading", name="Health of clerk")).to_be_visible()


async def test_a_version_that_does_worse_is_named_first_until_another_is_stored(
    console: Console,
) -> None:
    await console.define()
    client = console.server.client
    clerk = {"system_message": "You guess."}
    (await client.put("/v1/agents/clerk", json=clerk)).raise_for_status()
    outcomes = [
        {"key": f"clerk@{version}", "source": "check", "good": good, "partly": 0, "bad": bad}
        for version, good, bad in ((1, 101, 3), (2, 0, 21))
    ]

    async def judged(route: Route) -> None:
        await route.fulfill(json={"by": "version", "complete": True, "items": outcomes})

    await console.page.route("**/v1/metrics/outcomes?*", judged)
    page = await console.open()
    broken = page.get_by_role("alert").filter(has_text="clerk version 2")
    told = "clerk version 2: 0 of 21 good, version 1: 101 of 104; stored "
    await expect(broken).to_contain_text(told)
    assert await violations(page) == []
    await broken.get_by_role("link", name="What changed").click()
    await expect(page.get_by_role("heading", name="Two versions compared")).to_be_visible()


async def test_the_clock_that_a_test_moves_is_right_again_for_the_next(
    profile: BrowserContext,
) -> None:
    async with window(profile) as (page, _):
        await hold_clock(page)
        await page.clock.run_for(600_000)
        assert await ahead_ms(page) > 500_000
    async with window(profile) as (page, _):
        assert abs(await ahead_ms(page)) < 60_000


async def ahead_ms(page: Page) -> float:
    """Return how many milliseconds the page's clock is ahead."""
    await page.goto("data:text/html,x")
    return float(await page.evaluate("Date.now()")) - 1000 * time.time()
