/** A graph drawn: its nodes in layers, and its edges around them. The library is read only where a graph is. */
import { useEffect, useRef, useState } from "preact/hooks";

import { html } from "../html.js";
import { Loading } from "./basics.js";

const FLASH_MS = 1600;
const SHADES = ["surface", "line", "line-strong", "text", "text-soft", "accent", "accent-soft",
  ...["ok", "busy", "wait", "bad"].flatMap((tone) => [tone, `${tone}-soft`])];
const WIDTH = 168, HEIGHT = 46, COLUMN = 230, LINE = 84;

/** Return a function that gives a colour of the design as the canvas needs it: light or dark. */
function colours() {
  const probe = document.body.appendChild(document.createElement("i"));
  const found = {};
  for (const name of SHADES) {
    probe.style.color = `var(--${name})`;
    found[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return (name) => found[name];
}

function styles() {
  const css = getComputedStyle(document.documentElement);
  const colour = colours();
  const base = {
    shape: "round-rectangle", width: WIDTH, height: HEIGHT, "background-color": colour("surface"), "border-width": 1.5,
    "border-color": colour("line-strong"), label: "data(label)", color: colour("text"), "font-size": 12,
    "font-family": css.getPropertyValue("--sans"), "text-wrap": "wrap", "text-valign": "center", "text-max-width": 156,
      "line-height": 1.3,
  };
  return [
    { selector: "node", style: base },
    ...["ok", "busy", "wait", "bad"]
      .map((tone) => ({ selector: `node.${tone}`,
        style: { "border-color": colour(tone), "background-color": colour(`${tone}-soft`) } })),
    { selector: "node.chosen, node.aim", style: { "border-width": 3, "border-color": colour("accent") } },
    { selector: "node.aim", style: { "background-color": colour("accent-soft") } },
    { selector: "edge", style: { width: 1.5, "curve-style": "round-segments", "segment-weights": "data(weights)",
      "segment-distances": "data(distances)", "segment-radii": 24, "edge-distances": "node-position",
      "target-arrow-shape": "triangle", "arrow-scale": 0.9, "line-color": colour("line-strong"),
      "target-arrow-color": colour("line-strong"), label: "data(label)", "font-size": 10.5, color: colour("text-soft"),
      "text-background-color": colour("surface"), "text-background-opacity": 1, "text-background-padding": 2 } },
    { selector: "edge.call", style: { "line-style": "dashed", "line-color": colour("line"),
      "target-arrow-color": colour("line") } },
    { selector: "edge.flowed, edge.chosen",
      style: { width: 2, "line-color": colour("accent"), "target-arrow-color": colour("accent") } },
    { selector: "edge.flash", style: { width: 5, color: colour("accent") } },
  ];
}

/**
 * `nodes`: `[{id, label, classes}]`; `edges`: `[{id, source, target, label, classes, seq}]`: an edge lights up when
 * its `seq` grows.
 *
 * `onNode` and `onEdge` get the id of what is clicked; `onConnect` gets two ids when a line is pulled from node to
 * node.
 */
export function Canvas({ nodes, edges, label, onNode, onEdge, onConnect }) {
  const box = useRef(null);
  const drawn = useRef({ cy: null, shape: "", seqs: new Map() });
  const told = useRef(/** @type {any} */ ({}));
  told.current = { onNode, onEdge, onConnect };
  const [library, setLibrary] = useState(null);
  useEffect(() => {
    let left = false;
    /** @type {Promise<any[]>} */
    const libraries = Promise.all([import("cytoscape"), import("@dagrejs/dagre")]);
    libraries.then(([cytoscape, dagre]) => {
      if (!left) setLibrary({ cytoscape: cytoscape.default, dagre: dagre.default });
    });
    return () => {
      left = true;
      drawn.current.cy?.destroy();
      drawn.current = { cy: null, shape: "", seqs: new Map() };
    };
  }, []);

  useEffect(() => {
    if (!library) return undefined;
    const cy = library.cytoscape(
      { container: box.current, style: styles(), minZoom: 0.15, maxZoom: 2, autoungrabify: true });
    cy.on("tap", "node", ({ target }) => told.current.onNode?.(target.id()));
    cy.on("tap", "edge", ({ target }) => told.current.onEdge?.(target.id()));
    if (told.current.onConnect) pullLines(cy, (source, target) => told.current.onConnect(source, target));
    drawn.current.cy = cy;
    const restyle = () => cy.style(styles());
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", restyle);
    const themed = new MutationObserver(restyle);
    themed.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    return () => {
      dark.removeEventListener("change", restyle);
      themed.disconnect();
    };
  }, [library]);

  useEffect(() => {
    if (library && drawn.current.cy) draw(drawn.current, nodes, edges, library);
  }, [library, nodes, edges]);
  return html`<div class="canvas" ref=${box} role="img" aria-label=${label}></div>
    ${!library && html`<${Loading} what="the graph" />`}`;
}

/** Call `connect` when the mouse is pressed on one node and released on another. */
function pullLines(cy, connect) {
  let from = null;
  const isOther = (element) => element !== cy && element.isNode() && element.id() !== from;
  cy.on("mousedown", "node", ({ target }) => (from = target.id()));
  cy.on("mouseover", "node", ({ target }) => from !== null && isOther(target) && target.addClass("aim"));
  cy.on("mouseout", "node", ({ target }) => target.removeClass("aim"));
  cy.on("mouseup", ({ target }) => {
    if (from !== null && isOther(target)) connect(from, target.id());
    from = null;
    cy.nodes().removeClass("aim");
  });
}

function draw(drawn, nodes, edges, { dagre }) {
  const { cy } = drawn;
  const ids = new Set([...nodes, ...edges].map(({ id }) => id));
  const shape = JSON.stringify([nodes.map(({ id }) => id), edges.map(({ id }) => id)]);
  const isNew = shape !== drawn.shape;
  cy.batch(() => {
    for (const each of cy.elements()) if (!ids.has(each.id())) each.remove();
    for (const { id, label, classes } of nodes) {
      let element = cy.getElementById(id);
      if (element.empty()) element = cy.add({ group: "nodes", data: { id } });
      element.data("label", label);
      element.classes(classes);
    }
    for (const { id, source, target, label, classes, seq = 0 } of edges) {
      let element = cy.getElementById(id);
      if (element.empty()) element = cy.add(
        { group: "edges", data: { id, source, target, weights: [0.5], distances: [0] } });
      element.data("label", label);
      element.classes([...classes, ...(element.hasClass("flash") ? ["flash"] : [])]);
      if (drawn.shape && seq > (drawn.seqs.get(id) ?? 0)) {
        element.addClass("flash");
        setTimeout(() => element.removeClass("flash"), FLASH_MS);
      }
      drawn.seqs.set(id, seq);
    }
  });
  if (!isNew) return;
  drawn.shape = shape;
  if (nodes.length) arrange(cy, nodes, edges, dagre);
}

function arrange(cy, nodes, edges, dagre) {
  const layout = new dagre.graphlib.Graph({ multigraph: true })
    .setGraph({ rankdir: "LR", nodesep: LINE - HEIGHT, ranksep: COLUMN - WIDTH }).setDefaultEdgeLabel(() => ({}));
  for (const { id } of nodes) layout.setNode(id, { width: WIDTH, height: HEIGHT });
  for (const edge of edges) layout.setEdge(edge.source, edge.target, {}, edge.id);
  dagre.layout(layout);
  cy.nodes().positions((node) => {
    const { x, y } = layout.node(node.id());
    return { x, y };
  });
  for (const edge of edges) cy.getElementById(edge.id).data(bends(layout, edge));
  cy.fit(undefined, 24);
  if (cy.zoom() > 1.1) {
    cy.zoom(1.1);
    cy.center();
  }
}

/** The way of an edge around other nodes, relative to the straight line between its own two. */
function bends(layout, edge) {
  const [from, to] = [layout.node(edge.source), layout.node(edge.target)];
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy) || 1;
  const points = layout.edge(edge.source, edge.target, edge.id).points.slice(1, -1);
  const weights = points.map(({ x, y }) => ((x - from.x) * dx + (y - from.y) * dy) / length ** 2);
  const distances = points.map(({ x, y }) => ((y - from.y) * dx - (x - from.x) * dy) / length);
  return points.length ? { weights, distances } : { weights: [0.5], distances: [0] };
}
