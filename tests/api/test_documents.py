"""Public documents are bytes that are made once: asking for them costs next to nothing."""

import json
import statistics
import time
from typing import Any

import pytest
from starlette.types import Message

from bottega.main import create_app, server_config
from tests.service import Running

DOCUMENTS = ("/openapi.json", "/asyncapi.json", "/docs", "/docs-assets/swagger-ui.css",
             "/docs-assets/swagger-ui-bundle.js", "/console/",
             "/console/icon.svg", "/console/vendor/uplot.mjs")  # fmt: skip


@pytest.mark.parametrize("path", DOCUMENTS)
async def test_a_document_that_the_client_has_is_not_sent_again(shared: Running, path: str) -> None:
    plain = {"accept-encoding": "identity"}
    first = await shared.client.get(path, headers=plain)
    assert first.status_code == 200
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    assert tag.startswith('"')
    for sent in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        for more in (plain, {"accept-encoding": "gzip"}):
            same = await shared.client.get(path, headers={"if-none-match": sent, **more})
            assert (same.status_code, same.content) == (304, b"")
            assert same.headers["etag"] == tag
    for sent in ('"other"', tag.strip('"'), ""):
        again = await shared.client.get(path, headers={"if-none-match": sent, **plain})
        assert (again.status_code, again.content) == (200, first.content)
    packed = await shared.client.get(path, headers={"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["etag"] == f"W/{tag}"
    assert (packed.content, packed.headers["vary"]) == (first.content, "Accept-Encoding")
    refused = await shared.client.get(path, headers={"accept-encoding": "gzip;q=0, identity"})
    assert "content-encoding" not in refused.headers
    head = await shared.client.head(path, headers=plain)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(first.content))


@pytest.mark.parametrize("path", DOCUMENTS)
async def test_a_document_cannot_be_changed(shared: Running, path: str) -> None:
    answer = await shared.client.request("DELETE", path)
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    assert "GET" in answer.headers["allow"]


async def test_the_documents_say_what_they_said(shared: Running) -> None:
    openapi = await shared.client.get("/openapi.json")
    assert openapi.headers["content-type"] == "application/json"
    assert openapi.json() == json.loads(json.dumps(create_app(shared.service).openapi()))
    assert (await shared.client.get("/asyncapi.json")).json()["asyncapi"] == "3.0.0"


async def cost_of(app: Any, path: str, method: str = "GET") -> float:
    """Return the CPU milliseconds of this thread for one request, of many the typical ones."""
    costs = []
    for _ in range(40):
        messages: list[Message] = []

        async def send(message: Message) -> None:
            messages.append(message)  # noqa: B023

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"localhost")],
            "http_version": "1.1",
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "scheme": "http",
            "root_path": "",
        }
        began = time.thread_time()
        await app(scope, receive, send)
        costs.append(time.thread_time() - began)
        assert messages[0]["type"] == "http.response.start"
    return statistics.median(costs) * 1000


@pytest.mark.parametrize("path", [*DOCUMENTS, "/", "/healthz", "/console", "/console/x",
                                  "/docs-assets/x"])  # fmt: skip
async def test_a_public_path_costs_a_millisecond_at_most(shared: Running, path: str) -> None:
    app = server_config(create_app(shared.service)).app
    assert await cost_of(app, path) <= 1
    assert await cost_of(app, path, "DELETE") <= 1
