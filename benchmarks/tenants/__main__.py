"""Effect on a tenant of a neighbour that does its worst.

    python -m benchmarks.tenants [--seconds 6] [--rounds 3] [--only flood,uploads]

One API process, one worker, a database, a model that answers at once, two tenants with keys. One
starts six runs per second, evenly, and watches each over a WebSocket. The other attacks, from a
process of its own with low priority and bounded rate, since all share the machine's cores. Measured
is the time from a POST /v1/runs to its answer, and to the run's final event; and the longest time
from a run's end to the decision of its check, of the type `contains`. Each attack begins two
seconds earlier, and comes after the same time alone, in turns. Compare only figures of the same
invocation.
"""

import argparse
import asyncio
import multiprocessing
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.client import Client, Watched
from benchmarks.harness import temporary_database
from benchmarks.tenants.attacks import ATTACKS, RUN, attacking
from benchmarks.tenants.stage import Stage, stage

PACE_PER_S = 6
AHEAD_S = 2.0
_REST_S = 2.0  # until the measured tenant may send a full burst again
_DUE = "1,000 schedules due at once"


async def work(client: Client, seconds: float, failures: list[str]) -> list[Watched]:
    """Start and watch runs evenly; return the times of those that completed."""
    loop = asyncio.get_running_loop()
    began, tasks = loop.time(), []

    async def one() -> Watched | None:
        try:
            return await client.watched()
        except SystemExit as error:
            failures.append(str(error))
            return None

    for number in range(int(PACE_PER_S * seconds)):
        if (ahead := began + number / PACE_PER_S - loop.time()) > 0:
            await asyncio.sleep(ahead)
        tasks.append(asyncio.ensure_future(one()))
    return [each for each in await asyncio.gather(*tasks) if each is not None]


@dataclass(slots=True)
class Case:
    """The times beside one attack, and alone before it; what the attacker saw, what failed."""

    alone: list[Watched] = field(default_factory=list)
    beside: list[Watched] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    check_s: float = 0.0


async def measure(on: Stage, client: Client, name: str, seconds: float, case: Case) -> None:
    """Measure one round: alone, then beside the attack."""
    await asyncio.sleep(_REST_S)
    case.alone += await work(client, seconds, case.failures)
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    lasts_s = AHEAD_S + seconds + 1
    attacker = context.Process(
        target=attacking, args=(name, on.port, on.theirs, lasts_s, told), daemon=True
    )
    attacker.start()
    due = asyncio.ensure_future(on.let_schedules_fall_due()) if name == _DUE else None
    await asyncio.sleep(AHEAD_S)
    began = await on.now()
    case.beside += await work(client, seconds, case.failures)
    case.check_s = max(case.check_s, await on.check_s(began))
    if due is not None:
        due.cancel()
        await asyncio.wait([due])
    case.seen.update(await asyncio.to_thread(told.get))
    await asyncio.to_thread(attacker.join)
    await on.calm()


def report(cases: dict[str, Case], seconds: float) -> None:
    """Print the table."""
    print("\nmilliseconds; ratio: p99 beside the attack ÷ p99 alone before it")
    print(f"{'':36}{'answer':>8}{'':>14}{'':>7}  {'final event':>12}")
    heads = f"{'p50':>7}{'p99':>8}{'ratio':>7}{'p50':>9}{'p99':>8}{'ratio':>7}{'check':>7}"
    print(f"{'attack':36}{heads}  seen")
    for name, case in cases.items():
        row = f"{name:36}"
        for attribute, gap in (("answered_s", 7), ("took_s", 9)):
            alone, beside = [
                _percentiles([getattr(each, attribute) * 1000 for each in times])
                for times in (case.alone, case.beside)
            ]
            row += f"{beside[0]:{gap}.0f}{beside[1]:8.0f}{beside[1] / alone[1]:7.2f}"
        row += f"{1000 * case.check_s:7.0f}"
        seen = ", ".join(f"{count} {what}" for what, count in case.seen.most_common(4))
        print(f"{row}  {seen}", *case.failures[:1], sep="; ")
    every = [each for case in cases.values() for each in case.alone]
    for attribute, what in (("answered_s", "answer"), ("took_s", "final event")):
        found = _percentiles([getattr(each, attribute) * 1000 for each in every])
        print(f"alone, {what}: p50 {found[0]:.0f}, p99 {found[1]:.0f}")


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]


async def main(url: str, seconds: float, rounds: int, only: Sequence[str]) -> None:
    names = [name for name, attack in ATTACKS.items() if not only or attack.__name__ in only]
    cases = {name: Case() for name in names}
    async with stage(url) as on:
        client = Client(on.port, RUN, f"authorization: Bearer {on.mine}\r\n".encode())
        await work(client, 3, [])  # warm
        await on.calm()
        for _ in range(rounds):
            for name, case in cases.items():
                await measure(on, client, name, seconds, case)
                print(".", end="", flush=True)
        client.close()
    report(cases, seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    options = parser.parse_args()
    with temporary_database() as found:
        asyncio.run(main(found[0], options.seconds, options.rounds, options.only))
