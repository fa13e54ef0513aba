"""Public documents that have entity tags (RFC 9110, 13), such as the API's docs and the console."""

import asyncio
import gzip
import json
import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from copy import copy
from functools import cache, cached_property
from hashlib import sha256
from mimetypes import guess_type
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import RedirectResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import bottega
from bottega.api.errors import problem_response

CHECK = "no-cache"
"""Cache-Control of documents: a browser keeps a copy, and checks it before each use."""
LASTING = "public, max-age=31536000, immutable"
"""Cache-Control of URLs that contain a hash of their content: browsers never ask again."""
_NO_GZIP = re.compile(r"gzip\s*;\s*q=0(\.0*)?\s*(,|$)")
_READ = ("GET", "HEAD")
_VERSIONED = re.compile(r"([0-9a-f]{16})/(?=.)")
_TYPES = {".mjs": "text/javascript", ".js": "text/javascript", ".md": "text/markdown"}


class Document:
    """A document that anybody may read.

    Args:
        headers: headers of the document's responses, in addition to the headers of all documents.
    """

    def __init__(
        self, body: bytes, media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self._body = body
        self._media_type = media_type
        self._tag = f'"{sha256(body).hexdigest()[:32]}"'
        self._headers = {"Vary": "Accept-Encoding", **(headers or {})}

    @cached_property
    def gzipped(self) -> bytes:
        """The compressed body."""
        return gzip.compress(self._body, mtime=0)

    def answer(self, request: Request, caching: str = CHECK) -> Response:
        """Answer a GET or HEAD request; the status is 304 if the client's copy is current.

        Args:
            caching: the header Cache-Control of the response.
        """
        request_headers = request.headers
        if request.method not in _READ:
            return _not_allowed(request.method)
        headers = {**self._headers, "Cache-Control": caching, "ETag": self._tag}
        if _is_current(request_headers.get("if-none-match", ""), self._tag):
            return Response(status_code=304, headers=headers)
        packed = _takes_gzip(request_headers.get("accept-encoding", ""))
        # The entity tag is weak, because the compressed and the plain response differ.
        fields = {"ETag": f"W/{self._tag}", "Content-Encoding": "gzip"} if packed else {}
        body = self.gzipped if packed else self._body
        return Response(
            body,
            headers={**headers, **fields},
            media_type=self._media_type,
        )


class LateDocument:
    """A JSON document that a thread makes at the first request, because making it takes long.

    Args:
        make: a function that returns the document's bytes.
    """

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._document: Document | None = None
        self._making: asyncio.Task[Document] | None = None

    async def answer(self, request: Request) -> Response:
        """Answer a request; see :meth:`Document.answer`."""
        if self._document is None:
            if self._making is None or self._making.done():
                self._making = asyncio.create_task(asyncio.to_thread(self._made))
            self._document = await asyncio.shield(self._making)
        return self._document.answer(request)

    def _made(self) -> Document:
        document = Document(self._make(), "application/json")
        _ = document.gzipped  # compressed in this thread, too
        return document


class DocumentFolder:
    """ASGI application that answers with the files of a folder; it reads the folder once.

    Each file has a second path that begins with ``version``; browsers cache the file at this path
    for ever. A page of a different release asks for a path with a different version. This page gets
    the current file, and the browser may not cache the file for ever.

    Args:
        pattern: glob pattern of the files; ``**`` matches folders.

    Attributes:
        version: hash of all files, which keeps browsers from mixing modules of different releases.
    """

    def __init__(self, folder: Path, pattern: str = "**/*") -> None:
        paths = [path for path in sorted(folder.glob(pattern)) if path.is_file()]
        bodies = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        self._files = {name: Document(body, _type_of(Path(name))) for name, body in bodies.items()}
        content = "".join(f"{name}\0{sha256(body).hexdigest()}\0" for name, body in bodies.items())
        self.version = sha256(content.encode()).hexdigest()[:16]

    def with_index(self, page: Document) -> "DocumentFolder":
        """Return a copy of this application that answers with a page at the folder's own path."""
        same = copy(self)
        same._files = {**self._files, "": page}
        return same

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        name = scope["path"].removeprefix(scope.get("root_path", "")).lstrip("/")
        versioned = _VERSIONED.match(name)
        version = versioned[1] if versioned else ""
        document = self._files.get(name[versioned.end() :] if versioned else name)
        if document is None:
            answer = problem_response(404, "not_found", "there is no such file")
        else:
            answer = document.answer(request, LASTING if version == self.version else CHECK)
        await answer(scope, receive, send)


def _type_of(path: Path) -> str:
    media_type = _TYPES.get(path.suffix) or guess_type(path.name)[0]
    return media_type or "application/octet-stream"


def _not_allowed(method: str) -> Response:
    allowed = ", ".join(_READ)
    detail = f"{method} is not allowed here; allowed: {allowed}"
    return problem_response(405, "method_not_allowed", detail, headers={"Allow": allowed})


def _is_current(header: str, tag: str) -> bool:
    tags = [each.strip().removeprefix("W/") for each in header[:2000].split(",")]
    return tag in tags or tags == ["*"]


def _takes_gzip(header: str) -> bool:
    return "gzip" in header and not _NO_GZIP.search(header)


ASSETS = "/docs-assets"
OPENAPI = "/openapi.json"


def add_docs(app: FastAPI, openapi: Callable[[], bytes]) -> None:
    """Add ``/openapi.json``, and add ``/docs`` with a policy that allows only its own scripts.

    Args:
        openapi: a function that makes the OpenAPI document.
    """
    page, document = _page(app.title), LateDocument(openapi)

    async def docs(request: Request) -> Response:
        return page.answer(request)

    # Plain routes also answer HEAD; FastAPI's routes do not.
    app.add_route("/docs", docs, include_in_schema=False)
    app.add_route(OPENAPI, document.answer, include_in_schema=False)
    app.mount(ASSETS, _assets)


def _page(title: str) -> Document:
    assets = ASSETS.lstrip("/")
    page = get_swagger_ui_html(
        # These addresses are relative, because a proxy may serve the page below another path.
        openapi_url=OPENAPI.lstrip("/"),
        title=f"{title} - Swagger UI",
        swagger_js_url=f"{assets}/swagger-ui-bundle.js",
        swagger_css_url=f"{assets}/swagger-ui.css",
        swagger_favicon_url="console/icon.svg",
    )
    html = bytes(page.body).decode()
    script = html.rpartition("<script>")[2].partition("</script>")[0]
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; connect-src 'self'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"
    )
    return Document(html.encode(), "text/html", {"Content-Security-Policy": policy})


