"""The guard on outgoing HTTP, over real sockets."""

import asyncio
import gzip
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

import httpx2
import pytest
import trustme

from bottega.errors import InvalidInputError
from bottega.network import Resolver
from bottega.outside import BoundedReader
from bottega.tools.egress import Egress, EgressError, EgressRefusedError, Reply, checked_url
from tests.hostile import chunks
from tests.tools.helpers import Names
from tests.tools.raw_server import RawServer, Writer, answer
from tests.tools.test_addresses import INSIDE
from tests.waiting import until

LIMITS = {"timeout_s": 5.0, "max_bytes": 1000}
LOOPBACK = ["127.0.0.1"]
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def get(egress: Egress, url: str, *, max_bytes: int = 1000, timeout_s: float = 5) -> Reply:
    return await egress.request("GET", url, timeout_s=timeout_s, max_bytes=max_bytes)


async def refused(url: str, *answers: Sequence[str], allow: Sequence[str] = ()) -> str:
    async with aclosing(Egress(allow, resolve=Names(*answers or ([],)))) as egress:
        with pytest.raises(EgressRefusedError) as caught:
            await get(egress, url)
    return caught.value.detail


async def failure(egress: Egress, url: str, *, timeout_s: float = 5) -> EgressError:
    with pytest.raises(EgressError) as caught:
        await get(egress, url, timeout_s=timeout_s)
    assert caught.value.__context__ is None
    return caught.value


# Allowed destinations


async def test_an_allowed_address_is_reached(web: RawServer, egress: Egress) -> None:
    reply = await get(egress, web.url("/a?b=c"))
    assert (reply.status, reply.body, reply.truncated) == (200, b"hello", False)
    assert web.requests[0].line == "GET /a?b=c HTTP/1.1"
    assert web.requests[0].headers == {
        "host": f"127.0.0.1:{web.port}",
        "user-agent": "bottega",
        "accept": "*/*",
        "accept-encoding": "gzip, deflate",
    }


@pytest.mark.parametrize(
    "target", ["/%7e%2F%2e%2e/x?%zz=%&&;", "/a//b?q=a+b%20c?d", "/:@!$&'()*+,;=?|{}^`[]"]
)
async def test_the_target_is_sent_as_it_is_written(
    web: RawServer, egress: Egress, target: str
) -> None:
    await get(egress, web.url(target))
    assert web.requests[0].target == target


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_a_body_adds_its_length_alone(web: RawServer, egress: Egress, method: str) -> None:
    url, headers = web.url(), {"X-Case": "a"}
    await egress.request(method, url, content=b"abc", headers=headers, timeout_s=5, max_bytes=9)
    (request,) = web.requests
    assert request.body == b"abc"
    assert request.headers == {
        "host": f"127.0.0.1:{web.port}",
        "user-agent": "bottega",
        "accept": "*/*",
        "accept-encoding": "gzip, deflate",
        "x-case": "a",
        "content-length": "3",
    }


async def test_loopback_is_refused_unless_allowed(web: RawServer) -> None:
    said = await refused(web.url())
    assert "127.0.0.1 is not a public address (loopback)" in said
    assert "BOTTEGA_EGRESS_ALLOW" in said
    assert web.connections == 0


@pytest.mark.parametrize(("address", "reason"), INSIDE.items())
async def test_name_that_resolves_to_an_internal_address_is_refused(
    address: str, reason: str
) -> None:
    assert reason in await refused("http://name.example/", [address])


@pytest.mark.parametrize("address", [each for each in INSIDE if "%" not in each])
async def test_literal_internal_address_is_refused(address: str) -> None:
    host = f"[{address}]" if ":" in address else address
    assert "not a public address" in await refused(f"http://{host}/")


async def test_other_full_stops_make_no_difference() -> None:
    assert "127.0.0.1 is not a public address" in await refused("http://127\u30020\uff0e0\uff611/")


async def test_one_internal_address_among_public_ones_is_refused(web: RawServer) -> None:
    answers = ["8.8.8.8", "127.0.0.1", "2606:4700::1111"]
    assert "loopback" in await refused(web.url(host="name.example"), answers)
    assert "private" in await refused(
        web.url(host="name.example"), ["127.0.0.1", "10.0.0.1"], allow=LOOPBACK
    )
    assert web.connections == 0


@pytest.mark.parametrize("garbage", [["nonsense"], ["127.0.0.1", ""], ["0x7f.1"], ["127.1"]])
async def test_resolver_that_returns_non_addresses_is_refused(garbage: list[str]) -> None:
    assert "does not resolve" in await refused("http://name.example/", garbage, allow=LOOPBACK)


