"""A reference interpreter of graphs, by their definition: it asks backwards, and knows no order."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from bottega.graph.decisions import NodeEnd

Content = Mapping[str, Any]
Work = Callable[[str, Sequence[str], str], NodeEnd]
"""Returns the end of an agent, by its name, the texts that it read, and its question."""
Edge = tuple[str, str]


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


@dataclass
class Reference:
    """The results of a graph.

    Args:
        graphs: those in it, by name.
        received: texts that its first nodes read.
        question: of its agents.
    """

    content: Content
    work: Work
    about: Mapping[str, Any]
    graphs: Mapping[str, Content] = field(default_factory=dict)
    received: Sequence[str] = ()
    question: str = ""
    _statuses: dict[str, str] = field(default_factory=dict)
    _ends: dict[str, NodeEnd] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> dict[str, Content]:
        return {node.get("name") or node["agent"]: node for node in self.content["nodes"]}

    def results(self) -> tuple[dict[str, str], dict[Edge, bool]]:
        """Return the statuses of the nodes, and which edges are taken."""
        pairs = [(edge["source"], edge["target"]) for edge in self.content["edges"]]
        taken = {pair: self.is_taken(*pair) for pair in pairs}
        return {name: self.status(name) for name in self.nodes}, taken

    def result(self) -> NodeEnd:
        """Return the end of the whole graph, whose answer is that of one node."""
        statuses, _ = self.results()
        if any(self.is_fatal(name) for name in statuses):
            return NodeEnd("", is_failed=True)
        sinks = {edge["source"] for edge in self.content["edges"]}
        last = self.content.get("output") or next(each for each in statuses if each not in sinks)
        return self.end(last) if statuses[last] == "completed" else NodeEnd("", output="")

    def is_fatal(self, name: str) -> bool:
        return self.status(name) == "failed" and self.nodes[name].get("on_error") != "continue"

    def is_doomed(self, name: str) -> bool:
        """Return true if something upstream failed and ends the run."""
        sources = [edge["source"] for edge in self.content["edges"] if edge["target"] == name]
        return any(self.is_fatal(each) or self.is_doomed(each) for each in sources)

    def status(self, name: str) -> str:
        if name not in self._statuses:
            self._statuses[name] = self._status(name)
        return self._statuses[name]

    def _status(self, name: str) -> str:
        into = [edge for edge in self.content["edges"] if edge["target"] == name]
        if into:
            flows = [self.is_taken(edge["source"], name) for edge in into]
            wanted = all(flows) if self.nodes[name].get("join") == "all" else any(flows)
            if not wanted or self.is_doomed(name):
                return "skipped"
        return "failed" if self.end(name).is_failed else "completed"

    def is_taken(self, source: str, target: str) -> bool:
        found = self.status(source)
        if found == "skipped" or self.is_fatal(source):
            return False
        out = [edge for edge in self.content["edges"] if edge["source"] == source]
        own = next(edge for edge in out if edge["target"] == target)
        if self.nodes[source].get("router") and found == "completed":
            return bool(self.end(source).output_json["route"] == target)
        if own.get("else"):
            return not any(self.is_taken(source, each["target"]) for each in out if each != own)
        return "when" not in own or self.holds(own["when"], self.end(source))

    def holds(self, when: Content, end: NodeEnd) -> bool:
        """Return a condition of the few forms that random graphs have."""
        if "not" in when:
            return not self.holds(when["not"], end)
        if when["feature"] == "status":
            return bool(("failed" if end.is_failed else "completed") == when["value"])
        if when["feature"] == "metadata.n":
            return bool(self.about["metadata"]["n"] > when["value"])
        number = end.output_json.get("n") if isinstance(end.output_json, Mapping) else None
        return number is not None and bool(number > when["value"])

    def end(self, name: str) -> NodeEnd:
        """Return the end of a node that runs."""
        if name not in self._ends:
            edges = [edge for edge in self.content["edges"] if edge["target"] == name]
            taken = [each["source"] for each in edges if self.is_taken(each["source"], name)]
            read = {each: self.end(each).output for each in taken if not self.end(each).is_failed}
            node = self.nodes[name]
            if (each := node.get("for_each")) is not None:
                read.pop(each["from"], None)
            texts = [text for text in read.values() if text] if edges else list(self.received)
            self._ends[name] = self._end(node, texts)
        return self._ends[name]

    def _end(self, node: Content, texts: Sequence[str]) -> NodeEnd:
        if (each := node.get("for_each")) is None:
            return self.once(node, texts, self.question)
        items: Any = self.about["metadata"]["list"]
        if each["from"] != "run":  # a skipped node has no output
            is_skipped = self.status(each["from"]) == "skipped"
            items = None if is_skipped else self.end(each["from"]).output_json
        if not isinstance(items, list):
            return NodeEnd("", is_failed=True)
        ends = [self.once(node, texts, text_of(item)) for item in items]
        if each["on_error"] == "fail" and any(end.is_failed for end in ends):
            return NodeEnd("", is_failed=True)
        kept = [end for end in ends if not end.is_failed or each["on_error"] == "collect"]
        outputs = [e.output if e.output_json is None else e.output_json for e in kept]
        found = [{"error": 1} if e.is_failed else o for e, o in zip(kept, outputs, strict=True)]
        return NodeEnd("", output=text_of(found), output_json=found)

    def once(self, node: Content, texts: Sequence[str], question: str) -> NodeEnd:
        """Return the end of a node's work for the whole, or for one element."""
        if "graph" not in node:
            return self.work(node["agent"], texts, question)
        inner = Reference(self.graphs[node["graph"]], self.work, self.about, self.graphs)
        loop, end = node.get("loop"), NodeEnd("", output="")
        for _ in range(1 if loop is None else loop["max"]):
            last = [end.output] if end.output else []
            end = replace(inner, received=[*texts, *last], question=question).fresh().result()
            if loop is None or self.holds(loop["until"], end):
                return end
            if end.is_failed and loop["until"]["feature"] != "status":
                return end
        return end if loop is None or loop["on_max"] == "continue" else NodeEnd("", is_failed=True)

    def fresh(self) -> "Reference":
        return replace(self, _statuses={}, _ends={})
