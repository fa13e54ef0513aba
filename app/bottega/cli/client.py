"""Client for a Bottega server that the commands use: settings, requests, and live events of a run.

When the client reads a response, it makes the response's texts safe for a terminal.
"""

import contextlib
import difflib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Annotated, Any, Self
from urllib.parse import quote
from uuid import uuid4

import httpx2
from pydantic import Field, SecretStr, field_validator
from pydantic_core import from_json
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from bottega.cli.terminal import safe
from bottega.clock import monotonic
from bottega.environment import ENCODING, unwrap_all
from bottega.errors import BottegaError, ErrorKind


class ClientSettings(BaseSettings):
    """Address and key of a server, from environment variables or a ``.env`` file.

    If the environment has a key, the file is ignored, because a file from somebody else could send
    the key to the wrong server.
    """

    model_config = SettingsConfigDict(
        env_prefix="BOTTEGA_",
        env_file=".env",
        env_file_encoding=ENCODING,
        extra="ignore",
        frozen=True,
        env_ignore_empty=True,
        hide_input_in_errors=True,
    )

    url: Annotated[
        str | None, Field(description="Address of the server. Unset: the server of this machine.")
    ] = None
    port: Annotated[int, Field(description="Port of this machine's server.")] = 8400
    key: Annotated[SecretStr | None, Field(description="API key, if the server has keys.")] = None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        has_key = any(name.upper() == "BOTTEGA_KEY" and os.environ[name] for name in os.environ)
        unwrap_all(env_settings, dotenv_settings)
        return (env_settings,) if has_key else (env_settings, dotenv_settings)

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return url

    @field_validator("key")
    @classmethod
    def _fits_a_header(cls, key: SecretStr | None) -> SecretStr | None:
        text = "" if key is None else key.get_secret_value()
        if not (text.isascii() and (text.isprintable() or not text)) or " " in text:
            raise ValueError(
                "is not a key: it has spaces or other characters that keys do not have"
            )
        return key

    @property
    def address(self) -> str:
        """The server's address, without a final slash."""
        return (self.url or f"http://127.0.0.1:{self.port}").rstrip("/")


_LONGEST_PAUSE_S = 5.0
_HERE = frozenset(("127.0.0.1", "localhost", "::1"))
_NAMES_SHOWN = 10


class RemoteError(BottegaError):
    """The server refused a request, or cannot be reached.

    Attributes:
        status: HTTP status; 0: there was no response.
    """

    kind = ErrorKind.UNAVAILABLE
    code = "unreachable"

    def __init__(self, detail: str, *, code: str | None = None, status: int = 0) -> None:
        super().__init__(detail, code=code)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """True if the same request may succeed later, without a change."""
        return self.status in (0, 429) or self.status >= 500 or self.code == "in_flight"


