"""SVG drawing of a graph that marks the agents with a publication.

The columns are the waves in which the agents can run, from left to right. All lengths are px. The
drawing has no background and follows the viewer's light or dark mode. It uses no ids, so a page can
contain several drawings.

Layout of a drawn graph: positions of boxes and edges, in layers from left to right.

Pure geometry on numbered boxes. All lengths are px; x grows to the right, y downwards. Layers are
columns with the same middle, and an edge bends only between two columns. An edge that skips columns
goes round all boxes on a track above or below them; edges of one kind from one box share a track.
Boxes without edges stand in rows below.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from math import sqrt
from statistics import fmean
from typing import NamedTuple
from unicodedata import category, east_asian_width, normalize
from xml.sax.saxutils import escape

import networkx as nx

from bottega.graph.publication import PropagationPolicy
from bottega.graph.shared_memory import SharedMemoryGraph

HEAD = 9.0
"""Length of an arrow head: an edge's curve ends at this distance from the box."""

Size = tuple[float, float]
Point = tuple[float, float]

Edge = tuple[int, int, str]
"""(source, target, kind)."""

Bundle = tuple[int, str]
"""(source, kind) of edges that leave a box together."""

_TRACK_GAP = 11.0  # between two tracks
_BOX_GAP = 28.0  # between two boxes of a column
_SIDE_GAP = 20.0  # between the boxes and the first track
_COLUMN_GAP = 84.0  # between two columns
_ROW_GAP = 36.0  # between boxes without edges
_PORT_GAP = 9.0  # between two edges at one box, maximum
_PAGE_WIDTH = 1000.0  # boxes without edges fill rows at least this wide
_SWEEPS = 6  # a sweep orders all layers once


class Box(NamedTuple):
    """A placed box; ``x`` and ``y`` are its upper left corner."""

    x: float
    y: float
    width: float
    height: float


class Route(NamedTuple):
    """The path of an edge.

    Attributes:
        points: two level points are joined by a straight line, others by a curve with level ends.
            The last point is ``HEAD`` px before the target. A route that shares a track with a
            longer one starts where it leaves that one.
    """

    source: int
    target: int
    kind: str
    points: tuple[Point, ...]


class Layout(NamedTuple):
    """Boxes in the order of the input, and one route per edge."""

    boxes: tuple[Box, ...]
    routes: tuple[Route, ...]
    width: float
    height: float


def lay_out(sizes: Sequence[Size], edges: Iterable[Edge]) -> Layout:
    """Place boxes and edges; deterministic.

    Args:
        sizes: width and height of each box.
        edges: each from a lower number to a higher one, at most one per pair.
    """
    edges = sorted(edges)
    graph: nx.DiGraph[int] = nx.DiGraph((source, target) for source, target, _ in edges)
    boxes: dict[int, Box] = {}
    routes: tuple[Route, ...] = ()
    width = height = 0.0
    if edges:
        part = _Layered(sizes, edges, _layers(graph))
        boxes = {number: part.box(number) for number in graph}
        routes = tuple(map(part.route, edges))
        width, height = part.width, part.height
    lone = [number for number in range(len(sizes)) if number not in graph]
    area = sum((sizes[n][0] + _ROW_GAP) * (sizes[n][1] + _ROW_GAP) for n in lone)
    limit = max(_PAGE_WIDTH, width, 1.5 * sqrt(area))
    x, y = 0.0, height + _ROW_GAP if edges else 0.0
    for number in lone:
        if x and x + sizes[number][0] > limit:
            x, y = 0.0, height + _ROW_GAP
        boxes[number] = Box(x, y, *sizes[number])
        x += sizes[number][0] + _ROW_GAP
        width, height = max(width, x - _ROW_GAP), max(height, y + sizes[number][1])
    return Layout(tuple(boxes[n] for n in range(len(sizes))), routes, width, height)


