"""Requests on their way: through a proxy, after a redirect, with headers that cannot be sent."""

import asyncio
import sys
from asyncio.subprocess import PIPE, STDOUT
from base64 import b64encode

import pytest
from httpx2 import URL

from bottega.agents.messages import HumanMessage
from bottega.errors import InvalidInputError, ModelError
from bottega.llm.provider import _proxy, open_provider
from bottega.llm.server import ServerSpec
from bottega.llm.vendors import NO_KEY, OpenAIProvider
from tests.fake_model import FakeModel
from tests.llm.conftest import KEY
from tests.llm.test_errors import server_of_heads

REFUSED = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n"


async def _failure(base_url: str, key: str = KEY) -> ModelError:
    provider = OpenAIProvider("m", api_key=key, base_url=base_url, patience_s=0)
    try:
        with pytest.raises(ModelError) as caught:
            await provider.invoke([HumanMessage(content="hi")])
    finally:
        await provider.aclose()
    return caught.value


@pytest.mark.parametrize("login", ["", "user:word@"])
async def test_proxy_does_not_get_the_key(monkeypatch: pytest.MonkeyPatch, login: str) -> None:
    async with server_of_heads(REFUSED) as (port, heads):
        monkeypatch.setenv("HTTPS_PROXY", f"http://{login}127.0.0.1:{port}")
        monkeypatch.setenv("OPENAI_ORG_ID", "org-secret")
        await _failure("https://model.invalid/v1")
    assert heads[0].startswith(b"CONNECT model.invalid:443 ")
    assert KEY.encode() not in heads[0]
    assert b"org-secret" not in heads[0]
    assert (b"Proxy-Authorization: Basic " in heads[0]) is bool(login)


async def test_plain_request_names_the_key_once_before_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with server_of_heads(REFUSED) as (port, heads):
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
        await _failure("http://model.invalid/v1")
    assert heads[0].count(KEY.encode()) == 1
    assert b"Proxy-Authorization" not in heads[0]


async def test_proxy_without_a_scheme_is_an_http_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server_of_heads(REFUSED) as (port, heads):
        monkeypatch.setenv("HTTP_PROXY", f"127.0.0.1:{port}")
        error = await _failure("http://model.invalid/v1")
    assert heads[0].startswith(b"POST http://model.invalid/v1/chat/completions ")
    assert error.code == "model_forbidden"


