"""SVG drawing of a graph that marks the agents with a publication.

The columns are the waves in which the agents can run, from left to right. All lengths are px. The
drawing has no background and follows the viewer's light or dark mode. It uses no ids, so a page can
contain several drawings.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from unicodedata import category, east_asian_width, normalize
from xml.sax.saxutils import escape

from bottega.graph.layout import HEAD, Box, Layout, Route, lay_out
from bottega.graph.publication import PropagationPolicy
from bottega.graph.shared_memory import SharedMemoryGraph

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
