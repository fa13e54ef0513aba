/** The graphs: a list, and one of them to look at, change and try. */
import { useEffect, useState } from "preact/hooks";

import { call, get, post, url } from "../api.js";
import { excerpt } from "../format.js";
import { changes, draftOf, POLICIES } from "../graphs/draft.js";
import { GraphEditor, MissingAgents } from "../graphs/editor.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, chosenOf, Failure, Link, Panel, permitted, Read, Status, Tabs, Time,
  Value } from "../parts/basics.js";
import { Dialog } from "../parts/dialog.js";
import { Pages, Rows } from "../parts/lists.js";
import { instead, useWork } from "../parts/work.js";
import { may } from "../person.js";
import { follow, go } from "../router.js";
import { keep, unsaved } from "../unsaved.js";

const TABS = [["edit", "Graph"], ["try", "Try it", "run"], ["versions", "Versions"]];

export function Graphs({ id, query }) {
  return id ? html`<${One} key=${id} name=${id} query=${query} />` : html`<${All} />`;
}

function All() {
  return html`
    <div class="head"><h1>Graphs</h1></div>
    <${New} />
    <${Panel}><${Pages} path="/v1/graphs" what="graphs">${(graphs) => html`<${Rows} label="Graphs" items=${graphs}
      id=${({ name }) => name} head=${["Graph", "#Version", "Stored"]} empty="There is no graph yet."
      hint=${html`<p>A graph says which agents receive whose answers. Make one above.</p>`} cells=${(graph) => [
        html`<${Link} path=${["graphs", graph.name]}>${graph.name}<//>`, graph.version,
        html`<${Time} at=${graph.created_at} />`]} />`}<//><//>`;
}

function New() {
  const [name, setName] = useState("");
  const { error, work, postOnce } = useWork();
  const make = instead(() => work(() => follow(postOnce("/v1/graphs", { name }), () => ["graphs", name])));
  return may("define") && html`<form class="filters" onSubmit=${make}>
      <label>Name of a new graph <input value=${name} required pattern="[a-z][a-z0-9_\\-]{0,63}"
        title="Lower-case letters, digits, _ and -; starts with a letter" autocomplete="off"
          onInput=${(e) => setName(e.target.value.trim())} /></label>
      <button class="button primary">Create</button>
    </form>
    ${error && html`<${Failure} error=${error} />`}`;
}

function One({ name, query }) {
  const known = useData("/v1/agents?limit=200");
  const agents = known.data && !known.data.next_cursor ? known.data.items.map((agent) => agent.name) : null;
  return html`<${Read} path=${url`/v1/graphs/${name}`} what="the graph">${(graph, reload) => html`<${Workshop}
    ...${{ graph, agents, query, reload }} onAgent=${known.reload} />`}<//>`;
}

