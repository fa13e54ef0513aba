/** The graphs: a list, and one of them to look at, change and try. */
import { useEffect, useState } from "preact/hooks";

import { call, get, url } from "../api.js";
import { changes, draftOf } from "../graphs/draft.js";
import { Editor, MissingAgents } from "../graphs/editor.js";
import { Trial } from "../graphs/trial.js";
import { Versions } from "../graphs/versions.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { usePostOnce } from "../once.js";
import { Button, Empty, Failure, Link, Loaded, Panel, Tabs, Time, chosenOf, permitted } from "../parts/basics.js";
import { Dialog } from "../parts/dialog.js";
import { Pages, Table } from "../parts/lists.js";
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
    <${Panel}><${Pages} path="/v1/graphs" what="graphs">${(graphs) => graphs.length
      ? html`<${Table} label="Graphs" head=${["Graph", "#Version", "Stored"]}>${graphs.map((graph) => html`<tr
        key=${graph.name}>
          <td><${Link} path=${["graphs", graph.name]}>${graph.name}<//></td><td class="right">${graph.version}</td><td>
            <${Time} at=${graph.created_at} /></td></tr>`)}<//>`
      : html`<${Empty} title="There is no graph yet.">
        <p>A graph says which agents receive whose answers. Make one above.</p><//>`}<//><//>`;
}

function New() {
  const [postOnce] = usePostOnce();
  const [name, setName] = useState("");
  const { error, work } = useWork();
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
  const stored = useData(url`/v1/graphs/${name}`);
  const known = useData("/v1/agents?limit=200");
  const agents = known.data && !known.data.next_cursor ? known.data.items.map((agent) => agent.name) : null;
  return html`<${Loaded} from=${stored} what="the graph">${(graph) => html`<${Workshop} ...${{ graph, agents, query }}
    reload=${stored.reload} onAgent=${known.reload} />`}<//>`;
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
    ${tab === "edit" && html`<${Editor} graph=${draft} agents=${agents} problems=${error?.problem?.errors ?? []}
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
