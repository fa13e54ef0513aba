"""Layout of a drawn graph: positions of boxes and edges, in layers from left to right.

Pure geometry on numbered boxes. All lengths are px; x grows to the right, y downwards. Boxes are in
columns, and an edge bends only between two columns. An edge that skips columns crosses them on
lanes: rows of height 0 that no box may cover. So no edge crosses a box. Edges of one kind from one
box share their lanes.
"""

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import sqrt
from statistics import fmean

import networkx as nx

HEAD = 9.0
"""Length of an arrow head: an edge's curve ends at this distance from the box."""

Sizes = Sequence[tuple[float, float]]
"""Width and height of each box."""

Edge = tuple[int, int, str]
"""(source, target, kind); edges of different kinds share no lane."""

_LANE_GAP = 11.0  # between two lanes
_BOX_GAP = 28.0  # between two boxes
_SIDE_GAP = 20.0  # between a box and a lane
_COLUMN_GAP = (56.0, 190.0)  # between two columns: minimum, maximum
_PART_GAP = 36.0  # between unconnected parts
_PORT_GAP = 9.0  # between two edges at one box, maximum
_REACH = 60.0  # maximum distance to move a lane to straighten it
_TILT = 2.0  # an edge with a smaller rise is drawn level
_PAGE_WIDTH = 1000.0  # unconnected parts fill rows at least this wide
_SWEEPS = 12  # a sweep orders all layers once
_ROUNDS = 8  # a round places all layers twice
_MAX_LANES = 12_000  # bounds time and size; further edges go above all layers


@dataclass(frozen=True, slots=True)
class Box:
    """A placed box; ``x`` and ``y`` are its upper left corner."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Route:
    """The path of an edge.

    Attributes:
        points: two level points are joined by a straight line, others by a curve with level ends.
            The last point is ``HEAD`` px before the target. A route that shares lanes with a longer
            one starts where it leaves that one.
    """

    source: int
    target: int
    kind: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Boxes in the order of the input, and one route per edge."""

    boxes: tuple[Box, ...]
    routes: tuple[Route, ...]
    width: float
    height: float


Layers = list[list[int]]

Pull = tuple[int, float, float]
"""(item to align with, wanted offset downwards, weight)."""


def lay_out(sizes: Sizes, edges: Iterable[Edge]) -> Layout:
    """Place boxes and edges; deterministic.

    Args:
        edges: each from a lower number to a higher one, at most one per pair.
    """
    parts = list(_parts(sizes, sorted(edges)))
    corners, width, height = _pack(parts)
    boxes: dict[int, Box] = {}
    routes: list[Route] = []
    for part, (x, y) in zip(parts, corners, strict=True):
        boxes.update(zip(part.names, part.boxes(x, y), strict=True))
        routes += part.routes(x, y)
    routes.sort(key=lambda route: (route.source, route.target))
    return Layout(tuple(boxes[name] for name in range(len(sizes))), tuple(routes), width, height)


def _parts(sizes: Sizes, edges: Sequence[Edge]) -> Iterator["_Part"]:
    """Yield the connected parts, each with its own layout; single boxes come last."""
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(len(sizes)))
    graph.add_edges_from((source, target) for source, target, _ in edges)
    found = sorted(map(sorted, nx.connected_components(graph)), key=lambda p: (len(p) == 1, p))
    place = {name: (part, i) for part, names in enumerate(found) for i, name in enumerate(names)}
    inside: list[list[Edge]] = [[] for _ in found]
    for source, target, kind in edges:
        part, number = place[source]
        inside[part].append((number, place[target][1], kind))
    for names, joined in zip(found, inside, strict=True):
        budget = _MAX_LANES * len(names) // len(sizes)
        yield _Part(names, [sizes[name] for name in names], joined, budget)