def _layers(graph: "nx.DiGraph[int]") -> list[list[int]]:
    """Return the layers, each box near the mean place of its neighbours (barycentre sweeps)."""
    layers = [sorted(layer) for layer in nx.topological_generations(graph)]
    place: dict[int, float] = {}  # in its layer, from 0 (top) to 1
    for sweep in range(_SWEEPS):
        near, order = (graph.succ, layers[::-1]) if sweep % 2 else (graph.pred, layers)
        for layer in order:
            if sweep:
                layer.sort(key=lambda n: fmean([place[m] for m in near[n]] or [place[n]]))
            place |= {n: (index + 0.5) / len(layer) for index, n in enumerate(layer)}
    return layers


class _Layered:
    """The boxes that have edges. Its y is 0 in the middle of every column.

    Attributes:
        layer: number of each box's column.
        middle: y of each box's middle.
        furthest: target in the last column, of each bundle.
        tracks: y of each bundle's track, if an edge of it skips columns.
        leaving: y where each bundle leaves its source.
        arriving: y where each edge arrives, by source and target.
        columns: left and right x of each column.
    """

    def __init__(
        self, sizes: Sequence[Size], edges: Sequence[Edge], layers: Sequence[Sequence[int]]
    ) -> None:
        self.sizes = sizes
        self.layer = {box: index for index, column in enumerate(layers) for box in column}
        self.middle: dict[int, float] = {}
        for column in layers:
            y = (_BOX_GAP - sum(sizes[box][1] + _BOX_GAP for box in column)) / 2
            for box in column:
                self.middle[box] = y + sizes[box][1] / 2
                y += sizes[box][1] + _BOX_GAP
        by_reach = sorted(edges, key=lambda edge: self.layer[edge[1]])
        self.furthest = {(source, kind): target for source, target, kind in by_reach}
        self.tracks = self._tracks()
        self._set_ports(edges)
        widths = [max(sizes[box][0] for box in column) for column in layers]
        ends = accumulate(widths, lambda x, width: x + _COLUMN_GAP + width)
        self.columns = [(end - width, end) for end, width in zip(ends, widths, strict=True)]
        tops = [self.middle[box] - sizes[box][1] / 2 for box in self.layer]
        self.top = min([*tops, *self.tracks.values()])
        self.width = self.columns[-1][1]
        self.height = max([-min(tops), *self.tracks.values()]) - self.top

    def _tracks(self) -> dict[Bundle, float]:
        """Give each bundle that skips columns the nearest free track on its source's side."""
        reach = max(abs(y) + self.sizes[box][1] / 2 for box, y in self.middle.items())
        taken: tuple[list[list[range]], ...] = ([], [])
        tracks = {}
        spans = {
            (source, kind): range(self.layer[source] + 1, self.layer[target])
            for (source, kind), target in self.furthest.items()
        }
        for bundle, span in sorted(spans.items(), key=lambda item: (len(item[1]), item[0])):
            if not span:
                continue
            below = self.middle[bundle[0]] > 0
            rows = taken[below]
            free = (i for i, row in enumerate(rows) if not any(_overlap(span, o) for o in row))
            number = next(free, len(rows))
            if number == len(rows):
                rows.append([])
            rows[number].append(span)
            y = reach + _SIDE_GAP + number * _TRACK_GAP
            tracks[bundle] = y if below else -y
        return tracks

    def _skips(self, edge: Edge) -> bool:
        return self.layer[edge[1]] > self.layer[edge[0]] + 1

    def _set_ports(self, edges: Sequence[Edge]) -> None:
        """Spread the edges over the sides of their boxes, in the order of their other ends."""
        out: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        into: dict[int, dict[int, float]] = defaultdict(dict)
        for edge in edges:
            source, target, kind = edge
            track = self.tracks[source, kind] if self._skips(edge) else None
            out[source][kind].append(self.middle[target] if track is None else track)
            into[target][source] = self.middle[source] if track is None else track
        self.leaving: dict[Bundle, float] = {}
        self.arriving: dict[tuple[int, int], float] = {}
        for box, kinds in out.items():
            order = sorted(kinds, key=lambda kind: (fmean(kinds[kind]), kind))
            for kind, y in zip(order, self._ports(box, len(order)), strict=True):
                self.leaving[box, kind] = y
        for box, sources in into.items():
            upper = sorted(sources, key=lambda source: (sources[source], source))
            for source, y in zip(upper, self._ports(box, len(upper)), strict=True):
                self.arriving[source, box] = y

    def _ports(self, box: int, count: int) -> list[float]:
        step = min(_PORT_GAP, (self.sizes[box][1] - 14) / max(count - 1, 1))
        return [self.middle[box] + (index - (count - 1) / 2) * step for index in range(count)]

    def box(self, number: int) -> Box:
        """Return a placed box, as wide as its column."""
        left, right = self.columns[self.layer[number]]
        height = self.sizes[number][1]
        return Box(left, self.middle[number] - height / 2 - self.top, right - left, height)

    def route(self, edge: Edge) -> Route:
        """Return an edge's path."""
        source, target, kind = edge
        first, last = self.layer[source], self.layer[target]
        points = [
            (self.columns[first][1], self.leaving[source, kind]),
            (self.columns[last][0] - HEAD, self.arriving[source, target]),
        ]
        if self._skips(edge):
            y = self.tracks[source, kind]
            track = [(self.columns[first + 1][0], y), (self.columns[last - 1][1], y)]
            is_longest = self.furthest[source, kind] == target
            points = [points[0], *track, points[1]] if is_longest else [track[1], points[1]]
        points = [(x, y - self.top) for x, y in points]
        return Route(source, target, kind, tuple(points))


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


