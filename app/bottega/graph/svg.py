"""SVG drawing of a graph that marks the agents with a publication.

The agents of a column can run at the same time, after the agents of earlier columns. An edge that
skips columns runs on a track, a horizontal line above or below all boxes; edges with the same
source and policy share a track. Agents without edges are in the last columns. All lengths are in
px. The drawing has no background, and follows the viewer's light or dark mode. The drawing uses no
ids, so a page can contain several drawings.
"""

import re
from collections.abc import Iterator, Sequence
from statistics import fmean
from textwrap import TextWrapper
from typing import NamedTuple
from xml.sax.saxutils import escape

from bottega.graph.publication import PropagationPolicy
from bottega.graph.shared_memory import SharedMemoryGraph

FONT_SIZE = 14.0
HEAD = 9.0  # length of an arrow head; an edge's curve ends at this distance from the box

_LINE_HEIGHT = 19.0
_MARGIN = 20.0
_BOX_GAP = 32.0  # gap between two boxes of a column
_COLUMN_GAP = 84.0
_TRACK_GAP = 11.0
_LONE_PER_COLUMN = 4  # boxes in a column without edges; more if another column has more
_POLICIES = {
    PropagationPolicy.FINAL_RESPONSE_ONLY: ("final answer", "#7d8590", "none"),
    PropagationPolicy.TOOL_RESULTS: ("with tool results", "#3b82f6", "8 4"),
    PropagationPolicy.FULL_HISTORY: ("with full history", "#8b5cf6", "2 3"),
}
"""Meaning, colour and dashes of each policy's line."""

_STYLE = (
    ".bottega-graph{font:14px system-ui,'Segoe UI',Roboto,'Noto Sans','DejaVu Sans',sans-serif}"
    ".bottega-graph text{white-space:pre;text-anchor:middle;fill:#4b5563}"
    ".bottega-graph .box{fill:#ffffff;stroke:#7d8590}"
    "@media (prefers-color-scheme:dark){"
    ".bottega-graph text{fill:#c3cad2}.bottega-graph .box{fill:#161b22}}"
    ".bottega-graph .published .box{fill:#2e7d32;stroke:#2e7d32}"
    ".bottega-graph .published text{fill:#ffffff}"
    ".bottega-graph .skipped{opacity:.45}"
    ".bottega-graph .version{font-size:10px;text-anchor:end}"
    ".bottega-graph .edge{fill:none;stroke-width:1.8}.bottega-graph .edge:hover{stroke-width:3.5}"
)

