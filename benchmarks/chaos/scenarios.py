"""The scenarios: one function each, from a fault to a report."""

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import psutil

from benchmarks.chaos import audit
from benchmarks.chaos.audit import RunLog
from benchmarks.chaos.model import ModelRequest
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.report import Report
from benchmarks.chaos.stage import Bottega, Stage, stage
from benchmarks.chaos.watch import Watcher
from bottega.container import MAX_CRASHES

PATIENCE_S = 300.0
TAKEOVER_ASKED_S = 30.0
CANCEL_ASKED_S = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line.

    Attributes:
        takeover_s: ``BOTTEGA_TAKEOVER_S`` of the workers.
    """

    runs: int
    workers: int
    seed: int
    takeover_s: float

    def stage(
        self, workers: int | None = None, *, proxied: bool = False, **environment: str
    ) -> AbstractAsyncContextManager[tuple[Stage, Proxy]]:
        environment = {"BOTTEGA_TAKEOVER_S": str(self.takeover_s), **environment}
        count = self.workers if workers is None else workers
        return stage(self.seed, count, proxied=proxied, **environment)


async def killed_workers(options: Options) -> Report:
    """Kill workers that execute runs, at random times, and replace each (a)."""
    report = Report(f"a. kill -9 of workers with runs, {options.workers} at a time")
    kills: list[float] = []

    async def kill(on: Stage) -> None:
        with contextlib.suppress(LookupError):  # nobody asks at the moment
            kills.append(await on.kill(asker(on, on.model.requests[-1])))
            await on.add_worker()

    async with options.stage() as (on, _):
        async with happening(kill, on, every_s=(0.5, 2.0), at_most=options.runs // 10):
            watchers = await drive(on, options)
        await on.stop()
        logs = await on.logs()
    report.figure("workers killed", len(kills))
    judge(report, on, logs, watchers)
    judge_takeovers(report, audit.takeovers(logs, kills))
    return report


async def restarted_database(options: Options) -> Report:
    """Stop the database at once in the middle, and start it again (b)."""
    report = Report("b. the database stopped (immediate) and started again in the middle")
    away: list[float] = []

    async def restart(on: Stage) -> None:
        began = time.monotonic()
        await asyncio.to_thread(on.server.crash)
        await asyncio.sleep(on.random.uniform(0, 3))
        await asyncio.to_thread(on.server.start)
        away.append(time.monotonic() - began)

    async with options.stage() as (on, _):
        async with happening(restart, on, every_s=(2.0, 4.0), at_most=3):
            watchers = await drive(on, options)
        await on.stop()
        logs = await on.logs()
    report.figure("restarts, and seconds each was away", [round(took, 1) for took in away])
    judge(report, on, logs, watchers)
    return report


async def cut_connections(options: Options) -> Report:
    """Cut connections: to the database by proxy and server, and those of streams (c)."""
    report = Report("c. connections cut: to the database, and those of subscribers")
    ended: list[int] = []

    async with options.stage(proxied=True) as (on, proxy):
        api = on.client.base_url.port
        dial = lambda: asyncio.open_connection("127.0.0.1", api)  # noqa: E731
        async with Proxy(dial) as front:

            async def cut(on: Stage) -> None:
                proxy.cut(lambda index: on.random.random() < 0.3)
                front.cut(lambda index: on.random.random() < 0.3)
                killed = await on.fetch(_TERMINATE)
                ended.append(len(killed))

            async with happening(cut, on, every_s=(0.1, 0.6), at_most=100):
                watchers = await drive(on, options, port=front.port)
        await on.stop()
        logs = await on.logs()
    report.figure("database connections cut by the proxy", proxy.cuts)
    report.figure("database connections ended by the server", sum(ended))
    report.figure("subscribers' connections cut", front.cuts)
    judge(report, on, logs, watchers)
    return report


_TERMINATE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name = 'bottega' AND random() < 0.1
"""


