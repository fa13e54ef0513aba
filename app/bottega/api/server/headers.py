"""Security headers of every response."""

from base64 import b64encode
from hashlib import sha256

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ASSETS = "/docs-assets"
RawHeader = tuple[bytes, bytes]
"""Name, in lower case, and value: a header in ASGI's form."""
_ALWAYS: tuple[RawHeader, ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # Responses are not pages: one that a browser shows anyway may load and run nothing. Pages
    # set their own policy.
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)
_OF_API: tuple[RawHeader, ...] = (*_ALWAYS, (b"cache-control", b"no-store"))


def for_path(path: str) -> tuple[RawHeader, ...]:
    """Return the default headers of a response at ``path``."""
    return _OF_API if path.startswith(("/v1/", "/openai/")) else _ALWAYS


def sent(scope: Scope, name: bytes) -> list[bytes]:
    """Return the values of a request's header; ``name`` is in lower case."""
    return [value for each, value in scope["headers"] if each == name]


class SecurityHeaders:
    """Outermost middleware, which adds the default headers to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                own = list(message.get("headers", ()))
                named = {name for name, _ in own}
                added = (each for each in for_path(scope["path"]) if each[0] not in named)
                message["headers"] = [*own, *added]
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
