"""NATS, an optional server that carries wake-ups and live text between processes.

A process has one connection. A subject consists of a channel and ids, and never contains texts of
tenants. NATS loses messages while the connection is away, and may lose messages without a notice.
So readers also poll, and no message that must arrive is sent over NATS. Only Bottega's processes
may subscribe or publish: a subscriber sees all tenants' texts, and a publisher can show texts to
all tenants.

The client library does not reconnect after every error, and waits without limit for a silent
server. So this module makes a new client for each connection.
"""

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote, urlsplit
from uuid import UUID

from pydantic import Field, TypeAdapter
from pydantic_core import from_json
from typing_extensions import TypedDict

from bottega.errors import UnavailableError
from bottega.logger import Logger

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

TEXT = "bottega_text"
"""Channel of live text. A subject on this channel has the ids of a tenant and a run."""
TEXT_WANTED = "bottega_text_wanted"
"""Channel of requests to repeat open calls' live text. Subjects have the ids of tenant and run."""

_CONNECT_S = 2
_PAUSE_S = 1.0
"""Seconds between two tries to connect (at random ± 50 %), or two checks of a connection."""
_PROBE_S = 3
"""Seconds between two probes. If a probe gets no answer in this time, the connection is lost."""
_PATIENCE_S = 0.5
"""Time limit of a request, and of closing a connection, in seconds."""
_MOST_WAITING = 16 * 1024 * 1024
"""Maximum size in bytes of the messages that wait for a slow server, or that wait in a subscription
for this process. More messages are dropped."""
_HINT = "wake-ups and live text are not sent; readers poll, and this process tries again"

LONGEST_END = 10_000
"""Maximum number of characters of a call's text that :meth:`NatsSignals.text_of` returns."""


class TextMessage(TypedDict):
    """A piece of a call's live text, with the same fields as a row of the table ``live_text``.

    Attributes:
        at: number of the call's characters before ``text``; for tool progress, the report's number.
        text: the text; for a tool's progress, the report as JSON.
        is_repeated: true if watchers of the run may already have some of the text.
    """

    task_id: UUID | None
    call: int
    attempt: int
    at: Annotated[int, Field(ge=0)]
    text: str
    tool_call_id: str | None
    is_repeated: bool


@cache
def _messages() -> TypeAdapter[list[TextMessage]]:
    return TypeAdapter(list[TextMessage])


def decoded(data: bytes) -> list[TextMessage]:
    """Decode live text. Return an empty list for invalid data from an unknown sender."""
    try:
        messages = _messages().validate_json(data)
        for message in messages:
            if message["tool_call_id"] is not None:
                from_json(message["text"])
        return messages
    except ValueError:
        logger.warning("nats.not_text")
        return []


Receive = Callable[[bytes | None, str], None]
"""Function (message or ``None``: some may have been lost; subject for an answer)."""

logger = Logger(__name__)


