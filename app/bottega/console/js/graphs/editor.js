/** The editor of a graph: a drawing that can be changed by mouse, and lists of nodes and edges below the drawing. */
import { useEffect, useRef, useState } from "preact/hooks";

import { Editor, useEdited } from "../agents/editor.js";
import { url } from "../api.js";
import { Known } from "../forms/parts.js";
import { useKnown, useSchemas } from "../forms/schemas.js";
import { Fields } from "../forms/typed.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Empty, Failure, Link, Loading, Panel, Read, Select } from "../parts/basics.js";
import { Canvas } from "../parts/canvas.js";
import { Rows } from "../parts/lists.js";
import { instead, useWork } from "../parts/work.js";
import { may } from "../person.js";
import { conditionOf, cycleOf, has, idOf, levelsOf, moved, nameOf, POLICIES, retyped, upstreamOf, withEdge, withNode,
  withoutEdge, withoutNode, withPolicy, withTtl } from "./draft.js";

const USUAL = "final_response_only";
const KINDS = { agent: "agent", tool: "tool", human: "person", graph: "graph" };

/**
 * `graph`: the draft; `agents`: names of all agents, or null if there are too many; `problems`: `[{pointer, detail}]`
 * of the last try to store the graph; `onChange` gets the changed draft; `onAgent` is called after a new agent.
 */
export function GraphEditor({ graph, agents, problems, onChange, onAgent }) {
  const [chosen, setChosen] = useState(null);
  const [refused, setRefused] = useState(null);
  const level = levelsOf(graph);
  const panel = useRef(null);
  useEffect(() => panel.current?.scrollIntoView({ block: "nearest" }), [chosen]);
  const change = (next) => {
    setRefused(null);
    onChange(next);
  };
  const connect = (source, target, policy = USUAL) => {
    const path = cycleOf(graph, source, target);
    if (path) setRefused(`This edge would close a cycle: ${path.join(" → ")}`);
    else change(withEdge(graph, source, target, policy));
    return !path;
  };
  const nodes = graph.nodes.map((node) => {
    const [id, isBad] = [nameOf(node), isUnknown(agents, node.agent)
      || problems.some((each) => placeOf(graph, each.pointer) === nameOf(node))];
    const kind = node.router ? "router, " : node.agent ? "" : `${node.type}, `;
    const about = isUnknown(agents, node.agent) ? "no such agent" : `${kind}level ${level.get(id) + 1}`;
    return { id, label: `${id}\n${about}`,
      classes: [...(isBad ? ["bad"] : []), ...(chosen === id ? ["chosen"] : [])] };
  });
  const edges = graph.edges.map(
    (edge) => ({ id: idOf(edge), ...edge,
      label: [edge.policy === USUAL ? "" : edge.policy.replaceAll("_", " "), conditionOf(edge)].filter(Boolean)
      .join(", "), classes: chosen === idOf(edge) ? ["chosen"] : [] }));
  return html`
    <${Panel} title="Drawing"
      actions=${html`<span class="small soft">Pull a line from one agent to another to connect them</span>`}>
      ${nodes.length
        ? html`<div class="graph">
          <${Canvas} nodes=${nodes} edges=${edges} onNode=${setChosen} onEdge=${setChosen}
            onConnect=${(source, target) => connect(source, target)}
            label="The graph; the tables below say the same, and change it." /></div>`
        : html`<${Empty} title="The graph is empty."><p>Add its agents below.</p><//>`}
      ${refused && html`<p class="note bad" role="alert">${refused}</p>`}
      <${Problems} graph=${graph} problems=${problems} onChoose=${setChosen} />
    <//>
    <div class="columns">
      <${Agents} ...${{ graph, agents, level, chosen, setChosen, change }} />
      <${Edges} ...${{ graph, chosen, setChosen, change, connect }} />
    </div>
    ${chosen && (has(graph, chosen) || graph.edges.some((edge) => idOf(edge) === chosen))
      && html`<div ref=${panel}><${Details} ...${{ graph, chosen, agents, problems, change, onAgent }} /></div>`}`;
}

/** Move the focus to the table whose row is removed. */
const keepFocus = (event) => event.currentTarget.closest(".scroll").focus();

const isUnknown = (agents, agent) => Boolean(agent) && agents !== null && !agents.includes(agent);

function Agents({ graph, agents, level, chosen, setChosen, change }) {
  const [name, setName] = useState("");
  const [type, setType] = useState("agent");
  const add = instead(() => {
    change(withNode(graph, name.trim(), type));
    setChosen(name.trim());
    setName("");
  });
  return html`<${Panel} title="Agents">
    <div class="body"><form class="filters" onSubmit=${add}>
      <${Select} label="Kind of node" value=${type} options=${Object.entries(KINDS)} onChange=${setType} />
      <label class="grow">${type === "agent" ? "Add an agent" : "Name of the node"}
        <input value=${name} list=${type === "agent" ? "graph-agents" : undefined} required
          pattern="[a-z][a-z0-9_\\-]{0,63}"
          title="Lower-case letters, digits, _ and -; starts with a letter" autocomplete="off"
          onInput=${(e) => setName(e.target.value)} /></label>
      <datalist id="graph-agents">
        ${(agents ?? []).filter((each) => !has(graph, each)).map((each) => html`<option value=${each} />`)}</datalist>
      <button class="button">Add</button>
    </form></div>
    <${Rows} label="Agents of the graph" items=${graph.nodes} id=${nameOf}
      head=${["Agent", "Level", "Expires after (s)", ""]} kind=${(node) => (chosen === nameOf(node) ? "chosen" : "")}
      cells=${(node) => {
        const name = nameOf(node), at = graph.nodes.indexOf(node);
        const act = (label, sign, next, isOff) => html`<${Button} kind="small" aria-label=${label} disabled=${isOff}
          onClick=${(e) => (keepFocus(e), change(next))}>${sign}<//>`;
        return [html`<button type="button" class="link" aria-pressed=${chosen === name}
            onClick=${() => setChosen(name)}>${name}</button>${isUnknown(agents, node.agent) && html`<span
            class="small bad-text"> no such agent</span>`}`, level.get(name) + 1,
          html`<${Seconds} value=${node.ttl_s} label=${`Seconds until what ${name} says expires`}
            onChange=${(seconds) => change(withTtl(graph, name, seconds))} />`,
          html`<span class="actions end-of-row">${act(`${name} earlier`, "↑", moved(graph, name, -1), at === 0)}
            ${act(`${name} later`, "↓", moved(graph, name, 1), at === graph.nodes.length - 1)}
            ${act(`Remove ${name}`, "Remove", withoutNode(graph, name), false)}</span>`];
      }} />
    <p class="small soft">Each level reads only from levels before it. Within a level the order of this table
      counts.</p>
  <//>`;
}