@pytest.mark.parametrize(
    "url",
    [
        "http://2130706433/",
        "http://0x7f.1/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://127.0.0.1./",
        "http://①②⑦.⓪.⓪.①/",
        "http://127.0.0.1%2e/",
        "http://[::1%25lo]/",
        "http://[fe80::1%eth0]/",
        "http://%31%32%37.1/",
        "http://0/",
        "ftp://a.example/",
        "file:///etc/passwd",
        "gopher://a.example/",
        "//a.example/",
        "/a",
        "",
        "http://",
        "http:///a",
        "https:a.example",
        "http://user@a.example/",
        "http://:p@a.example/",
        "http://a.example:0/",
        "http://a.example:65536/",
        "http://a.example:x/",
        "http://a b/",
        "http://a.example/\r\nx: y",
        "http://a\\@b.example/",
        "http://a.example/\x00",
        "http://*/",
        "http://a.example/" + "a" * 8192,
        "http://a.example/" + "a" * 100000,
        "http://a..b/",
    ],
)
async def test_odd_url_is_refused_before_any_look_up(url: str) -> None:
    names = Names(LOOPBACK)
    async with aclosing(Egress(LOOPBACK, resolve=names)) as egress:
        with pytest.raises(EgressRefusedError):
            await get(egress, url)
    assert names.asked == []


async def test_localhost_by_any_name_is_refused_with_the_system_resolver(web: RawServer) -> None:
    async with aclosing(Egress()) as egress:
        for host in ("localhost", "LOCALHOST"):
            with pytest.raises(EgressRefusedError, match="loopback"):
                await get(egress, web.url(host=host))
    assert web.connections == 0


async def test_connection_goes_to_the_checked_address(web: RawServer) -> None:
    names = Names(LOOPBACK, ["169.254.169.254"])
    async with aclosing(Egress(LOOPBACK, resolve=names)) as egress:
        reply = await get(egress, web.url(host="rebind.invalid"))
        assert reply.body == b"hello"
        assert names.asked == ["rebind.invalid"]
        assert web.requests[0].headers["host"] == f"rebind.invalid:{web.port}"
        # The open connection is reused without a look-up; a new one is checked again.
        await get(egress, web.url(host="rebind.invalid"))
        assert (names.asked, web.connections) == (["rebind.invalid"], 1)
        web.hang_up()
        await web.closed.wait()
        with pytest.raises(EgressRefusedError, match="link-local"):
            await get(egress, web.url(host="rebind.invalid"))
    assert names.asked == ["rebind.invalid"] * 2
    assert web.connections == 1


async def test_an_allowed_name_may_resolve_to_anything(web: RawServer) -> None:
    async with aclosing(Egress(["intern.example"], resolve=Names(LOOPBACK))) as egress:
        assert (await get(egress, web.url(host="Intern.Example"))).status == 200
        with pytest.raises(EgressRefusedError):
            await get(egress, web.url(host="other.example"))


async def test_the_next_address_is_tried_when_one_does_not_answer(web: RawServer) -> None:
    names = Names(["::1", "127.0.0.1"])  # nothing listens on the first
    async with aclosing(Egress(["::1", "127.0.0.1"], resolve=names)) as egress:
        assert (await get(egress, web.url(host="both.example"))).status == 200


async def test_redirect_is_an_answer_and_never_followed(web: RawServer, egress: Egress) -> None:
    inside = "location: http://169.254.169.254/latest/meta-data"
    for status in (301, 302, 303, 307, 308):
        web.reply = answer(status=status, headers=(inside,))
        assert (await get(egress, web.url())).status == status
    assert len(web.requests) == 5


async def test_environments_proxy_is_not_used(
    web: RawServer, egress: Egress, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with RawServer() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, proxy.url())
        await get(egress, web.url())
        assert proxy.connections == 0


async def test_cookies_are_not_kept(web: RawServer, egress: Egress) -> None:
    web.reply = answer(headers=("set-cookie: a=b",))
    await get(egress, web.url())
    await get(egress, web.url())
    assert "cookie" not in web.requests[1].headers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", "a\r\nb: c"),
        ("x", "a\nb"),
        ("x", "a\x00"),
        ("x", "ä"),
        ("x", " a"),
        ("x", "a" * 9000),
        ("a b", "c"),
        ("a:", "c"),
        ("a\r\nb", "c"),
        ("", "c"),
        ("Host", "a"),
        ("host", "a"),
        ("Connection", "close"),
        ("Transfer-Encoding", "chunked"),
        ("Content-Length", "1"),
        ("Upgrade", "h2c"),
        ("TE", "trailers"),
        ("Proxy-Authorization", "x"),
        ("Expect", "x"),
        ("Accept-Encoding", "br"),
        ("Keep-Alive", "1"),
        ("Trailer", "x"),
    ],
)
async def test_header_that_could_change_the_request_is_refused(
    web: RawServer, egress: Egress, name: str, value: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        await egress.request("GET", web.url(), headers={name: value}, **LIMITS)  # type: ignore[arg-type]
    assert "b: c" not in caught.value.detail
    assert web.connections == 0


# Bounds


async def test_long_body_is_cut_off_and_not_read_on(web: RawServer, egress: Egress) -> None:
    hung_up = asyncio.Event()

    async def endless(writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(b"x" * 10_000)
                await writer.drain()
        except ConnectionError:
            hung_up.set()
            raise

    web.reply = endless
    reply = await get(egress, web.url())
    assert (len(reply.body), reply.truncated) == (1000, True)
    await hung_up.wait()


async def test_body_of_the_exact_limit_is_complete(web: RawServer, egress: Egress) -> None:
    web.reply = answer(b"x" * 1000)
    reply = await get(egress, web.url())
    assert (len(reply.body), reply.truncated) == (1000, False)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "GZIP", " gzip", "identity"])
