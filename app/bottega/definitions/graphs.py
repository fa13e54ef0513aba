"""Checks, changes and drawings of graphs' definitions."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from bottega.conditions import ConditionCheck, kind_of
from bottega.errors import ConflictError, InvalidInputError, NotFoundError
from bottega.errors import CycleError as ContainedError
from bottega.graph.decisions import (
    EdgeRule,
    GraphRules,
    NodeRule,
    is_plain,
    is_reference,
    label_of,
    name_of_node,
    note_of,
    route_schema,
    steps_of,
)
from bottega.graph.publication import Publication
from bottega.graph.shared_memory import PropagationPolicy, SharedMemoryGraph
from bottega.graph.svg import draw_svg

MOST_NODES = 500
MOST_NODES_IN_ALL = 2_000
"""Maximum number of nodes of a graph together with all graphs nested in it. A nested graph counts
at each use, because a run makes agents for each use.
"""
DEEPEST = 3
"""Maximum number of levels of nested graphs."""
RESERVED = ("run", "item")
"""Names that no node may have: in arguments, they mean the run and the current list element."""
FEATURE = re.compile(r"status|output|input|(output_json|metadata)(\.[^.\x00-\x1f]{1,64}){0,8}")
FEATURE_RULE = "the features are status, output, input, output_json[.NAME…] and metadata[.NAME…]"
_TURN = re.compile(r"status|output|output_json(\.[^.\x00-\x1f]{1,64}){0,8}")
_TURN_RULE = "the features of a turn are status, output and output_json[.NAME…]"

_ALWAYS = ("agent", "ttl_s", "source", "target", "policy")
_NODE = {"type": "agent", "join": "any", "on_error": "fail", "router": False, "who": "run"}
_EDGE = {"else": False}
_NEEDED = {
    "agent": ("agent",),
    "tool": ("name", "tool"),
    "human": ("name", "ask", "schema"),
    "graph": ("graph", "name"),
}
_OF_TYPES = {
    **dict.fromkeys(("agent", "router", "memory"), ("agent",)),
    **dict.fromkeys(("success_check", "budget"), ("agent", "graph")),
    **dict.fromkeys(("tool", "arguments"), ("tool",)),
    **dict.fromkeys(("ask", "schema", "who", "expires_s"), ("human",)),
    **dict.fromkeys(("graph", "version", "loop"), ("graph",)),
    **dict.fromkeys(("timeout_s", "retry", "for_each"), ("agent", "tool", "graph")),
}
"""Types of nodes for which a field has an effect. All other fields have an effect for all types."""
_KINDS = {
    "string": "text",
    "number": "number",
    "integer": "number",
    "boolean": "truth",
    "array": "list",
    "object": "",
}
"""Names for the types of compared values, by the type in a schema."""
_WHOLE = ("eq", "ne", "in", "not_in")

GraphRef = tuple[str, int | None]
"""Name and version of a sub-graph; a version of ``None`` means the current version."""
Graphs = Mapping[GraphRef, Mapping[str, Any]]
"""Definitions of sub-graphs at all levels."""
Schemas = Mapping[str, Mapping[str, Any] | None]
"""Output schemas of agents by the agent's name; ``None``: the agent answers with text."""


def subgraphs_of(content: Mapping[str, Any]) -> Iterator[tuple[int, GraphRef]]:
    """Yield (index of a node, sub-graph that the node runs) from a stored definition."""
    for number, node in enumerate(content["nodes"]):
        if (name := node.get("graph")) is not None:
            yield number, (name, node.get("version"))


def expanded(
    content: Mapping[str, Any], definition_of: Callable[[GraphRef], Mapping[str, Any]]
) -> dict[str, Any]:
    """Add the sub-graph's ``definition`` to each node that runs a sub-graph, at all levels.

    Nodes with the same sub-graph share one object of this definition.
    """

    def expand(content: Mapping[str, Any]) -> dict[str, Any]:
        nodes = list(content["nodes"])
        for number, ref in subgraphs_of(content):
            nodes[number] = {**nodes[number], "definition": below(ref)}
        return {**content, "nodes": nodes}

    @cache
    def below(ref: GraphRef) -> dict[str, Any]:
        return expand(definition_of(ref))

    return expand(content)