def _pack(parts: Sequence["_Part"]) -> tuple[list[tuple[float, float]], float, float]:
    """Arrange the parts in rows; return their upper left corners and the total size."""
    area = sum((part.width + _PART_GAP) * (part.height + _PART_GAP) for part in parts)
    limit = max([_PAGE_WIDTH, 1.5 * sqrt(area), *(part.width for part in parts)])
    corners: list[tuple[float, float]] = []
    x = y = row_height = width = 0.0
    for before, part in zip([None, *parts], parts, strict=False):
        first_single = before is not None and len(before.names) > 1 == len(part.names)
        if x and (x + part.width > limit or first_single):
            x, y, row_height = 0.0, y + row_height + _PART_GAP, 0.0
        corners.append((x, y))
        x += part.width + _PART_GAP
        row_height = max(row_height, part.height)
        width = max(width, x - _PART_GAP)
    return corners, width, y + row_height


class _Part:
    """One connected part. Its items are its boxes, which are numbered first, and its lanes.

    Attributes:
        names: the boxes' numbers in the whole graph.
        layer: layer of each item.
        chains: lanes by source and kind, one per layer after the source, as far as needed.
        tracks: lanes above all layers, each in place of a whole chain beyond ``max_lanes``.
        ways: items of each edge, from its source to its target.
        middle: y of each item's middle.
        columns: left and right x of each layer.
    """

    def __init__(
        self, names: Sequence[int], sizes: Sizes, edges: Sequence[Edge], max_lanes: int
    ) -> None:
        self.names = names
        self.sizes = sizes
        self.edges = edges
        self.layer = [0] * len(sizes)
        for source, target, _ in edges:
            self.layer[target] = max(self.layer[target], self.layer[source] + 1)
        self.chains: dict[tuple[int, str], list[int]] = {}
        self.tracks: set[int] = set()
        self.ways: dict[Edge, list[int]] = {}
        self._add_lanes(max_lanes)
        self._out_port: dict[tuple[int, str], float] = {}
        self._in_port: dict[tuple[int, int], float] = {}
        self.layers = self._arranged()
        self._set_ports()
        self.middle = self._placed()
        self._straighten()
        self._set_tracks()
        self.columns = self._columns()
        self.top = min(self._top(item) for item in range(len(self.layer)))
        self.width = self.columns[-1][1]
        self.height = max(self._top(i) + self._height(i) for i in range(len(self.layer))) - self.top

    def _add_lanes(self, max_lanes: int) -> None:
        reach: dict[tuple[int, str], int] = defaultdict(int)
        for source, target, kind in self.edges:
            reach[source, kind] = max(reach[source, kind], self.layer[target])
        bundles = sorted((last - self.layer[key[0]] - 1, *key) for key, last in reach.items())
        for lanes, source, kind in bundles:
            first, item = self.layer[source] + 1, len(self.layer)
            max_lanes -= lanes
            if lanes and max_lanes < 0:
                self.chains[source, kind] = [item]
                self.tracks.add(item)
                self.layer.append(first)
            else:
                self.chains[source, kind] = list(range(item, item + lanes))
                self.layer += range(first, first + lanes)
        for edge in self.edges:
            source, target, kind = edge
            lanes = self.layer[target] - self.layer[source] - 1
            self.ways[edge] = [source, *self.chains[source, kind][:lanes], target]

    def _height(self, item: int) -> float:
        return self.sizes[item][1] if item < len(self.sizes) else 0.0

    def _top(self, item: int) -> float:
        return self.middle[item] - self._height(item) / 2

    def _gap(self, upper: int, lower: int) -> float:
        """Return the minimum distance between the middles of two neighbours in a layer."""
        lanes = (upper >= len(self.sizes)) + (lower >= len(self.sizes))
        between = (_BOX_GAP, _SIDE_GAP, _LANE_GAP)[lanes]
        return between + (self._height(upper) + self._height(lower)) / 2

    def _links(self) -> dict[tuple[int, int], float]:
        """Return linked items of adjacent layers, and how much lower the right one should be."""
        links: dict[tuple[int, int], float] = {}
        for (source, _, kind), way in self.ways.items():
            if self.tracks.isdisjoint(way):
                for a, b in pairwise(way):
                    start = self._out_port.get((a, kind), 0.0)
                    links[a, b] = start - self._in_port.get((source, b), 0.0)
        return links

    def _arranged(self) -> Layers:
        layers: Layers = [[] for _ in range(1 + max(self.layer))]
        for item, layer in enumerate(self.layer):
            if item not in self.tracks:
                layers[layer].append(item)
        left: list[list[int]] = [[] for _ in self.layer]
        right: list[list[int]] = [[] for _ in self.layer]
        for a, b in self._links():
            right[a].append(b)
            left[b].append(a)
        return _ordered(layers, left, right)

    def _set_ports(self) -> None:
        """Spread the edges over the sides of their boxes, in the order of their neighbours."""
        rank = {item: index for layer in self.layers for index, item in enumerate(layer)}
        leaving: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        coming: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for (source, target, kind), way in self.ways.items():
            leaving[source][kind].append(rank.get(way[1], -1))
            coming[target].append((rank.get(way[-2], -1), source))
        for source, kinds in leaving.items():
            order = sorted(kinds, key=lambda kind: (sum(kinds[kind]) / len(kinds[kind]), kind))
            for kind, offset in zip(order, self._ports(source, len(order)), strict=True):
                self._out_port[source, kind] = offset
        for target, sources in coming.items():
            offsets = self._ports(target, len(sources))
            for (_, source), offset in zip(sorted(sources), offsets, strict=True):
                self._in_port[source, target] = offset

    def _ports(self, box: int, count: int) -> list[float]:
        step = min(_PORT_GAP, (self._height(box) - 14) / max(count - 1, 1))
        return [(index - (count - 1) / 2) * step for index in range(count)]

    def _placed(self) -> list[float]:
        """Return the middle of each item, aligned with its linked items; lanes weigh most."""
        pulls: tuple[list[list[Pull]], ...] = tuple([[] for _ in self.layer] for _ in range(2))
        for (a, b), lower in self._links().items():
            weight = (1.0, 2.0, 8.0)[(a >= len(self.sizes)) + (b >= len(self.sizes))]
            pulls[0][b].append((a, lower, weight))
            pulls[1][a].append((b, -lower, weight))
        both = [[*left, *right] for left, right in zip(*pulls, strict=True)]
        middle = [0.0] * len(self.layer)
        gaps = [[0.0, *(self._gap(a, b) for a, b in pairwise(layer))] for layer in self.layers]
        order = list(zip(self.layers, gaps, strict=True))
        for wanted in [*pulls * _ROUNDS, both, both]:
            for layer, distances in order[::-1] if wanted is pulls[1] else order:
                _settle(layer, distances, wanted, middle)
        return middle

    def _straighten(self) -> None:
        """Align each lane with the previous one, then with the next one, if there is room."""
        above = {b: a for layer in self.layers for a, b in pairwise(layer)}
        below = {a: b for b, a in above.items()}
        for key, chain in self.chains.items():
            level = self.middle[key[0]] + self._out_port[key]
            for item in [*chain, *reversed(chain)]:
                upper, lower = above.get(item), below.get(item)
                fits = abs(level - self.middle[item]) < _REACH
                if upper is not None:
                    fits &= level - self.middle[upper] >= self._gap(upper, item)
                if lower is not None:
                    fits &= self.middle[lower] - level >= self._gap(item, lower)
                level = self.middle[item] = level if fits else self.middle[item]

    def _set_tracks(self) -> None:
        """Place the tracks above all layers, those of the first layers on top."""
        y = min(self._top(item) for layer in self.layers for item in layer) - _SIDE_GAP
        for item in sorted(self.tracks, key=lambda item: (-self.layer[item], item)):
            self.middle[item] = y
            y -= _LANE_GAP

    def _columns(self) -> list[tuple[float, float]]:
        """Return left and right x of each layer; steeper curves get a wider gap."""
        rise = [0.0] * len(self.layers)
        for (a, b), lower in self._links().items():
            steep = abs(self.middle[b] - self.middle[a] - lower)
            rise[self.layer[b]] = max(rise[self.layer[b]], steep)
        columns: list[tuple[float, float]] = []
        x = 0.0
        for layer, steep in zip(self.layers, rise, strict=True):
            if columns:
                x += min(max(_COLUMN_GAP[0], 30 + steep / 3), _COLUMN_GAP[1])
            width = max(self.sizes[item][0] for item in layer if item < len(self.sizes))
            columns.append((x, x + width))
            x += width
        return columns

    def boxes(self, x: float, y: float) -> Iterator[Box]:
        """Yield the boxes in order; ``x``, ``y`` is the part's upper left corner."""
        for item, (_, height) in enumerate(self.sizes):
            left, right = self.columns[self.layer[item]]
            top = self._top(item) - self.top
            yield Box(x + left, y + top, right - left, height)

    def routes(self, x: float, y: float) -> Iterator[Route]:
        """Yield one route per edge; ``x``, ``y`` is the part's upper left corner."""
        longest: dict[tuple[int, str], int] = {}
        for source, target, kind in sorted(self.edges, key=lambda edge: self.layer[edge[1]]):
            longest[source, kind] = target
        for edge in self.edges:
            source, target, kind = edge
            points = self._points(edge)
            if len(points) > 2 and longest[source, kind] != target:
                points = points[-2:]
            moved = tuple((x + px, y + py - self.top) for px, py in points)
            yield Route(self.names[source], self.names[target], kind, moved)

    def _points(self, edge: Edge) -> list[tuple[float, float]]:
        source, target, kind = edge
        before = self.layer[target] - 1
        y = self.middle[source] + self._out_port[source, kind]
        points = [(self.columns[self.layer[source]][1], y)]
        for lane in self.ways[edge][1:-1]:
            first, y = self.layer[lane], self.middle[lane]
            last = before if lane in self.tracks else first
            points += [(self.columns[first][0], y), (self.columns[last][1], y)]
        end = self.middle[target] + self._in_port[source, target]
        return [*points, (self.columns[before + 1][0] - HEAD, y if abs(y - end) < _TILT else end)]