async def _assets(scope: Scope, receive: Receive, send: Send) -> None:
    await _read_assets()(scope, receive, send)


@cache
def _read_assets() -> DocumentFolder:
    return DocumentFolder(Path(__file__).with_name("vendor"), "swagger-ui*")


CONSOLE = "/console"
FILES = Path(bottega.__file__).parent / "console"

_MODULES = {
    "preact": "preact.mjs",
    "preact/hooks": "preact-hooks.mjs",
    "htm": "htm.mjs",
    "@preact/signals": "signals.mjs",
    "@preact/signals-core": "signals-core.mjs",
    "@dagrejs/dagre": "dagre.mjs",
    "marked": "marked.mjs",
    "dompurify": "dompurify.mjs",
    "uplot": "uplot.mjs",
}
"""Files in ``vendor``, by the name with which other modules import them."""
_OWN_FILE = re.compile(r'(?:href|src)="(?=\w)')
"""Text that comes before the address of the console's own files in the console's page."""


def add_console(app: FastAPI) -> None:
    """Add the console's pages with a policy that allows only their own scripts and styles."""
    files = _files()
    imports = {name: f"./{files.version}/vendor/{file}" for name, file in _MODULES.items()}
    modules = json.dumps({"imports": imports})
    html = (FILES / "index.html").read_text().replace("{{modules}}", modules)
    html = _OWN_FILE.sub(rf"\g<0>{files.version}/", html)
    digest = b64encode(sha256(modules.encode()).digest()).decode()
    policy = (
        f"default-src 'self'; script-src 'self' 'sha256-{digest}'; img-src 'self' data: blob:; "
        "base-uri 'none'; form-action 'none'; object-src 'none'; frame-ancestors 'none'"
    )
    page = Document(html.encode(), "text/html", {"Content-Security-Policy": policy})

    @app.get(CONSOLE, include_in_schema=False)
    async def without_slash() -> RedirectResponse:
        return RedirectResponse(f"{CONSOLE}/")

    app.mount(CONSOLE, files.with_index(page))


def wants_page(request: Request) -> bool:
    """Return true if a browser requests a page to show."""
    return "text/html" in request.headers.get("accept", "")


@cache
def _files() -> DocumentFolder:
    return DocumentFolder(FILES)
