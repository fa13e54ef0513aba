"""Prometheus metrics of this process's work.

All services in a process share these metrics. Processes that have the same parent (``bottega serve
--workers N``) store their values in files of one folder. So each process can report the sums. A
label has few different values, and is never an id.
"""

import os
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import cache
from typing import Any, Literal, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    values,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable: the folder for processes of one parent; ``prometheus_client`` reads it."""
NAME = "BOTTEGA_PROCESS"
"""Environment variable that names a process in that folder. After a restart, a process with the
same name continues its counts."""
OTHER = "other"
"""Label for names that have no label of their own."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_DIRECTIONS = ("input", "cached", "output", "reasoning")
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_MODEL = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)

if FOLDER in os.environ and NAME in os.environ:
    # The library would name the files by process id, so files would remain after each restart.
    values.ValueClass = values.MultiProcessValue(  # type: ignore[no-untyped-call]
        lambda: os.environ[NAME]
    )

disable_created_metrics()  # type: ignore[no-untyped-call]
_registry = CollectorRegistry()


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"bottega_{name}", text, labels, registry=_registry)


def _gauge(
    name: str, text: str, *labels: str, mode: Literal["livesum", "livemax"] = "livesum"
) -> Gauge:
    return Gauge(f"bottega_{name}", text, labels, registry=_registry, multiprocess_mode=mode)


