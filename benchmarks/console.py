"""Speed of the console in a real browser: first paint, and large runs live and scrolled.

python -m benchmarks.console [--tasks 1000] [--seconds 10]

The server is real. The large run is made up: the page gets its events from a script in place of the
WebSocket, so that nothing but the page is measured. Needs Debian's chromium and Playwright.
"""

import argparse
import asyncio
import shutil
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from playwright.async_api import Browser, CDPSession, Page, async_playwright

from benchmarks.harness import process

RUN = "01890000-0000-7000-8000-000000000001"
_LOADS = 7
_OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
_BATCH_MS = 8
_TABS = ("timeline", "graph", "flows", "events")
EVENTS_OF_TASK = 10

_FEED = """
(() => {
  window.WebSocket = class {
    constructor() {
      setTimeout(() => this.onopen?.());
      window.feed = (some) => { for (const each of some) this.onmessage({ data: each }); };
    }
    close() {}
  };
})();
"""

_LIVE = """
async ({ frames, seconds, batch }) => {
  const texts = frames.map((each) => JSON.stringify(each));
  const { meter } = window;
  const begin = performance.now();
  let at = 0;
  meter.start();
  await new Promise((done) => {
    const timer = setInterval(() => {
      const part = Math.min(1, (performance.now() - begin) / 1000 / seconds);
      const until = Math.ceil(texts.length * part);
      feed(texts.slice(at, until));
      at = until;
      if (at === texts.length) { clearInterval(timer); done(); }
    }, batch);
  });
  return meter.stop();
}
"""

_SCROLL = """
async ({ label, seconds }) => {
  const list = document.querySelector(`.windowed[aria-label="${label}"]`);
  const begin = performance.now();
  const most = list.scrollHeight - list.clientHeight;
  meter.start();
  await new Promise((done) => {
    const step = () => {
      const part = (performance.now() - begin) / 1000 / seconds;
      list.scrollTop = most * Math.sin(part * Math.PI);
      part < 1 ? requestAnimationFrame(step) : done();
    };
    requestAnimationFrame(step);
  });
  return meter.stop();
}
"""

_METER = """
window.meter = (() => {
  let frames = [], long = [], going = false;
  const take = (seen) => going && long.push(...seen.getEntries().map((each) => each.duration));
  new PerformanceObserver(take).observe({ type: "longtask" });
  const frame = (now) => { frames.push(now); if (going) requestAnimationFrame(frame); };
  return {
    start() { frames = []; long = []; going = true; requestAnimationFrame(frame); },
    stop() {
      going = false;
      const gaps = frames.slice(1).map((each, i) => each - frames[i]).sort((a, b) => a - b);
      return { frames: gaps.length, seconds: (frames.at(-1) - frames[0]) / 1000,
               gap: gaps[Math.floor(gaps.length * 0.99)] ?? 0, long };
    },
  };
})();
"""


@dataclass(frozen=True, slots=True)
class Smoothness:
    """Smoothness of the page while it had to move.

    Attributes:
        fps: animation frames per second.
        gap_ms: between two frames; 99 of 100 gaps are not longer.
        long: milliseconds of each task of the page that took more than 50.
        busy_ms: CPU time of the page's thread per frame; other processes do not change it much.
    """

    fps: float
    gap_ms: float
    long: list[float]
    busy_ms: float

    def __str__(self) -> str:
        longest = max(self.long, default=0)
        return (
            f"{self.fps:5.1f} fps, {self.busy_ms:5.1f} ms of CPU per frame, p99 of gaps "
            f"{self.gap_ms:4.0f} ms, {len(self.long)} long tasks (longest {longest:.0f} ms)"
        )


def events(
    tasks: int, seconds: float = 10, *, at_once: int = 50, pieces: int = 3
) -> Iterator[dict[str, Any]]:
    """Make up the frames of a run whose lead dispatches tasks, without the run's end.

    Args:
        seconds: from its first event, which is now, to its last.
        at_once: tasks that are under way together.
        pieces: of live text for each model call; they are not in the log.
    """
    numbers = count(1)
    begin = datetime.now(UTC)
    step = timedelta(seconds=seconds / (tasks * EVENTS_OF_TASK))

    def event(kind: str, task: int | None, agent: str | None, **data: Any) -> dict[str, Any]:
        is_live = kind == "llm.delta"
        seq = None if is_live else next(numbers)
        return {
            "seq": seq,
            "run_id": RUN,
            "type": kind,
            "at": (begin + step * (seq or 0)).isoformat(),
            "task_id": None if task is None else f"task-{task}",
            "parent_task_id": None,
            "agent": agent,
            "data": data,
        }

    yield event("run.queued", None, None)
    yield event("run.started", None, None, attempt=1)
    yield event("agent.started", None, "lead", depth=0)
    for first in range(0, tasks, at_once):
        several = range(first, min(first + at_once, tasks))
        stories = [list(_story(event, task, pieces)) for task in several]
        for moment in zip(*stories, strict=True):
            for kind, task, agent, data in moment:
                yield event(kind, task, agent, **data)


