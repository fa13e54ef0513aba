"""Decisions in a run's graph: which nodes run, and which edges are taken.

:class:`GraphCourse` holds the states of a run's nodes and edges. A caller reports each node's end,
and gets the decisions that follow from this end: decided edges, skipped nodes, and nodes that may
start. The class needs no database and no event loop, so the engine, dry runs and tests can use it.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self, get_args

from bottega.conditions import Condition, holds, named
from bottega.events.data import NodeType
from bottega.graph.publication import as_text

NodeStatus = Literal["pending", "running", "waiting", "completed", "failed", "skipped"]
EdgeKey = tuple[str, str]
"""Source and target of an edge."""

_MOST_REASONS = 3
_NEW_IN_NODES = frozenset(
    (
        *("name", "type", "join", "on_error", "router", "timeout_s", "retry", "budget"),
        *("success_check", "for_each"),
    )
)


@dataclass(frozen=True, slots=True)
class NodeRule:
    """The fields of a node on which decisions depend.

    Attributes:
        agent: name of the agent, if the node is of type ``agent``.
        needs_all: true: the node runs only if all incoming edges are taken; false: one taken edge
            is enough.
        goes_on: true: the run continues if the node fails.
        is_router: true: the node's answer ``{"route": TARGET}`` decides which edge is taken.
    """

    name: str
    type: NodeType = "agent"
    agent: str | None = None
    needs_all: bool = False
    goes_on: bool = False
    is_router: bool = False

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> Self:
        """Read a node of a stored definition.

        Raises:
            LookupError: nodes of this type do not exist.
        """
        kind, name = node.get("type", "agent"), name_of_node(node)
        if kind not in get_args(NodeType):
            raise LookupError(f"the node '{name}' has the unknown type {kind!r}")
        return cls(
            name,
            kind,
            node.get("agent"),
            node.get("join") == "all",
            node.get("on_error") == "continue",
            bool(node.get("router")),
        )


def name_of_node(node: Mapping[str, Any]) -> str:
    """Return a node's name; if the node has no name, return the name of its agent."""
    name: str = node.get("name") or node["agent"]
    return name


@dataclass(frozen=True, slots=True, eq=False)
class EdgeRule:
    """The fields of an edge on which decisions depend; without a condition, the edge is taken."""

    source: str
    target: str
    when: Condition | None = None
    is_else: bool = False

    @classmethod
    def of(cls, edge: Mapping[str, Any]) -> Self:
        """Read an edge of a stored definition."""
        return cls(edge["source"], edge["target"], edge.get("when"), bool(edge.get("else")))


@dataclass(frozen=True, slots=True)
class GraphRules:
    """The nodes and edges of a graph, in the form that decisions need.

    Attributes:
        nodes: nodes by name, in the order of the definition.
        incoming, outgoing: the edges of each node, in the order of the definition.
        output: node that gives the run's answer; ``None``: the sinks give the answers.
        is_plain: true: the graph has no decisions, so a node runs when its sources have answered.
    """

    nodes: Mapping[str, NodeRule]
    incoming: Mapping[str, Sequence[EdgeRule]]
    outgoing: Mapping[str, Sequence[EdgeRule]]
    output: str | None
    is_plain: bool

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Read a stored definition; see :func:`bottega.definitions.graphs.normalised`."""
        nodes = {rule.name: rule for rule in map(NodeRule.of, content["nodes"])}
        incoming: dict[str, list[EdgeRule]] = {name: [] for name in nodes}
        outgoing: dict[str, list[EdgeRule]] = {name: [] for name in nodes}
        for edge in map(EdgeRule.of, content["edges"]):
            outgoing[edge.source].append(edge)
            incoming[edge.target].append(edge)
        return cls(nodes, incoming, outgoing, content.get("output"), is_plain(content))

    @property
    def answering(self) -> Sequence[str]:
        """The nodes whose answers are the run's answers: the node ``output``, or the sinks."""
        if self.output is not None:
            return (self.output,)
        return [name for name, edges in self.outgoing.items() if not edges]

    def below(self, name: str) -> Iterator[EdgeRule]:
        """Yield an edge into each descendant of a node, nearest descendants first."""
        seen, waiting = {name}, deque([name])
        while waiting:
            for edge in self.outgoing[waiting.popleft()]:
                if edge.target not in seen:
                    seen.add(edge.target)
                    waiting.append(edge.target)
                    yield edge


def is_plain(content: Mapping[str, Any]) -> bool:
    """Return true if a definition has no decisions, and all its nodes are agents."""
    return (
        content.get("output") is None
        and all(_NEW_IN_NODES.isdisjoint(node) for node in content["nodes"])
        and all("when" not in edge and "else" not in edge for edge in content["edges"])
    )