class RemoteServer:
    """Client of one server.

    Args:
        address: base URL, such as ``http://127.0.0.1:8400``.
        key: API key; ``None``: the server needs no key.
    """

    def __init__(self, address: str, key: str | None) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            here = httpx2.URL(address).host in _HERE
            self._client = httpx2.Client(
                base_url=address,
                headers=headers,
                # This timeout is longer than the time between a stream's heartbeats.
                timeout=httpx2.Timeout(60.0, connect=5.0),
                trust_env=not here,  # use no proxy for a server on this machine
            )
        except httpx2.InvalidURL as error:
            raise RemoteError(f"BOTTEGA_URL is no address: {error}") from None
        self.address = address
        self._reached = False

    @classmethod
    def of(cls, settings: ClientSettings) -> Self:
        key = settings.key
        return cls(settings.address, None if key is None else key.get_secret_value())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str, **query: Any) -> Any:
        """Return the body of the response.

        Raises:
            RemoteError: the server refused the request or was not reached; all methods raise this
                error.
        """
        params = {name: value for name, value in query.items() if value is not None}
        return self._patient("GET", path, params=params)

    def create(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a POST with an idempotency key, so that a repetition creates no second object."""
        return self._patient("POST", path, json=body, headers={"Idempotency-Key": uuid4().hex})

    def create_batch(self, data: bytes, **fields: str | int | None) -> Any:
        """Start a batch from lines of items; the same lines and fields return the same batch."""
        body = {name: value for name, value in fields.items() if value is not None}
        key = sha256(repr(sorted(body.items())).encode() + data).hexdigest()
        headers = {"Idempotency-Key": key, "Content-Type": "application/x-ndjson"}
        return self._patient("POST", "/v1/batches", content=data, params=body, headers=headers)

    def lines(self, path: str) -> Iterator[bytes]:
        """Yield the response's bytes as they arrive."""
        with self._translated(), self._client.stream("GET", path) as answer:
            if not answer.is_success:
                answer.read()
                self._checked(answer)
            yield from answer.iter_bytes()

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a POST that is safe to repeat, because the server's operation is idempotent."""
        return self._patient("POST", path, json=body or {})

    def replace(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._patient("PUT", path, json=body)

    def all(self, path: str, *, as_stored: bool = False, **query: Any) -> Iterator[Any]:
        """Yield all items of a list. ``as_stored``: the items are not safe for a terminal."""
        params = {name: value for name, value in query.items() if value is not None}
        params["limit"] = 100
        cursor: str | None = ""
        while cursor is not None:
            params |= {"cursor": cursor} if cursor else {}
            page = self._patient("GET", path, params=params, as_stored=as_stored)
            yield from page["items"]
            cursor = page["next_cursor"]

    def apply(self, body: Mapping[str, Any], places: Mapping[str, str]) -> Any:
        """Store many definitions; return the server's result, which is not safe for a terminal.

        Args:
            places: names of the definitions by JSON Pointer, for the texts of errors.
        """
        return self._patient("POST", "/v1/apply", json=body, places=places, as_stored=True)

    def start(self, agent: str, **run: Any) -> Any:
        """Start a run of an agent; the error for an unknown agent suggests similar names."""
        try:
            return self.create("/v1/runs", {"agent": agent, **run})
        except RemoteError as error:
            if error.status in (404, 422):
                self.agent(agent)
            raise

    def agent(self, name: str) -> Any:
        """Return an agent's definition; the error for an unknown agent suggests similar names."""
        try:
            return self.get(f"/v1/agents/{quote(name, safe='')}")
        except RemoteError as error:
            if error.status in (404, 422):
                raise self._unknown(name, error) from None
            raise

    @contextmanager
    def streaming(self, path: str, after: int) -> Iterator[Iterator[bytes] | None]:
        """Open a stream of the run's events after event ``after``; yield an iterator of the bytes.

        Yield ``None`` if the run has ended and has no events after event ``after``.
        """
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        with self._translated(), self._client.stream("GET", path, headers=headers) as answer:
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                yield answer.iter_bytes()
            else:
                answer.read()
                self._checked(answer)
                yield None

    def _patient(
        self,
        method: str,
        path: str,
        *,
        places: Mapping[str, str] = {},
        as_stored: bool = False,
        **request: Any,
    ) -> Any:
        """Return the response's body; repeat the request while the server is busy or silent."""
        began, pause_s = monotonic(), 0.1
        while True:
            reached = self._reached
            try:
                with self._translated():
                    answer = self._client.request(method, path, **request)
                    body = self._checked(answer, places)
                    return from_json(answer.content) if as_stored else body
            except RemoteError as error:
                never_there = not reached and error.code == "nobody"
                # For 30 s, requests without a response and requests to a busy server are repeated.
                if never_there or not error.may_pass or monotonic() - began > 30.0:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx2.ConnectError as error:
            raise RemoteError(
                f"no server answers at {self.address} ({safe(str(error))}): start one with "
                "`bottega serve`, or set BOTTEGA_URL",
                code="nobody",
            ) from None
        except (httpx2.TransportError, httpx2.InvalidURL, httpx2.DecodingError) as error:
            why = safe(str(error)) or type(error).__name__
            raise RemoteError(f"the connection to {self.address} failed: {why}") from None

    def _checked(self, answer: httpx2.Response, places: Mapping[str, str] = {}) -> Any:
        """Return the response's body, made safe for a terminal.

        Raises:
            RemoteError: the response is a refusal, or does not come from a Bottega server.
        """
        body: Any = None
        with contextlib.suppress(ValueError):
            body = safe(from_json(answer.content))
        if answer.is_success and (answer.status_code == 204 or isinstance(body, dict)):
            self._reached = True
            return body
        if not isinstance(body, dict) or not isinstance(body.get("detail"), str):
            raise RemoteError(
                f"{self.address} is no Bottega server, or a proxy answers instead of it "
                f"(HTTP {answer.status_code}): check BOTTEGA_URL",
                code="no_bottega",
                status=answer.status_code,
            )
        self._reached = True
        detail = "; ".join(placed(body, places)) or body["detail"]
        if answer.status_code == 401:
            detail += ". The key is read from BOTTEGA_KEY"
        raise RemoteError(detail, code=str(body.get("code")), status=answer.status_code)

    def _unknown(self, name: str, error: RemoteError) -> RemoteError:
        try:
            names = [each["name"] for each in self.get("/v1/agents", limit=100)["items"]]
        except RemoteError:  # the key has no right to list agents
            return error
        detail = f"there is no agent '{safe(name)}'"
        if near := difflib.get_close_matches(name, names, cutoff=0.5):
            detail += f": did you mean {' or '.join(near)}?"
        elif names:
            more = ", …" if len(names) > _NAMES_SHOWN else ""
            detail += f". There are: {', '.join(names[:_NAMES_SHOWN])}{more}"
        else:
            detail += ", and no other agent: POST /v1/agents creates one"
        return RemoteError(detail, code="unknown_agent", status=404)


def placed(problem: Mapping[str, Any], places: Mapping[str, str]) -> Iterator[str]:
    """Yield a text for each error in a definition; ``places`` has the definitions' names."""
    for error in problem.get("errors") or ():
        _, section, number, *rest = [*str(error.get("pointer")).split("/"), "", ""]
        if (pointer := places.get(f"/{section}/{number}")) is not None:
            inside = "/".join(each for each in rest if each)
            yield f"{pointer}{inside and f' at {inside}'}: {error.get('detail')}"


Event = dict[str, Any]

ENDS = frozenset(("run.completed", "run.failed", "run.timeout", "run.cancelled"))

_FIRST_PAUSE_S = 0.1


class RunEvents:
    """A run's events and live text until the final event; a lost connection is opened again.

    A second iteration continues after the last event of the first iteration.

    Args:
        notice: called with a text when the connection is lost, and when it is restored.
    """

    def __init__(self, server: RemoteServer, run_id: str, notice: Callable[[str], None]) -> None:
        self._server = server
        self._path = f"/v1/runs/{run_id}/events"
        self._notice = notice
        self._after = 0
        self._over = False

    def __iter__(self) -> Iterator[Event]:
        """Yield the events in order.

        Raises:
            RemoteError: the run was deleted, the key is invalid, or the server was not reached
                for 5 minutes.
        """
        away_since: float | None = None
        pause_s = _FIRST_PAUSE_S
        while not self._over:
            try:
                for event in self._connected():
                    if away_since is not None:
                        self._notice("The connection is back.")
                        away_since, pause_s = None, _FIRST_PAUSE_S
                    if event is not None:
                        yield event
            except RemoteError as error:
                if not error.may_pass:
                    raise
                if away_since is None:
                    away_since = monotonic()
                    self._notice(f"{error.detail}. Trying again …")
                if monotonic() - away_since > 300.0:
                    raise
            if not self._over:  # the server stops, or the connection was lost
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _connected(self) -> Iterator[Event | None]:
        with self._server.streaming(self._path, self._after) as content:
            if content is None:
                self._over = True
                return
            for position, text in _frames(content):
                self._after = max(self._after, position)
                event = None if text is None else safe(from_json(text))
                self._over = event is not None and event["type"] in ENDS
                yield event
                if self._over:
                    return


def _frames(content: Iterable[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Yield a stream's frames as (id, data). Id 0: no id; data ``None``: a heartbeat.

    Only a line feed ends a line, because JSON may contain other characters at which Python would
    split lines.
    """
    position, data = 0, None
    for line in _lines(content):
        if line.startswith(b"id: "):
            position = int(line[4:])
        elif line.startswith(b"data: "):
            data = line[6:]
        elif line.startswith(b":"):
            yield 0, None
        elif not line and data is not None:
            yield position, data
            position, data = 0, None


def _lines(content: Iterable[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []
    for chunk in content:
        first, *more = chunk.split(b"\n")
        parts.append(first)
        for rest in more:
            yield b"".join(parts).removesuffix(b"\r")
            parts = [rest]