/** A field for a number. It reports the number when the focus leaves; typed text survives a redraw of the page. */
function Seconds({ value, label, onChange }) {
  const [typed, setTyped] = useState(null);
  return html`<input class="short" type="number" min="1" max="31536000" placeholder="never"
    value=${typed ?? value ?? ""} aria-label=${label} onInput=${(e) => setTyped(e.target.value)}
    onChange=${(e) => (setTyped(null), onChange(e.target.value ? Number(e.target.value) : null))} />`;
}

function Edges({ graph, chosen, setChosen, change, connect }) {
  const names = graph.nodes.map(nameOf);
  const [wanted, setWanted] = useState({ source: "", target: "", policy: USUAL });
  const set = (part) => setWanted((old) => ({ ...old, ...part }));
  const add = instead(() => {
    if (connect(wanted.source, wanted.target, wanted.policy)) setWanted({ source: "", target: "", policy: USUAL });
  });
  const choice = (label, name) => html`<${Select} label=${label} required any="agent" value=${wanted[name]}
    options=${names} onChange=${(value) => set({ [name]: value })} />`;
  return html`<${Panel} title="Edges">
    <div class="body"><form class="filters" onSubmit=${add}>
      ${choice("From", "source")} ${choice("To", "target")}
      <label>Passes on <${Policy} value=${wanted.policy} onChange=${(policy) => set({ policy })} /></label>
      <button class="button">Connect</button>
    </form></div>
    <${Rows} label="Edges of the graph" items=${graph.edges} id=${idOf} empty="No agent reads from another yet."
      head=${["From", "To", "Passes on", "Taken", ""]}
      kind=${(edge) => ([idOf(edge), edge.source, edge.target].includes(chosen) ? "chosen" : "")} cells=${(edge) => [
        edge.source, edge.target, html`<${Policy} value=${edge.policy} onFocus=${() => setChosen(idOf(edge))}
          label=${`What passes from ${edge.source} to ${edge.target}`}
          onChange=${(policy) => change(withPolicy(graph, idOf(edge), policy))} />`,
        html`<button type="button" class="link" onClick=${() => setChosen(idOf(edge))}>${conditionOf(edge) || "always"}
          <span class="hidden">: when ${edge.source} to ${edge.target} is taken</span></button>`,
        html`<${Button} kind="small" aria-label=${`Remove ${edge.source} to ${edge.target}`}
          onClick=${(e) => (keepFocus(e), change(withoutEdge(graph, idOf(edge))))}>Remove<//>`]} />
    <p class="small soft">An edge passes what its source says to its target, before the target's first model call.</p>
  <//>`;
}

