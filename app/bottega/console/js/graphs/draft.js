/** Changes of a graph that is not stored yet. All functions are pure: each returns a changed copy. */

export const POLICIES = { final_response_only: "the answer", tool_results: "the answer and the tools' results",
  full_history: "the whole conversation" };

/** The part of `GET /v1/graphs/{name}` that can be changed. */
export const draftOf = ({ nodes, edges, ttl_s, output }) => ({ nodes, edges, ttl_s, ...(output ? { output } : {}) });

/** The name of a node, as in edges. */
export const nameOf = (node) => node.name ?? node.agent;

export const idOf = (edge) => `${edge.source}→${edge.target}`;

export const has = (graph, agent) => graph.nodes.some((node) => nameOf(node) === agent);

/** The first content of a node, by type. */
const FRESH = { agent: {}, tool: { arguments: {} }, human: { ask: "" }, graph: { graph: "" } };
/** Fields of all types of nodes. */
const COMMON = ["name", "ttl_s", "join", "timeout_s", "retry", "on_error"];

export function withNode(graph, name, type = "agent") {
  if (has(graph, name)) return graph;
  const node = type === "agent" ? { agent: name, ttl_s: null } : { name, ttl_s: null, type, ...FRESH[type] };
  return { ...graph, nodes: [...graph.nodes, node] };
}

/** A copy of a node with another type. It keeps the fields that both types have. */
export const retyped = (node, type) => ({
  ...Object.fromEntries(Object.entries(node).filter(([name]) => COMMON.includes(name))), type,
  ...(type === "agent" ? { agent: nameOf(node) } : FRESH[type]),
});

/** Names of the nodes whose answers a node may read. */
export function upstreamOf(graph, name) {
  const found = new Set([name]); // the loop also reaches names that it adds to the set
  for (const each of found) for (const { source, target } of graph.edges) if (target === each) found.add(source);
  found.delete(name);
  return [...found];
}

export const withoutNode = (graph, agent) => ({
  ...graph,
  nodes: graph.nodes.filter((node) => nameOf(node) !== agent),
  edges: graph.edges.filter((edge) => edge.source !== agent && edge.target !== agent),
});

/** The cycle that an edge would close, as a path from the edge's source to the same node; null: none. */
export function cycleOf(graph, source, target) {
  const paths = [[target]];
  const seen = new Set([target]);
  for (const path of paths) {
    const last = path.at(-1);
    if (last === source) return [source, ...path];
    for (const edge of graph.edges) {
      if (edge.source === last && !seen.has(edge.target)) {
        seen.add(edge.target);
        paths.push([...path, edge.target]);
      }
    }
  }
  return null;
}

export const withEdge = (graph, source, target, policy) => (
  { ...graph, edges: [...graph.edges.filter((edge) => idOf(edge) !== idOf({ source, target })),
    { source, target, policy }] });

export const withoutEdge = (graph, id) => ({ ...graph, edges: graph.edges.filter((edge) => idOf(edge) !== id) });

export const withPolicy = (graph, id, policy) => (
  { ...graph, edges: graph.edges.map((edge) => (idOf(edge) === id ? { ...edge, policy } : edge)) });

/** Move an agent in the list. Of agents that can work at the same time, the first in the list starts first. */
export function moved(graph, agent, step) {
  const at = graph.nodes.findIndex((node) => nameOf(node) === agent);
  const nodes = [...graph.nodes];
  if (!nodes[at + step]) return graph;
  [nodes[at], nodes[at + step]] = [nodes[at + step], nodes[at]];
  return { ...graph, nodes };
}

export const withTtl = (graph, agent, ttl_s) => (
  { ...graph, nodes: graph.nodes.map((node) => (nameOf(node) === agent ? { ...node, ttl_s } : node)) });

/** The settings of a node or an edge: all fields except the node's name or the edge's ends. */
function detailsOf(graph, id) {
  const node = graph.nodes.find((each) => nameOf(each) === id);
  const { name, ttl_s, source, target, policy, ...details } = node ?? graph.edges.find((each) => idOf(each) === id)
    ?? {};
  return details;
}

/**
 * A condition in words; "": no condition.
 *
 * @param {{when?: any, else?: boolean}} node
 * @returns {string}
 */
export function conditionOf({ when, else: isElse }) {
  if (isElse) return "else";
  if (!when) return "";
  if (when.not) return `not (${conditionOf({ when: when.not })})`;
  const group = when.all ? "all" : when.any ? "any" : null;
  if (group) return when[group].map((each) => conditionOf({ when: each })).join(group === "all" ? " and " : " or ");
  return `${when.feature} ${when.op}${when.op === "exists" ? "" : ` ${JSON.stringify(when.value)}`}`;
}

/** Agents by level: each agent is one level below the deepest agent whose answer it reads. */
export function levelsOf(graph) {
  const level = new Map(graph.nodes.map((node) => [nameOf(node), 0]));
  for (let turn = 0; turn < graph.nodes.length; turn++) {
    let isDone = true;
    for (const { source, target } of graph.edges) {
      if (level.get(target) > level.get(source)) continue;
      level.set(target, level.get(source) + 1);
      isDone = false;
    }
    if (isDone) break;
  }
  return level;
}

const USUAL = { type: "agent", join: "any", on_error: "fail" };

/** The settings of a node that differ from the defaults, as JSON; "": none. */
function decided(graph, id) {
  const { agent, ...details } = detailsOf(graph, id);
  const found = Object.fromEntries(
    [...(agent && agent !== id ? [["agent", agent]] : []), ...Object.entries(details)
      .filter(([name, value]) => USUAL[name] !== value)]);
  return Object.keys(found).length ? JSON.stringify(found) : "";
}

/** The differences between two graphs, a few words for each. */
export function changes(before, after) {
  const words = (graph) => new Map([
    ...graph.nodes.map((node) => [`${node.type ?? "agent"} ${nameOf(node)}`,
      [node.ttl_s ? `expires after ${node.ttl_s} s` : "", decided(graph, nameOf(node))].filter(Boolean).join(", ")]),
    ...graph.edges.map((edge) => [`${edge.source} → ${edge.target}`, [POLICIES[edge.policy], conditionOf(edge)]
      .filter(Boolean).join(", if ")]),
  ]);
  const [old, now] = [words(before), words(after)];
  return [
    ...[...now.keys()].filter((name) => !old.has(name)).map((name) => `+ ${name}`),
    ...[...old.keys()].filter((name) => !now.has(name)).map((name) => `− ${name}`),
    ...[...now].filter(([name, about]) => old.has(name) && old.get(name) !== about)
      .map(([name, about]) => `${name}: ${about || "never expires"}`),
    ...(before.nodes.map(nameOf).join() !== after.nodes.map(nameOf).join() && before.nodes.length === after.nodes.length
      && after.nodes.every((node) => has(before, nameOf(node))) ? ["another order"] : []),
  ];
}