@pytest.mark.parametrize(
    ("direct", "server"),
    [
        ("model.invalid:81", "http://model.invalid:81"),
        ("10.0.0.0/8", "http://10.255.255.1:9"),
        ("a.invalid, http://model.invalid", "http://model.invalid"),
        ("[::2]", "http://[::2]:9"),
    ],
)
async def test_no_proxy_names_hosts_ports_and_networks(
    monkeypatch: pytest.MonkeyPatch, direct: str, server: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert _proxy(URL(server)) == "http://127.0.0.1:9"
    monkeypatch.setenv("NO_PROXY", direct)
    assert _proxy(URL(server)) is None
    assert _proxy(URL("http://other.invalid:82")) is not None


async def test_error_whose_body_does_not_end_is_known_by_its_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bottega.llm.provider._LONGEST_ERROR_S", 0.2)

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\n\r\nno")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    async with server, asyncio.timeout(30):
        error = await _failure(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
    assert error.code == "model_unauthorized"
    assert "It said: no" in error.detail


@pytest.mark.parametrize("to", ["http://a..b/v1", "http://user:word@127.0.0.1:{port}/v1"])
async def test_redirect_that_cannot_be_followed_is_an_error_of_the_model(to: str) -> None:
    moved = bytearray()
    async with server_of_heads(moved) as (port, _):
        location = to.format(port=port).encode()
        moved += b"HTTP/1.1 307 Moved\r\ncontent-length: 0\r\nlocation: " + location + b"\r\n\r\n"
        error = await _failure(f"http://127.0.0.1:{port}/v1")
    assert error.code == "model_unavailable"


@pytest.mark.parametrize("header", [("X-Own", "a\r\nX-Other: 1"), ("X Own", "a"), ("X-Own", "\0")])
def test_header_that_cannot_be_sent_is_an_error_at_the_start(header: tuple[str, str]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        open_provider(ServerSpec(api_key=KEY, headers=dict([header])), "m")
    assert header[0] in caught.value.detail
    assert KEY not in caught.value.detail


def test_variable_with_a_line_break_is_an_error_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org\r\nX-Other: 1")
    with pytest.raises(InvalidInputError):
        OpenAIProvider("m", api_key=KEY)


@pytest.mark.parametrize("key", [NO_KEY, KEY])
async def test_login_in_the_address_is_sent_in_place_of_a_key(key: str) -> None:
    async with server_of_heads(REFUSED) as (port, heads):
        url = f"http://us%40er:word@127.0.0.1:{port}/v1"
        if key == KEY:  # both would be the same header
            with pytest.raises(InvalidInputError):
                OpenAIProvider("m", api_key=key, base_url=url)
            return
        error = await _failure(url, key)
    assert b"Authorization: Basic " + b64encode(b"us@er:word") + b"\r\n" in heads[0]
    assert heads[0].count(b"uthorization") == 1
    assert "word" not in error.detail


async def test_long_error_is_read_as_far_as_it_came() -> None:
    said = b'{"error": {"code": "context_length_exceeded", "message": "' + b"too long " * 20_000
    head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n" % (len(said) + 3)
    async with server_of_heads(head + said + b'"}}') as (port, _):
        error = await _failure(f"http://127.0.0.1:{port}/v1")
    assert error.code == "model_context_too_long"


BOTH_FORMS = """
import asyncio, sys
from bottega.agents import BaseAgent, set_default_provider
from bottega.llm.vendors import OpenAIProvider

provider = OpenAIProvider("m", api_key="k", base_url=sys.argv[1])
set_default_provider(lambda: provider)
it = BaseAgent("You are brief.")


async def streamed():
    async for event in it.stream("hi"):
        pass


for _ in range(2):
    assert it.execute_query("hi").error is None
    assert asyncio.run(it.execute_query_async("hi")).error is None
    asyncio.run(streamed())
print(len(provider._client._sessions))
"""


async def test_both_forms_of_a_query_in_one_program_leave_no_session_open() -> None:
    async with FakeModel() as model:
        command = (sys.executable, "-X", "dev", "-c", BOTH_FORMS, model.base_url)
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
        output, _ = await process.communicate()
        assert len(model.requests) == 6
    # A loop in development mode tells of each step above 100 ms, which load may cause.
    lines = [line for line in output.splitlines() if not line.startswith(b"Executing ")]
    assert (process.returncode, lines) == (0, [b"0"])


async def test_a_closed_provider_opens_a_new_session() -> None:
    async with FakeModel() as model:
        provider = OpenAIProvider("m", api_key=KEY, base_url=model.base_url)
        for _ in range(2):
            asked = [provider.invoke([HumanMessage(content="hi")]) for _ in range(3)]
            await asyncio.gather(*asked)
            await provider.aclose()
            await provider.aclose()
            assert not provider._client._sessions


async def test_a_broken_chunk_ends_a_call_at_once() -> None:
    is_read = asyncio.Event()
    event = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'

    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await is_read.wait()
        writer.write(b"zz\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(break_off, "127.0.0.1", 0)
    async with server, asyncio.timeout(30):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        provider = OpenAIProvider("m", api_key=KEY, base_url=url, patience_s=0)
        with pytest.raises(ModelError) as caught:
            await provider.invoke([HumanMessage(content="hi")], on_delta=lambda _: is_read.set())
        await provider.aclose()
    assert caught.value.code == "model_stream_broken"