const Policy = ({ value, label, onChange, onFocus }) =>
  html`<select value=${value} aria-label=${label} onFocus=${onFocus} onChange=${(e) => onChange(e.target.value)}>
  ${Object.entries(POLICIES).map(([name, words]) => html`<option value=${name}>${words}</option>`)}</select>`;

/** A link to the page where the agents of a graph are made. */
export const MissingAgents = ({ graph, agents }) => {
  const missing = agents === null ? [] : graph.nodes.filter(({ agent }) => isUnknown(agents, agent));
  return missing.length
    ? html`<p class="note">A run of this graph is refused until there are agents of these
      names: ${missing.map(({ agent }) => agent).join(", ")}. <${Link} path=${["agents"]}>Make them<//></p>`
    : null;
};

/** Fields that only nodes of one type have. */
const OWN = { agent: ["agent", "router"], tool: ["tool", "arguments"], human: ["ask", "schema", "who", "expires_s"],
  graph: ["graph", "version", "loop"] };
const TYPE_WORDS = { agent: "Agent", tool: "Tool", human: "A person", graph: "Another graph" };
/** The field of a node, in the table of nodes or in the panel. */
const ELSEWHERE = ["name", "type", "ttl_s", "source", "target", "policy"];
const OTHERS = Object.values(OWN).flat();
const FEATURES = ["status", "output", "output_json", "input", "metadata"];

/** `problems`: `[{pointer, detail}]` of the last try to store the graph; `onAgent` is called after a new agent. */
function Details({ graph, chosen, agents, problems, change, onAgent }) {
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
    <div class="body stacked"><${Select} label=${`Type of ${name}`} value=${type}
      options=${Object.entries(TYPE_WORDS)} onChange=${(value) => set(retyped(node, value))} />
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
    <div class="body stacked"><${Select} label="It is taken" value=${kind}
      options=${Object.entries(WHEN)} onChange=${(value) => set(begin[value])} />
      ${kind === "when" && html`<${Fields} schema=${schemas.Edge} value=${edge} at=${`/edges/${at}`} onChange=${set}
        shown=${({ name }) => name === "when"} />`}
      <p class="small soft">${conditionOf(edge) ? `Now: ${conditionOf(edge)}` : ""}</p></div><//>`;
}

/** Errors of nodes and edges, with a link to each node or edge. */
function Problems({ graph, problems, onChoose }) {
  const found = problems.map((each) => ({ ...each, id: placeOf(graph, each.pointer) })).filter(({ id }) => id);
  return found.length > 0 && html`<ul class="rows">${found.map(({ id, detail }) => html`<li>
    <${Button} kind="small" onClick=${() => onChoose(id)}>${id}<//> <span class="bad-text">${detail}</span></li>`)}
    </ul>`;
}

/** The node or edge to which a JSON Pointer leads; null: none. */
function placeOf(graph, pointer) {
  const [, list, at] = pointer?.split("/") ?? [];
  const one = list === "nodes" ? graph.nodes[Number(at)] : list === "edges" ? graph.edges[Number(at)] : null;
  return one ? (list === "nodes" ? nameOf(one) : idOf(one)) : null;
}

function NodeAgent({ name }) {
  const [known, failed] = useKnown();
  if (failed) return html`<${Failure} error=${failed} />`;
  if (!known) return html`<${Loading} what="the form" />`;
  return html`<${Read} path=${url`/v1/agents/${name}`} what="the agent">${(stored) => html`<${Form}
    ...${{ known, stored }} />`}<//>`;
}

/** A form that makes a node's missing agent from instructions. The user sets all other fields later. */
function NewAgent({ name, onMade }) {
  const [text, setText] = useState("");
  const { busy, error, work, postOnce } = useWork();
  const make = instead(() => work(() => postOnce("/v1/agents", { name, system_message: text }).then(onMade)));
  return html`<form class="form body" aria-label=${`New agent ${name}`} onSubmit=${make}>
    <p>There is no agent ${name} yet.</p>
    <label>Instructions <textarea rows="3" required value=${text} onInput=${(e) => setText(e.target.value)}></textarea>
      </label>
    ${error && html`<${Failure} error=${error} />`}
    <div class="actions"><${Button} type="submit" kind="primary" busy=${busy}>Create ${name}<//>
      <${Link} path=${["agents", "+new"]} query=${{ name }}>With tools and all else<//></div></form>`;
}

/** The agent's own page has the same changes that are not stored. */
function Form({ known, stored }) {
  const { agent, form } = useEdited(stored, known);
  return html`<div class="node-agent"><${Editor} ...${form} label=${`Save ${agent.name}`} isAlone=${false}>
    <p class="small soft body">Version ${agent.version} of ${agent.name}. What is saved is its next version, for the
      next runs of all graphs that name it. <${Link}
        path=${["agents", agent.name]}>Its page, to try it<//></p><//></div>`;
}