class GraphSize(NamedTuple):
    """Number of a graph's own nodes, and the sub-graphs that these nodes run."""

    nodes: int
    subgraphs: Sequence[GraphRef]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Return the size of the graph in a definition."""
        return cls(len(content["nodes"]), [ref for _, ref in subgraphs_of(content)])


def excess_subgraph(size: GraphSize, inner: Mapping[GraphRef, GraphSize]) -> int | None:
    """Return the index of the sub-graph that makes the graph too large, or ``None``.

    Args:
        inner: sizes of the sub-graphs at all levels.
    """

    @cache
    def count(ref: GraphRef, level: int) -> int:
        if level > DEEPEST or ref not in inner:
            return 0  # :func:`refuse_nesting` refuses this sub-graph
        nodes, below = inner[ref]
        return nodes + sum(count(each, level + 1) for each in below)

    total = size.nodes
    for index, ref in enumerate(size.subgraphs):
        total += count(ref, 2)
        if total > MOST_NODES_IN_ALL:
            return index
    return None


TOO_MANY_NODES = (
    f"the graph and its sub-graphs, each counted at every use, have more than {MOST_NODES_IN_ALL} "
    f"nodes: use fewer or smaller graphs"
)


def refuse_nesting(name: str, content: Mapping[str, Any], graphs: Graphs) -> None:
    """Check that a graph's sub-graphs exist, have one answer each, and form no circle.

    Raises:
        CycleError: a graph contains itself through its sub-graphs.
        InvalidInputError: a sub-graph is wrong; the error's ``pointer`` names the node's field.
    """
    sizes = {ref: GraphSize.of(each) for ref, each in graphs.items()}
    if (place := excess_subgraph(GraphSize.of(content), sizes)) is not None:
        number, _ = [*subgraphs_of(content)][place]
        raise _wrong(TOO_MANY_NODES, f"/nodes/{number}/graph")
    _refuse_nesting(name, content, graphs, ())


def _refuse_nesting(
    name: str, content: Mapping[str, Any], graphs: Graphs, above: Sequence[str]
) -> None:
    above = (*above, name)
    for number, (inner, version) in subgraphs_of(content):
        at = f"/nodes/{number}/graph"
        if inner == name:
            raise _wrong("a graph cannot contain itself", at)
        if inner in above:
            raise ContainedError((*above[above.index(inner) :], inner), what="node")
        if (graph := graphs.get((inner, version))) is None:
            if version is not None and (inner, None) in graphs:
                raise _wrong(f"the graph '{inner}' has no version {version}", at[:-5] + "version")
            raise _wrong(f"there is no graph '{inner}'", at)
        if len(above) >= DEEPEST:
            raise _wrong(f"graphs may be nested at most {DEEPEST} levels deep", at)
        if len(GraphRules.of(graph).answering) > 1:
            raise _wrong(f"'{inner}' has several sinks: name one of them in its 'output'", at)
        try:
            _refuse_nesting(inner, graph, graphs, above)
        except InvalidInputError as error:
            error.pointer = at
            raise


def to_graph(content: Mapping[str, Any]) -> SharedMemoryGraph:
    """Build the graph of a definition, without publications.

    Args:
        content: result of :func:`normalised`; a skipped node may have a ``reason``.

    Raises:
        CycleError: the edges form a cycle.
    """
    graph = SharedMemoryGraph(ttl_s=content["ttl_s"])
    for node in content["nodes"]:
        graph.add_agent(name_of_node(node), ttl_s=node["ttl_s"])
    graph.add_edges(
        [
            (edge["source"], edge["target"], PropagationPolicy(edge["policy"]))
            for edge in content["edges"]
        ]
    )
    graph.relays = frozenset(name_of_node(node) for node in content["nodes"] if node.get("router"))
    for edge in content["edges"]:
        if (label := label_of(edge)) is not None:
            graph.labels[edge["source"], edge["target"]] = label
    for node in content["nodes"]:
        if node.get("reason") is not None:
            graph.skipped[name_of_node(node)] = node["reason"]
        if (note := note_of(node)) is not None:
            graph.notes[name_of_node(node)] = note
    return graph


def normalised(
    content: Mapping[str, Any],
    schemas: Schemas = MappingProxyType({}),
    graphs: Graphs = MappingProxyType({}),
    *,
    adds_nodes: bool = False,
) -> dict[str, Any]:
    """Check a definition, and return its stored form.

    The stored form lists all nodes, including nodes that only edges name. A node has ``agent``,
    ``ttl_s`` and all fields that differ from the defaults. An edge has ``source``, ``target``,
    ``policy``, and the edge's condition, if any.

    Args:
        schemas: output schemas of the agents in the graph and in its sub-graphs.
        graphs: the sub-graphs, which :func:`refuse_nesting` checks.
        adds_nodes: true: edges may name nodes that the definition does not list. (In a plain
            graph, edges always may.)

    Raises:
        CycleError: the edges form a cycle.
        ConflictError: a node or an edge is listed twice (``exists``).
        InvalidInputError: the definition is wrong; the error's ``pointer`` names the field.
    """
    nodes = [_stored_node(node, f"/nodes/{at}") for at, node in enumerate(content["nodes"])]
    edges = [_without_defaults(edge, _EDGE) for edge in content["edges"]]
    names = [name_of_node(node) for node in nodes]
    pairs = [(edge["source"], edge["target"]) for edge in edges]
    for what, listed in (("node", names), ("edge", [" -> ".join(pair) for pair in pairs])):
        twice = next((item for item, times in Counter(listed).items() if times > 1), None)
        if twice is not None:
            raise ConflictError(f"the graph lists the {what} {twice} twice", code="exists")
    node_names = set(names)
    if names and not adds_nodes and not is_plain({**content, "nodes": nodes, "edges": edges}):
        _refuse_unlisted(edges, node_names)
    ends = dict.fromkeys(end for pair in pairs for end in pair)
    nodes += [{"agent": name, "ttl_s": None} for name in ends if name not in node_names]
    if len(nodes) > MOST_NODES:
        raise InvalidInputError(
            f"the graph has {len(nodes)} nodes, including nodes that only edges name; "
            f"the maximum is {MOST_NODES}: remove some nodes",
            pointer="/edges",
        )
    content_stored = {"nodes": nodes, "edges": edges, "ttl_s": content["ttl_s"]}
    if content.get("output") is not None:
        content_stored["output"] = content["output"]
    if content.get("success_check"):
        content_stored["success_check"] = content["success_check"]
    if _has_cycle(pairs):
        to_graph(content_stored)  # raises the error that names the nodes of the cycle
    if not is_plain(content_stored):
        _Checks(GraphRules.of(content_stored), nodes, schemas, graphs).refuse_wrong(edges)
    return content_stored


def _refuse_unlisted(edges: Sequence[Mapping[str, Any]], node_names: Collection[str]) -> None:
    for index, edge in enumerate(edges):
        for end in ("source", "target"):
            if edge[end] not in node_names:
                raise _wrong(f"'{edge[end]}' is none of the graph's nodes", f"/edges/{index}/{end}")


def _stored_node(node: Mapping[str, Any], path: str) -> dict[str, Any]:
    node_stored = _without_defaults(node, _NODE)
    kind = node_stored.get("type", "agent")
    for needed in _NEEDED[kind]:
        if node_stored.get(needed) is None:
            raise _wrong(f"a node of type '{kind}' needs '{needed}'", f"{path}/{needed}")
    for field in node_stored:
        if field in _OF_TYPES and kind not in _OF_TYPES[field] and node_stored[field] is not None:
            raise _wrong(f"'{field}' has no effect on a node of type '{kind}'", f"{path}/{field}")
    if node_stored.get("name") == node_stored["agent"]:
        node_stored.pop("name", None)
    if (name := name_of_node(node_stored)) in RESERVED:
        at = "name" if "name" in node_stored else "agent"
        raise _wrong(f"'{name}' is reserved: give the node another 'name'", f"{path}/{at}")
    return node_stored


def _without_defaults(fields: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in fields.items()
        if name in _ALWAYS or (value is not None and value != shape.get(name))
    }


def _wrong(detail: str, pointer: str) -> InvalidInputError:
    return InvalidInputError(detail, pointer=pointer)


class _Checks:
    """Checks of a graph's conditions, routers and references.

    Attributes:
        outputs: schema of each node's parsed output; ``None``: the output is a text. A node without
            an entry may have any output.
    """

    def __init__(
        self,
        rules: GraphRules,
        nodes: Sequence[Mapping[str, Any]],
        schemas: Schemas,
        graphs: Graphs,
    ) -> None:
        self.rules = rules
        self.nodes = nodes
        self.outputs: dict[str, Mapping[str, Any] | None] = {}
        self.last_turns: dict[str, Mapping[str, Any] | None] = {}
        for node, rule in zip(nodes, rules.nodes.values(), strict=True):
            schema = _answer_schema(node, rules, schemas, graphs)
            self.last_turns[rule.name] = schema
            self.outputs[rule.name] = _of_elements(node, schema)

    def refuse_wrong(self, edges: Sequence[Mapping[str, Any]]) -> None:
        """Check conditions, routers and arguments, and check that each node can run."""
        output = self.rules.output
        if output is not None and output not in self.rules.nodes:
            raise _wrong(f"'{output}' is none of the graph's nodes", "/output")
        for index, edge in enumerate(edges):
            self._edge(edge, f"/edges/{index}")
            if (when := edge.get("when")) is not None:
                ConditionCheck(FEATURE, FEATURE_RULE).condition(when, f"/edges/{index}/when")
                self._compared(when, edge["source"], f"/edges/{index}/when")
        for index, (node, rule) in enumerate(
            zip(self.nodes, self.rules.nodes.values(), strict=True)
        ):
            if rule.is_router and len(self.rules.outgoing[rule.name]) < 2:
                raise _wrong("a router needs two targets or more", f"/nodes/{index}/router")
            self._elements(rule, node.get("for_each"), f"/nodes/{index}/for_each")
            if (loop := node.get("loop")) is not None:
                at = f"/nodes/{index}/loop/until"
                ConditionCheck(_TURN, _TURN_RULE).condition(loop["until"], at)
                self._compared(loop["until"], rule.name, at, self.last_turns)
            has_item = "for_each" in node
            for argument, value in node.get("arguments", {}).items():
                if is_reference(value) and not (has_item and value["from"] == "item"):
                    self._reference(rule.name, value, f"/nodes/{index}/arguments/{argument}")
        self._refuse_unreachable()

    def _edge(self, edge: Mapping[str, Any], pointer: str) -> None:
        branch = next((each for each in ("when", "else") if each in edge), None)
        if branch is None:
            return
        source = edge["source"]
        siblings = [each for each in self.rules.outgoing[source] if each.target != edge["target"]]
        if self.rules.nodes[source].is_router:
            raise _wrong(
                "the edges of a router may have no conditions, because the router's answer decides",
                f"{pointer}/{branch}",
            )
        if branch == "when" and "else" in edge:
            raise _wrong("an edge has 'when' or 'else', not both", f"{pointer}/when")
        if branch == "else" and not siblings:
            raise _wrong(f"'else' needs a second edge that leaves {source}", f"{pointer}/else")
        if branch == "else" and any(each.is_else for each in siblings):
            raise _wrong(f"two edges that leave {source} have 'else'", f"{pointer}/else")
        if branch == "else" and any(each.when is None for each in siblings):
            text = f"this edge is never taken: an edge of {source} without 'when' is always taken"
            raise _wrong(text, f"{pointer}/else")

    def _compared(
        self, condition: Any, source: str, at: str, outputs: Schemas | None = None
    ) -> None:
        for group in ("all", "any"):
            for index, member in enumerate(condition.get(group, ())):
                self._compared(member, source, f"{at}/{group}/{index}", outputs)
        if "not" in condition:
            self._compared(condition["not"], source, f"{at}/not", outputs)
        if "feature" not in condition:
            return
        first, *path = condition["feature"].split(".")
        kind, allowed = "text", ["completed", "failed"] if first == "status" else None
        if first == "output_json":
            schema = self._schema_at(source, path, f"{at}/feature", outputs)
            type_name = schema.get("type")
            kind = _KINDS.get(type_name, "") if isinstance(type_name, str) else ""
            values = schema.get("enum")
            allowed = values if isinstance(values, list) else None
        elif first == "metadata":
            return
        op, value = condition["op"], condition.get("value")
        if op == "exists" or not kind:
            return
        if op in ("lt", "le", "gt", "ge") and kind != "number":
            raise _wrong(
                f"'{op}' compares numbers, but the feature '{first}' is not a number", f"{at}/op"
            )
        for member in value if op in ("in", "not_in") else [value]:
            if kind != "list" and kind_of(member) != kind:
                raise _wrong(f"the value must have the feature's type, {kind}", f"{at}/value")
            if allowed is not None and op in _WHOLE and member not in allowed:
                names = ", ".join(map(str, allowed[:20]))
                raise _wrong(f"the feature can only have the values {names}", f"{at}/value")

    def _schema_at(
        self, node: str, path: Sequence[str], pointer: str, outputs: Schemas | None = None
    ) -> Mapping[str, Any]:
        """Return the schema of a value in a node's parsed output; ``{}``: any value is valid."""
        schema: Any = (self.outputs if outputs is None else outputs)[node]
        if schema is None:
            raise _wrong(f"the answer of '{node}' is text: its agent has no schema", pointer)
        for step in path:
            if not isinstance(schema, Mapping):
                return {}
            kind, properties = schema.get("type"), schema.get("properties")
            if kind == "array" and step.isdecimal():
                schema = schema.get("items", {})
            elif isinstance(properties, Mapping) and step in properties:
                schema = properties[step]
            elif (kind in _KINDS and kind != "object") or (
                isinstance(properties, Mapping)
                and not (schema.get("additionalProperties") or "patternProperties" in schema)
            ):
                raise _wrong(f"the schema of '{node}' has no '{step}' at this pointer", pointer)
            else:
                return {}
        return schema if isinstance(schema, Mapping) else {}

    def _elements(self, rule: NodeRule, for_each: Mapping[str, Any] | None, pointer: str) -> None:
        if for_each is None:
            return
        if rule.is_router:
            raise _wrong("a router takes only one edge, so it cannot have 'for_each'", pointer)
        kind = self._reference(rule.name, for_each, pointer).get("type", "array")
        if kind != "array" and "array" not in kind:
            raise _wrong(
                f"this pointer leads to a value of the type {kind}, not to a list",
                f"{pointer}/pointer",
            )

    def _reference(self, name: str, value: Mapping[str, Any], pointer: str) -> Mapping[str, Any]:
        if (source := value["from"]) == "run":
            return {}
        below = source in self.rules.nodes and self.rules.below(source)
        if not below or all(edge.target != name for edge in below):
            raise _wrong(f"no path leads from the node '{source}' to '{name}'", f"{pointer}/from")
        return self._schema_at(source, steps_of(value.get("pointer", "")), f"{pointer}/pointer")

    def _refuse_unreachable(self) -> None:
        """Raise an error if a node can never run, whatever the nodes before it choose."""
        needed: dict[str, dict[str, frozenset[str]]] = {}
        numbers = {name: index for index, name in enumerate(self.rules.nodes)}
        for name in _order(self.rules):
            ways = [
                _both(needed[edge.source], self._choice(edge)) for edge in self.rules.incoming[name]
            ]
            if not ways:
                needed[name] = {}
                continue
            if self.rules.nodes[name].needs_all:
                common: dict[str, frozenset[str]] | None = {}
                for way in ways:
                    common = None if common is None or way is None else _both(common, way)
            else:
                common = _any_of([way for way in ways if way is not None])
            if common is None:
                text = f"'{name}' can never run: its edges exclude each other"
                raise _wrong(text, f"/nodes/{numbers[name]}")
            needed[name] = common

    def _choice(self, edge: EdgeRule) -> dict[str, frozenset[str]]:
        """Return {source: choice that leads to the edge}: a route, ``when`` or ``else``."""
        source = edge.source
        if self.rules.nodes[source].is_router and not self.rules.nodes[source].goes_on:
            return {source: frozenset((edge.target,))}
        if any(each.is_else for each in self.rules.outgoing[source]):
            return {source: frozenset(("else" if edge.is_else else "when",))}
        return {}