_UNPRINTABLE = re.compile("[^\\x20-\\x7e\\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BREAKS = re.compile(r"(?<=[\s_.:,;/|\\@-])(?![\s_.:,;/|\\@-])|(?<=[^\W\d_A-Z])(?=[A-Z])")

Edge = tuple[int, int, PropagationPolicy]  # source and target by topological number
Tracks = dict[Edge, float]  # y coordinate of the track by edge


class Box(NamedTuple):
    """A node's box; ``x`` and ``y`` are the upper left corner."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def draw_svg(graph: SharedMemoryGraph) -> str:
    """Draw the graph as an SVG document; equal graphs give equal documents.

    The root element has the class ``bottega-graph``. A node is a ``g.node``; its ``data-node`` is
    its number in topological order. A node with a publication also has the class ``published``. An
    edge is a ``path``; its ``data-edge`` is the numbers of source and target. Positions and sizes
    do not depend on publications.
    """
    names = graph.get_topological_order()
    if not names:
        text = "No agents in this graph yet"
        return _document([Box(0, 0, 230, 19)], text, [_text("name", 115, 14, text)])
    number = {name: index for index, name in enumerate(names)}
    edges = sorted(
        (number[source], number[target], graph.edge_policy(source, target))
        for source, target in graph.get_edges_for_nodes(names)
    )
    labels = [printable(name) for name in names]
    lines = [wrapped(label) for label in labels]
    boxes, tracks = _place(lines, edges)
    body = list(_edges(graph, names, edges, boxes, tracks))
    body += [_node(graph, name, i, boxes[i], lines[i]) for i, name in enumerate(names)]
    extent = [*boxes, *(Box(0, y, 0, 0) for y in tracks.values())]
    if any(policy is not PropagationPolicy.FINAL_RESPONSE_ONLY for _, _, policy in edges):
        extent.append(Box(0, max(box.y + box.height for box in extent) + 28, 570, 20))
        body += _legend(extent[-1].middle)
    published = [
        f"{label} (version {publication.version})"
        for name, label in zip(names, labels, strict=True)
        if (publication := graph.publication(name)) is not None
    ]
    about = f"Agents: {len(names)}, edges: {len(edges)}. Order: {', '.join(labels)}."
    return _document(extent, f"{about} Published: {', '.join(published) or 'none yet'}.", body)


def _place(lines: list[tuple[str, ...]], edges: Sequence[Edge]) -> tuple[list[Box], Tracks]:
    """Place the columns around y = 0, and the tracks above and below the columns."""
    columns = _columns(len(lines), edges)
    heights = [len(label) * _LINE_HEIGHT + 24 for label in lines]
    widths = [max(66.0, *map(text_width, label)) + 30 for label in lines]
    boxes: dict[int, Box] = {}
    x = 0.0
    for column in columns:
        width = max(widths[node] for node in column)
        y = (_BOX_GAP - sum(heights[node] + _BOX_GAP for node in column)) / 2
        for node in column:
            boxes[node] = Box(x, y, width, heights[node])
            y += heights[node] + _BOX_GAP
        x += width + _COLUMN_GAP
    return [boxes[node] for node in range(len(lines))], _tracks(columns, boxes, edges)


def _columns(count: int, edges: Sequence[Edge]) -> list[list[int]]:
    """Return the columns; barycentre sweeps put a box near the mean height of its neighbours.

    Agents without edges are in the last columns.
    """
    import networkx as nx

    digraph: nx.DiGraph[int] = nx.DiGraph((source, target) for source, target, _ in edges)
    columns = [sorted(column) for column in nx.topological_generations(digraph)]
    place = {n: (i + 0.5) / len(column) for column in columns for i, n in enumerate(column)}
    for neighbours, order in 3 * ((digraph.pred, columns), (digraph.succ, columns[::-1])):
        for column in order:
            column.sort(key=lambda n: fmean([place[m] for m in neighbours[n]] or [place[n]]))
            place |= {n: (i + 0.5) / len(column) for i, n in enumerate(column)}
    lone = [node for node in range(count) if node not in digraph]
    size = max([_LONE_PER_COLUMN, *map(len, columns)])
    return columns + [lone[start : start + size] for start in range(0, len(lone), size)]


def _tracks(columns: list[list[int]], boxes: dict[int, Box], edges: Sequence[Edge]) -> Tracks:
    """Give each edge that skips columns the next free track on the side of the edge's source."""
    column_of = {node: index for index, column in enumerate(columns) for node in column}
    reach = max((-box.y for box in boxes.values()), default=0.0) + 2 * _TRACK_GAP
    rows: dict[tuple[int, PropagationPolicy], int] = {}
    tracks: Tracks = {}
    for source, target, policy in edges:
        if column_of[target] > column_of[source] + 1:
            y = reach + rows.setdefault((source, policy), len(rows)) * _TRACK_GAP
            tracks[source, target, policy] = y if boxes[source].middle > 0 else -y
    return tracks


def _edges(
    graph: SharedMemoryGraph,
    names: Sequence[str],
    edges: Sequence[Edge],
    boxes: Sequence[Box],
    tracks: Tracks,
) -> Iterator[str]:
    for edge in edges:
        source, target, policy = edge
        left, right = boxes[source].x + boxes[source].width, boxes[target].x
        points = [(left, boxes[source].middle), (right - HEAD, boxes[target].middle)]
        if edge in tracks:
            points[1:1] = [(left + _COLUMN_GAP, tracks[edge]), (right - _COLUMN_GAP, tracks[edge])]
        from_to = f"{printable(names[source])[:60]} \u2192 {printable(names[target])[:60]}"
        title = f"{from_to}: {_POLICIES[policy][0]}"
        if (condition := graph.labels.get((names[source], names[target]))) is not None:
            title += f", if {printable(condition)}"
        yield _edge(policy, points, title, f' data-edge="{source}-{target}"')


def _edge(
    policy: PropagationPolicy, points: list[tuple[float, float]], title: str, data: str = ""
) -> str:
    """Draw an edge with an arrow head; the line is straight between points of equal height."""
    (x, y), *rest = points
    path = f"M{x:g} {y:g}"
    for to_x, to_y in rest:
        half = (x + to_x) / 2
        path += f"C{half:g} {y:g} {half:g} {to_y:g} {to_x:g} {to_y:g}"
        x, y = to_x, to_y
    _, colour, dashes = _POLICIES[policy]
    return (
        f'<g class="edge" stroke="{colour}"><title>{escape(title)}</title>'
        f'<path{data} stroke-dasharray="{dashes}" d="{path}"/>'
        f'<path fill="{colour}" stroke="none" d="M{x + HEAD:g} {y:g}l-{HEAD:g}-4v8z"/></g>'
    )


def _node(graph: SharedMemoryGraph, name: str, index: int, box: Box, lines: Sequence[str]) -> str:
    kind, title, badge = "node", "not published yet", ""
    if (reason := graph.skipped.get(name)) is not None:
        kind, title = "node skipped", escape(f"skipped: {printable(reason)}")
    elif (publication := graph.publication(name)) is not None:
        version = publication.version
        kind, title = "node published", f"published, version {version}"
        badge = _text("version", box.x + box.width - 8, box.y + 12, f"\u2713 v{version}")
    if (note := graph.notes.get(name)) is not None:
        title = f"{escape(printable(note))}; {title}"
    place = f'x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"'
    label = f'<rect class="box" {place} rx="8"/>'
    for row, line in enumerate(lines):
        y = box.middle + (row - len(lines) / 2 + 0.72) * _LINE_HEIGHT
        label += _text("name", box.x + box.width / 2, y, line)
    return f'<g class="{kind}" data-node="{index}"><title>{title}</title>{label}{badge}</g>'


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" xml:space="preserve">{escape(text)}</text>'


def _legend(y: float) -> Iterator[str]:
    for x, (policy, (meaning, _, _)) in zip((0.0, 190.0, 380.0), _POLICIES.items(), strict=True):
        yield _edge(policy, [(x, y), (x + 30, y)], meaning)
        yield _text("legend", x + 108, y + 5, meaning)


def _document(extent: Sequence[Box], about: str, body: Sequence[str]) -> str:
    top = min(box.y for box in extent)
    width = max(box.x + box.width for box in extent) + 2 * _MARGIN
    height = max(box.y + box.height for box in extent) - top + 2 * _MARGIN
    shape = f'width="{width:g}" height="{height:g}"'
    shape += f' viewBox="{-_MARGIN:g} {top - _MARGIN:g} {width:g} {height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="bottega-graph" role="img" {shape}>'
    title = f"<title>Shared-memory graph</title><desc>{escape(about)}</desc>"
    return "\n".join([head, title, f"<style>{_STYLE}</style>", *body, "</svg>", ""])


def printable(text: str) -> str:
    """Replace characters that are invalid in XML with U+FFFD, and white space with spaces."""
    return _UNPRINTABLE.sub("\ufffd", re.sub(r"\s", " ", text))


def text_width(text: str) -> float:
    """Estimate the maximum width of ``text`` in common sans-serif fonts."""
    narrow = sum(char.islower() and char not in "mw" for char in text)
    wide = sum(char >= "\u2000" for char in text)  # Chinese characters and emoji
    return FONT_SIZE * (0.66 * narrow + 1.45 * wide + 1.05 * (len(text) - narrow - wide))


def wrapped(text: str) -> tuple[str, ...]:
    """Wrap ``text`` into lines, if possible after separators; a longer text gets longer lines.

    The joined lines equal ``text``.
    """
    wrapper = TextWrapper(max(28, len(text) // 20), expand_tabs=False)
    wrapper.replace_whitespace = wrapper.drop_whitespace = wrapper.break_on_hyphens = False
    wrapper.wordsep_simple_re = _BREAKS
    return tuple(wrapper.wrap(text)) or ("",)
