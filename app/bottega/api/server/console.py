"""The console: pages of this package that use the public API, for browsers."""

import functools
import gzip
import json
import os
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import bottega

CONSOLE = "/console"
FILES = Path(bottega.__file__).parent / "console"

_MODULES = {
    "preact": "preact.mjs",
    "preact/hooks": "preact-hooks.mjs",
    "htm": "htm.mjs",
    "@preact/signals": "signals.mjs",
    "@preact/signals-core": "signals-core.mjs",
    "cytoscape": "cytoscape.mjs",
    "@dagrejs/dagre": "dagre.mjs",
}
"""Files in ``vendor``, by the name that other modules import."""


def add_console(app: FastAPI) -> None:
    """Add the console's pages, with a policy that allows only their own scripts and styles."""
    imports = {name: f"{CONSOLE}/vendor/{file}" for name, file in _MODULES.items()}
    modules = json.dumps({"imports": imports})
    html = (FILES / "index.html").read_text().replace("{{modules}}", modules)
    digest = b64encode(sha256(modules.encode()).digest()).decode()
    policy = (
        f"default-src 'self'; script-src 'self' 'sha256-{digest}'; img-src 'self' data: blob:; "
        "base-uri 'none'; form-action 'none'; object-src 'none'; frame-ancestors 'none'"
    )
    page = HTMLResponse(html, headers={"Content-Security-Policy": policy, "Cache-Control": _CHECK})

    @app.get(f"{CONSOLE}/", include_in_schema=False)
    async def console() -> HTMLResponse:
        return page

    @app.get(CONSOLE, include_in_schema=False)
    async def without_slash() -> RedirectResponse:
        return RedirectResponse(f"{CONSOLE}/")

    app.mount(CONSOLE, _Revalidated(_Compressed(directory=FILES)))


def wants_page(request: Request) -> bool:
    """Return true if a browser asks for a page to show."""
    return "text/html" in request.headers.get("accept", "")


_CHECK = "no-cache"  # a browser keeps its copy, and asks each time if it is still current


class _Compressed(StaticFiles):
    """Files that are compressed once: anybody may ask for them, as often as they like."""

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        plain = super().file_response(full_path, stat_result, scope, status_code)
        plain.headers["Vary"] = "Accept-Encoding"
        wanted = Headers(scope=scope).get("accept-encoding", "")
        if not isinstance(plain, FileResponse) or "gzip" not in wanted:
            return plain
        response = Response(_gzipped(str(full_path), stat_result.st_mtime_ns))
        kept = {name: plain.headers[name] for name in ("content-type", "etag", "vary")}
        response.headers.update({**kept, "Content-Encoding": "gzip"})
        return response


@functools.cache
def _gzipped(path: str, changed_at: int) -> bytes:
    """Return a file's content, compressed. The time of its last change is part of the key."""
    return gzip.compress(Path(path).read_bytes(), mtime=0)


class _Revalidated:
    """Makes browsers ask for each file whether it has changed: a new version shows at once."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_checked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Cache-Control"] = _CHECK
            await send(message)

        await self.app(scope, receive, send_checked)
