"""Webhooks (Standard Webhooks) about runs that ended, and runs that wait for people.

The transaction that ends a run, or makes a run wait, queues the delivery of a message. A worker
leases the delivery; see :mod:`bottega.leased_work`. If the worker dies, another worker sends the
message again with the same id.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json
from standardwebhooks import Webhook

from bottega.db.pool import acting_as
from bottega.errors import BottegaError, ConflictError
from bottega.events.types import EventType
from bottega.leased_work import LeasedWork
from bottega.logger import Logger
from bottega.tenants import webhook_secrets
from bottega.tools.egress import Egress, EgressRefusedError
from bottega.trace_context import Trace, headers_of

CHANNEL = "bottega_webhooks"
RETRIES_S = (5.0, 60.0, 300.0, 1800.0, 7200.0, 21_600.0, 43_200.0)
"""Seconds from each failed try to the next try. The sum is about a day."""

_MAX_OUTPUT = 102_400

logger = Logger(__name__)

_TO = """
SELECT w.url, t.name AS tenant, now() AS at FROM webhooks w JOIN tenants t ON t.id = w.tenant_id
WHERE w.tenant_id = $1 AND w.run_id = $2 AND w.seq = $3
"""
_RUN = f"""
SELECT id, status, mode, agent, graph, session_id, stop_reason, error, usage, metadata, retry_of,
       created_at, started_at, ended_at, traceparent, tracestate,
       octet_length(output::text) > {_MAX_OUTPUT} AS long,
       CASE WHEN octet_length(output::text) <= {_MAX_OUTPUT} THEN output END AS output,
       CASE WHEN octet_length(output::text) <= {_MAX_OUTPUT} THEN output_json END AS output_json
FROM runs WHERE tenant_id = $1 AND id = $2
"""  # noqa: S608
_EVENT = """
SELECT e.type, e.data, s.at FROM run_events e, (
    SELECT last_seq, at FROM run_steps
    WHERE tenant_id = $1 AND run_id = $2 AND last_seq >= $3 ORDER BY last_seq LIMIT 1) AS s
WHERE e.tenant_id = $1 AND e.run_id = $2 AND e.seq = $3 AND e.step = s.last_seq
"""
_STORE = """
UPDATE webhooks SET status = $5, answer = $6, error = $7,
    next_at = CASE WHEN $5 = 'pending' THEN now() + make_interval(secs => $8) END,
    ended_at = CASE WHEN $5 <> 'pending' THEN now() END
