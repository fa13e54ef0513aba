"""A strict TypeScript client compiles the bodies that people write, and refuses wrong ones.

It needs Node.js and `npm ci --prefix tests/contract/node`; without them the test is skipped, unless
`JUDGES=required`.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.judges import needed

TESTS = Path(__file__).parent
DOCS = (TESTS.parents[1] / "README.md", *sorted((TESTS.parents[1] / "docs").rglob("*.md")))
TOOLS = TESTS / "node/node_modules/.bin"
DOCUMENT = TESTS / "snapshots/openapi.json"
_BODY = re.compile(r"-d '(\{.*?\})'", re.DOTALL)
_PART = r"(?:\$\([^)]*\)|[^\s\"'?])"
_PATH = re.compile(rf"\$\{{?BOTTEGA(?:_URL)?\}}?(/v1/{_PART}*)")
_POST = re.compile(rf"^ *post \"?({_PART}+)[^\s']* '(\{{.*?\}})'", re.DOTALL | re.MULTILINE)
"""A page's own `post PATH BODY`."""
_METHOD = re.compile(r"-X (\w+)")

WRONG: tuple[tuple[str, str, Any], ...] = (
    ("post", "/v1/runs", {"agent": 1, "input": "x"}),
    ("post", "/v1/runs", {"agent": "a", "input": "x", "answer": "y"}),
    ("post", "/v1/sessions", {"user": True}),
)


def of_docs(document: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield method, path and body of each request that the docs send with curl or `post`."""
    templates = {path: re.sub(r"\{\w+\}", "[^/]+", path) for path in document["paths"]}
    for method, sent, text in in_docs():
        path = re.sub(r"\$\([^)]*\)", "x", sent)
        exact = [path] if path in templates else []
        like = [each for each, pattern in templates.items() if re.fullmatch(pattern, path)]
        taken = [each for each in (*exact, *like) if method in document["paths"][each]]
        yield method, taken[0], json.loads(re.sub(r"'\"?\$\{?\w+\}?\"?'", "x", text))


def in_docs() -> Iterator[tuple[str, str, str]]:
    """Yield method, path and body of each request as the docs write it."""
    for page in DOCS:
        text = page.read_text()
        for found in _BODY.finditer(text):
            command = text[text.rindex("curl ", 0, found.start()) : found.start()]
            path, method = _PATH.search(command), _METHOD.search(command)
            assert path, command
            yield (method[1].lower() if method else "post"), path[1], found[1]
        yield from (("post", f"/v1/{path}", body) for path, body in _POST.findall(text))


def of_examples(document: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield method, path and body of each example of a request."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            reference = (content or {}).get("schema", {}).get("$ref", "")
            schema = document["components"]["schemas"].get(reference.rpartition("/")[2], {})
            for body in schema.get("examples", ()):
                yield method, path, body


@pytest.mark.timeout(300)
def test_a_strict_client_compiles_the_bodies(tmp_path: Path) -> None:
    needed(TOOLS.exists(), "there is no TypeScript: npm ci --prefix tests/contract/node")
    document = json.loads(DOCUMENT.read_text())
    subprocess.run(
        [TOOLS / "openapi-typescript", DOCUMENT, "-o", tmp_path / "api.d.ts"],
        check=True,
        capture_output=True,
    )
    lines = [
        'import type { components, paths } from "./api";',
        'type Started = components["schemas"]["LlmStartedData"];',
        'export const mayBeAbsent: undefined extends Started["beside"] ? true : false = true;',
        "type Body<P extends keyof paths, M extends keyof paths[P]> = paths[P][M] extends",
        '  { requestBody?: { content: { "application/json": infer B } } } ? B : never;',
    ]
    docs, examples = list(of_docs(document)), list(of_examples(document))
    assert len(docs) > 80
    assert len(examples) > 20
    for is_wrong, bodies in ((False, [*docs, *examples]), (True, WRONG)):
        for method, path, body in bodies:
            lines += ["// @ts-expect-error"] if is_wrong else []
            lines.append(
                f'export const b{len(lines)}: Body<"{path}", "{method}"> = {json.dumps(body)};'
            )
    (tmp_path / "bodies.ts").write_text("\n".join(lines))
    options = "--noEmit --strict --exactOptionalPropertyTypes --target es2022 --module nodenext"
    found = subprocess.run(
        [TOOLS / "tsc", *options.split(), tmp_path / "bodies.ts"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[:4000]