def _answer_schema(
    node: Mapping[str, Any], rules: GraphRules, schemas: Schemas, graphs: Graphs
) -> Mapping[str, Any] | None:
    """Return the schema of one output of a node (a ``for_each`` has many); ``None``: a text."""
    rule = rules.nodes[name_of_node(node)]
    if rule.is_router:
        return route_schema([edge.target for edge in rules.outgoing[rule.name]])
    if rule.type == "human":
        schema: Mapping[str, Any] = node["schema"]
        return schema
    if rule.type == "tool":
        return node["tool"].get("output_schema") or {}
    if rule.type == "agent":
        return schemas.get(rule.agent or "", {})
    if (inner := graphs.get((node["graph"], node.get("version")))) is None:
        return {}
    below = GraphRules.of(inner)
    (last,) = (each for each in inner["nodes"] if name_of_node(each) in below.answering)
    return {} if "for_each" in last else _answer_schema(last, below, schemas, graphs)


def _of_elements(
    node: Mapping[str, Any], schema: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    if (each := node.get("for_each")) is None:
        return schema
    item = {"type": "string"} if schema is None else schema
    return {"type": "array", "items": {} if each["on_error"] == "collect" else item}


def publication_schema(
    node: Mapping[str, Any], content: Mapping[str, Any], schemas: Schemas
) -> Mapping[str, Any] | None:
    """Return the schema of a node's publication; ``None``: any text is valid.

    Args:
        content: the graph in the form of :func:`expanded`.
    """
    graphs = dict(inner_of(content))
    schema = _of_elements(node, _answer_schema(node, GraphRules.of(content), schemas, graphs))
    return schema or None


def inner_of(content: Mapping[str, Any]) -> Iterator[tuple[GraphRef, Mapping[str, Any]]]:
    """Yield the name, version and definition of each sub-graph at all levels of a definition."""
    for number, ref in subgraphs_of(content):
        inner = content["nodes"][number]["definition"]
        yield ref, inner
        yield from inner_of(inner)


def _order(rules: GraphRules) -> Iterable[str]:
    return TopologicalSorter(
        {name: [edge.source for edge in edges] for name, edges in rules.incoming.items()}
    ).static_order()


_Needed = Mapping[str, frozenset[str]]
"""Choices by the node that decides: the node must make one of its choices."""


def _both(one: _Needed, other: _Needed) -> dict[str, frozenset[str]] | None:
    """Return the choices that satisfy both ``one`` and ``other``; ``None``: no choices do."""
    merged = {**one, **other}
    for name in one.keys() & other.keys():
        merged[name] = one[name] & other[name]
    return merged if all(merged.values()) else None


def _any_of(ways: Sequence[_Needed]) -> dict[str, frozenset[str]] | None:
    """Return the choices that satisfy at least one of ``ways``; ``None``: ``ways`` is empty."""
    if not ways:
        return None
    common = set.intersection(*(set(way) for way in ways))
    return {each: frozenset().union(*(way[each] for way in ways)) for each in common}


def _has_cycle(edges: Iterable[tuple[str, str]]) -> bool:
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for source, target in edges:
        sorter.add(target, source)
    try:
        sorter.prepare()
    except CycleError:
        return True
    return False


def with_edge(content: dict[str, Any], edge: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the definition with an additional edge.

    Raises:
        CycleError, ConflictError: see :func:`normalised`.
    """
    return normalised({**content, "edges": [*content["edges"], edge]}, adds_nodes=True)


def without_edge(content: dict[str, Any], source: str, target: str) -> dict[str, Any]:
    """Return a copy of the definition with both nodes, but without the edge between them.

    Raises:
        NotFoundError: the graph has no such edge.
    """
    edges_kept = [
        edge for edge in content["edges"] if (edge["source"], edge["target"]) != (source, target)
    ]
    if len(edges_kept) == len(content["edges"]):
        raise NotFoundError(f"the graph has no edge {source} -> {target}")
    return {**content, "edges": edges_kept}


_DRAW = {
    "svg": draw_svg,
    "mermaid": SharedMemoryGraph.to_mermaid,
    "dot": SharedMemoryGraph.to_dot,
}
_UNSHOWN = datetime.min.replace(tzinfo=UTC)


def draw(content: dict[str, Any], versions: Mapping[str, int], form: str) -> bytes:
    """Draw a graph. Drawing the largest graph takes 0.2 s.

    Args:
        content: see :func:`to_graph`.
        versions: versions of publications, by agent.
        form: ``svg``, ``mermaid`` or ``dot``.
    """
    graph = to_graph(content)
    for agent, version in versions.items():
        graph.restore(Publication(agent, content="", version=version, timestamp=_UNSHOWN))
    return _DRAW[form](graph).encode()
