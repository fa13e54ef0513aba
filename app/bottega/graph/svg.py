"""SVG drawing of a graph that marks the agents with a publication.

Each column has agents that can run at the same time, after the agents of earlier columns. An edge
that skips columns runs on a track above or below all boxes; edges with equal source and policy
share a track. Agents without edges are in rows below. All lengths are in px. The drawing has no
background, follows the viewer's light or dark mode, and uses no ids, so that a page can contain
several drawings.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from statistics import fmean
from textwrap import TextWrapper
from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape

from bottega.graph.publication import PropagationPolicy
from bottega.graph.shared_memory import SharedMemoryGraph

if TYPE_CHECKING:
    import networkx as nx

FONT_SIZE = 14.0
HEAD = 9.0  # length of an arrow head; an edge's curve ends at this distance from the box

_LINE_HEIGHT = 19.0
_MARGIN = 20.0  # margin around the drawing
_BOX_GAP = 32.0  # gap between two boxes of a column, or between two boxes without edges
_COLUMN_GAP = 84.0
_TRACK_GAP = 11.0
_LONE_PER_ROW = 7  # boxes without edges in one row
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

Edge = tuple[int, int, PropagationPolicy]  # source and target, as numbers in topological order
Tracks = dict[Edge, float]  # y coordinates of tracks, by edge that skips columns


class Box(NamedTuple):
    """A box with its position; ``x`` and ``y`` are its upper left corner."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def draw_svg(graph: SharedMemoryGraph) -> str:
    """Draw the graph as an SVG document; equal graphs give equal documents.

    The root element has the class ``bottega-graph``. A node is a ``g.node`` with its number in
    topological order as ``data-node``, and the class ``published`` if it has a publication. An edge
    is a ``path`` with ``data-edge`` (source and target number). Publications move and resize
    nothing.
    """
    names = graph.get_topological_order()
    if not names:
        text = "No agents in this graph yet"
        return _document([Box(0, 0, 230, 19)], text, [f'<text x="115" y="14">{text}</text>'])
    number = {name: index for index, name in enumerate(names)}
    edges = sorted(
        (number[source], number[target], graph.edge_policy(source, target))
        for source, target in graph.get_edges_for_nodes(names)
    )
    labels = [printable(name) for name in names]
    lines = [wrapped(label) for label in labels]
    boxes, tracks = _place(lines, edges)
    published = map(graph.publication, names)
    versions = [None if each is None else each.version for each in published]
    extent = [*boxes, *(Box(0, y, 0, 0) for y in tracks.values())]
    conditions = {
        (number[source], number[target]): text for (source, target), text in graph.labels.items()
    }
    body = list(_edges(edges, boxes, tracks, labels, conditions))
    reasons = [graph.skipped.get(name) for name in names]
    notes = [graph.notes.get(name) for name in names]
    body += [
        _node(i, box, lines[i], versions[i], reasons[i], notes[i]) for i, box in enumerate(boxes)
    ]
    if any(policy is not PropagationPolicy.FINAL_RESPONSE_ONLY for _, _, policy in edges):
        extent.append(Box(0, max(box.y + box.height for box in extent) + 28, 570, 20))
        body += _legend(extent[-1].middle)
    done = [f"{label} (version {v})" for label, v in zip(labels, versions, strict=True) if v]
    about = f"Agents: {len(names)}, edges: {len(edges)}. Order: {', '.join(labels)}."
    return _document(extent, f"{about} Published: {', '.join(done) or 'none yet'}.", body)


def _place(lines: list[tuple[str, ...]], edges: Sequence[Edge]) -> tuple[list[Box], Tracks]:
    """Place the columns around y = 0, tracks above and below them, and the other boxes."""
    import networkx as nx

    digraph: nx.DiGraph[int] = nx.DiGraph((source, target) for source, target, _ in edges)
    columns = _columns(digraph)
    sources = Counter(target for _, target, _ in edges)
    rows = [max(len(label), min(sources[i], 32) / 4) for i, label in enumerate(lines)]
    heights = [row * _LINE_HEIGHT + 24 for row in rows]
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
    tracks = _tracks(columns, boxes, edges)
    lone = sorted(set(range(len(lines))) - set(digraph))
    y = max([0, *(box.y + box.height for box in boxes.values()), *tracks.values()]) + _BOX_GAP
    for index, node in enumerate(lone):
        row, place = divmod(index, _LONE_PER_ROW)
        x = place * (max(widths[node] for node in lone) + _BOX_GAP)
        boxes[node] = Box(x, y + row * (max(heights) + _BOX_GAP), widths[node], heights[node])
    return [boxes[node] for node in range(len(lines))], tracks


def _columns(digraph: "nx.DiGraph[int]") -> list[list[int]]:
    """Return the columns; a box is near its neighbours' mean height (barycentre sweeps)."""
    import networkx as nx

    columns = [sorted(column) for column in nx.topological_generations(digraph)]
    place = {n: (i + 0.5) / len(column) for column in columns for i, n in enumerate(column)}
    for neighbours, order in 3 * ((digraph.pred, columns), (digraph.succ, columns[::-1])):
        for column in order:
            column.sort(key=lambda n: fmean([place[m] for m in neighbours[n]] or [place[n]]))
            place |= {n: (i + 0.5) / len(column) for i, n in enumerate(column)}
    return columns


