/** The agents of a run, who calls whom, and what flows along the graph's edges. */
import { useEffect, useRef, useState } from "preact/hooks";

import { html } from "../html.js";
import { Loading } from "../parts/basics.js";

const FLASH_MS = 1600;
const COLOURS = { queued: "quiet", running: "busy", streaming: "busy", waiting: "wait", completed: "ok", failed: "bad", timeout: "bad", cancelled: "quiet", idle: "quiet" };
const WORST = ["streaming", "running", "waiting", "queued", "failed", "timeout", "cancelled", "completed"];
const SHADES = ["surface", "line", "line-strong", "text", "text-soft", "accent", ...["ok", "busy", "wait", "bad"].flatMap((tone) => [tone, `${tone}-soft`])];
const COLUMN = 230, LINE = 84;

/** Nodes by agent, and edges: those of the run's graph, and calls. */
export function elementsOf(state, graph) {
  const nodes = new Map();
  const add = (agent) => {
    if (!nodes.has(agent)) nodes.set(agent, { tasks: [], status: "idle" });
    return nodes.get(agent);
  };
  for (const node of graph?.nodes ?? []) add(node.agent);
  const edges = new Map();
  const edge = (source, target, kind) => {
    const id = `${kind}:${source}→${target}`;
    if (!edges.has(id)) edges.set(id, { id, source, target, kind, flows: 0, last: 0, seq: 0 });
    return edges.get(id);
  };
  for (const task of state.tasks.values()) {
    add(task.agent).tasks.push(task);
    const parent = state.tasks.get(task.parent);
    if (parent && parent.agent !== task.agent) edge(parent.agent, task.agent, "call");
  }
  for (const each of graph?.edges ?? []) edge(each.source, each.target, "data");
  for (const flow of state.flows) {
    add(flow.source);
    const found = edge(flow.source, flow.target, "data");
    found.flows += 1;
    found.last = flow.at;
    found.seq = flow.seq;
    found.version = flow.version;
  }
  for (const node of nodes.values()) {
    node.status = WORST.find((status) => node.tasks.some((task) => task.status === status)) ?? "idle";
  }
  return { nodes, edges };
}

const shapeOf = ({ nodes, edges }) => JSON.stringify([[...nodes.keys()], [...edges.keys()]]);

const labelOf = (agent, node) => {
  const times = node.tasks.length > 1 ? ` × ${node.tasks.length}` : "";
  return `${agent}${times}\n${node.status === "idle" ? "not called" : node.status}`;
};

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
    shape: "round-rectangle", width: 168, height: 46, "background-color": colour("surface"), "border-width": 1.5,
    "border-color": colour("line-strong"), label: "data(label)", color: colour("text"), "font-size": 12,
    "font-family": css.getPropertyValue("--sans"), "text-wrap": "wrap", "text-valign": "center", "text-max-width": 156, "line-height": 1.3,
  };
  return [
    { selector: "node", style: base },
    ...["ok", "busy", "wait", "bad"].map((tone) => ({ selector: `node.${tone}`, style: { "border-color": colour(tone), "background-color": colour(`${tone}-soft`) } })),
    { selector: "node.chosen", style: { "border-width": 3, "border-color": colour("accent") } },
    { selector: "edge", style: { width: 1.5, "curve-style": "round-segments", "segment-weights": "data(weights)", "segment-distances": "data(distances)", "segment-radii": 24, "edge-distances": "node-position", "target-arrow-shape": "triangle", "arrow-scale": 0.9, "line-color": colour("line-strong"), "target-arrow-color": colour("line-strong"), label: "data(label)", "font-size": 10.5, color: colour("text-soft"), "text-background-color": colour("surface"), "text-background-opacity": 1, "text-background-padding": 2 } },
    { selector: "edge.call", style: { "line-style": "dashed", "line-color": colour("line"), "target-arrow-color": colour("line") } },
    { selector: "edge.flowed", style: { width: 2, "line-color": colour("accent"), "target-arrow-color": colour("accent") } },
    { selector: "edge.flash", style: { width: 5, color: colour("accent") } },
  ];
}