FONT_SIZE = 14.0

_MARGIN = 20.0  # around the drawing; has room for the badges of the topmost boxes
_LINE_HEIGHT = 19.0
_PADDING = (15.0, 12.0)  # inside a box: horizontal, vertical
_MIN_WIDTH = 96.0
_MAX_LINE = 260.0  # longer names are wrapped
_BADGE = 18.0  # height; half of it is above the box
_LONGEST_CLUSTER = 32  # characters kept on one line
_SHORT = 60  # characters of a name in a tooltip

_LIGHT = {
    "surface": "#ffffff",
    "ink": "#4b5563",
    "rule": "#7d8590",
    "accent": "#2e7d32",
    "on-accent": "#ffffff",
    "mark": "#2e7d32",
    "final": "#7d8590",
    "tools": "#3b82f6",
    "history": "#8b5cf6",
}
_DARK = _LIGHT | {"surface": "#161b22", "ink": "#c3cad2", "mark": "#56d364"}

_POLICIES = {
    PropagationPolicy.FINAL_RESPONSE_ONLY: ("final", "final answer"),
    PropagationPolicy.TOOL_RESULTS: ("tools", "with tool results"),
    PropagationPolicy.FULL_HISTORY: ("history", "with full history"),
}
"""Class and meaning of each policy's line."""

# Widths in em: those of the widest common sans-serif font, rounded up.
_ASCII = {
    char: width
    for width, chars in (
        (0.43, " !'(),-./:;I[\\]fijlrt"),
        (0.61, '"*?JL_`cksvxyz|'),
        (0.66, "0123456789$FTabdeghnopqu{}"),
        (0.74, "ABCEKPRSVXYZ"),
        (0.81, "&DGHNOQU"),
        (0.87, "#+<=>^w~"),
        (1.05, "%@MWm"),
    )
    for char in chars
}