WHERE tenant_id = $1 AND run_id = $2 AND seq = $3 AND tries = $4 AND status = 'pending'
"""


@dataclass(frozen=True, slots=True)
class Delivery:
    """The result of a try to deliver a message.

    Attributes:
        status: ``delivered``, ``failed``, or ``pending``: the next try follows after ``wait_s`` s.
        answer: the HTTP status of the reply; ``None``: there was no reply.
        error: the reason why the message was not delivered.
    """

    status: str
    answer: int | None = None
    error: str | None = None
    wait_s: float = 0.0


def outcome(
    answer: int | None, error: BottegaError | None, tries: int, retries_s: tuple[float, ...]
) -> Delivery:
    """Return the result of a try, from the HTTP status of the reply or from the error. Pure."""
    if answer is not None and 200 <= answer < 300:
        return Delivery("delivered", answer)
    if error is not None:
        why = error.detail
    elif answer is not None and 300 <= answer < 400:
        why = f"the receiver answered {answer}: redirects are not followed, so use the new address"
    else:
        why = f"the receiver answered {answer}"
    if answer == HTTPStatus.GONE or isinstance(error, EgressRefusedError) or tries > len(retries_s):
        return Delivery("failed", answer, why)
    return Delivery("pending", answer, why, retries_s[tries - 1])


def message(tenant: str, run: Mapping[str, Any], event: asyncpg.Record | None = None) -> bytes:
    """Return the body of the message about the end of a run or batch. Pure.

    Args:
        event: ``type``, ``data`` and ``at`` of the final event of a batch, which ends again after
            each retry; ``None`` for a run, which ends only once.
    """
    data = {name: run[name] for name in _FIELDS}
    data |= {name: None if run[name] is None else from_json(run[name]) for name in _JSON}
    kind, folder = ("batch", "batches") if run["mode"] == "batch" else ("run", "runs")
    data |= {"output_omitted": bool(run["long"]), "path": f"/v1/{folder}/{run['id']}"}
    if event is not None:
        event_data = from_json(event["data"])
        data |= {"status": event["type"].removeprefix("batch."), "ended_at": event["at"]}
        data |= {name: event_data.get(name) for name in ("stop_reason", "usage", "error")}
    about = {"type": f"{kind}.{data['status']}", "timestamp": data["ended_at"], "tenant": tenant}
    return to_json({**about, "data": data})


_FIELDS = (
    *("id", "status", "mode", "agent", "graph", "session_id", "stop_reason", "retry_of"),
    *("created_at", "started_at", "ended_at"),
)
_JSON = ("output", "output_json", "error", "usage", "metadata")


def waiting_message(tenant: str, run: Mapping[str, Any], event: asyncpg.Record) -> bytes:
    """Return the body of the message about a run that waits for people. Pure.

    Every try to deliver sends the same body, even if the run continues between the tries.

    Args:
        event: ``at`` and ``data`` of the event ``run.waiting``.
    """
    fields = {name: run[name] for name in _OF_WAITING}
    fields |= {"metadata": from_json(run["metadata"]), "path": f"/v1/runs/{run['id']}"}
    interrupts = from_json(event["data"])["interrupts"]
    data = {"run": {**fields, "status": "waiting"}, "interrupts": interrupts}
    about = {"type": "run.waiting", "timestamp": event["at"], "tenant": tenant}
    return to_json({**about, "data": data})


_OF_WAITING = ("id", "mode", "agent", "graph", "session_id", "retry_of", "created_at", "started_at")


def signed(secrets: Sequence[str], message_id: str, at: datetime, body: bytes) -> dict[str, str]:
    """Return the headers of a message, with one signature for each secret. Pure."""
    signatures = [Webhook(secret).sign(message_id, at, body.decode()) for secret in secrets]
    return {
        "content-type": "application/json",
        "webhook-id": message_id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": " ".join(signatures),
    }


class Webhooks:
    """Sender of a worker's due deliveries. Each tenant has a limit of concurrent deliveries.

    Args:
        secret: the first webhook secret of the tenant ``default``.
        retries_s: seconds from each failed try to the next try, in order.
        timeout_s: timeout in seconds for a delivery's database queries, and for its HTTP request.
        lease_s: length of a delivery's lease in seconds; more than twice ``timeout_s``.
        jitter: returns a random factor by which the time until the next try is multiplied.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        egress: Egress,
        secret: str | None,
        *,
        retries_s: tuple[float, ...] = RETRIES_S,
        timeout_s: float = 15.0,
        lease_s: float = 60.0,
        jitter: Callable[[], float] = lambda: random.uniform(0.8, 1.2),  # noqa: S311
    ) -> None:
        self.work = LeasedWork(
            pool=pool,
            name="webhook",
            columns="run_id uuid, seq bigint, tries integer",
            lease_s=lease_s,
            share=8,
            do=self._send,
            channel=CHANNEL,
        )
        self._pool = pool
        self._egress = egress
        self._secret = secret
        self._retries_s = retries_s
        self._timeout_s = timeout_s
        self._jitter = jitter

    async def _send(self, tenant_id: UUID, claimed: Sequence[asyncpg.Record]) -> None:
        ((_, run_id, seq, tries),) = claimed
        message_id = f"{run_id}-{seq}" if seq else str(run_id)
        async with asyncio.timeout(self._timeout_s), acting_as(self._pool, tenant_id) as connection:
            to = await connection.fetchrow(_TO, tenant_id, run_id, seq)
            run = await connection.fetchrow(_RUN, tenant_id, run_id)
            event = await connection.fetchrow(_EVENT, tenant_id, run_id, seq) if seq else None
            secrets = await webhook_secrets.signing(connection, tenant_id, self._secret)
        if to is None or run is None:
            return  # the run and its delivery were deleted
        tenant = to["tenant"]
        if event is not None and event["type"] == EventType.RUN_WAITING:
            body = waiting_message(tenant, run, event)
        else:
            body = message(tenant, run, event)
        answer, failure = None, None
        try:
            trace = Trace.of(run["traceparent"], run["tracestate"])
            answer = await self._post(to, message_id, body, secrets, trace)
        except BottegaError as error:
            failure = error
        what = outcome(answer, failure, tries, self._retries_s)
        wait_s = what.wait_s * self._jitter()
        stored = (what.status, what.answer, what.error, wait_s)
        async with acting_as(self._pool, tenant_id) as connection:
            await connection.execute(_STORE, tenant_id, run_id, seq, tries, *stored)
        if what.error is not None:
            logger.warning("webhook.failed", run_id=str(run_id), tries=tries, error=what.error)

    async def _post(
        self,
        to: Mapping[str, Any],
        message_id: str,
        body: bytes,
        secrets: Sequence[str],
        trace: Trace | None,
    ) -> int:
        """Post a body and return the HTTP status of the reply.

        Raises:
            BottegaError: the body was not sent, or there was no reply.
        """
        if not secrets:
            raise ConflictError(
                "the tenant has no webhook secret: create one with POST /v1/webhook-secret",
                code="no_webhook_secret",
            )
        reply = await self._egress.request(
            "POST",
            to["url"],
            headers=signed(secrets, message_id, to["at"], body) | headers_of(trace),
            content=body,
            timeout_s=self._timeout_s,
            max_bytes=4096,
            tenant=to["tenant"],
        )
        return reply.status