/** `graph`: of `GET /v1/runs/{id}/graph`, or null; `chosen`: an agent's name. */
export function Graph({ state, graph, chosen, onChoose }) {
  const box = useRef(null);
  const drawn = useRef({ cy: null, shape: "", seqs: new Map() });
  const choose = useRef(onChoose);
  choose.current = onChoose;
  const [library, setLibrary] = useState(null);
  useEffect(() => {
    let left = false;
    Promise.all([import("cytoscape"), import("@dagrejs/dagre")]).then(([cytoscape, dagre]) => {
      if (!left) setLibrary({ cytoscape: cytoscape.default, dagre: dagre.default });
    });
    return () => {
      left = true;
      drawn.current.cy?.destroy();
      drawn.current = { cy: null, shape: "", seqs: new Map() };
    };
  }, []);
  const found = elementsOf(state, graph);

  useEffect(() => {
    if (!library) return undefined;
    const cy = library.cytoscape({ container: box.current, style: styles(), minZoom: 0.15, maxZoom: 2, autoungrabify: true });
    cy.on("tap", "node", ({ target }) => choose.current(target.id()));
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
    if (library && drawn.current.cy) draw(drawn.current, found, library, chosen);
  });
  return html`<div class="graph">
    <div class="canvas" ref=${box} role="img" aria-label="The graph of the agents; the list below says the same."></div>
    ${!library && html`<${Loading} what="the graph" />`}
    <ul class="agents">${[...found.nodes].map(([agent, node]) => html`<li key=${agent}>
      <button type="button" class=${`button small ${chosen === agent ? "primary" : ""}`} aria-pressed=${chosen === agent} disabled=${!node.tasks.length} onClick=${() => onChoose(agent)}>
        ${agent}${node.tasks.length > 1 ? ` × ${node.tasks.length}` : ""}: ${node.status === "idle" ? "not called" : node.status}</button></li>`)}</ul>
  </div>`;
}

function draw(drawn, found, { dagre }, chosen) {
  const { cy } = drawn;
  const shape = shapeOf(found);
  const isNew = shape !== drawn.shape;
  cy.batch(() => {
    for (const each of cy.elements()) {
      if (!(each.isNode() ? found.nodes.has(each.id()) : found.edges.has(each.id()))) each.remove();
    }
    for (const [agent, node] of found.nodes) {
      let element = cy.getElementById(agent);
      if (element.empty()) element = cy.add({ group: "nodes", data: { id: agent } });
      element.data("label", labelOf(agent, node));
      element.classes([COLOURS[node.status], ...(chosen === agent ? ["chosen"] : [])]);
    }
    for (const edge of found.edges.values()) {
      let element = cy.getElementById(edge.id);
      if (element.empty()) element = cy.add({ group: "edges", data: { id: edge.id, source: edge.source, target: edge.target, weights: [0.5], distances: [0] } });
      element.data("label", edge.flows ? `v${edge.version}${edge.flows > 1 ? ` · ${edge.flows} ×` : ""}` : "");
      element.toggleClass("call", edge.kind === "call");
      element.toggleClass("flowed", edge.flows > 0);
      if (drawn.shape && edge.seq > (drawn.seqs.get(edge.id) ?? 0)) {
        element.addClass("flash");
        setTimeout(() => element.removeClass("flash"), FLASH_MS);
      }
      drawn.seqs.set(edge.id, edge.seq);
    }
  });
  if (!isNew) return;
  drawn.shape = shape;
  const layout = new dagre.graphlib.Graph({ multigraph: true }).setGraph({ rankdir: "LR", nodesep: LINE - 46, ranksep: COLUMN - 168 }).setDefaultEdgeLabel(() => ({}));
  for (const agent of found.nodes.keys()) layout.setNode(agent, { width: 168, height: 46 });
  for (const edge of found.edges.values()) layout.setEdge(edge.source, edge.target, {}, edge.id);
  dagre.layout(layout);
  cy.nodes().positions((node) => {
    const { x, y } = layout.node(node.id());
    return { x, y };
  });
  for (const edge of found.edges.values()) cy.getElementById(edge.id).data(bends(layout, edge));
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