/** The page of one graph, with the drafts since it was last stored: the last one is shown. */
function Workshop({ graph, agents, query, reload, onAgent }) {
  const { name } = graph;
  const place = `graphs/${name}`;
  const [base, setBase] = useState(unsaved(place)?.base ?? graph);
  const [drafts, setDrafts] = useState(unsaved(place)?.drafts ?? []);
  const { busy, error, work, setError } = useWork();
  const [removes, setRemoves] = useState(false);
  const draft = drafts.at(-1) ?? draftOf(base);
  const differences = changes(base, draft);
  const isChanged = differences.length > 0;
  const tab = chosenOf(TABS, query.tab);
  const show = (next) => go(["graphs", name], { tab: next === "edit" ? "" : next }, { replace: true });
  useEffect(() => keep(place, isChanged ? { base, drafts } : null), [base, drafts]);
  const undo = () => setDrafts((old) => old.slice(0, -1));
  useEffect(() => {
    const onKeyDown = (event) => {
      if (!(event.ctrlKey || event.metaKey) || event.key !== "z" || event.target.matches("input, textarea")) return;
      event.preventDefault();
      undo();
    };
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  }, []);
  const adopt = (next) => {
    setBase(next);
    setDrafts([]);
    setError(null);
  };
  const save = () => work(async () => {
    setBase(await call("PUT", url`/v1/graphs/${name}`, draft, { headers: { "If-Match": `"${base.version}"` } }));
    if (unsaved(place)?.drafts.at(-1) === draft) keep(place, null); // also if the page was left
    // What was changed or undone meanwhile stays.
    setDrafts((now) => (now.includes(draft) ? now.slice(now.indexOf(draft) + 1) : [now.at(-1) ?? draftOf(base)]));
    reload();
  });
  return html`<div class="workshop">
    <div class="head">
      <div><h1>${name}</h1><p class="soft small">Version ${base.version}, stored <${Time} at=${base.created_at} /></p>
        </div>
      <div class="actions">
        <${Button} disabled=${!drafts.length} onClick=${undo}>Undo<//>
        <${Button} needs="define" kind="primary" busy=${busy} disabled=${!isChanged}
          onClick=${save}>Save version ${base.version + 1}<//>
        <${Button} needs="define" kind="danger" onClick=${() => setRemoves(true)}>Delete<//>
      </div>
    </div>
    ${error && html`<${Failure} error=${error} />`}
    ${error?.status === 412 && html`<p class="note">Somebody stored another version. <${Button} kind="small"
      onClick=${() => get(url`/v1/graphs/${name}`).then(adopt, setError)}>Drop my changes and show it<//></p>`}
    ${isChanged && html`<p class="note" role="status">Not saved: ${differences.join(" · ")}</p>`}
    <${MissingAgents} graph=${draft} agents=${agents} />
    <${Tabs} tabs=${permitted(TABS)} chosen=${tab} onChoose=${show} label="Views of the graph" />
    ${tab === "edit" && html`<${GraphEditor} graph=${draft} agents=${agents} problems=${error?.problem?.errors ?? []}
      onAgent=${onAgent} onChange=${(next) => setDrafts((old) => [...old, next])} />`}
    ${tab === "try" && html`<${Trial} name=${name} agents=${agents} isChanged=${isChanged} />`}
    ${tab === "versions" && html`<${Versions} key=${base.version} name=${name} current=${base.version}
      onTake=${(content) => {
      setDrafts((old) => [...old, content]);
      show("edit");
    }} />`}
    ${removes && html`<${Removal} name=${name} version=${base.version} onClose=${() => setRemoves(false)} />`}
  </div>`;
}

function Removal({ name, version, onClose }) {
  const { error, work } = useWork();
  const remove = () => work(async () => {
    await follow(call("DELETE", url`/v1/graphs/${name}`, undefined, { headers: { "If-Match": `"${version}"` } }),
      () => ["graphs"]);
    keep(`graphs/${name}`, null);
  });
  return html`<${Dialog} title=${`Delete ${name}?`} onClose=${onClose}>
    <p>Runs that were accepted keep their version. Schedules that name the graph fail.</p>
    ${error && html`<${Failure} error=${error} />`}
    <div class="actions"><${Button} kind="danger" onClick=${remove}>Delete it<//><${Button}
      onClick=${onClose}>Keep it<//></div>
  <//>`;
}

const LIMIT = 50;

