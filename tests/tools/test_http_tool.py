"""Tools that are HTTP requests: the request, the result, and secrets."""

import json
import logging
from contextlib import aclosing
from typing import Any

import pytest
from pydantic import ValidationError

from bottega.agents.messages import ToolStatus
from bottega.agents.parts import Part
from bottega.events.data import PartType
from bottega.tools.egress import Egress
from bottega.tools.http import HttpTool, HttpToolDefinition, Secrets
from bottega.tools.secrets import TenantSecrets
from tests.tools.helpers import Names, call, error_of, result_of
from tests.tools.raw_server import RawServer, Writer, answer
from tests.tools.test_media import png

KEY = 'Bearer s3cr3t/"t0ken'
SEARCH = {
    "properties": {
        "id": {"type": "string"},
        "q": {"type": "string"},
        "limit": {"type": "integer", "maximum": 50},
    },
    "required": ["id"],
}


def defined(url: str, **fields: Any) -> HttpToolDefinition:
    return HttpToolDefinition.model_validate(
        {"name": "items", "description": "Finds items.", "url": url, "parameters": SEARCH} | fields
    )


def made(egress: Egress, url: str, **fields: Any) -> HttpTool:
    found = TenantSecrets({"BOTTEGA_SECRET_ACME__KEY": KEY}).of("acme")

    async def secrets(name: str) -> str:
        return found(name)

    return HttpTool(defined(url, **fields), secrets=secrets, egress=egress)


def always(value: str) -> Secrets:
    async def secrets(name: str) -> str:
        return value

    return secrets


def json_answer(value: Any, **more: Any) -> bytes:
    return answer(json.dumps(value), content_type="application/json", **more)


# Request


async def test_arguments_fill_the_url_and_the_rest_goes_to_the_query(
    web: RawServer, egress: Egress
) -> None:
    tool = made(egress, web.url("/items/{id}?q={q}"))
    web.reply = json_answer({"found": [1, None, "ü"]})
    assert await result_of(tool, id="a/b", q="x&y", limit=3) == {
        "status": 200,
        "content_type": "application/json",
        "body": {"found": [1, None, "ü"]},
    }
    assert web.requests[0].line == "GET /items/a%2Fb?q=x%26y&limit=3 HTTP/1.1"
    await result_of(made(egress, web.url("/{id}"), method="DELETE"), id="1", limit=2)
    assert web.requests[1].line == "DELETE /1?limit=2 HTTP/1.1"
    assert web.requests[1].body == b""


@pytest.mark.parametrize(
    ("body", "kind", "media_type"),
    [
        (png(3, 2), "image", "image/png"),
        (b"%PDF-1.7", "document", "application/pdf"),
        (b"RIFF....WAVE", "audio", "audio/wav"),
    ],
)
async def test_an_image_is_a_part_of_the_result(
    web: RawServer, egress: Egress, body: bytes, kind: PartType, media_type: str
) -> None:
    web.reply = answer(body, content_type="application/octet-stream")

    result = await call(made(egress, web.url("/{id}")), id="1")

    assert result.result["body"] is None
    assert result.parts == (Part(kind, data=body, media_type=media_type),)


async def test_an_svg_is_a_text(web: RawServer, egress: Egress) -> None:
    web.reply = answer("<svg/>", content_type="image/svg+xml")

    result = await call(made(egress, web.url("/{id}")), id="1")

    assert (result.result["body"], result.parts) == ("<svg/>", ())


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
async def test_arguments_outside_the_url_go_to_the_body(
    web: RawServer, egress: Egress, method: str
) -> None:
    tool = made(egress, web.url("/items/{id}"), method=method)
    await result_of(tool, id="1", q="ü", limit=3)
    request = web.requests[0]
    assert request.line == f"{method} /items/1 HTTP/1.1"
    assert request.headers["content-type"] == "application/json"
    assert json.loads(request.body) == {"q": "ü", "limit": 3}
    await result_of(tool, id="1")
    assert web.requests[1].body == b"{}"


async def test_arguments_are_matched_with_patterns(web: RawServer, egress: Egress) -> None:
    one = {"properties": {"id": {"pattern": "^[0-9]{1,3}$"}}, "required": ["id"]}
    tool = made(egress, web.url("/{id}"), parameters=one)
    await result_of(tool, id="12")
    assert "does not match" in await error_of(tool, id="1234")
    assert [request.line for request in web.requests] == ["GET /12 HTTP/1.1"]
    bomb = {"properties": {"id": {"pattern": "(a{99}){99}"}}, "required": ["id"]}
    stored = made(egress, web.url("/{id}"), parameters=bomb)  # by a version without these bounds
    assert "use smaller repeats" in await error_of(stored, id="a")


