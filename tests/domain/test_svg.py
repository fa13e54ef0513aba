"""The SVG drawing of a graph, its geometry read back from the SVG itself."""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import combinations, pairwise
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bottega.graph.publication import PropagationPolicy, Publication
from bottega.graph.shared_memory import SharedMemoryGraph
from bottega.graph.svg import FONT_SIZE, HEAD, draw_svg, printable, text_width, wrapped

SVG = "{http://www.w3.org/2000/svg}"
POLICIES = list(PropagationPolicy)
TEAM = [("requirements", "designer"), ("designer", "implementer"), ("requirements", "implementer")]
SLACK = 0.11  # px; the most that rounding to one decimal costs on two sides

Point = tuple[float, float]
Links = Sequence[tuple[str, str] | tuple[str, str, PropagationPolicy]]


class Rect(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def holds(self, point: Point, margin: float = SLACK) -> bool:
        x, y = point
        across = self.left + margin < x < self.right - margin
        return across and self.top + margin < y < self.bottom - margin

    def overlaps(self, other: "Rect") -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


class Node(NamedTuple):
    box: Rect
    lines: list[str]
    published: bool
    badge: str


def graph_of(
    links: Links, nodes: Sequence[str] = (), versions: Mapping[str, int] | None = None
) -> SharedMemoryGraph:
    graph = SharedMemoryGraph()
    for name in nodes:
        graph.add_agent(name)
    for link in links:
        graph.add_edge(*link)
    for name, version in (versions or {}).items():
        graph.restore(Publication(name, "text", version, datetime(2026, 1, 1, tzinfo=UTC)))
    return graph


def random_graph(nodes: int, edges: int, seed: int) -> SharedMemoryGraph:
    dice = random.Random(seed)
    pairs: set[tuple[int, int]] = set()
    while len(pairs) < edges:
        low, high = sorted(dice.sample(range(nodes), 2))
        pairs.add((low, high))
    links = [(f"agent {a}", f"agent {b}", dice.choice(POLICIES)) for a, b in sorted(pairs)]
    return graph_of(links, [f"agent {number}" for number in range(nodes)])


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def rect_of(element: ElementTree.Element) -> Rect:
    x, y, width, height = (float(element.attrib[key]) for key in ("x", "y", "width", "height"))
    return Rect(x, y, x + width, y + height)


def nodes_of(root: ElementTree.Element) -> list[Node]:
    """Return the nodes, in topological order."""
    found = {}
    for group in root.findall(f"{SVG}g[@data-node]"):
        (box,) = group.findall(f"{SVG}rect[@class='box']")
        lines = [text.text or "" for text in group.findall(f"{SVG}text[@class='name']")]
        badge = group.findtext(f"{SVG}text[@class='version']", "")
        published = group.attrib["class"].split() == ["node", "published"]
        found[int(group.attrib["data-node"])] = Node(rect_of(box), lines, published, badge)
    return [found[number] for number in range(len(found))]


def curves_of(root: ElementTree.Element) -> dict[tuple[int, int], list[list[Point]]]:
    """Return each edge's path: two or four points per line or curve."""
    found = {}
    for path in root.iterfind(f".//{SVG}path[@data-edge]"):
        source, target = map(int, path.attrib["data-edge"].split("-"))
        assert (source, target) not in found
        found[source, target] = pieces(path.attrib["d"])
    return found


def pieces(data: str) -> list[list[Point]]:
    found: list[list[Point]] = []
    at: Point = (0.0, 0.0)
    for letter, text in re.findall(r"([MC])([-\d. e]+)", data):
        numbers = [float(number) for number in text.split()]
        points = list(zip(numbers[::2], numbers[1::2], strict=True))
        if letter != "M":
            found.append([at, *points])
        at = points[-1]
    return found


def hull(piece: Sequence[Point]) -> Rect:
    (*across,), (*down,) = zip(*piece, strict=True)
    return Rect(min(across), min(down) - SLACK, max(across), max(down) + SLACK)


def sampled(piece: list[Point]) -> Iterator[Point]:
    for step in range(25):
        share, points = step / 24, piece
        while len(points) > 1:  # de Casteljau
            points = [
                (ax + (bx - ax) * share, ay + (by - ay) * share)
                for (ax, ay), (bx, by) in pairwise(points)
            ]
        yield points[0]


def check_boxes(root: ElementTree.Element, nodes: Sequence[Node]) -> None:
    for one, other in combinations(nodes, 2):
        assert not one.box.overlaps(other.box)
    x, y, width, height = map(float, root.attrib["viewBox"].split())
    assert (width, height) == (float(root.attrib["width"]), float(root.attrib["height"]))
    for node in nodes:
        assert x <= node.box.left < node.box.right <= x + width
        assert y <= node.box.top < node.box.bottom <= y + height


def check_labels(nodes: Sequence[Node]) -> None:
    for box, lines, *_ in nodes:
        assert max(map(text_width, lines)) <= box.right - box.left - FONT_SIZE
        assert len(lines) * FONT_SIZE * 1.3 <= box.bottom - box.top


def check_edges(graph: SharedMemoryGraph, root: ElementTree.Element) -> None:
    nodes, curves = nodes_of(root), curves_of(root)
    number = {name: index for index, name in enumerate(graph.get_topological_order())}
    edges = graph.get_edges_for_nodes(graph.nodes)
    assert set(curves) == {(number[source], number[target]) for source, target in edges}
    for (source, target), way in curves.items():
        begin, end = way[0][0], way[-1][-1]
        assert nodes[source].box.right < nodes[target].box.left
        assert end[0] + HEAD == pytest.approx(nodes[target].box.left, abs=SLACK)
        assert nodes[target].box.top < end[1] < nodes[target].box.bottom
        for a, *_, b in way:
            assert a[0] < b[0]
        for piece in way:
            near = [node.box for node in nodes if node.box.overlaps(hull(piece))]
            assert not any(box.holds(point) for box in near for point in sampled(piece))
        assert begin[0] == pytest.approx(nodes[source].box.right, abs=SLACK)
        assert nodes[source].box.top < begin[1] < nodes[source].box.bottom


ODD_NAMES = [
    "",
    " two  spaces ",
    "line\nbreak\r\tand \x00\x1b\x7f\x85\u2028 controls",
    "\ud800 lone surrogate \udfff\ufffe",
    "</text></svg><script>alert(1)</script>&amp;\"']]>",
    "\u202eright to left\u202c المحلل",
    "要件定義エージェントと非常に長い日本語の名前を持つ担当者です",
    "\U0001f469\u200d\U0001f680" * 20,
    "e" + "\u0301" * 100,
    "W" * 200,
    "customer_requirements_and_constraints_collector-for.the/european:market",
]


@given(st.lists(st.text(st.characters(), max_size=60), min_size=1, max_size=6, unique=True))
@example(ODD_NAMES)
@settings(deadline=None)
def test_any_names_give_well_formed_xml_with_labels_inside_their_boxes(names: list[str]) -> None:
    graph = graph_of(list(pairwise(names)), names, {names[0]: 1})
    root = parsed(draw_svg(graph))
    nodes = nodes_of(root)
    assert ["".join(node.lines) for node in nodes] == [printable(name) for name in names]
    check_boxes(root, nodes)
    check_labels(nodes)
    check_edges(graph, root)
    assert not list(root.iter(f"{SVG}script"))


def test_characters_that_xml_forbids_are_replaced() -> None:
    assert printable("a\tb\r\nc\u2028d\xa0e") == "a b  c d e"
    assert printable("\x00\x1b\x7f\x9f\ud800\uffff") == "\ufffd" * 6
    assert printable("é要\U0001f680") == "é要\U0001f680"


@st.composite
def graphs(draw: st.DrawFn) -> SharedMemoryGraph:
    count = draw(st.integers(1, 14))
    names = [f"{number} {draw(st.sampled_from(ODD_NAMES))}" for number in range(count)]
    pair = st.tuples(*[st.integers(0, count - 1)] * 2, st.sampled_from(POLICIES))
    pairs = draw(st.lists(pair, max_size=30))
    links = [(names[min(a, b)], names[max(a, b)], policy) for a, b, policy in pairs if a != b]
    return graph_of(links, names)


@given(graphs())
@settings(deadline=None)
def test_edges_lead_right_and_avoid_every_box(graph: SharedMemoryGraph) -> None:
    root = parsed(draw_svg(graph))
    check_boxes(root, nodes_of(root))
    check_labels(nodes_of(root))
    check_edges(graph, root)


@pytest.mark.parametrize("seed", range(3))
def test_edges_avoid_boxes_in_a_crowded_graph(seed: int) -> None:
    graph = random_graph(40, 160, seed)
    root = parsed(draw_svg(graph))
    check_boxes(root, nodes_of(root))
    check_edges(graph, root)


def test_edges_that_skip_columns_go_round_all_boxes() -> None:
    root = parsed(draw_svg(random_graph(40, 160, 5)))
    boxes = [node.box for node in nodes_of(root)]
    above, below = min(box.top for box in boxes), max(box.bottom for box in boxes)
    level = [a[1] for way in curves_of(root).values() for a, b, *_ in way if a[1] == b[1]]
    assert min(level) < above - FONT_SIZE
    assert max(level) > below + FONT_SIZE


def test_chain_is_a_level_line_and_skipping_edges_go_round_it() -> None:
    chain = parsed(draw_svg(graph_of([("a", "b"), ("b", "c")])))
    assert {y for way in curves_of(chain).values() for piece in way for _, y in piece} == {0.0}
    boxes = [node.box for node in nodes_of(parsed(draw_svg(graph_of(TEAM))))]
    assert boxes[0].right < boxes[1].left < boxes[1].right < boxes[2].left


def test_unconnected_agents_stand_in_columns_at_the_right() -> None:
    root = parsed(draw_svg(graph_of(TEAM, nodes=[f"lone {number}" for number in range(30)])))
    order = graph_of(TEAM, nodes=[f"lone {number}" for number in range(30)]).get_topological_order()
    nodes = dict(zip(order, nodes_of(root), strict=True))
    check_boxes(root, list(nodes.values()))
    team = max(nodes[name].box.right for name in ("requirements", "designer", "implementer"))
    lone = [node.box for name, node in nodes.items() if name.startswith("lone")]
    assert all(box.left > team for box in lone)
    assert len({box.left for box in lone}) == 8


def test_agents_that_published_are_marked_by_more_than_colour() -> None:
    graph = graph_of(TEAM, versions={"requirements": 3, "designer": 1})
    svg = draw_svg(graph)
    marks = [(node.published, node.badge) for node in nodes_of(parsed(svg))]
    assert marks == [(True, "\u2713 v3"), (True, "\u2713 v1"), (False, "")]
    assert "<title>published, version 3</title>" in svg
    assert svg.count("<title>not published yet</title>") == 1


def test_publishing_moves_nothing() -> None:
    before, after = graph_of(TEAM), graph_of(TEAM, versions={"requirements": 99_999_999})
    first, second = (parsed(draw_svg(graph)) for graph in (before, after))
    assert [node.box for node in nodes_of(first)] == [node.box for node in nodes_of(second)]
    assert curves_of(first) == curves_of(second)
    assert first.attrib == second.attrib


def test_policies_have_their_own_line_styles_and_a_legend() -> None:
    plain = draw_svg(graph_of(TEAM))
    assert 'class="legend"' not in plain
    mixed = draw_svg(graph_of([("a", "b", PropagationPolicy.TOOL_RESULTS), ("a", "c")]))
    words = [text.text for text in parsed(mixed).findall(f"{SVG}text[@class='legend']")]
    assert words == ["final answer", "with tool results", "with full history"]
    lines = {
        title: re.search(r'stroke="(\S+)".*stroke-dasharray="([^"]+)"', line)
        for line in mixed.splitlines()
        for title in words
        if f": {title}</title>" in line
    }
    styles = [found.groups() for found in lines.values() if found is not None]
    assert len(styles) == len(lines) == 2
    assert all(len(set(column)) == 2 for column in zip(*styles, strict=True))
    assert "<title>a \u2192 b: with tool results</title>" in mixed


def test_drawing_describes_itself_in_words() -> None:
    root = parsed(draw_svg(graph_of(TEAM, versions={"requirements": 2})))
    assert root.attrib["role"] == "img"
    assert root[0].tag == f"{SVG}title"
    assert root.findtext(f"{SVG}desc") == (
        "Agents: 3, edges: 3. Order: requirements, designer, implementer."
        " Published: requirements (version 2)."
    )


def test_empty_graph_says_so() -> None:
    root = parsed(draw_svg(SharedMemoryGraph()))
    assert root.findtext(f"{SVG}text") == "No agents in this graph yet"
    assert float(root.attrib["width"]) < 500


def test_the_same_graph_gives_the_same_drawing() -> None:
    graph = random_graph(30, 60, 7)
    assert draw_svg(graph) == draw_svg(graph)
    assert draw_svg(SharedMemoryGraph.from_dict(graph.to_dict())) == draw_svg(graph)


@pytest.mark.deep
def test_large_graph_gives_a_file_of_bounded_size() -> None:
    svg = draw_svg(random_graph(500, 5000, 1))
    root = parsed(svg)
    assert len(nodes_of(root)) == 500
    assert len(curves_of(root)) == 5000
    assert len(svg) < 3_000_000


@pytest.mark.deep
def test_long_chain_whose_end_reads_from_all_gives_a_small_file() -> None:
    names = [f"step {number}" for number in range(300)]
    svg = draw_svg(graph_of([*pairwise(names), *((name, names[-1]) for name in names[:-2])]))
    assert len(svg) < 1_000_000


@given(st.text(st.characters(), max_size=400))
@settings(deadline=None)
def test_wrapping_loses_nothing(text: str) -> None:
    assert "".join(wrapped(text)) == text


def test_names_wrap_after_separators_and_before_inner_capitals() -> None:
    assert wrapped("short_name") == ("short_name",)
    assert wrapped("customer_requirements_and_constraints_collector") == (
        "customer_requirements_and_",
        "constraints_collector",
    )
    assert wrapped("DecisionDocumentationAssistantForLargeSystems") == (
        "DecisionDocumentation",
        "AssistantForLargeSystems",
    )
    assert len(wrapped("x" * 3000)) < 60


def luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Compute the contrast by WCAG 2, from 1 to 21."""
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_text_and_lines_have_contrast_on_any_page(mode: int) -> None:
    links = [("a", name, policy) for name, policy in zip("bcd", POLICIES, strict=True)]
    svg = draw_svg(graph_of(links))
    style = parsed(svg).findtext(f"{SVG}style", "")
    text = re.findall(r"graph text\{.*?fill:(#\w{6})", style)[mode]
    box = re.findall(r"graph \.box\{fill:(#\w{6})", style)[mode]
    assert contrast(text, box) >= 4.5
    (published,) = set(re.findall(r"published .box\{fill:(#\w{6})", style))
    assert contrast("#ffffff", published) >= 4.5
    lines = {*re.findall(r'stroke="(#\w{6})"', svg), "#7d8590", published}
    assert len(lines) == 4
    for line in lines:
        for page in ("#ffffff", "#0d1117"):  # the page's mode may differ from the drawing's
            assert contrast(line, page) >= 3.0
