"""The console: pages of this package that use the public API, for browsers."""

import json
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse

import bottega
from bottega.api.server.documents import Document, DocumentFolder

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
    page = Document(html.encode(), "text/html", {"Content-Security-Policy": policy})

    @app.get(CONSOLE, include_in_schema=False)
    async def without_slash() -> RedirectResponse:
        return RedirectResponse(f"{CONSOLE}/")

    app.mount(CONSOLE, _files().with_index(page))


def wants_page(request: Request) -> bool:
    """Return true if a browser asks for a page to show."""
    return "text/html" in request.headers.get("accept", "")


@cache
def _files() -> DocumentFolder:
    """Read the console's files once per process."""
    return DocumentFolder(FILES)
