"""Metrics for Prometheus: the permission to read them, and gauges from the database."""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import product
from typing import get_args
from urllib.parse import urlsplit

import asyncpg
from prometheus_client.metrics_core import GaugeMetricFamily
from pydantic_core import from_json

from bottega import metrics
from bottega.db.failures import is_transient
from bottega.errors import BottegaError, UnauthenticatedError, UnavailableError
from bottega.events.types import WaitReason
from bottega.logger import Logger
from bottega.memory.episodes.episode import Outcome, StorageState
from bottega.memory.learning.lessons import LessonState
from bottega.memory.patterns.pattern import Category, PatternState
from bottega.settings import Settings
from bottega.tenants.keys import KeyCache

_GAUGES = """
SELECT queued, oldest_s, alive, waiting, episodes, patterns, lessons
FROM service_gauges(), memory_gauges()
"""
_TEXTS = {
    "bottega_queue_depth": "Queued runs of all tenants.",
    "bottega_queue_oldest_seconds": (
        "Seconds since the oldest queued run could first have been claimed."
    ),
    "bottega_workers": "Workers that are alive.",
}
_REFUSAL = (
    "send the scrape token: 'Authorization: Bearer <BOTTEGA_METRICS_TOKEN>'; API keys are not "
    "accepted"
)

log = Logger(__name__)


@dataclass(frozen=True, slots=True)
class Scraping:
    """Report of this process's metrics, for callers who may read the metrics."""

    settings: Settings
    pool: asyncpg.Pool
    keys: KeyCache

    async def report(self, authorization: Sequence[bytes]) -> bytes:
        """Return the metrics in Prometheus's text form.

        While the database is unreachable, the metrics from the database are missing.

        Args:
            authorization: values of the request's header ``Authorization``.

        Raises:
            UnauthenticatedError: the caller may not read the metrics.
            UnavailableError: the database is unreachable, so the process does not know if API keys
                exist.
        """
        if not self._has_token(authorization) and not await self._is_open():
            raise UnauthenticatedError(_REFUSAL, code="bad_metrics_token")
        return metrics.report(await self._of_database())

    def _has_token(self, authorization: Sequence[bytes]) -> bool:
        token = self.settings.metrics_token
        if token is None or len(authorization) != 1:
            return False
        scheme, _, given = authorization[0].partition(b" ")
        wanted = token.get_secret_value().encode()
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), wanted)

    async def _is_open(self) -> bool:
        try:
            return await self.keys.is_open()
        except BottegaError:
            raise
        except Exception as error:
            if is_transient(error):
                raise UnavailableError(
                    "the database does not answer: send the scrape token",
                    code="database_unavailable",
                ) from error
            raise

    async def _of_database(self) -> list[GaugeMetricFamily]:
        try:
            async with asyncio.timeout(2.0):
                row = await self.pool.fetchrow(_GAUGES)
        except Exception as error:
            if not is_transient(error):
                log.exception("metrics.not_read")
            return []
        assert row is not None
        *values, waiting, episodes, patterns, lessons = row.values()
        return [
            *(
                GaugeMetricFamily(name, text, float(value))
                for (name, text), value in zip(_TEXTS.items(), values, strict=True)
            ),
            _by_label(
                *("bottega_runs_waiting", "Runs that wait, by the reason.", "reason"),
                *(get_args(WaitReason), from_json(waiting)),
            ),
            _by_state(
                *("bottega_episodes", "Episodes of all tenants.", "tier", "outcome"),
                *(StorageState, Outcome, from_json(episodes)),
            ),
            _by_state(
                *("bottega_patterns", "Patterns of all tenants.", "state", "category"),
                *(PatternState, Category, from_json(patterns)),
            ),
            _by_label(
                *("bottega_lessons", "Lessons of all tenants.", "state"),
                *(get_args(LessonState), from_json(lessons)),
            ),
        ]


def _by_label(
    name: str, text: str, label: str, values: Iterable[str], counts: Mapping[str, int]
) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, text, labels=[label])
    for value in values:
        gauge.add_metric([value], float(counts.get(value, 0)))
    return gauge


def _by_state(
    name: str,
    text: str,
    state_label: str,
    kind_label: str,
    states: Iterable[str],
    kinds: Iterable[str],
    counts: Mapping[str, Mapping[str, int]],
) -> GaugeMetricFamily:
    """Return a gauge that has a value for each pair of a state and a kind, even if the value is 0.

    Args:
        counts: numbers of rows by state and kind.
    """
    gauge = GaugeMetricFamily(name, text, labels=[state_label, kind_label])
    for state, kind in product(states, kinds):
        gauge.add_metric([state, kind], float(counts.get(state, {}).get(kind, 0)))
    return gauge


async def refresh_regularly(operators: Iterable[str]) -> None:
    """Set this process's gauges every 2 s, because reports of sibling processes contain them, too.

    Args:
        operators: names of the operator's model providers.
    """
    metrics.add_operators(operators)
    while True:
        metrics.refresh()
        await asyncio.sleep(2.0)


@asynccontextmanager
async def serving(scraping: Scraping, port: int) -> AsyncIterator[int]:
    """Serve ``GET /metrics`` during the block, without a web framework; yield the port.

    Raises:
        UnavailableError: ``port_taken``.
    """
    at_once = asyncio.Semaphore(8)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(5.0):
                if at_once.locked():
                    return
                async with at_once:
                    head = await _head(reader)
                    writer.write(await _answer(scraping, head))
                    await writer.drain()
        writer.close()

    host = scraping.settings.host
    try:
        server = await asyncio.start_server(answer, host, port, limit=8192)
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {host} port {port} ({error.strerror}): choose another "
            "BOTTEGA_METRICS_PORT",
            code="port_taken",
        ) from error
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _head(reader: asyncio.StreamReader) -> list[bytes]:
    try:
        return (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    except asyncio.LimitOverrunError:
        return []


async def _answer(scraping: Scraping, head: Sequence[bytes]) -> bytes:
    fields = [line.partition(b":") for line in head[1:]]
    of: Callable[[bytes], list[bytes]] = lambda name: [  # noqa: E731
        value.strip() for each, _, value in fields if each.strip().lower() == name
    ]
    target = (head or [b""])[0].split(b" ")
    if len(target) != 3 or target[0] != b"GET" or target[1].partition(b"?")[0] != b"/metrics":
        return _response("404 Not Found", b"only GET /metrics is here\n")
    if scraping.keys.may_be_open and not _names_this_machine(scraping.settings.host, of(b"host")):
        return _response("403 Forbidden", b"the Host header must name this machine\n")
    try:
        return _response("200 OK", await scraping.report(of(b"authorization")))
    except UnauthenticatedError as error:
        return _response("401 Unauthorized", f"{error.detail}\n".encode())
    except BottegaError as error:
        return _response("503 Service Unavailable", f"{error.detail}\n".encode())


def _names_this_machine(host: str, sent: Sequence[bytes]) -> bool:
    """Return true if the Host header names this machine. This check prevents DNS rebinding."""
    try:
        name = urlsplit(f"//{sent[0].decode('ascii')}").hostname if len(sent) == 1 else None
    except ValueError:
        return False
    return name in {"localhost", "127.0.0.1", "::1", host}


def _response(status: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: {metrics.CONTENT_TYPE}\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n"
        "x-content-type-options: nosniff\r\n\r\n"
    )
    return head.encode() + body
