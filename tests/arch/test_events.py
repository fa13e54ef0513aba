"""Rule: the data of a type of event have one definition, which writers and readers use."""

import ast

from bottega.events.data import DATA
from bottega.events.types import EventType
from tests.arch.sources import PACKAGE, nodes

_IN_LOG = {EventType.LLM_COMPLETED: "StoredLlmCompletedData"}
_MADE_ELSEWHERE = {EventType.CONTEXT_RECALLED, EventType.SUBAGENT_BACKPRESSURE}
_ALIKE = {
    "EdgeDecided": "a decision, before the engine adds the names of outer nodes",
    "DryRunReceived": "a message of a dry run, which writes no events",
}


def test_module_that_writes_an_event_uses_the_class_of_its_data() -> None:
    """Refuse bare dicts, whose fields the type checker does not compare with the class."""
    for path in PACKAGE.rglob("*.py"):
        of_module = {node.id for node in nodes(path) if isinstance(node, ast.Name)}
        for node in nodes(path):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="add" | "write"),
                    args=[*_, ast.Attribute(value=ast.Name("EventType"), attr=kind), data],
                ):
                    place = f"{path}:{node.lineno}"
                    assert not isinstance(data, ast.Dict | ast.BinOp), place
                    own = _IN_LOG.get(EventType[kind], DATA[EventType[kind]].__name__)
                    names = of_module
                    if isinstance(data, ast.Call) and isinstance(data.func, ast.Name):
                        names = {data.func.id}
                    assert own in names or EventType[kind] in _MADE_ELSEWHERE, place


def test_fields_of_an_event_are_listed_only_once() -> None:
    """Refuse other classes with four or more fields, all of them of one event."""
    known = [each.__annotations__.keys() for each in DATA.values()]
    twins = set()
    for path in {*PACKAGE.rglob("*.py")} - {PACKAGE / "events/data.py"}:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                own = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                fields = {each.id for each in own if isinstance(each, ast.Name)}
                if len(fields) > 3 and any(fields <= of_event for of_event in known):
                    twins.add(node.name)
    assert twins == _ALIKE.keys()