class NodeEnd(NamedTuple):
    """Result of a node that has ended.

    Attributes:
        output: the node's answer as text.
        output_json: the parsed answer, if the node has a schema.
    """

    name: str
    is_failed: bool = False
    output: str | None = None
    output_json: Any = None


class EdgeDecided(NamedTuple):
    """A decision that an edge is taken, or is not taken."""

    source: str
    target: str
    taken: bool
    reason: str


class NodeSkipped(NamedTuple):
    """A decision that a node does not run; the node ``source`` is the cause."""

    name: str
    reason: str
    source: str


class NodeReady(NamedTuple):
    """A decision that a node may start now."""

    name: str


Decision = EdgeDecided | NodeSkipped | NodeReady


@dataclass(slots=True)
class GraphCourse:
    """The states of a run's nodes and edges.

    Attributes:
        about: the run's ``input`` (a text) and ``metadata``, which conditions read.
        recorded: decisions about edges in earlier attempts, which this attempt does not change.
        statuses: status of each node, by the node's name.
        taken: the decided edges; the value is true if the edge is taken.
        reasons: reason why a node was skipped, by the node's name.
    """

    rules: GraphRules
    about: Mapping[str, Any] = field(default_factory=dict)
    recorded: Mapping[EdgeKey, bool] = field(default_factory=dict)
    statuses: dict[str, NodeStatus] = field(default_factory=dict)
    taken: dict[EdgeKey, bool] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    _why_not: defaultdict[str, list[EdgeDecided]] = field(default_factory=lambda: defaultdict(list))

    def begin(self) -> list[Decision]:
        """Return the decisions to start the nodes that depend on no other node."""
        self.statuses = dict.fromkeys(self.rules.nodes, "pending")
        return [self._start(name) for name, edges in self.rules.incoming.items() if not edges]

    def end(self, end: NodeEnd) -> list[Decision]:
        """Return the decisions that follow from the end of a node, in the order they were made."""
        self.statuses[end.name] = "failed" if end.is_failed else "completed"
        decisions: list[Decision] = []
        waiting: deque[EdgeDecided] = deque(self._edges_of(end))
        if end.is_failed and not self.rules.nodes[end.name].goes_on:
            for edge in self.rules.below(end.name):
                if self.statuses[edge.target] == "pending":
                    how = "failed" if edge.source == end.name else "was skipped"
                    skipped = NodeSkipped(edge.target, f"{edge.source} {how}", edge.source)
                    decisions.append(skipped)
                    waiting += self._skip(skipped)
        while waiting:
            edge_decided = waiting.popleft()
            decisions.append(edge_decided)
            target = edge_decided.target
            self.taken[edge_decided.source, target] = edge_decided.taken
            if not edge_decided.taken:
                self._why_not[target].append(edge_decided)
            if (decision := self._node_decision(target)) is None:
                continue
            decisions.append(decision)
            if isinstance(decision, NodeSkipped):
                waiting += self._skip(decision)
        return decisions

    def _start(self, name: str) -> NodeReady:
        self.statuses[name] = "running"
        return NodeReady(name)

    def _skip(self, skipped: NodeSkipped) -> Iterable[EdgeDecided]:
        name = skipped.name
        self.statuses[name], self.reasons[name] = "skipped", skipped.reason
        reason = f"{name} was skipped"
        return [self._decided(edge, False, reason) for edge in self.rules.outgoing[name]]

    def _node_decision(self, name: str) -> NodeReady | NodeSkipped | None:
        """Return the decision to start or skip a node; ``None``: no new decision."""
        incoming = self.rules.incoming[name]
        found = [self.taken.get((edge.source, edge.target)) for edge in incoming]
        if self.statuses[name] != "pending" or None in found:
            return None
        if all(found) if self.rules.nodes[name].needs_all else any(found):
            return self._start(name)
        against = self._why_not[name]
        reasons = dict.fromkeys(edge.reason for edge in against)
        return NodeSkipped(name, "; ".join([*reasons][:_MOST_REASONS]), against[0].source)

    def _edges_of(self, end: NodeEnd) -> list[EdgeDecided]:
        rule, edges = self.rules.nodes[end.name], self.rules.outgoing[end.name]
        if end.is_failed and not rule.goes_on:
            return [self._decided(edge, False, f"{end.name} failed") for edge in edges]
        if rule.is_router and not end.is_failed:
            route = end.output_json["route"]
            reason = f"{end.name} chose {route}"
            return [self._decided(edge, edge.target == route, reason) for edge in edges]
        how = "failed, and the run goes on" if end.is_failed else "completed"
        decided = {
            edge: self._decided(edge, True, f"{end.name} {how}")
            if edge.when is None
            else self._by_condition(edge, edge.when, end)
            for edge in edges
            if not edge.is_else
        }
        others = any(each.taken for each in decided.values())
        which = "another edge" if others else "no other edge"
        return [
            self._decided(edge, not others, f"{which} of {end.name} was taken")
            if edge.is_else
            else decided[edge]
            for edge in edges
        ]

    def _by_condition(self, edge: EdgeRule, when: Condition, end: NodeEnd) -> EdgeDecided:
        taken = holds(when, lambda feature: feature_of(feature, end, self.about))
        said = "holds" if taken else "does not hold"
        return self._decided(edge, taken, f"the condition on {edge.source} {said}")

    def _decided(self, edge: EdgeRule, is_taken: bool, reason: str) -> EdgeDecided:
        is_taken = self.recorded.get((edge.source, edge.target), is_taken)
        return EdgeDecided(edge.source, edge.target, is_taken, reason)