async def test_compressed_body_is_unpacked(web: RawServer, egress: Egress, encoding: str) -> None:
    packed = {"deflate": zlib.compress(b"hello"), "identity": b"hello"}
    body = packed.get(encoding, gzip.compress(b"hello"))
    web.reply = answer(body, headers=(f"content-encoding: {encoding}",))
    assert (await get(egress, web.url())).body == b"hello"


async def test_compression_bomb_is_unpacked_only_up_to_the_limit(
    web: RawServer, egress: Egress
) -> None:
    bomb = gzip.compress(bytes(200 << 20), compresslevel=1)
    web.reply = answer(bomb, headers=("content-encoding: gzip",))
    reply = await get(egress, web.url())
    assert (len(reply.body), reply.truncated) == (1000, True)


@pytest.mark.parametrize(
    "encoding", ["gzip, gzip", "br", "zstd", "x-gzip", "gzip,gzip,gzip,gzip,gzip"]
)
async def test_unrequested_compression_is_an_error(
    web: RawServer, egress: Egress, encoding: str
) -> None:
    web.reply = answer(b"hello", headers=(f"content-encoding: {encoding}",))
    assert (await failure(egress, web.url())).code == "egress_bad_answer"


async def test_broken_compression_is_an_error(web: RawServer, egress: Egress) -> None:
    web.reply = answer(b"hello", headers=("content-encoding: gzip",))
    assert (await failure(egress, web.url())).code == "egress_bad_answer"


async def silent(writer: Writer) -> None:
    await asyncio.Event().wait()