_UNPRINTABLE = re.compile("[^\\x20-\\x7e\\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SPACES = re.compile("[\\t\\n\\r\\x0b\\x0c\\x85\u2028\u2029]")
_SEPARATORS = r"[\s_.:,;/|\\@-]"
_BREAKS = re.compile(rf"(?<={_SEPARATORS})(?!{_SEPARATORS})|(?<=[^\W\d_A-Z])(?=[A-Z])")


def draw_svg(graph: SharedMemoryGraph) -> str:
    """Draw the graph as an SVG document; deterministic.

    The root has the class ``bottega-graph``. A node is a ``g.node`` with its number in topological
    order as ``data-node``, and the class ``published`` if it has a publication. An edge is a
    ``path`` with ``data-edge`` (source and target number). A publication moves and resizes nothing.
    """
    names = graph.get_topological_order()
    if not names:
        return _empty()
    lines = [wrapped(printable(name)) for name in names]
    number = {name: index for index, name in enumerate(names)}
    edges = [
        (number[source], number[target], graph.edge_policy(source, target))
        for source, target in graph.get_edges_for_nodes(names)
    ]
    sources = Counter(target for _, target, _ in edges)
    layout = lay_out([_box_size(label, sources[i]) for i, label in enumerate(lines)], edges)
    versions = {
        index: publication.version
        for index, name in enumerate(names)
        if (publication := graph.publication(name)) is not None
    }
    legend, legend_width, legend_height = _legend(sorted({kind for _, _, kind in edges}), layout)
    labels = [printable(name) for name in names]
    body = [
        *_edges(layout.routes, [_shortened(name) for name in labels]),
        *(_node(i, box, lines[i], versions.get(i)) for i, box in enumerate(layout.boxes)),
        *legend,
    ]
    size = (max(layout.width, legend_width), layout.height + legend_height)
    return _document(size, _description(labels, len(edges), versions), body)


def _document(size: tuple[float, float], description: str, body: Sequence[str]) -> str:
    width, height = (side + 2 * _MARGIN for side in size)
    box = " ".join(map(_px, (-_MARGIN, -_MARGIN, width, height)))
    shape = f'width="{_px(width)}" height="{_px(height)}" viewBox="{box}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="bottega-graph" role="img" {shape}>',
        "<title>Shared-memory graph</title>",
        f"<desc>{escape(description)}</desc>",
        f"<style>{_style()}</style>",
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _empty() -> str:
    text = "No agents in this graph yet"
    width = text_width(text) + 2 * _PADDING[0]
    body = [
        _rect("panel", 0, 0, width, 44, 8),
        f'<text class="middle" x="{_px(width / 2)}" y="27">{text}</text>',
    ]
    return _document((width, 44.0), text + ".", body)


def _description(names: Sequence[str], edges: int, versions: Mapping[int, int]) -> str:
    order = ", ".join(names)
    done = ", ".join(f"{names[index]} (version {v})" for index, v in versions.items())
    return f"Agents: {len(names)}, edges: {edges}. Order: {order}. Published: {done or 'none yet'}."


def _node(index: int, box: Box, lines: Sequence[str], version: int | None) -> str:
    x = _px(box.x + box.width / 2)
    y = box.y + (box.height - _LINE_HEIGHT * len(lines)) / 2 + 0.72 * _LINE_HEIGHT
    label = "".join(
        f'<text class="middle" x="{x}" y="{_px(y + row * _LINE_HEIGHT)}" xml:space="preserve">'
        f"{escape(line)}</text>"
        for row, line in enumerate(lines)
    )
    published = version is not None
    return (
        f'<g class="node{" published" if published else ""}" data-node="{index}">'
        f"<title>{f'published, version {version}' if published else 'not published yet'}</title>"
        f"{_rect('box', box.x, box.y, box.width, box.height, 8)}{label}"
        f"{'' if version is None else _badge(box, version)}</g>"
    )


def _rect(name: str, x: float, y: float, width: float, height: float, radius: float) -> str:
    place = f'x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}"'
    return f'<rect class="{name}" {place} rx="{_px(radius)}"/>'


def _badge(box: Box, version: int) -> str:
    """Draw a check mark and the version across the upper right edge of the box."""
    text = f"v{version}" if version < 1_000_000 else "v999999+"
    width = 0.8 * text_width(text) + 26
    x, y = box.x + box.width - width - 8, box.y - _BADGE / 2
    return (
        f"{_rect('badge', x, y, width, _BADGE, _BADGE / 2)}"
        f'<path class="check" d="M{_px(x + 8)} {_px(y + 9.5)}l2.8 3 5-6.5"/>'
        f'<text class="version" x="{_px(x + 19.5)}" y="{_px(y + 13)}">{text}</text>'
    )


def _edges(routes: Sequence[Route], names: Sequence[str]) -> Iterator[str]:
    """Draw the edges by policy and source; the arrow heads of a policy come after its lines."""
    for policy, (kind, meaning) in _POLICIES.items():
        same = [route for route in routes if route.kind == policy]
        for source, group in groupby(same, key=lambda route: route.source):
            paths = list(group)
            targets = ", ".join(names[route.target] for route in paths[:8])
            more = f" and {len(paths) - 8} more" if len(paths) > 8 else ""
            title = f"{names[source]} \u2192 {targets}{more}: {meaning}"
            yield f'<g class="edge {kind}"><title>{escape(title)}</title>'
            for route in paths:
                ends = f"{route.source}-{route.target}"
                yield f'<path data-edge="{ends}" d="{_curve(route.points)}"/>'
            yield "</g>"
        if same:
            heads = "".join(_head(*route.points[-1]) for route in same)
            yield f'<path class="head {kind}" d="{heads}"/>'


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Return an SVG path: lines between level points, else curves with level ends."""
    (x, y), *rest = points
    steps = [f"M{_px(x)} {_px(y)}"]
    for index, (to_x, to_y) in enumerate(rest):
        if to_y != y:
            half = _px((x + to_x) / 2)
            steps.append(f"C{half} {_px(y)} {half} {_px(to_y)} {_px(to_x)} {_px(to_y)}")
        elif index + 1 == len(rest) or rest[index + 1][1] != y:
            steps.append(f"H{_px(to_x)}")
        else:
            continue  # extend the line to the next point
        x, y = to_x, to_y
    return "".join(steps)


def _head(x: float, y: float) -> str:
    return f"M{_px(x + HEAD)} {_px(y)}l{_px(-HEAD)}-4v8z"


def _legend(kinds: Sequence[str], layout: Layout) -> tuple[list[str], float, float]:
    """Draw a legend if an edge has a policy other than the default; return its width and height."""
    if set(kinds) <= {PropagationPolicy.FINAL_RESPONSE_ONLY}:
        return [], 0.0, 0.0
    top, x, rows = layout.height + 28, 14.0, []
    for policy, (kind, meaning) in _POLICIES.items():
        if policy in kinds:
            rows += [
                f'<g class="edge {kind}"><path d="M{_px(x)} {_px(top + 18)}h30"/></g>',
                f'<path class="head {kind}" d="{_head(x + 30, top + 18)}"/>',
                f'<text x="{_px(x + 48)}" y="{_px(top + 23)}">{meaning}</text>',
            ]
            x += 48 + text_width(meaning) + 14
    return ['<g class="legend">', _rect("panel", 0, top, x, 36, 8), *rows, "</g>"], x, 64.0


def _style() -> str:
    def variables(colours: Mapping[str, str]) -> str:
        return "".join(f"--{name}:{value};" for name, value in colours.items())

    def paint(prop: str, name: str) -> str:
        # Twice: viewers without CSS variables use the plain colour.
        return f"{prop}:{_LIGHT[name]};{prop}:var(--{name})"

    rules = {
        "": f"{variables(_LIGHT)}font:{_px(FONT_SIZE)}px system-ui,'Segoe UI',Roboto,'Noto Sans',"
        "'DejaVu Sans',sans-serif",
        " text": f"white-space:pre;{paint('fill', 'ink')}",
        " .middle": "text-anchor:middle",
        " .box": f"{paint('fill', 'surface')};{paint('stroke', 'rule')};stroke-width:1.25",
        " .panel": f"{paint('fill', 'surface')};{paint('stroke', 'rule')};stroke-width:.5",
        " .published .box": f"{paint('fill', 'accent')};{paint('stroke', 'accent')}",
        " .published text": paint("fill", "on-accent"),
        " .badge": f"{paint('fill', 'surface')};{paint('stroke', 'mark')};stroke-width:1.5",
        " .published .version": f"font-size:.8em;{paint('fill', 'mark')}",
        " .check": f"fill:none;{paint('stroke', 'mark')};stroke-width:2",
        " .edge path": "fill:none;stroke-width:1.6",
        " .edge:hover path": "stroke-width:3.5",
        " .edge.tools path": "stroke-dasharray:8 4;stroke-width:2",
        " .edge.history path": "stroke-dasharray:2 3;stroke-width:2.2",
    }
    for kind, _ in _POLICIES.values():
        rules[f" .edge.{kind}"] = paint("stroke", kind)
        rules[f" .head.{kind}"] = paint("fill", kind)
    css = "".join(f".bottega-graph{name}{{{rule}}}" for name, rule in rules.items())
    return f"{css}@media (prefers-color-scheme:dark){{.bottega-graph{{{variables(_DARK)}}}}}"


# Text


def printable(text: str) -> str:
    """Replace characters invalid in XML by U+FFFD, and line breaks and tabs by spaces."""
    return _UNPRINTABLE.sub("\ufffd", _SPACES.sub(" ", text))


def text_width(text: str) -> float:
    """Estimate the maximum width of ``text`` in common sans-serif fonts."""
    return FONT_SIZE * sum(map(_em, text))


@lru_cache(maxsize=4096)
def _em(char: str) -> float:
    if char in _ASCII:
        return _ASCII[char]
    if category(char) in ("Cf", "Mn", "Me"):  # joiners and accents
        return 0.0
    if east_asian_width(char) in "WF":
        return 1.4 if category(char).startswith("S") else 1.05
    own = 1.15 if char < "\u0900" else 1.45  # Latin to Arabic; others, and symbols shown as emoji
    letters = normalize("NFKD", char)
    return own if letters == char else min(own, sum(map(_em, letters)))


def wrapped(text: str) -> tuple[str, ...]:
    """Wrap ``text`` into lines of similar width, after separators where possible.

    The joined lines equal ``text``. Very long texts get longer lines.
    """
    width = text_width(text)
    limit = max(_MAX_LINE, (width * _LINE_HEIGHT * 4) ** 0.5)
    lines = _broken(text, limit)
    if len(lines) > 1:  # try narrower lines that need no additional line
        for share in (1.02, 1.1, 1.2, 1.35, 1.5):
            tried = _broken(text, width / len(lines) * share)
            if len(tried) == len(lines):
                return tried
    return lines


def _broken(text: str, limit: float) -> tuple[str, ...]:
    lines = [""]
    used = 0.0
    for word in _BREAKS.split(text):
        width = text_width(word)
        pieces = [word] if width <= limit else _clusters(word)
        for piece in pieces:
            width = text_width(piece)
            if used and used + width > limit:
                lines.append("")
                used = 0.0
            lines[-1] += piece
            used += width
    return tuple(lines)


def _clusters(word: str) -> list[str]:
    """Split ``word`` into characters with their combining marks."""
    clusters = [""]
    for char in word:
        joins = _em(char) == 0 or category(char) == "Mc" or clusters[-1].endswith("\u200d")
        if joins and len(clusters[-1]) < _LONGEST_CLUSTER:
            clusters[-1] += char
        else:
            clusters.append(char)
    return clusters


def _shortened(name: str) -> str:
    return name if len(name) <= _SHORT else name[: _SHORT - 1] + "\u2026"


def _box_size(lines: Sequence[str], sources: int) -> tuple[float, float]:
    across, above = _PADDING
    width = max(map(text_width, lines)) + 2 * across
    height = max(len(lines) * _LINE_HEIGHT, min(sources, 32) * 5.0) + 2 * above
    return max(width, _MIN_WIDTH), height


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
