"""The project's source files, each read and parsed once for all rules."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "app" / "bottega"


@cache
def text_of(path: Path) -> str:
    """Return a file's text."""
    return path.read_text()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a Python file's syntax tree, the module first."""
    return tuple(ast.walk(ast.parse(text_of(path))))


@cache
def calls(path: Path) -> tuple[tuple[str, int], ...]:
    """Return every call in a file as ``name(arguments)`` without nested calls, with its line."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Call):
            plain = all(isinstance(argument, ast.Constant) for argument in node.args)
            called = ast.unparse(node) if plain else _name(node.func)
            found.append((called, node.lineno))
    return tuple(found)


def _name(function: ast.expr) -> str:
    """Return the text of what is called; for dotted names several times faster than ``unparse``."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        return f"{_name(function.value)}.{function.attr}"
    return ast.unparse(function)