def _histogram(name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
    return Histogram(f"bottega_{name}", text, labels, registry=_registry, buckets=tuple(buckets))


http_requests = _counter(
    "http_requests", "Answered requests, by the route's pattern.", "method", "route", "status"
)
http_request_duration = _histogram(
    "http_request_duration_seconds", "Time from a request to the head of its answer.", _SHORT
)
runs = _counter("runs", "Runs that have ended.", "status", "mode")
claim_duration = _histogram(
    "claim_duration_seconds", "Time of a query for queued runs that returned runs.", _SHORT
)
step_duration = _histogram(
    "step_duration_seconds",
    "Time to store a step of a run, including the wait for steps that are stored together with it.",
    _SHORT,
)
model_calls = _counter(
    "model_calls",
    "Tries of model calls; outcome: ok, cancelled, or the error's code.",
    *("provider", "model", "outcome"),
)
model_call_duration = _histogram(
    "model_call_duration_seconds", "Duration of a try of a model call.", _MODEL, "provider", "model"
)
time_to_first_token = _histogram(
    "time_to_first_token_seconds",
    "Time from the start of a model call, or of its next try, to the first piece of the answer.",
    _MODEL,
    *("provider", "model"),
)
tokens = _counter(
    "tokens", "Tokens of model calls; input includes cached, output reasoning.", "direction"
)
cost = _counter(
    "cost_usd", "Cost of model calls with a known price, in US dollars.", "provider", "model"
)
tool_calls = _counter("tool_calls", "Tool calls that have ended.", "type", "outcome")
subagents = _gauge("subagents", "Asynchronous tasks of the runs in this process.", "state")
subagents_dispatched = _counter("subagent_dispatched", "Dispatched tasks.")
subagents_rejected = _counter("subagent_rejected", "Refused dispatches.", "reason")
subagents_ended = _counter("subagent_ended", "Tasks that have ended.", "status")
subagent_duration = _histogram(
    "subagent_duration_seconds", "Time from a task's dispatch to its end.", _MODEL
)
subagent_queue_wait = _histogram(
    "subagent_queue_wait_seconds", "Time from a task's dispatch to its start.", _MODEL
)
subagent_queue_depth = _gauge("subagent_queue_depth", "Tasks that wait for their start.")
subagents_active = _gauge("subagent_active", "Started tasks that have not ended.")
subagent_pool_size = _gauge("subagent_pool_size", "Slots for tasks.")
subagent_pool_utilization = _gauge(
    "subagent_pool_utilization", "Share of the slots that tasks hold.", mode="livemax"
)
subagent_breakers_opened = _counter(
    "subagent_breakers_opened", "Circuit breakers of an agent's tasks that opened."
)
subagent_tokens = _counter("subagent_tokens", "Tokens of tasks that have ended.", "direction")
subagents_collected = _counter("subagent_collected", "Ended tasks that were removed from memory.")
breakers_open = _gauge(
    "breakers_open", "Circuit breakers of models and tasks that are not closed in this process."
)
streams = _gauge("streams", "Open streams of events.", "kind")
wakeup_latency = _histogram(
    "wakeup_latency_seconds",
    "Time from when events are stored until the streams of this process have them.",
    _SHORT,
)
db_pool_connections = _gauge("db_pool_connections", "Open connections to the database.", "state")
db_statement_duration = _histogram(
    "db_statement_duration_seconds", "Duration of a database statement.", _SHORT
)
episodes_stored = _counter("episodes_stored", "Runs that were stored as episodes.")
episode_searches = _counter(
    "episode_searches", "Searches of episodes; mode: meaning, spelling, or only words.", "mode"
)
recalls = _counter(
    "recalls",
    "Agent starts that looked for memory of earlier runs; result: given, nothing, or nobody (no "
    "user).",
    "result",
)
verdicts = _counter("verdicts", "Verdicts on runs: check, judge, feedback, or approval.", "by")
cache_hits = _counter("cache_hits", "Reads that a cache of this process answered.", "cache")
service_deaths = _counter(
    "service_deaths",
    "Background services that failed because of a bug and were started again.",
    "service",
)
learning_jobs = _counter("learning_jobs", "Jobs of learning and maintenance of memory.", "outcome")

for _mode in ("orchestrated", "dag"):
    for _status in ("completed", "failed", "cancelled", "timeout"):
        # Start each metric with the value 0. Otherwise Prometheus would not count the first failure
        # as an increase.
        runs.labels(_status, _mode)
for _direction in _DIRECTIONS:
    tokens.labels(_direction)
for _direction in ("input", "output"):
    subagent_tokens.labels(_direction)
for _status in ("completed", "failed", "timeout", "cancelled"):
    subagents_ended.labels(_status)
for _reason in ("circuit_open", "queue_full", "depth", "budget", "guard"):
    subagents_rejected.labels(_reason)
for _result in ("given", "nothing", "nobody"):
    recalls.labels(_result)
for _by in ("check", "judge", "feedback", "approval"):
    verdicts.labels(_by)
for _kind in ("sse", "websocket"):
    streams.labels(_kind)

refreshers: dict[object, Callable[[], None]] = {}
"""Functions that set gauges to current values, called every few seconds and before reports."""


def refresh() -> None:
    """Set all gauges to current values."""
    for each in list(refreshers.values()):
        each()


class _Collected:
    """A collector for ``prometheus_client`` that returns the given metrics."""

    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = list(found)

    def collect(self) -> list[Metric]:
        return self._found


def report(more: Iterable[Metric] = ()) -> bytes:
    """Return a text for Prometheus: the metrics of this process, or of all processes of its parent.

    Args:
        more: metrics that belong to no process, such as metrics of the database.
    """
    refresh()
    folder = os.environ.get(FOLDER)
    source = _registry if folder is None else MultiProcessCollector(None, folder)  # type: ignore[no-untyped-call]
    return generate_latest(_Collected([*source.collect(), *more]))


class _Names:
    """The names of providers and models that are labels; their number is limited.

    Tenants choose these names. Therefore a model gets a label only after it has answered, or has
    failed with an error that may be temporary. All other models have the label ``other``.
    """

    def __init__(self) -> None:
        self._providers: dict[str, set[str]] = {}
        self._operators: set[str] = set()

    def add_operators(self, providers: Iterable[str]) -> None:
        """Give labels to the operator's providers. For these, the limit does not apply."""
        self._operators.update(providers)

    def of(self, provider: str, model: str, *, proven: bool) -> tuple[str, str]:
        models = self._providers.get(provider)
        if models is not None and model in models:
            return provider, model
        if models is None:
            own = len(self._providers.keys() - self._operators)
            if provider not in self._operators and own >= 20:
                return OTHER, OTHER
            models = self._providers.setdefault(provider, set())
        if not proven or len(models) >= 20 or len(model) > 100:
            return provider, OTHER
        models.add(model)
        return provider, model


@cache
def _labelled(metric: Any, *labels: str) -> Any:
    """Return a metric with labels from a cache, because the library's look-up is slow."""
    return metric.labels(*labels)


_names = _Names()
add_operators = _names.add_operators


def model_called(
    provider: str,
    model: str,
    outcome: str,
    *,
    seconds: float,
    first_s: float | None,
    may_recover: bool = True,
) -> None:
    """Count one try of a model call.

    Args:
        outcome: ``ok``, ``cancelled``, or an error code.
        first_s: seconds until the first piece of the answer; ``None``: no piece arrived.
        may_recover: true if another try may succeed.
    """
    labels = _names.of(provider, model, proven=may_recover)
    _labelled(model_calls, *labels, outcome).inc()
    _labelled(model_call_duration, *labels).observe(seconds)
    if first_s is not None:
        _labelled(time_to_first_token, *labels).observe(first_s)


class Paid(Protocol):
    """Tokens of a model call, and the call's cost in US dollars (``None``: unknown)."""

    input: int
    cached: int
    output: int
    reasoning: int
    cost: Decimal | None


def paid(provider: str, model: str, usage: Paid) -> None:
    """Count the tokens and the cost of a model call."""
    for direction in _DIRECTIONS:
        if count := getattr(usage, direction):
            _labelled(tokens, direction).inc(count)
    if usage.cost:
        cost.labels(*_names.of(provider, model, proven=True)).inc(float(usage.cost))


def answered(method: str, route: str, status: int, seconds: float) -> None:
    """Count a request. ``route``: pattern of the request's path."""
    http_requests.labels(method if method in _METHODS else "OTHER", route, str(status)).inc()
    http_request_duration.observe(seconds)