async def test_without_other_parameters_there_is_no_body(web: RawServer, egress: Egress) -> None:
    only_id = {"properties": {"id": {"type": "string"}}, "required": ["id"]}
    await result_of(made(egress, web.url("/{id}"), method="POST", parameters=only_id), id="1")
    assert web.requests[0].headers["content-length"] == "0"
    assert "content-type" not in web.requests[0].headers


async def test_headers_are_sent_with_secrets_from_the_environment(
    web: RawServer, egress: Egress
) -> None:
    headers = {"Authorization": {"secret": "KEY"}, "Accept": "application/json", "X-A": "b"}
    await result_of(made(egress, web.url("/{id}"), headers=headers), id="1")
    sent = web.requests[0].headers
    assert (sent["authorization"], sent["accept"], sent["x-a"]) == (KEY, "application/json", "b")


async def test_wrong_arguments_are_reported_and_nothing_is_sent(
    web: RawServer, egress: Egress
) -> None:
    tool = made(egress, web.url("/items/{id}"))
    assert "'id' is a required property" in await error_of(tool)
    assert "limit: 99 is greater than" in await error_of(tool, id="1", limit=99)
    assert "'admin' was unexpected" in await error_of(tool, id="1", admin=True)
    assert "'id' must not be empty" in await error_of(tool, id="")
    assert "'id' cannot be a part" in await error_of(tool, id="../admin")
    assert "longer than" in await error_of(made(egress, web.url("/{id}")), id="x" * 9000)
    post = made(egress, web.url("/{id}"), method="POST")
    assert "longer than 1000000 bytes" in await error_of(post, id="1", q="x" * 1_000_001)
    assert "cannot be written as JSON" in await error_of(post, id="1", q="\ud800")
    assert web.connections == 0


def test_schema_and_idempotence_are_declared() -> None:
    tool = made(Egress(), "https://a.example/{id}")
    assert tool.schema.name == "items"
    assert tool.schema.parameters == {
        "type": "object",
        **SEARCH,
        "additionalProperties": False,
    }
    assert tool.timeout_s == 35
    repeatable = {"GET": True, "PUT": True, "DELETE": True, "POST": False, "PATCH": False}
    for method, may in repeatable.items():
        assert made(Egress(), "https://a.example/{id}", method=method).idempotent is may
    assert made(Egress(), "https://a.example/{id}", method="POST", idempotent=True).idempotent
    assert not made(Egress(), "https://a.example/{id}", idempotent=False).idempotent


# Result


@pytest.mark.parametrize(
    ("content_type", "body", "read"),
    [
        ("application/json", b"[1]", [1]),
        ("application/problem+json; charset=utf-8", b'{"a": "\xc3\xbc"}', {"a": "ü"}),
        ("application/json", b"{broken", "{broken"),
        ("application/json", b"NaN", None),
        ("application/json", b"1e999", None),
        ("application/json", b"[" * 100 + b"]" * 100, "[" * 100 + "]" * 100),
        ("application/json", b"[" * 50_000, "[" * 50_000),
        ("application/json", b"9" * 5000, "9" * 5000),
        ("text/csv", b"a,b", "a,b"),
        ("", b"plain", "plain"),
        ("image/png", b"\x89PNG\x00\xff", None),
        ("application/json", b"", None),
    ],
)
async def test_body_is_decoded_by_its_content_type(
    web: RawServer, egress: Egress, content_type: str, body: bytes, read: Any
) -> None:
    web.reply = answer(body, content_type=content_type)
    result = await result_of(made(egress, web.url("/{id}")), id="1")
    assert result == {"status": 200, "content_type": content_type, "body": read}


async def test_a_body_that_does_not_fit_its_schema_is_an_error(
    web: RawServer, egress: Egress
) -> None:
    schema = {"type": "object", "properties": {"found": {"type": "integer"}}, "required": ["found"]}
    tool = made(egress, web.url("/{id}"), output_schema=schema)
    web.reply = json_answer({"found": 3})
    assert await result_of(tool, id="a") == {
        "status": 200,
        "content_type": "application/json",
        "body": {"found": 3},
    }
    web.reply = json_answer({"found": "three"})
    assert await error_of(tool, id="a") == (
        "the answer does not fit the tool's output_schema: /found: 'three' is not of type 'integer'"
    )
    web.reply = answer("found 3", content_type="text/plain")
    assert "the whole body: 'found 3' is not of type 'object'" in await error_of(tool, id="a")


@pytest.mark.parametrize("schema", [{"type": "objekt"}, {"$ref": "https://example.com/a"}])
def test_an_invalid_schema_of_the_answer_is_refused(schema: Any) -> None:
    with pytest.raises(ValidationError):
        defined("https://example.com/{id}", output_schema=schema)