class NatsSignals:
    """The connection of this process to NATS.

    Args:
        url: address of a server, or several addresses separated by commas. An address begins with
            ``nats://`` or ``tls://``, and has the user and password, or the token.

    Raises:
        UnavailableError: the client library is missing.
    """

    def __init__(self, url: str) -> None:
        self._client_type = _client_type()
        servers = [urlsplit(each.strip()) for each in url.split(",")]
        login = servers[0].username or "", servers[0].password or ""
        self._user, self._password = map(unquote, login)  # the library does not decode %xx
        plain = [each._replace(netloc=each.netloc.rpartition("@")[2]) for each in servers]
        self._servers = [each.geturl() for each in plain]
        self._client: Client | None = None
        self._receivers: defaultdict[str, list[Receive]] = defaultdict(list)
        self._changed: dict[str, None] = {}
        self._messages: list[tuple[str, bytes]] = []
        self._size = 0
        self._news = asyncio.Event()
        self._is_away = False
        self._is_refused = False

    @property
    def is_connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    def publish(self, channel: str, *ids: str, data: bytes = b"") -> bool:
        """Queue a message for sending. Return false if the message is certainly lost."""
        return self.answer(".".join((channel, *ids)), data)

    def answer(self, subject: str, data: bytes) -> bool:
        """Queue a message to a subject. Return false if the message is certainly lost."""
        client = self._client
        if client is None or not client.is_connected or len(data) > client.max_payload:
            return False
        if client.pending_data_size + self._size > _MOST_WAITING:
            return False
        self._messages.append((subject, data))
        self._size += len(data)
        self._news.set()
        return True

    def subscribe(self, channel: str, *ids: str, receive: Receive) -> Callable[[], None]:
        """Call ``receive`` for each message. Return a function that ends the calls.

        The first call is ``receive(None, …)``: from then on, messages arrive. This call is repeated
        after each interruption of the connection, because messages may have been lost.
        """
        subject = ".".join((channel, *ids))
        self._receivers[subject].append(receive)
        self._change(subject)

        def end() -> None:
            self._receivers[subject].remove(receive)
            if not self._receivers[subject]:
                del self._receivers[subject]
                self._change(subject)

        return end

    def _change(self, subject: str) -> None:
        self._changed[subject] = None
        self._news.set()

    async def text_of(self, tenant_id: UUID, run_id: UUID) -> dict[UUID | None, str]:
        """Ask the run's worker for the last text of each open model call. Return it by task."""
        from nats.errors import Error

        client = self._client
        if client is None or not client.is_connected:
            return {}
        subject = ".".join((TEXT_WANTED, str(tenant_id), str(run_id)))
        try:
            answer = await client.request(subject, timeout=_PATIENCE_S)
        except (Error, OSError, TimeoutError):  # no worker answers
            return {}
        calls = decoded(answer.data)
        return {each["task_id"]: each["text"] for each in calls if each["tool_call_id"] is None}

    async def run(self) -> None:
        """Keep a connection until cancelled. Reconnect when the connection is lost."""
        while True:
            client = self._client_type()
            try:
                reason = await self._connect(client)
                if reason is None:
                    await self._use(client)
                elif not self._is_away:  # warn only once per outage
                    logger.warning("nats.away", error=reason, hint=_HINT)
                    self._is_away = True
            finally:
                self._client = None
                self._messages.clear()
                await _close(client)
            await asyncio.sleep(_PAUSE_S * random.uniform(0.5, 1.5))  # noqa: S311

    async def refusal(self) -> str | None:
        """Try to connect once. Return the reason if the connection fails."""
        client = self._client_type()
        try:
            return await self._connect(client)
        finally:
            await _close(client)

    async def _connect(self, client: "Client") -> str | None:
        """Connect to a server. Return the error's text if that fails or takes too long."""
        reasons = ["no answer"]

        async def note(error: Exception) -> None:
            reasons[0] = str(error) or type(error).__name__
            if client.is_connected and not self._is_refused:  # false: the error is about a subject
                self._is_refused = True
                logger.warning("nats.lost", error=reasons[0], hint=_HINT)

        async def wake() -> None:
            self._news.set()

        try:
            async with asyncio.timeout(_CONNECT_S):
                await client.connect(
                    self._servers,
                    user=self._user if self._password else None,
                    password=self._password or None,
                    token=None if self._password else self._user or None,
                    name="bottega",
                    error_cb=note,
                    closed_cb=wake,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=_CONNECT_S,
                    ping_interval=_PROBE_S,
                    max_outstanding_pings=1,
                    pending_size=4 * _MOST_WAITING,  # beyond it, the library waits
                )
        except Exception as error:
            if reasons == ["no answer"] and not isinstance(error, TimeoutError):
                reasons = [str(error) or type(error).__name__]
        return None if client.is_connected else reasons[0]

    async def _use(self, client: "Client") -> None:
        self._client = client
        if self._is_away:
            logger.info("nats.connected")
        self._is_away = self._is_refused = False
        subscriptions: dict[str, Subscription] = {}
        self._changed = dict.fromkeys(self._receivers)
        reason = "the server closed the connection, or does not answer"
        try:
            while client.is_connected:
                self._news.clear()
                async with asyncio.timeout(2 * _PROBE_S):
                    await self._send(client, subscriptions)
                if (task := asyncio.current_task()) and task.cancelling():
                    raise asyncio.CancelledError  # the library may have swallowed the cancellation
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PAUSE_S):
                        await self._news.wait()
        except Exception as error:
            reason = str(error) or type(error).__name__
        logger.warning("nats.lost", error=reason, hint=_HINT)
        self._is_away = True

    async def _send(self, client: "Client", subscriptions: "dict[str, Subscription]") -> None:
        changed, self._changed = self._changed, {}
        begun = []
        for subject in changed:
            if subject not in self._receivers:
                if (old := subscriptions.pop(subject, None)) is not None:
                    await old.unsubscribe()
                continue
            if subject not in subscriptions:
                on_message = partial(self._receive, subject)
                subscriptions[subject] = await client.subscribe(
                    subject, cb=on_message, pending_bytes_limit=_MOST_WAITING
                )
            begun.append(subject)
        messages, self._messages, self._size = self._messages, [], 0
        for subject, data in messages:
            await client.publish(subject, data)
        if begun:
            await client.flush(_PROBE_S)  # the answer shows that messages arrive now
            for subject in begun:
                self._hand_on(subject, None, "")

    async def _receive(self, subject: str, message: "Msg") -> None:
        self._hand_on(subject, message.data, message.reply)

    def _hand_on(self, subject: str, data: bytes | None, reply: str) -> None:
        for receive in list(self._receivers.get(subject, ())):
            try:
                receive(data, reply)
            except Exception:  # a receiver's error must not end the connection
                logger.exception("nats.not_handled")


def _client_type() -> "type[Client]":
    try:
        from nats.aio.client import Client
    except ImportError:
        raise UnavailableError(
            "BOTTEGA_NATS_URL needs the extra nats: install bottega[nats] (in the checkout: "
            ".[nats]), or unset BOTTEGA_NATS_URL"
        ) from None
    return Client


async def _close(client: "Client") -> None:
    """Close a connection. Do not wait long for a silent server."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_PATIENCE_S):
            await client.close()