def _tracks(columns: list[list[int]], boxes: dict[int, Box], edges: Sequence[Edge]) -> Tracks:
    """Give each edge that skips columns the nearest free track on the side of its source."""
    column_of = {node: index for index, column in enumerate(columns) for node in column}
    bundles: dict[tuple[int, PropagationPolicy], list[Edge]] = defaultdict(list)
    for source, target, policy in edges:
        if column_of[target] > column_of[source] + 1:
            bundles[source, policy].append((source, target, policy))
    reach = max((-box.y for box in boxes.values()), default=0.0) + 2 * _TRACK_GAP
    used: dict[tuple[bool, int], set[int]] = defaultdict(set)
    tracks: Tracks = {}
    for (source, _), bundle in bundles.items():
        below = boxes[source].middle > 0
        span = range(column_of[source] + 1, max(column_of[target] for _, target, _ in bundle))
        row = next(i for i in count() if used[below, i].isdisjoint(span))
        used[below, row].update(span)
        tracks |= dict.fromkeys(bundle, (reach + row * _TRACK_GAP) * (1 if below else -1))
    return tracks


def _edges(
    edges: Sequence[Edge],
    boxes: Sequence[Box],
    tracks: Tracks,
    labels: Sequence[str],
    conditions: Mapping[tuple[int, int], str],
) -> Iterator[str]:
    """Draw the edges; at a box, they arrive in the order of their sources' heights."""
    total, arrived = Counter(target for _, target, _ in edges), Counter[int]()
    for edge in sorted(edges, key=lambda edge: tracks.get(edge, boxes[edge[0]].middle)):
        source, target, policy = edge
        left, right = boxes[source].x + boxes[source].width, boxes[target].x
        step = min(9.0, (boxes[target].height - 14) / max(total[target] - 1, 1))
        end = boxes[target].middle + (arrived[target] - (total[target] - 1) / 2) * step
        arrived[target] += 1
        points = [(left, boxes[source].middle), (right - HEAD, end)]
        if edge in tracks:
            points[1:1] = [(left + _COLUMN_GAP, tracks[edge]), (right - _COLUMN_GAP, tracks[edge])]
        title = f"{labels[source][:60]} \u2192 {labels[target][:60]}: {_POLICIES[policy][0]}"
        if (condition := conditions.get((source, target))) is not None:
            title += f", if {printable(condition)}"
        yield _edge(policy, points, title, f' data-edge="{source}-{target}"')


def _edge(
    policy: PropagationPolicy, points: list[tuple[float, float]], title: str, data: str = ""
) -> str:
    """Draw a path with arrow head: straight between points of equal height, otherwise curved."""
    (x, y), *rest = points
    steps = [f"M{x:g} {y:g}"]
    for to_x, to_y in rest:
        half = (x + to_x) / 2
        curve = f"C{half:g} {y:g} {half:g} {to_y:g} {to_x:g} {to_y:g}"
        steps.append(f"H{to_x:g}" if abs(to_y - y) < 0.05 else curve)
        x, y = to_x, to_y
    _, colour, dashes = _POLICIES[policy]
    return (
        f'<g class="edge" stroke="{colour}"><title>{escape(title)}</title>'
        f'<path{data} stroke-dasharray="{dashes}" d="{"".join(steps)}"/>'
        f'<path fill="{colour}" stroke="none" d="M{x + HEAD:g} {y:g}l-{HEAD:g}-4v8z"/></g>'
    )


def _node(
    index: int,
    box: Box,
    lines: Sequence[str],
    version: int | None,
    reason: str | None,
    note: str | None,
) -> str:
    place = f'x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"'
    name, title, badge = "node", "not published yet", ""
    if reason is not None:
        name, title = "node skipped", escape(f"skipped: {printable(reason)}")
    elif version is not None:
        name, title = "node published", f"published, version {version}"
        at = f'x="{box.x + box.width - 8:g}" y="{box.y + 12:g}"'
        badge = f'<text class="version" {at}>\u2713 v{version}</text>'
    if note is not None:
        title = f"{escape(printable(note))}; {title}"
    label = f'<rect class="box" {place} rx="8"/>'
    for row, line in enumerate(lines):
        y = box.middle + (row - len(lines) / 2 + 0.72) * _LINE_HEIGHT
        at = f'x="{box.x + box.width / 2:g}" y="{y:g}"'
        label += f'<text class="name" {at} xml:space="preserve">{escape(line)}</text>'
    return f'<g class="{name}" data-node="{index}"><title>{title}</title>{label}{badge}</g>'


def _legend(y: float) -> Iterator[str]:
    for x, (policy, (meaning, _, _)) in zip((0.0, 190.0, 380.0), _POLICIES.items(), strict=True):
        yield _edge(policy, [(x, y), (x + 30, y)], meaning)
        yield f'<text class="legend" x="{x + 108:g}" y="{y + 5:g}">{meaning}</text>'


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
    """Wrap ``text`` into lines, after separators if possible; a long text has longer lines.

    The joined lines equal ``text``.
    """
    wrapper = TextWrapper(max(28, len(text) // 20), expand_tabs=False)
    wrapper.replace_whitespace = wrapper.drop_whitespace = wrapper.break_on_hyphens = False
    wrapper.wordsep_simple_re = _BREAKS
    return tuple(wrapper.wrap(text)) or ("",)