def feature_of(feature: str, end: NodeEnd, about: Mapping[str, Any]) -> Any:
    """Return the value of a condition's feature; ``None``: the value does not exist."""
    first, *path = feature.split(".")
    match first:
        case "status":
            return "failed" if end.is_failed else "completed"
        case "output":
            return end.output
        case "output_json":
            found = end.output_json
        case _:
            found = about.get(first)
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def is_last_turn(until: Condition, end: NodeEnd) -> bool:
    """Return true if a turn of a loop is the last turn, because the loop's condition is true.

    If a turn fails, it is also the last turn, unless the condition reads ``status``.
    """
    if end.is_failed and "status" not in named(until):
        return True
    return holds(until, lambda feature: feature_of(feature, end, {}))


def route_schema(targets: Sequence[str]) -> dict[str, Any]:
    """Return the JSON Schema of a router's answer. (Model servers require an object.)"""
    route = {"type": "string", "enum": list(targets)}
    reason = {"type": "string", "description": "Why, in one sentence."}
    return {
        "type": "object",
        "properties": {"route": route, "reason": reason},
        "required": ["route"],
        "additionalProperties": False,
    }


def label_of(edge: Mapping[str, Any]) -> str | None:
    """Return the condition of a stored edge in words; ``None``: the edge has no condition."""
    when = edge.get("when")
    return "else" if edge.get("else") else None if when is None else _in_words(when)[:200]


def note_of(node: Mapping[str, Any]) -> str | None:
    """Describe a stored node's sub-graph and repetitions; ``None``: the node has neither."""
    each, loop = node.get("for_each"), node.get("loop")
    words = [] if node.get("graph") is None else [f"graph {node['graph']}"]
    if each is not None:
        words.append(f"for each of {each['from']}{each['pointer']}")
    if loop is not None:
        words.append(f"until {_in_words(loop['until'])[:200]}, {loop['max']} turns at most")
    return ", ".join(words) or None


def _in_words(when: Condition) -> str:
    for group, word in (("all", " and "), ("any", " or ")):
        if group in when:
            return word.join(
                f"({_in_words(each)})" if "feature" not in each else _in_words(each)
                for each in when[group]
            )
    if "not" in when:
        return f"not ({_in_words(when['not'])})"
    value = "" if when["op"] == "exists" else f" {as_text(when.get('value'))}"
    return f"{when['feature']} {when['op']}{value}"


class MissingArgumentError(Exception):
    """Error of a tool node whose argument refers to a value that does not exist."""


def is_reference(value: Any) -> bool:
    """Return true for an argument ``{"from": NODE, "pointer": "/a/b"}``."""
    return isinstance(value, Mapping) and "from" in value and value.keys() <= {"from", "pointer"}


def arguments_of(arguments: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool node's arguments; replace each reference by the value it refers to.

    Args:
        outputs: {node: parsed output}, with two more members: ``run`` (the run's values) and
            ``item`` (the current list element).

    Raises:
        MissingArgumentError: a reference names a value that does not exist.
    """
    return {
        name: referred(value, outputs) if is_reference(value) else value
        for name, value in arguments.items()
    }


def referred(reference: Mapping[str, Any], outputs: Mapping[str, Any]) -> Any:
    """Return the value that a reference with ``from`` and ``pointer`` names.

    Raises:
        MissingArgumentError: the value does not exist.
    """
    node, pointer = reference["from"], reference.get("pointer", "")
    found = outputs.get(node)
    for step in steps_of(pointer):
        if isinstance(found, Mapping):
            found = found.get(step)
        elif isinstance(found, Sequence) and not isinstance(found, str) and step.isdecimal():
            found = found[int(step)] if int(step) < len(found) else None
        else:
            found = None
    if found is None:
        raise MissingArgumentError(f"'{node}' has no value at {pointer or 'the root'}")
    return found


def steps_of(pointer: str) -> list[str]:
    """Split a JSON Pointer (RFC 6901) into names and indexes."""
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