async def dripping(writer: Writer) -> None:
    """Answer endlessly, always busy: no limit between two reads would end it."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n")
    turn = asyncio.Event()
    while True:
        writer.write(b"x")
        turn.clear()
        asyncio.get_running_loop().call_later(0.005, turn.set)
        await turn.wait()


async def endless_head(writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x: " + b"y" * 1000 + b"\r\n")
        await writer.drain()


async def hanging_up(writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc")
    await writer.drain()
    writer.close()
    raise ConnectionError


async def half_head(writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 O")
    await asyncio.Event().wait()


@pytest.mark.parametrize("reply", [silent, half_head, dripping])
async def test_slow_server_times_out(
    web: RawServer, egress: Egress, reply: Callable[[Writer], Awaitable[None]]
) -> None:
    web.reply = reply
    error = await failure(egress, web.url(), timeout_s=0.1)
    assert error.code == "egress_timeout"
    assert error.detail == "no complete answer from 127.0.0.1 within 0.1 s"


async def test_slow_resolver_times_out() -> None:
    async def slow(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    async with aclosing(Egress(resolve=slow)) as egress:
        error = await failure(egress, "http://slow.example/", timeout_s=0.05)
    assert error.code == "egress_timeout"


async def test_endless_header_and_truncated_body_are_errors(web: RawServer, egress: Egress) -> None:
    web.reply = endless_head
    assert (await failure(egress, web.url())).code == "egress_bad_answer"
    web.reply = hanging_up
    assert (await failure(egress, web.url())).code == "egress_bad_answer"
    web.reply = b"I am no HTTP server\r\n\r\n"
    assert (await failure(egress, web.url())).code == "egress_bad_answer"


async def test_a_broken_chunk_is_an_error_at_once(web: RawServer, egress: Egress) -> None:
    is_read = asyncio.Event()

    async def breaking(writer: Writer) -> None:
        writer.write(CHUNKED + b"3\r\nabc\r\n")
        await is_read.wait()
        writer.write(b"zz\r\n")
        await asyncio.Event().wait()

    web.reply = breaking
    answer = await egress.stream(httpx2.Request("GET", web.url()), "", BoundedReader(1000))
    pieces = answer.aiter_raw()
    assert await anext(pieces) == b"abc"
    is_read.set()
    with pytest.raises(EgressError, match="is not valid HTTP"):
        await anext(pieces)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000, "is not valid HTTP"),
        (CHUNKED + chunks(bytes(50_000), 1), "sent chunks of a few bytes"),
    ],
)
async def test_framing_that_is_costly_is_an_error(
    web: RawServer, egress: Egress, reply: bytes, said: str
) -> None:
    web.reply = reply
    with pytest.raises(EgressError, match=said) as caught:
        await get(egress, web.url(), max_bytes=100_000)
    assert caught.value.code == "egress_bad_answer"


async def test_an_answer_in_short_chunks_is_read(web: RawServer, egress: Egress) -> None:
    for size, length in ((1, 10_000), (5, 200_000)):
        web.reply = CHUNKED + chunks(bytes(length), size)
        assert len((await get(egress, web.url(), max_bytes=length)).body) == length


@pytest.mark.parametrize("method", ["GET", "PUT", "POST"])
async def test_a_request_is_sent_once_also_if_a_kept_connection_breaks_off(
    web: RawServer, egress: Egress, method: str
) -> None:
    await get(egress, web.url())

    async def hang_up(writer: Writer) -> None:
        raise ConnectionError

    web.reply = hang_up
    with pytest.raises(EgressError):
        await egress.request(method, web.url(), timeout_s=5, max_bytes=1000)
    assert (len(web.requests), web.connections) == (2, 1)


async def test_few_connections_are_kept(web: RawServer, egress: Egress) -> None:
    everybody = asyncio.Barrier(25)

    async def together(writer: Writer) -> None:
        await everybody.wait()
        writer.write(answer("hello"))

    web.reply = together
    await asyncio.gather(*(get(egress, web.url()) for _ in range(25)))
    await until(lambda: web.open, lambda number: number == 20)


async def test_cancelled_request_disconnects(web: RawServer, egress: Egress) -> None:
    asked = asyncio.Event()

    async def silent_but_noticed(writer: Writer) -> None:
        asked.set()
        await asyncio.Event().wait()

    web.reply = silent_but_noticed
    task = asyncio.create_task(get(egress, web.url()))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_unreachable_host_is_reported() -> None:
    async with RawServer() as gone:
        url = gone.url()
    async with aclosing(Egress(LOOPBACK)) as egress:
        assert (await failure(egress, url)).detail == "cannot connect to 127.0.0.1"


async def unknown(host: str, port: int) -> Sequence[str]:
    raise socket.gaierror(socket.EAI_NONAME, "not known")


@pytest.mark.parametrize("names", [unknown, Names([])])
async def test_unresolvable_name_is_reported(names: Resolver) -> None:
    async with aclosing(Egress(resolve=names)) as egress:
        error = await failure(egress, "http://no.example/")
    assert error.code == "egress_unreachable"
    assert error.detail == "the name no.example cannot be resolved"


# TLS


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


def serving_tls(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def test_certificate_is_checked_against_the_name_not_the_address(
    authority: trustme.CA,
) -> None:
    asked: list[str | None] = []
    tls = serving_tls(authority, "right.example")
    tls.sni_callback = lambda _, name, __: asked.append(name)
    egress = Egress(LOOPBACK, resolve=Names(LOOPBACK), ssl_context=trusting(authority))
    async with RawServer(tls=tls) as web, aclosing(egress):
        assert (await get(egress, web.url(host="right.example"))).body == b"hello"
        assert web.requests[0].headers["host"] == f"right.example:{web.port}"
        error = await failure(egress, web.url(host="wrong.example"))
        assert error.code == "egress_tls"
        assert "no secure connection to wrong.example: its certificate is not valid" in error.detail
        assert (await failure(egress, web.url())).code == "egress_tls"
        assert len(web.requests) == 1
    assert asked[:2] == ["right.example", "wrong.example"]


async def test_untrusted_certificate_is_refused(authority: trustme.CA) -> None:
    egress = Egress(LOOPBACK, resolve=Names(LOOPBACK))
    async with RawServer(tls=serving_tls(authority, "self.example")) as web, aclosing(egress):
        assert (await failure(egress, web.url(host="self.example"))).code == "egress_tls"
        assert web.requests == []


async def test_server_without_tls_is_reported(web: RawServer, egress: Egress) -> None:
    web.greeting = b"HTTP/1.1 400 Speak HTTP\r\n\r\n"
    error = await failure(egress, web.url().replace("http:", "https:"))
    assert (error.code, "handshake" in error.detail) == ("egress_tls", True)


async def test_endless_handshake_times_out(web: RawServer, egress: Egress) -> None:
    error = await failure(egress, web.url().replace("http:", "https:"), timeout_s=0.1)
    assert error.code == "egress_timeout"
    await web.closed.wait()


def test_fragment_is_not_sent() -> None:
    assert str(checked_url("https://a.example/b#c")) == "https://a.example/b"
