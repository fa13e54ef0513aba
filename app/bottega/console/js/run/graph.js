/** The agents of a run, who calls whom, and what flows along the graph's edges. */
import { useEffect, useRef, useState } from "preact/hooks";

import { plain } from "../format.js";
import { conditionOf } from "../graphs/draft.js";
import { html } from "../html.js";
import { Canvas } from "../parts/canvas.js";

/** Between two drawings: each measures and paints every text that has changed. */
const DRAWN_EVERY_MS = 200;
/** A label that an edge may get: the drawing does not move when it comes. */
const ROOM = "v1 · 1 ×";
const COLOURS = { queued: "quiet", running: "busy", streaming: "busy", waiting: "wait", completed: "ok", failed: "bad",
  timeout: "bad", cancelled: "quiet", skipped: "quiet", idle: "quiet" };
const WORST = ["streaming", "running", "waiting", "queued", "failed", "timeout", "cancelled", "completed"];

/** Nodes by agent, and edges: those of the run's graph, and calls. */
export function elementsOf(state, graph) {
  const nodes = new Map();
  const add = (agent) => {
    if (!nodes.has(agent)) nodes.set(agent, { tasks: [], status: "idle" });
    return nodes.get(agent);
  };
  // Elements and turns of a node are one in the drawing: "improve/2/draft" is "improve/draft".
  const whole = (name) => name.replace(/\/(\d+|try-\d+)(?=\/|$)/g, "");
  const decided = new Map([...state.nodes].map(([name, node]) => [whole(name), node]));
  for (const name of [...(graph?.nodes ?? []).map((node) => whole(node.name)), ...decided.keys()]) add(name);
  const edges = new Map();
  const edge = (source, target, kind) => {
    const id = `${kind}:${source}→${target}`;
    if (!edges.has(id)) edges.set(id, { id, source, target, kind, flows: 0, last: 0, seq: 0 });
    return edges.get(id);
  };
  const nameOf = (task) => whole(task.node ?? task.agent ?? "");
  for (const task of state.tasks.values()) {
    add(nameOf(task)).tasks.push(task);
    const parent = state.tasks.get(task.parent);
    if (parent && parent.agent !== task.agent) edge(nameOf(parent), nameOf(task), "call");
  }
  for (const each of graph?.edges ?? []) {
    edge(whole(each.source), whole(each.target), "data").condition = conditionOf(each);
  }
  for (const { source, target, taken } of state.decisions) edge(whole(source), whole(target), "data").taken = taken;
  for (const flow of state.flows) {
    add(whole(flow.source));
    const found = edge(whole(flow.source), whole(flow.target), "data");
    found.flows += 1;
    found.last = flow.at;
    found.seq = flow.seq;
    found.version = flow.version;
  }
  for (const [name, node] of nodes) {
    node.reason = decided.get(name)?.reason ?? null;
    node.status = decided.get(name)?.status === "skipped" ? "skipped"
      : WORST.find((status) => node.tasks.some((task) => task.status === status)) ?? "idle";
  }
  return { nodes, edges };
}

/** Which nodes were skipped, and the conditions that did not hold, in a sentence; "": none. */
export function skippedOf(state, graph) {
  const skipped = [...state.nodes].filter(([, { status }]) => status === "skipped");
  if (!skipped.length) return "";
  const whyOf = ([name, { reason }]) => {
    const { source, taken, condition } = [...elementsOf(state, graph).edges.values()].find((each) =>
      each.target === name && each.taken === false && each.condition) ?? {};
    return taken === false ? `${source} → ${name} is taken only if ${condition}` : reason;
  };
  const causes = [...new Set(skipped.map(whyOf))];
  return `${skipped.map(([name]) => name).join(" and ")} ${skipped.length > 1 ? "were" : "was"} skipped: ${
    causes.join("; ")}.`;
}

const labelOf = (agent, node) => {
  const times = node.tasks.length > 1 ? ` × ${node.tasks.length}` : "";
  return `${agent}${times}\n${node.status === "idle" ? "not called" : node.status}`;
};

/** What `make` returns; it is called again when `key` changes, but not more often than every `ms`. */
function useSeldom(make, key, ms) {
  const kept = useRef({ at: -Infinity, key: undefined, value: undefined });
  const [, redraw] = useState(0);
  const now = performance.now();
  if (kept.current.key !== key && now >= kept.current.at + ms) kept.current = { at: now, key, value: make() };
  const { at, key: shown, value } = kept.current;
  useEffect(() => {
    if (shown === key) return undefined;
    const timer = setTimeout(() => redraw((n) => n + 1), at + ms - now + 1);
    return () => clearTimeout(timer);
  });
  return value;
}

/** Nodes and edges as the canvas needs them, and the agents with their tasks. */
function drawing(state, graph, chosen) {
  const found = elementsOf(state, graph);
  const nodes = [...found.nodes]
    .map(([id, node]) => ({ id, label: labelOf(id, node),
      classes: [COLOURS[node.status], ...(chosen === id ? ["chosen"] : [])] }));
  const edges = [...found.edges.values()].map((edge) => ({
    ...edge,
    label: [edge.condition, edge.flows && `v${edge.version}${edge.flows > 1 ? ` · ${edge.flows} ×` : ""}`]
      .filter(Boolean).join(" · "),
    room: ROOM,
    classes: [...(edge.kind === "call" ? ["call"] : []), ...(edge.flows > 0 ? ["flowed"] : []),
      ...(edge.taken === false ? ["untaken"] : [])],
  }));
  return { agents: found.nodes, nodes, edges };
}

/** What a node has published by now. */
function Published({ state, node }) {
  const found = state.published.findLast((each) => each.agent === node);
  if (!found) return null;
  return html`<div class="body"><h3>${node} published <span class="small soft">version ${found.version}</span></h3>
    <pre class="text">${plain(state.textOf(found.data))}</pre></div>`;
}

/** `graph`: of `GET /v1/runs/{id}/graph`, or null; `chosen`: an agent's name. */
export function Graph({ state, graph, chosen, onChoose }) {
  const { agents, nodes, edges } =
    useSeldom(() => drawing(state, graph, chosen), `${state.last} ${graph !== null} ${chosen}`, DRAWN_EVERY_MS);
  return html`<div class="graph">
    <${Canvas} nodes=${nodes} edges=${edges} onNode=${onChoose}
      label="The graph of the agents; the list below says the same." />
    <ul class="agents">${[...agents].map(([agent, node]) => html`<li key=${agent}>
      <button type="button" class=${`button small ${chosen === agent ? "primary" : ""}`}
        aria-pressed=${chosen === agent} disabled=${!node.tasks.length} onClick=${() => onChoose(agent)}>
        ${agent}${node.tasks.length > 1 ? ` × ${node.tasks.length}` : ""}: ${node.status === "idle" ? "not called"
          : node.status}</button>
      ${node.reason && html`<span class="small soft"> ${node.reason}</span>`}</li>`)}</ul>
    ${chosen && html`<${Published} state=${state} node=${chosen} />`}
  </div>`;
}