def _story(event: Any, task: int, pieces: int) -> Iterator[tuple[str, int, str, dict[str, Any]]]:
    agent = f"agent-{task % 8}"
    usage = {"input": 400, "output": 80, "cost": {"amount": "0.0004", "complete": True}}
    call = {"call": 1, "attempt": 1}
    tool = {"call": 1, "tool_call_id": "a", "name": "search"}
    yield "subagent.dispatched", task, agent, {"prompt": f"Part {task}"}
    yield "subagent.dequeued", task, agent, {}
    yield "agent.started", task, agent, {"depth": 1}
    flowed = {"source": f"agent-{(task + 1) % 8}", "version": task, "content": "known " * 20}
    yield "memory.injected", task, agent, flowed
    yield "llm.started", task, agent, {**call, "model": "demo", "provider": "demo"}
    for piece in range(pieces):
        yield (
            "llm.delta",
            task,
            agent,
            {**call, "offset": piece * 30, "text": "It goes on and on " * 2},
        )
    done = {**call, "message": {"content": "x"}, "usage": usage, "duration_ms": 90, "try": 1}
    yield "llm.completed", task, agent, done
    yield "tool.started", task, agent, {**tool, "arguments": {"q": task}}
    yield "tool.completed", task, agent, {**tool, "result": "found " * 10}
    yield "agent.completed", task, agent, {"output": "Done."}
    yield "subagent.completed", task, agent, {"token_usage": usage, "duration_ms": 200}


def made_up_run() -> dict[str, Any]:
    """Return the run as ``GET /v1/runs/{id}`` would answer it."""
    return {
        "id": RUN,
        "agent": "lead",
        "graph": None,
        "status": "running",
        "input": "?",
        "question": "?",
        "output": None,
        "memory": "off",
        "metadata": {},
        "attempts": [],
        "outcome": {"value": "UNKNOWN", "source": None},
        "created_at": "2026-01-01T00:00:00Z",
    }


async def watched(page: Page, address: str, tab: str = "timeline") -> None:
    """Open the made-up run; its events come once ``feed`` is called in the page."""
    await page.add_init_script(_FEED)
    await page.add_init_script(_METER)
    await page.route(f"**/v1/runs/{RUN}", lambda route: route.fulfill(json=made_up_run()))
    await page.route("**/v1/ws-tickets", lambda route: route.fulfill(json={"ticket": "none"}))
    await page.goto(f"{address}#/runs/{RUN}?tab={tab}")
    await page.wait_for_function("() => 'feed' in window")


async def live(page: Page, tasks: int, seconds: float) -> Smoothness:
    """Measure the page while the run's events come, evenly over the seconds."""
    fed = {"frames": list(events(tasks, seconds)), "seconds": seconds, "batch": _BATCH_MS}
    return await _measured(page, _LIVE, fed)


async def scrolled(page: Page, label: str, seconds: float) -> Smoothness:
    """Measure the page while a long list is scrolled up and down."""
    return await _measured(page, _SCROLL, {"label": label, "seconds": seconds})


async def _measured(page: Page, script: str, given: dict[str, Any]) -> Smoothness:
    inside = await page.context.new_cdp_session(page)
    await inside.send("Performance.enable", {"timeDomain": "threadTicks"})
    before = await _busy_s(inside)
    seen = await page.evaluate(script, given)
    busy_s = await _busy_s(inside) - before
    await inside.detach()
    frames = max(1, seen["frames"])
    return Smoothness(
        frames / max(0.001, seen["seconds"]), seen["gap"], seen["long"], 1000 * busy_s / frames
    )


async def _busy_s(inside: CDPSession) -> float:
    metrics = (await inside.send("Performance.getMetrics"))["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))


async def first_paint_ms(browser: Browser, address: str) -> tuple[float, float]:
    """Return when an empty cache has the first page's first paint, and its first data."""
    context = await browser.new_context(viewport={"width": 1280, "height": 900})
    page = await context.new_page()
    await page.goto(address)
    await page.locator(".figures").wait_for()
    await page.get_by_role("heading", name="Latest runs").wait_for()
    found = await page.evaluate(
        """() => [
            performance.getEntriesByName("first-contentful-paint")[0]?.startTime,
            Math.max(...performance.getEntriesByType("resource").map((each) => each.responseEnd)),
        ]"""
    )
    await context.close()
    return found[0], found[1]


@asynccontextmanager
async def _chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = await playwright.chromium.launch(executable_path=path, args=[*_OPTIONS])
        yield browser
        await browser.close()


async def _main(tasks: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="bottega-", ignore_cleanup_errors=True) as folder:
        serving = process("serve", "--port", "0", ready="listens", BOTTEGA_DATA_DIR=folder)
        async with serving as (_, line), _chromium() as browser:
            port = line.split("http://127.0.0.1:")[1].split()[0]
            address = f"http://127.0.0.1:{port}/console/"
            loads = [await first_paint_ms(browser, address) for _ in range(_LOADS)]
            paint, data = (statistics.median(each) for each in zip(*loads, strict=True))
            worst = max(first for first, _ in loads)
            print(
                f"first paint, median of {_LOADS}: {paint:.0f} ms (worst {worst:.0f} ms);", end=" "
            )
            print(f"all files and data: {data:.0f} ms")
            for tab in _TABS:
                context = await browser.new_context(viewport={"width": 1280, "height": 900})
                page = await context.new_page()
                await watched(page, address, tab)
                print(f"{tasks} tasks live, {tab:9} {await live(page, tasks, seconds)}", flush=True)
                for label in {"timeline": ("Tasks",), "events": ("Events",)}.get(tab, ()):
                    number = tasks if label == "Tasks" else tasks * EVENTS_OF_TASK
                    print(f"  {number} {label.lower()} scrolled: {await scrolled(page, label, 4)}")
                await context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10)
    given = parser.parse_args()
    asyncio.run(_main(given.tasks, given.seconds))


if __name__ == "__main__":
    main()
