/** Changes of a graph that is not stored yet. All functions are pure: they return another graph. */

export const POLICIES = { final_response_only: "the answer", tool_results: "the answer and the tools' results", full_history: "the whole conversation" };

/** The part of `GET /v1/graphs/{name}` that can be changed. */
export const draftOf = ({ nodes, edges, ttl_s }) => ({ nodes, edges, ttl_s });

export const idOf = (edge) => `${edge.source}→${edge.target}`;

export const has = (graph, agent) => graph.nodes.some((node) => node.agent === agent);

export const withNode = (graph, agent) => (has(graph, agent) ? graph : { ...graph, nodes: [...graph.nodes, { agent, ttl_s: null }] });

export const withoutNode = (graph, agent) => ({
  ...graph,
  nodes: graph.nodes.filter((node) => node.agent !== agent),
  edges: graph.edges.filter((edge) => edge.source !== agent && edge.target !== agent),
});

/** The path that an edge would close to a cycle, from its source back to it; null: none. */
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

export const withEdge = (graph, source, target, policy) => ({ ...graph, edges: [...graph.edges.filter((edge) => idOf(edge) !== idOf({ source, target })), { source, target, policy }] });

export const withoutEdge = (graph, id) => ({ ...graph, edges: graph.edges.filter((edge) => idOf(edge) !== id) });

export const withPolicy = (graph, id, policy) => ({ ...graph, edges: graph.edges.map((edge) => (idOf(edge) === id ? { ...edge, policy } : edge)) });

/** Move an agent in the list: of those that can work at the same time, the first one goes first. */
export function moved(graph, agent, step) {
  const at = graph.nodes.findIndex((node) => node.agent === agent);
  const nodes = [...graph.nodes];
  if (!nodes[at + step]) return graph;
  [nodes[at], nodes[at + step]] = [nodes[at + step], nodes[at]];
  return { ...graph, nodes };
}

export const withTtl = (graph, agent, ttl_s) => ({ ...graph, nodes: graph.nodes.map((node) => (node.agent === agent ? { ...node, ttl_s } : node)) });

/** Agents by level: each is one below the deepest that it reads from. */
export function levelsOf(graph) {
  const level = new Map(graph.nodes.map(({ agent }) => [agent, 0]));
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

/** What differs between two graphs, in a few words each. */
export function changes(before, after) {
  const words = (graph) => new Map([
    ...graph.nodes.map((node) => [`agent ${node.agent}`, node.ttl_s ? `expires after ${node.ttl_s} s` : ""]),
    ...graph.edges.map((edge) => [`${edge.source} → ${edge.target}`, POLICIES[edge.policy]]),
  ]);
  const [old, now] = [words(before), words(after)];
  return [
    ...[...now.keys()].filter((name) => !old.has(name)).map((name) => `+ ${name}`),
    ...[...old.keys()].filter((name) => !now.has(name)).map((name) => `− ${name}`),
    ...[...now].filter(([name, about]) => old.has(name) && old.get(name) !== about).map(([name, about]) => `${name}: ${about || "never expires"}`),
    ...(before.nodes.map(({ agent }) => agent).join() !== after.nodes.map(({ agent }) => agent).join() && before.nodes.length === after.nodes.length && after.nodes.every(({ agent }) => has(before, agent)) ? ["another order"] : []),
  ];
}
