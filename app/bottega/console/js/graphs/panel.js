/** The panel of the chosen node or edge of a graph: what it decides, in typed fields. */
import { useState } from "preact/hooks";

import { Known } from "../forms/parts.js";
import { useSchemas } from "../forms/schemas.js";
import { Fields } from "../forms/typed.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Failure, Loading, Panel } from "../parts/basics.js";
import { may } from "../person.js";
import { conditionOf, idOf, nameOf, retyped, upstreamOf } from "./draft.js";
import { NewAgent, NodeAgent } from "./node_agent.js";

/** Fields that nodes of one type have alone. */
const OWN = { agent: ["agent", "router"], tool: ["tool", "arguments"], human: ["ask", "schema", "who", "expires_s"],
  graph: ["graph", "version", "loop"] };
const TYPE_WORDS = { agent: "Agent", tool: "Tool", human: "A person", graph: "Another graph" };
/** The field of a node, in the table of nodes or in the panel. */
const ELSEWHERE = ["name", "type", "ttl_s", "source", "target", "policy"];
const OTHERS = Object.values(OWN).flat();
const FEATURES = ["status", "output", "output_json", "input", "metadata"];

/** `problems`: `[{pointer, detail}]` of the last try to store the graph; `onAgent`: an agent of it was made. */
export function Details({ graph, chosen, agents, problems, change, onAgent }) {
  const [schemas, error] = useSchemas();
  const graphs = useData("/v1/graphs?limit=200").data?.items.map((each) => each.name);
  const servers = useData("/v1/mcp-servers?limit=200").data?.items.map((each) => each.name);
  if (error) return html`<${Failure} error=${error} />`;
  if (!schemas) return html`<${Loading} what="the fields" />`;
  const known = { schemas, problems, agents: agents ?? [], graphs, servers, features: FEATURES };
  const node = graph.nodes.findIndex((each) => nameOf(each) === chosen);
  if (node >= 0) return html`<${Known.Provider} value=${{ ...known, nodes: upstreamOf(graph, chosen) }}>
    <${NodePanel} key=${chosen} ...${{ graph, at: node, agents, schemas, change, onAgent }} /><//>`;
  const edge = graph.edges.findIndex((each) => idOf(each) === chosen);
  return edge >= 0 && html`<${Known.Provider} value=${known}>
    <${EdgePanel} key=${chosen} ...${{ graph, at: edge, schemas, change }} /><//>`;
}

function NodePanel({ graph, at, agents, schemas, change, onAgent }) {
  const node = graph.nodes[at];
  const [name, type] = [nameOf(node), node.type ?? "agent"];
  const set = (next) => change({ ...graph, nodes: graph.nodes.with(at, { name, ...next }) });
  const isShown = (each) => !ELSEWHERE.includes(each.name)
    && (OWN[type].includes(each.name) || !OTHERS.includes(each.name));
  const agent = type === "agent" ? node.agent : null;
  const isKnown = agents === null || agents.includes(agent);
  const [isOpen, setOpen] = useState(false);
  const way = agent && isKnown && html`<${Button} kind="small" aria-expanded=${isOpen}
    onClick=${() => setOpen(!isOpen)}>Instructions, model and tools<//>`;
  return html`<${Panel} title=${`Node ${name}`} actions=${way}>
    ${isOpen && agent && isKnown && html`<${NodeAgent} key=${agent} name=${agent} />`}
    ${agent && !isKnown && may("define") && html`<${NewAgent} key=${agent} name=${agent} onMade=${onAgent} />`}
    <div class="body stacked"><label>Type of ${name} <select value=${type}
      onChange=${(e) => set(retyped(node, e.target.value))}>${Object.entries(TYPE_WORDS).map(([value, word]) => html`
        <option value=${value}>${word}</option>`)}</select></label>
      <${Fields} schema=${schemas.Node} value=${node} at=${`/nodes/${at}`} onChange=${set}
        shown=${(each) => isShown(each) && OWN[type].includes(each.name)} />
      <details><summary>When it runs, repeats, fails</summary><div class="stacked">
        <${Fields} schema=${schemas.Node} value=${node} at=${`/nodes/${at}`} onChange=${set}
          shown=${(each) => isShown(each) && !OWN[type].includes(each.name)} /></div></details></div><//>`;
}

const WHEN = { always: "always", when: "under a condition", else: "if no other edge is" };

function EdgePanel({ graph, at, schemas, change }) {
  const edge = graph.edges[at];
  const { when, else: isElse, ...plain } = edge;
  const set = (next) => change({ ...graph, edges: graph.edges.with(at, next) });
  const kind = isElse ? "else" : when ? "when" : "always";
  const begin = { always: plain, else: { ...plain, else: true },
    when: { ...plain, when: { feature: "output", op: "contains", value: "" } } };
  return html`<${Panel} title=${`Edge from ${edge.source} to ${edge.target}`}>
    <div class="body stacked"><label>It is taken <select value=${kind} onChange=${(e) => set(begin[e.target.value])}>
      ${Object.entries(WHEN).map(([value, words]) => html`<option value=${value}>${words}</option>`)}</select></label>
      ${kind === "when" && html`<${Fields} schema=${schemas.Edge} value=${edge} at=${`/edges/${at}`} onChange=${set}
        shown=${({ name }) => name === "when"} />`}
      <p class="small soft">${conditionOf(edge) ? `Now: ${conditionOf(edge)}` : ""}</p></div><//>`;
}

/** What is wrong with nodes and edges, with a way to each. */
export function Problems({ graph, problems, onChoose }) {
  const found = problems.map((each) => ({ ...each, id: placeOf(graph, each.pointer) })).filter(({ id }) => id);
  return found.length > 0 && html`<ul class="rows">${found.map(({ id, detail }) => html`<li>
    <${Button} kind="small" onClick=${() => onChoose(id)}>${id}<//> <span class="bad-text">${detail}</span></li>`)}
    </ul>`;
}

/** The node or edge that a JSON Pointer is in; null: none. */
export function placeOf(graph, pointer) {
  const [, list, at] = pointer?.split("/") ?? [];
  const one = list === "nodes" ? graph.nodes[Number(at)] : list === "edges" ? graph.edges[Number(at)] : null;
  return one ? (list === "nodes" ? nameOf(one) : idOf(one)) : null;
}
