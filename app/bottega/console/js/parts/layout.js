/** Where the nodes, edges and labels of a graph are drawn. Pure. */

/** Sizes of a drawing, in units of its own. */
export const WIDTH = 168, HEIGHT = 46, MARGIN = 24;
const COLUMN = 230, LINE = 84;
const LETTER = 6, LABEL_HEIGHT = 18, LABEL_PADDING = 12;
const MOST_LETTERS = { node: 26, edge: 34 };

/** A text as short as what it is written on. */
export const cut = (text, kind) => (text.length > MOST_LETTERS[kind]
  ? `${text.slice(0, MOST_LETTERS[kind] - 1)}…` : text);

/** The width that an edge keeps free for its label; `room`: a text that it may have later. */
export function widthOf({ label = "", room = "" }) {
  const letters = Math.max(cut(label, "edge").length, room.length);
  return letters ? LETTER * letters + LABEL_PADDING : 0;
}

/**
 * `{nodes: Map of {x, y}, edges: Map of {points, x, y}, width, height}`, both maps by id; `x` and `y` of an edge are
 * the middle of its label, which no node covers.
 *
 * @param {any} dagre the library
 */
export function arrange(dagre, nodes, edges) {
  const layout = new dagre.graphlib.Graph({ multigraph: true })
    .setGraph({ rankdir: "LR", nodesep: LINE - HEIGHT, ranksep: COLUMN - WIDTH }).setDefaultEdgeLabel(() => ({}));
  for (const { id } of nodes) layout.setNode(id, { width: WIDTH, height: HEIGHT });
  for (const edge of edges) {
    const width = widthOf(edge);
    layout.setEdge(edge.source, edge.target, width ? { width, height: LABEL_HEIGHT, labelpos: "c" } : {}, edge.id);
  }
  if (nodes.length) dagre.layout(layout);
  const { width = WIDTH, height = HEIGHT } = layout.graph();
  return {
    width, height,
    nodes: new Map(nodes.map(({ id }) => [id, layout.node(id)])),
    edges: new Map(edges.map(({ id, source, target }) => [id, layout.edge(source, target, id)])),
  };
}

/** A smooth line through all points, so that the label of an edge is on it. */
export function pathOf(points) {
  const [first] = points;
  const bends = points.slice(1).map((to, place) => {
    const from = points[place], before = points[place - 1] ?? from, after = points[place + 2] ?? to;
    return `C${from.x + (to.x - before.x) / 6} ${from.y + (to.y - before.y) / 6} ${to.x - (after.x - from.x) / 6} ${
      to.y - (after.y - from.y) / 6} ${to.x} ${to.y}`;
  });
  return `M${first.x} ${first.y}${bends.join("")}`;
}
