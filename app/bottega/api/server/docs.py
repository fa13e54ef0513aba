"""The documentation that this server shows: its OpenAPI document, and a page that reads it."""

from base64 import b64encode
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path

import fastapi_offline
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import Response

from bottega.api.server.documents import Document, DocumentFolder, LateDocument

ASSETS = "/docs-assets"
OPENAPI = "/openapi.json"


def add_docs(app: FastAPI, openapi: Callable[[], bytes]) -> None:
    """Add ``/openapi.json``, and ``/docs`` with a policy that allows only its own scripts.

    Args:
        openapi: makes the OpenAPI document.
    """
    page, document = _page(app.title), LateDocument(openapi)

    async def docs(request: Request) -> Response:
        return page.answer(request)

    # Plain routes, which take HEAD, too.
    app.add_route("/docs", docs, include_in_schema=False)
    app.add_route(OPENAPI, document.answer, include_in_schema=False)
    app.mount(ASSETS, _assets())


def _page(title: str) -> Document:
    page = get_swagger_ui_html(
        openapi_url=OPENAPI,
        title=f"{title} - Swagger UI",
        swagger_js_url=f"{ASSETS}/swagger-ui-bundle.js",
        swagger_css_url=f"{ASSETS}/swagger-ui.css",
        swagger_favicon_url=f"{ASSETS}/favicon.png",
    )
    html = bytes(page.body).decode()
    script = html.rpartition("<script>")[2].partition("</script>")[0]
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; connect-src 'self'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"
    )
    return Document(html.encode(), "text/html", {"Content-Security-Policy": policy})


@cache
def _assets() -> DocumentFolder:
    """Read the page's script and style once per process; FastAPI's own come from the internet."""
    return DocumentFolder(Path(fastapi_offline.__file__).parent / "static", "[!r]*")
