"""Functions of :mod:`bottega.tools.egress` that need aiohttp; the first request imports them."""

import socket
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing

import aiohttp
import httpx2

from bottega.http_sessions import NETWORK_ERRORS, body_of, reader_of
from bottega.network import AddressRefusedError
from bottega.outside import STEP_BYTES, BoundedReader, OutsideError
from bottega.tools.guard import EgressError, EgressRefusedError
from bottega.tools.secrets import check_header

FAILURES = (*NETWORK_ERRORS, OutsideError)
_INVALID = (
    aiohttp.ClientResponseError,
    aiohttp.ClientPayloadError,
    aiohttp.ServerDisconnectedError,
)


def fields_of(url: httpx2.URL, headers: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    for name, value in headers.items():
        check_header(name, value)
    fields = {"user-agent": "bottega", "accept": "*/*"}
    fields |= {name.lower(): value for name, value in headers.items()}
    fields |= {"host": url.netloc.decode("ascii"), "accept-encoding": "gzip, deflate"}
    return fields.items()


async def read(answer: aiohttp.ClientResponse, max_bytes: int) -> tuple[bytes, bool]:
    """Return an answer's decompressed body, cut to ``max_bytes``, and true if it was longer."""
    body = bytearray()
    async with aclosing(body_of(answer, reader_of(answer, max_bytes + STEP_BYTES))) as steps:
        async for step in steps:
            body += step
            if len(body) > max_bytes:
                break
    return bytes(body[:max_bytes]), len(body) > max_bytes


def explained(error: Exception, host: str, timeout_s: float) -> EgressError | EgressRefusedError:
    if isinstance(error, aiohttp.ClientConnectorError):
        if isinstance(error.os_error, AddressRefusedError):
            return EgressRefusedError(str(error.os_error))
        if isinstance(error.os_error, socket.gaierror):
            return EgressError(f"the name {host} cannot be resolved")
    if (tls := _tls_reason(error)) is not None:
        return EgressError(f"no secure connection to {host}: {tls}", code="egress_tls")
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return EgressError(f"cannot connect to {host}")
    if isinstance(error, TimeoutError):
        return EgressError(
            f"no complete answer from {host} within {timeout_s:g} s", code="egress_timeout"
        )
    if isinstance(error, OutsideError):
        return EgressError(f"{host} sent {error.detail}", code="egress_bad_answer")
    if isinstance(error, _INVALID):
        return EgressError(f"the answer of {host} is not valid HTTP", code="egress_bad_answer")
    return EgressError(f"the connection to {host} broke off before the answer was complete")


def _tls_reason(error: BaseException | None) -> str | None:
    while isinstance(error, aiohttp.ClientError):  # TLS errors: use their cause
        error = error.__cause__ or error.__context__
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid ({error.verify_message})"
    return "the TLS handshake failed" if isinstance(error, ssl.SSLError) else None


class Body(httpx2.AsyncByteStream):
    """The body of an answer; a network error while it is read becomes an EgressError."""

    def __init__(self, answer: aiohttp.ClientResponse, reader: BoundedReader, host: str) -> None:
        self._answer = answer
        self._reader = reader
        self._host = host

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for step in body_of(self._answer, self._reader):
                yield step
        except NETWORK_ERRORS as error:
            failure = error
        else:
            return
        raise explained(failure, self._host, 0)

    async def aclose(self) -> None:
        self._answer.release()