def _ordered(
    layers: Layers, left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]
) -> Layers:
    """Order the layers for few crossings: the best of several barycentre sweeps."""
    place = {item: share for layer in layers for item, share in _shares(layer)}
    best, fewest = layers, _crossings(layers, right)
    current = [list(layer) for layer in layers]
    for sweep in range(_SWEEPS):
        beside, order = (right, current[::-1]) if sweep % 2 else (left, current)
        for layer in order:
            wish = {item: fmean(place[i] for i in beside[item] or [item]) for item in layer}
            layer.sort(key=wish.__getitem__)
            place.update(_shares(layer))
        crossings = _crossings(current, right)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in current], crossings
    return best


def _shares(layer: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Yield each item with its relative place from 0 (top) to 1, comparable between layers."""
    return ((item, (index + 0.5) / len(layer)) for index, item in enumerate(layer))


def _crossings(layers: Layers, right: Sequence[Sequence[int]]) -> int:
    """Count the crossings of links between adjacent layers."""
    total = 0
    for layer, following in pairwise(layers):
        rank = {item: index for index, item in enumerate(following)}
        seen: list[int] = []
        for item in layer:
            ends = [rank[other] for other in right[item]]
            total += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return total


def _settle(
    layer: Sequence[int],
    distances: Sequence[float],
    pulls: Sequence[Sequence[Pull]],
    middle: list[float],
) -> None:
    """Move the items of a layer to their weighted targets, as close as possible (least squares).

    Keeps their order and minimum distances; uses the pool adjacent violators algorithm.
    """
    blocks: list[tuple[float, float, int]] = []  # place, weight, number of items
    offsets = list(accumulate(distances))
    for item, offset in zip(layer, offsets, strict=True):
        weight = sum(pull[2] for pull in pulls[item])
        wish = middle[item]
        if weight:
            wish = sum((middle[n] + lower) * w for n, lower, w in pulls[item]) / weight
        place, weight, count = wish - offset, weight or 0.1, 1
        while blocks and blocks[-1][0] > place:
            other, heavy, many = blocks.pop()
            place = (place * weight + other * heavy) / (weight + heavy)
            weight, count = weight + heavy, count + many
        blocks.append((place, weight, count))
    places = (place for place, _, count in blocks for _ in range(count))
    for item, offset, place in zip(layer, offsets, places, strict=True):
        middle[item] = place + offset
