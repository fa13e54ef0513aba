"""Layout of a drawn graph: positions of boxes and edges, in layers from left to right.

Pure geometry on numbered boxes. All lengths are px; x grows to the right, y downwards. Layers are
columns with the same middle, and an edge bends only between two columns. An edge that skips columns
goes round all boxes on a track above or below them; edges of one kind from one box share a track.
Boxes without edges stand in rows below.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import sqrt
from statistics import fmean
from typing import NamedTuple

import networkx as nx

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
