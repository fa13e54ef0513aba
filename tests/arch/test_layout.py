"""Rules about the tree: names of classes, files that the documentation names."""

import ast
import re
import tomllib
from collections import defaultdict

from tests.arch.sources import PACKAGE, ROOT, nodes


def test_class_name_is_used_once() -> None:
    """Bodies of the API, and data of events, may have the name of what they show."""
    homes: defaultdict[tuple[bool, str], list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        is_schema = "api" in path.relative_to(PACKAGE).parts or path == PACKAGE / "events/data.py"
        module = nodes(path)[0]
        assert isinstance(module, ast.Module)
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[is_schema, node.name].append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_documentation_names_files_that_exist() -> None:
    """Look for names in all pages; one without a folder may be of any file of code or tests."""
    suffix = "py|m?js|json|md|sql|toml|ya?ml|html|css|txt|lock|sh|conf"
    form = rf"`((?:[a-z0-9_.-]+/)+(?:[a-z0-9_.-]+\.(?:{suffix}))?|[a-z0-9_]+\.(?:py|sql|toml|md))`"
    bases = (ROOT, ROOT / "app", PACKAGE, ROOT / "docs", ROOT / "tests")
    anywhere = {path.name for base in (PACKAGE, ROOT / "tests") for path in base.rglob("*.*")}
    pages = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    named = {(page, name) for page in pages for name in re.findall(form, page.read_text())}
    assert len(named) > 200
    missing = [
        (str(page.relative_to(ROOT)), name)
        for page, name in named
        if name not in anywhere and not any((base / name).exists() for base in bases)
    ]
    assert missing == []


def test_architecture_lists_all_modules_in_the_order_of_imports() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (order,) = (
        each["layers"] for each in contracts["contracts"] if each["name"] == "Imports point one way"
    )
    layer_of = {name: at for at, layer in enumerate(order) for name in layer.split(" | ")}
    text = (ROOT / "docs/explain/architecture.md").read_text()
    table = text[text.index("| folder | holds |") :].splitlines()[2:]
    named = [
        name.removesuffix(".py")
        for row in table
        if row.startswith("| `")
        for name in re.findall(r"`([a-z_.]+)`", row.split(" | ")[0])
    ]
    assert sorted(named) == sorted({*layer_of, "console"})
    layers = [layer_of[name] for name in named if name != "console"]
    assert layers == sorted(layers)
