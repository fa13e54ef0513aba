"""The shares that a worker has of model servers' limits, kept in step with the database."""

import asyncio
import contextlib
from typing import Any
from uuid import UUID

import asyncpg
import structlog
from pydantic_core import from_json, to_json

from bottega.clock import monotonic
from bottega.events.listener import happens
from bottega.llm.traffic.limits import Admission, ServerKey, ServerLimits, Share

_LOOK_S = 0.4
"""Seconds between two reports of shares that hold or wait for something."""
_PATIENCE_S = 5.0
_MOST = 500
"""Shares in one report."""
_SHARE = "SELECT share_limits($1, $2)::text"

log = structlog.get_logger(__name__)


class Shares:
    """Asks the database for what calls need, in one statement for all; returns what is idle.

    Args:
        worker_id: the shares belong to its lease.
    """

    def __init__(self, pool: asyncpg.Pool, worker_id: UUID) -> None:
        self._pool = pool
        self._worker_id = worker_id
        self._shares: dict[ServerKey, Share] = {}
        self._any = asyncio.Event()
        self._urgent = asyncio.Event()

    async def enter(
        self, key: ServerKey, limits: ServerLimits, tokens: int, since: float, wait_s: float
    ) -> Admission | None:
        """Admit a call; ``None``: its server is over its limit, and the wait is over.

        Args:
            tokens: those that it may take, estimated.
            since: when it began to wait, by the monotonic clock.
            wait_s: longest wait; 0: as long as the database needs to answer.
        """
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = Share(limits)
        share.limits = limits
        self._any.set()
        if (admission := share.admit(tokens)) is not None:
            return admission
        self._urgent.set()
        return await share.wait(tokens, since, wait_s)

    def admit(self, key: ServerKey) -> Admission | None:
        """Admit a call without tokens if this worker holds what it needs; ask nobody."""
        share = self._shares.get(key)
        return None if share is None else share.admit(0)

    def leave(self, key: ServerKey, admission: Admission, tokens: int | None) -> None:
        """End a call; see :meth:`Share.release`."""
        share = self._shares.get(key)
        if share is not None:  # otherwise only requests are limited, and this one is told
            share.release(admission, tokens)
            if share.is_wanted:
                self._urgent.set()

    def wake(self) -> None:
        """Ask the database at once: it granted something, or a notice may be lost."""
        if self._shares:
            self._urgent.set()

    async def run(self) -> None:
        """Keep the shares in step until cancelled; return them then."""
        looked_at = monotonic()
        try:
            while True:
                await self._any.wait()
                await happens(self._urgent, self._pause_s())
                self._urgent.clear()
                # Between two looks at all only those that somebody waits for.
                is_look = monotonic() - looked_at >= _LOOK_S
                looked_at = monotonic() if is_look else looked_at
                await self._exchange(only_wanted=not is_look)
                if not self._shares:
                    self._any.clear()
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await asyncio.shield(self._exchange(is_last=True))
            raise

    def _pause_s(self) -> float:
        soon = [each.again_s for each in self._shares.values() if each.waiting and each.again_s]
        return max(0.02, min((_LOOK_S, *soon)))

    async def _exchange(self, *, only_wanted: bool = False, is_last: bool = False) -> None:
        for key, share in list(self._shares.items()):
            if share.is_idle:
                del self._shares[key]
        shares = [
            (key, share)
            for key, share in self._shares.items()
            if share.waiting or share.is_wanted or not only_wanted
        ]
        for at in range(0, len(shares), _MOST):
            page = shares[at : at + _MOST]
            news = [_about(key) | share.report(is_last=is_last) for key, share in page]
            sent = to_json(news).decode()
            async with asyncio.timeout(_PATIENCE_S):
                answers = await self._pool.fetchval(_SHARE, self._worker_id, sent)
            for (_, share), answer in zip(page, from_json(answers), strict=True):
                share.settle(answer)


def _about(key: ServerKey) -> dict[str, Any]:
    return {
        "tenant": key.tenant_id,
        "is_operators": key.is_operators,
        "provider": key.provider,
    }