async def stopped_worker(options: Options) -> Report:
    """Stop a worker until after its lease; continue it when another has its runs (d)."""
    report = Report("d. SIGSTOP a worker, let another take its runs, SIGCONT, kill the other")
    count = max(3, options.runs // 20)
    async with options.stage(workers=1) as (on, _):
        model = on.model
        model.holds = lambda request: True
        (zombie,) = on.workers
        runs = [await on.post() for _ in range(count)]
        await model.until(lambda: len(model.requests) == count)
        stopped = time.time()
        zombie.send(signal.SIGSTOP)
        owner = await on.add_worker()
        await model.until(lambda: len(model.requests) == 2 * count)
        zombie.send(signal.SIGCONT)
        release(model.requests[:count])
        await zombie.says("run.fenced", count)
        killed = await on.kill(owner)
        model.holds = lambda request: False
        release(model.requests)
        watchers = await watch_all(on, runs)
        await on.stop()
        logs = await on.logs()
    judge(report, on, logs, watchers)
    judge_takeovers(report, audit.takeovers(logs, [stopped, killed]))
    causes = Counter(log.causes for log in logs)
    report.claim(
        "the zombie's runs went to the second worker, and from it back",
        set(causes) == {("start", "crash", "crash")},
        str(causes),
    )
    return report


async def cancelled_runs(options: Options) -> Report:
    """Cancel runs through the API, a process other than their worker (e)."""
    report = Report("e. cancel from another process")
    wishes: dict[str, float] = {}

    async def cancel(on: Stage, number: int) -> Watcher:
        run_id = await on.post(parallel=number % 2 == 0)
        marker, calls = on.created[run_id], on.random.randint(1, 4)
        watcher = Watcher(run_id, "WebSocket")
        watching = asyncio.ensure_future(watcher.watch(lambda: on.client.base_url.port or 0))
        await on.model.until(lambda: len(on.model.asked_by(marker)) >= calls)
        answer = await on.client.post(f"/v1/runs/{run_id}/cancel")
        if answer.status_code == 202:
            wishes[run_id] = time.time()
        await watching
        return watcher

    async with options.stage() as (on, _):
        slots = asyncio.Semaphore(5 * options.workers)

        async def in_turn(number: int) -> Watcher:
            async with slots:
                return await cancel(on, number)

        watchers = await asyncio.gather(*(in_turn(n) for n in range(max(20, options.runs // 2))))
        await asyncio.sleep(CANCEL_ASKED_S)  # to see requests that should not come
        await on.stop()
        logs = await on.logs()
    report.figure("over before the wish", len(logs) - len(wishes))
    logs = [log for log in logs if log.id in wishes]
    watchers = [watcher for watcher in watchers if watcher.run_id in wishes]
    judge(report, on, logs, watchers, expected="cancelled")
    judge_cancels(report, on, logs, wishes)
    return report


def judge_cancels(
    report: Report, on: Stage, logs: Sequence[RunLog], wishes: dict[str, float]
) -> None:
    """Judge the time from a 202 to the end of its run, and the requests after it."""
    effect, cuts, late, open_ = [], [], [], []
    for log in logs:
        asked, end = wishes[log.id], log.events[-1].at
        effect.append(end - asked)
        for request in on.model.asked_by(log.marker):
            if request.cut_at is not None:
                cuts.append(request.cut_at - asked)
            elif request.answered_at is None:
                open_.append(f"{request.step} is still open")
            after_s = request.arrived_at - end  # a short delay: it was in transit
            if after_s > CANCEL_ASKED_S or (after_s > 0 and request.answered_at is not None):
                late.append(f"{request.step} came {after_s:.3f} s after the end")
    report.figure("cancelled while a model call was under way", len(cuts))
    report.figure("202 → final event, s", spread(effect))
    report.figure("202 → the model's socket is closed, s", spread(cuts))
    slowest = max(effect + cuts, default=0)
    report.claim(f"over within {CANCEL_ASKED_S} s", slowest < CANCEL_ASKED_S)
    report.claim("every socket to the model is closed", not open_, *open_)
    report.claim("no request after the end", not late, *late)


async def rolling_restart(options: Options) -> Report:
    """Stop workers in sequence, each after its replacement has started (f)."""
    report = Report("f. rolling restart: SIGTERM with the default time to drain")
    on, logs, _ = await _restarted(report, options, options.stage())
    report.claim("nothing repeated", audit.repeats(logs, on.steps()) == audit.Repeats())
    return report


async def hasty_restart(options: Options) -> Report:
    """Do the same without time to drain: runs are handed over in the middle (f)."""
    report = Report("f. rolling restart: SIGTERM with no time to drain")
    _, _, causes = await _restarted(report, options, options.stage(BOTTEGA_DRAIN_GRACE_S="0"))
    report.claim("runs were handed back", causes["drain"] > 0, str(causes))
    return report


async def _restarted(
    report: Report, options: Options, stage: AbstractAsyncContextManager[tuple[Stage, Proxy]]
) -> tuple[Stage, list[RunLog], Counter[str]]:
    """Replace the workers one by one; return the stage, the logs and the causes of attempts."""
    codes: list[int] = []
    async with stage as (on, _):
        async with happening(lambda on: replace(on, codes), on, (0.2, 1.0), at_most=20):
            watchers = await drive(on, options)
        await on.stop()
        logs = await on.logs()
    report.figure("workers replaced", len(codes))
    judge(report, on, logs, watchers)
    causes = Counter(cause for log in logs for cause in log.causes)
    report.claim("no worker counts as crashed", causes["crash"] == 0, str(causes))
    report.claim("all of them stopped with 0", not any(codes), str(codes))
    return on, logs, causes


async def replace(on: Stage, codes: list[int]) -> None:
    """Start a worker, and stop one in its place: one that executes runs, if there is any."""
    leaving = on.workers[0]
    with contextlib.suppress(LookupError):  # nobody asks at the moment
        leaving = asker(on, on.model.requests[-1])
    on.workers.remove(leaving)
    await on.add_worker()
    leaving.send(signal.SIGTERM)
    codes.append(await leaving.process.wait())


async def poison_pill(options: Options) -> Report:
    """Let a run kill its worker at each model call, beside other runs (g)."""
    report = Report("g. a run that kills its worker each time")
    limit = MAX_CRASHES
    kills: list[float] = []
    async with options.stage() as (on, _):
        poison = await on.post()
        marker = on.created[poison]
        arrived: asyncio.Queue[ModelRequest] = asyncio.Queue()
        on.model.holds = lambda request: request.step[0] == marker
        on.model.on_arrival = lambda request: (
            arrived.put_nowait(request) if request.step[0] == marker else None
        )

        async def kill_whoever_asks() -> None:
            while True:
                worker = asker(on, await arrived.get())
                kills.append(await on.kill(worker))
                await on.add_worker()

        for request in on.model.requests:
            on.model.on_arrival(request)
        killing = asyncio.ensure_future(kill_whoever_asks())
        others = [await on.post() for _ in range(3 * options.workers)]
        watchers = await watch_all(on, [poison, *others])
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        await on.stop()
        logs = await on.logs()
    (pill,) = (log for log in logs if log.id == poison)
    report.figure("workers killed", len(kills))
    report.figure("its attempts", ", ".join(pill.causes))
    report.figure("its error", pill.error)
    report.claim(
        f"it ends as failed with code crashed after {limit} crashes",
        (pill.status, (pill.error or {}).get("code")) == ("failed", "crashed")
        and pill.causes.count("crash") == limit == len(kills),
    )
    judge(report, on, logs, watchers, but=poison)
    return report


def asker(on: Stage, request: ModelRequest) -> Bottega:
    """Return the worker that sent a request, by the port of its connection."""
    for worker in on.workers:
        for connection in psutil.Process(worker.process.pid).net_connections("tcp"):
            if connection.laddr.port == request.port:
                return worker
    raise LookupError(f"nobody here asked for {request.step}")


@asynccontextmanager
async def happening(
    fault: Callable[[Stage], Awaitable[None]], on: Stage, every_s: tuple[float, float], at_most: int
) -> AsyncIterator[None]:
    """Repeat a fault at random times during the block."""
    over = asyncio.Event()

    async def loop() -> None:
        for _ in range(at_most):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(on.random.uniform(*every_s)):
                    await over.wait()
            if over.is_set():
                return
            await fault(on)

    happens = asyncio.ensure_future(loop())
    try:
        yield
    finally:
        over.set()
        await happens


async def drive(on: Stage, options: Options, port: int | None = None) -> list[Watcher]:
    slots = asyncio.Semaphore(10 * options.workers)

    async def one(number: int) -> Watcher:
        async with slots:
            run_id = await on.post(parallel=number % 4 == 3)
            return (await watch_all(on, [run_id], port, first=number))[0]

    return await asyncio.gather(*(one(number) for number in range(options.runs)))


async def watch_all(
    on: Stage, runs: Sequence[str], port: int | None = None, first: int = 0
) -> list[Watcher]:
    """Watch runs to their end, by WebSocket and SSE in turn, with a time limit."""
    to = port or on.client.base_url.port or 0
    kinds = ("WebSocket", "SSE")
    watchers = [Watcher(run, kinds[(first + n) % 2]) for n, run in enumerate(runs)]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(watcher.watch(lambda: to) for watcher in watchers))
    return watchers


def release(requests: Sequence[ModelRequest]) -> None:
    for request in requests:
        request.released.set()


def judge(
    report: Report,
    on: Stage,
    logs: Sequence[RunLog],
    watchers: Sequence[Watcher],
    expected: str = "completed",
    but: str | None = None,
) -> None:
    """Check the invariants of every fault.

    Args:
        expected: outcome of the runs, except ``but``.
    """
    steps = on.steps()
    lengths = {log.id: len(log.events) for log in logs}
    count(report, on, logs, watchers)
    others = [
        f"{log.id} is {log.status} {log.error or ''}"
        for log in logs
        if log.status != expected and log.id != but
    ]
    report.claim(f"all{' other' if but else ''} runs end as {expected}", not others, *others)
    lost = [watcher.run_id for watcher in watchers if watcher.run_id not in lengths]
    report.claim("no accepted run is lost", not lost, *lost)
    twice = [text for text, times in Counter(log.marker for log in logs).items() if times > 1]
    report.claim("no run is created twice", not twice, *twice)
    broken = [text for log in logs for text in audit.violations(log, steps)]
    report.claim(
        "events gapless, one final and last; no write after a run is lost; "
        "no request after its answer is stored",
        not broken,
        *broken,
    )
    partial = [
        f"{w.over} of {w.run_id} saw {len(w.seen)} events of {lengths.get(w.run_id)}: {w.seen}"
        for w in watchers
        if not (w.whole and len(w.seen) == lengths.get(w.run_id))
    ]
    report.claim("every subscriber sees every event once, in order", not partial, *partial)
    troubles = on.troubles()
    report.claim("no process reports an error of its own", not troubles, *troubles)


def count(report: Report, on: Stage, logs: Sequence[RunLog], watchers: Sequence[Watcher]) -> None:
    again = audit.repeats(logs, on.steps())
    resumed = Counter({watcher.over: 0 for watcher in watchers})
    for watcher in watchers:
        resumed[watcher.over] += watcher.resumed
    report.figure("runs by how they ended", dict(Counter(log.status for log in logs)))
    report.figure("attempts by cause", dict(Counter(c for log in logs for c in log.causes)))
    report.figure("POSTs repeated, as the service was away", on.refused)
    report.figure("model calls stored", sum(len(log.answers()) for log in logs))
    report.figure("  repeated, cut before the answer", again.cut)
    report.figure("  repeated, answered but not stored", again.unstored)
    report.figure("events", sum(len(log.events) for log in logs))
    report.figure("subscribers' resumptions", dict(resumed))


def judge_takeovers(report: Report, took: Sequence[float]) -> None:
    report.figure("worker's death → run.resumed, s", spread(took))
    longest = max(took, default=0)
    report.claim(f"resumed within {TAKEOVER_ASKED_S:.0f} s", longest <= TAKEOVER_ASKED_S)


def spread(values: Sequence[float]) -> str:
    ordered = sorted(values)
    if not ordered:
        return "none"
    return f"n {len(ordered)}, median {ordered[len(ordered) // 2]:.3f}, max {ordered[-1]:.3f}"