/** `current`: the stored version's number; `onTake` gets the content of a version. */
const Versions = ({ name, current, onTake }) => html`<${Panel} title="Versions">
    <${Read} path=${url`/v1/graphs/${name}/versions?order=desc&view=full&limit=${LIMIT}`} what="versions">
      ${({ items, next_cursor }) => html`
      <ol class="rows">${items.map((graph, at) => html`<li key=${graph.version}>
        <strong>Version ${graph.version}</strong> <span class="small soft"><${Time} at=${graph.created_at}
          /> · ${graph.nodes.length} agents, ${graph.edges.length} edges</span>
        ${graph.version === current ? html` <span class="status ok">current</span>` : html` <${Button} needs="define"
          kind="small" aria-label=${`Edit version ${graph.version}`}
            onClick=${() => onTake(draftOf(graph))}>Go back to it<//>`}
        <div class="small soft">${items[at + 1] ? changes(items[at + 1], graph).join(" · ") || "no change"
          : graph.version === 1 ? "the first" : ""}</div></li>`)}</ol>
      ${next_cursor && html`<p class="small soft">Older ones: <code>GET /v1/graphs/${name}/versions</code></p>`}`}<//>
  <//>`;

/** `name`: of the graph; `agents`: names, or null; `isChanged`: the page has changes that are not stored. */
function Trial({ name, agents, isChanged }) {
  const [agent, setAgent] = useState("");
  const [input, setInput] = useState("");
  const { busy, error, work, postOnce } = useWork();
  const [found, setFound] = useState(null);
  const asked = agent ? { agent, input } : { input };
  const dryRun = instead(() => work(async () => setFound(await post(url`/v1/graphs/${name}/dry-run`, asked)), "dry"));
  const start = () => work(() =>
    follow(postOnce("/v1/runs", { ...asked, graph: name, mode: agent ? "orchestrated" : "dag" }),
      ({ id }) => ["runs", id]));
  return html`
    <${Panel} title="Try it">
      <form class="body form" onSubmit=${dryRun}>
        ${isChanged && html`<p class="note">It tries the stored version, without your changes.</p>`}
        <label>Ask <input value=${agent} list="trial-agents" placeholder="all agents of the graph" autocomplete="off"
          onInput=${(e) => setAgent(e.target.value.trim())} /></label>
        <datalist id="trial-agents">${(agents ?? []).map((each) => html`<option value=${each} />`)}</datalist>
        <label>Question <textarea rows="2" required maxlength="20000" value=${input}
          onInput=${(e) => setInput(e.target.value)}></textarea></label>
        <div class="actions">
          <${Button} type="submit" kind="primary" busy=${Boolean(busy)}>${busy === "dry" ? "Working…" : "Dry run"}<//>
          <${Button} busy=${Boolean(busy)} disabled=${!input} onClick=${start}>Start a run<//>
          <span class="small soft">A dry run uses the demo model, calls no tool that has an effect, and stores
            nothing.</span>
        </div>
      </form>
      ${error && html`<${Failure} error=${error} />`}
    <//>
    ${found && html`<${Result} found=${found} />`}`;
}

function Result({ found }) {
  const said = new Map(found.tasks.map(({ agent, output }) => [agent, output])); // a node has its agent's name mostly
  const flows = found.tasks.flatMap(
    (task) => task.received.map((each) => ({ ...each, number: task.number, target: task.agent })));
  return html`
    <${Panel} title=${`What version ${found.version} would do`}>
      <div class="body" role="status">
        <p>${found.tasks.length} tasks, ${flows.length} texts received.
          Levels: ${found.levels.map((level) => level.join(", ")).join(" → ")}.</p>
        <ul class="rows" aria-label="What became of each node">${found.nodes.map((each) => html`<li key=${each.name}>
          <strong>${each.name}</strong> <${Status} value=${each.status} /> ${each.reason
            ?? excerpt(said.get(each.name), 160)}</li>`)}</ul>
        ${found.error && html`<p class="note bad">${found.error}</p>`}
        ${found.warnings.map(({ message }) => html`<p class="note">${message}</p>`)}
        <${Tools} agents=${found.agents} />
      </div>
      ${found.tasks.map((task) => html`<${Task} key=${task.number} task=${task} />`)}
    <//>
    <${Panel} title="The answer"><div class="body">
      ${typeof found.output === "string" ? html`<pre class="text">${found.output}</pre>`
        : html`<${Value} value=${found.output} />`}
    </div><//>`;
}

function Tools({ agents }) {
  const having = agents.filter(({ tools }) => tools.some((tool) => !tool.agent));
  if (!having.length) return null;
  return html`<ul class="small">
    ${having.map(({ agent, tools }) =>
      html`<li key=${agent}>${agent} would
        have: ${tools.filter((tool) => !tool.agent)
          .map((tool) => `${tool.name}${tool.called ? "" : " (not called here)"}`).join(", ")}</li>`)}</ul>`;
}

const calledBy = ({ messages }) => messages.flatMap((each) => each.tool_calls.map(({ name }) => name));

function Task({ task }) {
  const from = task.received.map((each) => `${each.source} v${each.version}`);
  return html`<details class="trial-task">
    <summary><span class="numbers soft">${task.number}</span> <strong>${task.agent}</strong> <span class="small soft">
      ${task.parent === null ? "asked by the run" : `asked by task ${task.parent}`}
      ${from.length ? ` · received ${from.join(", ")}` : ""} · calls ${calledBy(task).join(", ") || "no tool"}</span>
        ${task.error && html` <span class="status bad">${task.error}</span>`}</summary>
    <div class="body">
      ${task.received.map((each) =>
        html`<div key=${`${each.source}${each.version}`}>
          <h3>From ${each.source}, version ${each.version}: ${POLICIES[each.policy] ?? "recalled"}</h3>
          <pre class="text">${each.content}</pre></div>`)}
      <h3>As the model sees it</h3>
      ${task.messages.map((message, at) =>
        html`<div key=${at} class=${`message ${message.role}`}><span class="small soft">${message.role}</span>
        ${message.content && html`<pre class="text">${message.content}</pre>`}
        ${message.tool_calls.map(
          (call) => html`<p key=${call.id}
            class="small">calls <code>${call.name}</code> <code>${JSON.stringify(call.arguments)}</code></p>`)}</div>`)}
    </div>
  </details>`;
}