async def test_no_content_is_a_success(web: RawServer, egress: Egress) -> None:
    web.reply = b"HTTP/1.1 204 No Content\r\n\r\n"
    result = await result_of(made(egress, web.url("/{id}"), method="DELETE"), id="1")
    assert result == {"status": 204, "content_type": "", "body": None}


async def test_any_other_status_is_an_error_with_the_start_of_the_body(
    web: RawServer, egress: Egress
) -> None:
    tool = made(egress, web.url("/{id}"))
    web.reply = json_answer({"detail": "no such item"}, status=404)
    assert await error_of(tool, id="1") == (
        'the server answered 404 Not Found: {"detail": "no such item"}'
    )
    refused = await call(tool, id="1")
    assert (refused.error_type, refused.error_status) == ("http_error", 404)
    web.reply = answer("x" * 50_000, status=500)
    said = await error_of(tool, id="1")
    assert said == f"the server answered 500 Internal Server Error: {'x' * 1000}…"
    web.reply = answer(status=429, headers=("retry-after: 5",))
    assert await error_of(tool, id="1") == (
        "the server answered 429 Too Many Requests and asks to wait 5 s"
    )


async def test_redirect_is_not_followed_and_names_the_host(web: RawServer, egress: Egress) -> None:
    headers = {"Authorization": {"secret": "KEY"}}
    async with RawServer() as other:
        web.reply = answer(status=307, headers=(f"location: {other.url('/x?key=1')}",))
        said = await error_of(made(egress, web.url("/{id}"), headers=headers), id="1")
        assert said == (
            "the server answered 307 Temporary Redirect, a redirect to 127.0.0.1; redirects are "
            "not followed: the tool's URL has to be the target's URL"
        )
        assert other.connections == 0


async def test_too_large_too_slow_and_unreachable_have_different_errors(
    web: RawServer, egress: Egress
) -> None:
    async def silent(writer: Writer) -> None:
        await writer.drain()

    web.reply = answer("x" * 101)
    small = made(egress, web.url("/{id}"), max_bytes=100)
    assert await error_of(small, id="1") == "the answer is larger than 100 bytes"
    web.reply = answer("x" * 100)
    assert await result_of(small, id="1")
    web.reply = silent
    slow = made(egress, web.url("/{id}"), timeout_s=0.05)
    assert await error_of(slow, id="1") == "no complete answer from 127.0.0.1 within 0.05 s"
    async with aclosing(Egress(resolve=Names(["10.0.0.1"]))) as guarded:
        inside = made(guarded, "http://db.example/{id}")
        assert "db.example is not a public address (private)" in await error_of(inside, id="1")
    tls = made(egress, web.url("/{id}").replace("http:", "https:"), timeout_s=5)
    web.greeting = b"HTTP/1.1 400 Speak HTTP\r\n\r\n"
    web.hang_up()
    assert "no secure connection to 127.0.0.1" in await error_of(tls, id="1")


# Secrets


@pytest.mark.parametrize("status", [200, 401])
@pytest.mark.parametrize(
    "echo",
    [
        json.dumps({"you sent": [KEY, {KEY: 1}, f"key={KEY}."], "token": 's3cr3t/"t0ken'}),
        f"you sent {KEY}",
        'invalid token s3cr3t/"t0ken',
        r'{"php": "s3cr3t\/\"t0ken"} broken',
        "<p>s3cr3t/&quot;t0ken</p> ?key=s3cr3t%2F%22t0ken",
        json.dumps({"a": KEY}) + " broken",
    ],
)
async def test_secret_in_an_answer_is_removed(
    web: RawServer,
    egress: Egress,
    caplog: pytest.LogCaptureFixture,
    status: int,
    echo: str,
) -> None:
    caplog.set_level(logging.INFO)
    tool = made(egress, web.url("/{id}"), headers={"Authorization": {"secret": "KEY"}})
    web.reply = answer(
        echo, status=status, content_type="application/json", headers=(f"x-echo: {KEY}",)
    )
    result = await call(tool, id="1")
    assert web.requests[0].headers["authorization"] == KEY
    everything = f"{result!r} {result.text} {tool!r} {tool.definition!r} {vars(tool)} {caplog.text}"
    assert "t0ken" not in everything
    assert "[secret]" in result.text


async def test_secret_is_removed_even_where_the_text_is_cut_off(
    web: RawServer, egress: Egress
) -> None:
    headers = {"Authorization": {"secret": "KEY"}}
    tool = made(egress, web.url("/{id}"), headers=headers, max_bytes=12)
    web.reply = answer("x" * 990 + KEY, status=400)
    assert "s3cr3t" not in await error_of(tool, id="1")
    web.reply = answer(f"say: {KEY}", status=400)
    assert (await error_of(tool, id="1")).endswith("say: [secret]")


