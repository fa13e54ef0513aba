"""Demo of learning from earlier runs: thirty similar tasks, each judged by a success check.

The lead agent does not know the right order of its sub-agents. A run is a success only if the facts
were collected before the text was written, and the text written before it was checked.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
from rich.console import Console
from rich.panel import Panel

from bottega.cli.demo.client import DemoError, checked
from bottega.cli.demo.scenarios import Scenario

NIGHTS = (10, 18, 24)
"""Numbers of tasks after which maintenance of the memory runs, as it otherwise does at night."""
TRIAL_SHARE = 0.8
"""Share of runs on trial; above the default, since there are only thirty runs."""
TOPICS = (
    "tides in Venice", "night trains", "wind mills", "urban beekeeping", "printed books",
    "public baths", "salt marshes", "wooden bridges", "fountain pens", "paper making",
    "tram lines", "city wells", "rooftop farms", "stone quarries", "canal locks",
    "olive oil", "glass blowing", "mountain huts", "lighthouses", "street markets",
    "vertical farming", "bell towers", "river ferries", "rice fields", "old orchards",
    "water towers", "cable cars", "clock makers", "fish ladders", "snow sheds",
)  # fmt: skip
_ABOUT = {"domain": "editorial", "task_type": "briefing"}
_SAID = {
    "used": "given the pattern",
    "trial": "given it on trial",
    "withheld": "pattern withheld at random",
    "control": "candidate withheld at random",
}
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class _Done:
    """Finished task.

    Attributes:
        arm: the assignment of its run for a pattern, if there was one.
    """

    run_id: str
    good: bool
    arm: str | None


async def watch(client: httpx2.AsyncClient, scenario: Scenario, console: Console) -> int:
    """Run all tasks and show the learning; return the process's exit status."""
    done: list[_Done] = []
    since = 0
    for number, topic in enumerate(TOPICS, 1):
        done.append(await _one(client, scenario, number, topic, console))
        if number in NIGHTS:
            await _night(client, done[since:], console)
            since = number
    return await _sum_up(client, done, console)


async def _one(
    client: httpx2.AsyncClient, scenario: Scenario, number: int, topic: str, console: Console
) -> _Done:
    """Run one task, and wait until its success check has judged it."""
    task = scenario.task.format(topic=topic)
    # One user per topic: a pattern names a domain only if tasks of three users had it.
    body = {**scenario.run, "input": task, "user": topic, "metadata": _ABOUT}
    run = await checked(client.post("/v1/runs", params={"wait": 60}, json=body))
    if run["status"] != "completed":
        raise DemoError(f"run {run['id']} {run['status']}: {run['error'] or 'it took too long'}")
    events = f"/v1/runs/{run['id']}/events"
    started = await checked(client.get(events, params={"types": "agent.started", "limit": 100}))
    asked = [event["agent"] for event in started["items"] if event["task_id"] is not None]
    given = await checked(client.get(events, params={"types": "context.recalled", "limit": 100}))
    arms = [event["data"]["arm"] for event in given["items"] if "arm" in event["data"]]
    where = f"/v1/runs/{run['id']}"
    judged = await _until(client, where, lambda found: found["outcome"]["source"] is not None)
    good = judged["outcome"]["value"] == "SUCCESS"
    mark = "[green]✓[/]" if good else "[red]✗[/]"
    why = f"  [dim]{_SAID[arms[0]]}[/]" if arms else ""
    console.print(f"{number:>3} {mark} {' → '.join(asked)}{why}", highlight=False)
    return _Done(run["id"], good, arms[0] if arms else None)


async def _night(client: httpx2.AsyncClient, done: Sequence[_Done], console: Console) -> None:
    """Run the memory's maintenance, and show the patterns."""
    for each in done:
        await _until(client, f"/v1/runs/{each.run_id}/learning", _is_over)
    job = await checked(client.post("/v1/memory/maintenance", json={}))
    report = await _until(client, f"/v1/memory/reports/{job['id']}", _is_over)
    if report["status"] == "failed":
        raise DemoError(f"maintenance of the memory failed: {report['error']}")
    console.print("[bold]— maintenance: patterns so far —[/]", highlight=False)
    for pattern in (await checked(client.get("/v1/patterns")))["items"]:
        console.print(f"    {_render(pattern)}", highlight=False, soft_wrap=True)


def _render(pattern: Mapping[str, Any]) -> str:
    known = pattern["evidence"]
    line = f"[bold]{pattern['lifecycle']['state']}[/] {pattern['category']}: {pattern['name']}"
    if known["applications"]:
        line += f" ({known['success_rate']:.0%} of {known['applications']}, e = "
        line += f"{known['e_value']:.1f}, confidence {known['confidence']:.2f})"
    return line


def _is_over(found: Mapping[str, Any]) -> bool:
    return found["status"] in ("done", "failed")


async def _until(
    client: httpx2.AsyncClient, path: str, is_met: Callable[[Mapping[str, Any]], bool]
) -> dict[str, Any]:
    """Poll a path until its body meets a condition; return the body."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                found = await checked(client.get(path))
                if is_met(found):
                    return found
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise DemoError(f"{path} did not finish within {_PATIENCE_S:g} s") from None


async def _sum_up(client: httpx2.AsyncClient, done: Sequence[_Done], console: Console) -> int:
    with_it = [each.good for each in done if each.arm in ("trial", "used")]
    without = [each.good for each in done if each.arm not in ("trial", "used")]
    used = sum(each.arm == "used" for each in done[NIGHTS[-1] :])
    page = await checked(client.get("/v1/patterns", params={"state": "VALIDATED"}))
    lines = [f"Successes without a pattern: {_share(without)}; with one: {_share(with_it)}."]
    lines += [_render(each) for each in page["items"]]
    lines.append(f"{used} of the last {len(TOPICS) - NIGHTS[-1]} runs were given it.")
    console.print(Panel("\n".join(lines), title="What the runs taught"))
    return 0 if page["items"] and used else 1


def _share(good: Sequence[bool]) -> str:
    return f"{sum(good)} of {len(good)}"
