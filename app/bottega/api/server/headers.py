"""Security headers of every response."""

from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ASSETS = "/docs-assets"
_ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Responses are not pages: one that a browser shows anyway may load and run nothing. Pages
    # set their own policy.
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


def for_path(path: str) -> Iterator[tuple[str, str]]:
    """Yield the default headers of a response at ``path``."""
    yield from _ALWAYS.items()
    if path.startswith("/v1/"):
        yield "Cache-Control", "no-store"


class SecurityHeaders:
    """Outermost middleware, which adds the default headers to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                for name, value in for_path(scope["path"]):
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, send_with_headers)


def add_docs(app: FastAPI) -> None:
    """Add ``/docs``, with a policy that allows only its own scripts."""
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title=f"{app.title} - Swagger UI",
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

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(html, headers={"Content-Security-Policy": policy})
