"""Names that say nothing of what they name: nothing that the package or a test defines has one."""

import ast

import pytest

from tests.arch.sources import ROOT, nodes

OLD_NAMES = """
_Taker _Others instead spare but Soon Loops Wait Held Holder Passage Admission _UnderWay gone told
busy facts_of way given TAUGHT written fold remember hear spread elsewhere _past beside Once wanted
followed plain Silence Trust keeping settle _by_the_clock NameLookups reading stand_ins left_work
looks_if_it_waits observed turns sharing callers people
"""


@pytest.mark.parametrize("folder", ["app", "tests"])
def test_no_definition_has_an_old_name(folder: str) -> None:
    """Check classes, functions, methods and modules. The field ``beside`` of an event is public."""
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    old = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in nodes(path):
            names = {node.name} if isinstance(node, definitions) else set()
            if isinstance(node, ast.Module):
                own = [part for part in node.body if isinstance(part, ast.Assign | ast.AnnAssign)]
                names = {
                    name.id
                    for part in own
                    for name in ast.walk(part)
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
                }
            old += [f"{path.relative_to(ROOT)}: {name}" for name in names & set(OLD_NAMES.split())]
    assert not old
