"""The console's files: vendored modules, size, policy, and what a browser is sent."""

import gzip
import re
from pathlib import Path

import httpx2
import pytest

from bottega.api.server.documents import FILES
from tests.fake_model import FakeModel
from tests.flows.conftest import shared, shared_model, shared_url
from tests.service import Running

__all__ = ["shared", "shared_model", "shared_url"]

MOST_COMPRESSED = 350_000
MOST_COLUMNS = 120
OWN = [path for path in FILES.rglob("*") if path.suffix in (".js", ".css", ".html")]


def test_all_scripts_together_are_small() -> None:
    scripts = [*FILES.rglob("*.js"), *FILES.rglob("*.mjs")]
    sizes = {path.name: len(gzip.compress(path.read_bytes(), 6)) for path in scripts}
    assert sum(sizes.values()) <= MOST_COMPRESSED, sizes


def test_no_line_is_wider_than_a_window() -> None:
    wide = [
        f"{path.relative_to(FILES)}:{number}"
        for path in OWN
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MOST_COLUMNS
    ]
    assert wide == []


def test_no_file_loads_anything_from_elsewhere() -> None:
    assert len(OWN) > 20
    for path in OWN:
        assert not re.search(r"(?:src|href|import|url)\W{1,3}(?:https?:)?//", path.read_text()), (
            path
        )


@pytest.mark.parametrize("path", [each for each in OWN if each.suffix == ".css"], ids=str)
def test_styles_are_in_layers_and_colours_are_tokens(path: Path) -> None:
    style = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    outside, depth = [""], 0
    for letter in style:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0 and letter in ";}":
            outside.append("")
        elif depth == 0:
            outside[-1] += letter
    assert all(each.strip().startswith("@layer ") for each in outside if each.strip()), outside
    assert path.name == "tokens.css" or not re.search(r"#[0-9a-f]{3,8}\b|\brgb\(", style)


@pytest.mark.parametrize("sent", ["text/html,*/*;q=0.8", "application/json", "*/*"])
async def test_the_root_sends_browsers_to_the_console(shared: Running, sent: str) -> None:
    answer = await shared.client.get("/", headers={"accept": sent})
    if "html" in sent:
        assert (answer.status_code, answer.headers["location"]) == (307, "/console/")
    else:
        assert (answer.status_code, answer.json()["name"]) == (200, "bottega")


async def test_its_page_may_run_only_its_own_scripts(shared: Running) -> None:
    page = await shared.client.get("/console/")
    assert page.status_code == 200
    assert page.headers["cache-control"] == "no-cache"
    policy = dict(
        each.split(" ", 1) for each in page.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'self'"
    assert re.fullmatch(r"'self' 'sha256-[^']+'", policy["script-src"])
    assert policy["frame-ancestors"] == policy["object-src"] == policy["base-uri"] == "'none'"
    assert "{{" not in page.text


async def test_its_files_are_public_and_revalidated(
    shared: Running, shared_model: FakeModel
) -> None:
    async with httpx2.AsyncClient(base_url=str(shared.client.base_url)) as stranger:
        module = await stranger.get("/console/vendor/uplot.mjs")
        assert module.status_code == 200
        assert module.headers["content-encoding"] == "gzip"
        assert module.headers["content-type"].startswith("text/javascript")
        old = {"if-none-match": module.headers["etag"]}
        again = await stranger.get("/console/vendor/uplot.mjs", headers=old)
        assert again.status_code == 304
        for outside in ("..%2fmain.py", "%2e%2e/main.py", "vendor/../../main.py", "nothing.js"):
            assert (await stranger.get(f"/console/{outside}")).status_code == 404
        assert (await stranger.get("/console")).headers["location"].endswith("/console/")


async def test_its_page_names_files_that_a_browser_keeps(shared: Running) -> None:
    page = (await shared.client.get("/console/")).text
    own = re.findall(r'(?:href|src)="(\w[^"]+)"', page) + re.findall(r'"\./([^"]+)"', page)
    assert len(own) > 15
    version = own[0].split("/")[0]
    for address in own:
        assert address.startswith(f"{version}/")
        kept = await shared.client.head(f"/console/{address}")
        assert kept.status_code == 200
        assert kept.headers["cache-control"] == "public, max-age=31536000, immutable"
    module = own[-1].removeprefix(version)
    for other in (f"/console{module}", f"/console/{'0' * 16}{module}"):  # of another release
        assert (await shared.client.head(other)).headers["cache-control"] == "no-cache"


async def test_its_files_are_compressed_once(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a stranger's requests would take the time of all others'."""
    compressed = []

    def count(content: bytes, *arguments: object, **more: object) -> bytes:
        compressed.append(len(content))
        return whole(content)

    whole = gzip.compress
    monkeypatch.setattr(gzip, "compress", count)
    content = (FILES / "vendor" / "dagre.mjs").read_bytes()
    for _ in range(3):
        module = await shared.client.get("/console/vendor/dagre.mjs")
        assert module.headers["content-encoding"] == "gzip"
        assert module.headers["vary"] == "Accept-Encoding"
        assert module.content == content
    assert len(compressed) <= 1  # another test of this process may have read the file
    plain = await shared.client.get(
        "/console/vendor/dagre.mjs", headers={"accept-encoding": "identity"}
    )
    assert "content-encoding" not in plain.headers
    assert plain.content == content
