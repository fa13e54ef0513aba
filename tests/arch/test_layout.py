"""Rules about the tree: names of classes, files that the documentation names."""

import ast
import re
from collections import defaultdict

from tests.arch.sources import PACKAGE, ROOT, nodes


def test_class_name_is_used_once() -> None:
    """Bodies of the API may have the name of what they show: they are another namespace."""
    homes: defaultdict[tuple[bool, str], list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        is_schema = "api" in path.relative_to(PACKAGE).parts
        module = nodes(path)[0]
        assert isinstance(module, ast.Module)
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[is_schema, node.name].append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_architecture_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", text))
    assert len(named) > 20
    missing = [name for name in named if not (PACKAGE / name).is_file()]
    assert not [name for name in missing if not (ROOT / name).is_file()]
    folders = re.findall(r"^\| `([a-z_]+)`", text, flags=re.MULTILINE)
    assert not [name for name in folders if not (PACKAGE / name).is_dir()]
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert not packages - set(re.findall(r"`(\w+)`", text))