async def test_missing_secret_error_tells_the_operator_its_name(
    web: RawServer, egress: Egress
) -> None:
    tool = made(egress, web.url("/{id}"), headers={"X-Key": {"secret": "OTHER"}})
    assert await error_of(tool, id="1") == (
        "the secret 'OTHER' is not configured for the tenant 'acme': store it by PUT "
        "/v1/secrets/OTHER, or the operator of this server has to set BOTTEGA_SECRET_ACME__OTHER"
    )
    assert web.connections == 0


@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "sch\u00fcssel", "a\x00b", "x" * 10_000])
async def test_secret_that_no_header_can_hold_is_not_shown(
    web: RawServer, egress: Egress, value: str
) -> None:
    definition = defined(web.url("/{id}"), headers={"X-Key": {"secret": "KEY"}})
    tool = HttpTool(definition, secrets=always(value), egress=egress)
    said = await error_of(tool, id="1")
    assert "the value of the header x-key must be printable ASCII" in said
    assert value not in said
    assert web.connections == 0


async def test_line_end_after_a_secret_is_ignored(web: RawServer, egress: Egress) -> None:
    definition = defined(web.url("/{id}"), headers={"X-Key": {"secret": "KEY"}})
    tool = HttpTool(definition, secrets=always("abc\n"), egress=egress)
    assert (await call(tool, id="1")).status is ToolStatus.SUCCESS
    assert web.requests[0].headers["x-key"] == "abc"


# Definition


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"url": "https://{id}.example/"}, "must look like"),
        ({"url": "file:///etc/passwd"}, "must look like"),
        ({"url": "https://a.example/{other}"}, "without a parameter: ['other']"),
        ({"url": "https://a.example/{q}"}, "must be required: ['q']"),
        ({"url": "https://a.example/{id}?limit=1"}, "already sets these parameters: ['limit']"),
        ({"name": "no blanks"}, "pattern"),
        ({"description": ""}, "at least 1"),
        ({"method": "TRACE"}, "GET"),
        ({"timeout_s": 0}, "greater than 0"),
        ({"timeout_s": 121}, "less than or equal to 120"),
        ({"timeout_s": float("nan")}, "less than or equal to 120"),
        ({"max_bytes": 1_000_001}, "less than or equal to 1000000"),
        ({"max_bytes": 0}, "greater than or equal to 1"),
        ({"parameters": {"type": "string"}}, "type 'object'"),
        ({"parameters": {"properties": {"a": {"$ref": "http://a.example/"}}}}, "$ref"),
        ({"headers": {"Host": "a.example"}}, "Host cannot be set"),
        ({"headers": {"transfer-encoding": {"secret": "A"}}}, "cannot be set"),
        ({"headers": {"X-A": "a\r\nX-B: c"}}, "printable ASCII"),
        ({"headers": {"X-A\r\nX-B": "c"}}, "not a valid header name"),
        ({"headers": {"X-A": "a", "x-a": "b"}}, "occurs twice"),
        ({"headers": {"Authorization": "Bearer sk-1"}}, "PUT /v1/secrets/NAME"),
        ({"headers": {"X-API-Key": "sk-1"}}, "PUT /v1/secrets/NAME"),
        ({"headers": {"Cookie": "sk-1"}}, "PUT /v1/secrets/NAME"),
        ({"url": "https://a.example/{id}?API_Key=sk-1"}, "API_Key in the URL's query is a secret"),
        ({"url": "https://a.example/{id}?token=sk-1-{id}"}, "token in the URL's query is a secret"),
        ({"headers": {"X-A": {"secret": "lower"}}}, "pattern"),
        ({"headers": {"X-A": {"secret": "A", "value": "b"}}}, "not permitted"),
        ({"headers": {"Content-Type": "text/xml"}}, "remove the header content-type"),
        ({"headers": {f"X-{n}": "a" for n in range(51)}}, "at most 50"),
        ({"unknown": 1}, "not permitted"),
        ({"type": "mcp"}, "http"),
    ],
)
def test_invalid_definition_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError) as caught:
        defined(**{"url": "https://a.example/{id}"} | fields)
    assert reason in str(caught.value)
    assert "sk-1" not in str(caught.value)


def test_argument_may_be_a_credential_and_other_keys_are_none() -> None:
    url = "https://a.example/{id}?token={id}&keywords=tea&author=ada&next_token"
    assert defined(url).url == url


def test_definition_survives_storage() -> None:
    definition = defined(
        "https://a.example/{id}",
        headers={"Authorization": {"secret": "KEY"}, "X-A": "b"},
        method="POST",
    )
    stored = definition.model_dump_json()
    assert HttpToolDefinition.model_validate_json(stored) == definition
    assert HttpToolDefinition.model_validate(json.loads(stored)) == definition
