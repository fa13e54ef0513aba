/** The agents: a list, and one of them to edit, compare and try. */
import { useState } from "preact/hooks";

import { Editor, useEdited } from "../agents/editor.js";
import { useKnown } from "../forms/schemas.js";
import { asText, contentOf, noteOf, withNote } from "../agents/schema.js";
import { call, url } from "../api.js";
import { excerpt } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { usePostOnce } from "../once.js";
import { Button, chosenOf, Failure, Link, Loaded, Loading, Panel, permitted, Read,
  Select, Tabs, Time } from "../parts/basics.js";
import { Diff } from "../parts/diff.js";
import { Confirmed, Pages, Rows } from "../parts/lists.js";
import { follow, go } from "../router.js";
import { keep, unsaved } from "../unsaved.js";

const NEW = "+new";
const TABS = [["edit", "Settings"], ["versions", "Versions"]];

export function Agents({ id, query }) {
  if (id === NEW) return html`<${New} wanted=${query.name} />`;
  return id ? html`<${Stored} key=${id} name=${id} query=${query} />` : html`<${All} query=${query} />`;
}

function All({ query }) {
  const text = (query.text ?? "").toLowerCase();
  const fits = (agent) => `${agent.name} ${agent.description}`.toLowerCase().includes(text);
  const models = (model) => (model == null ? "default" : [model].flat().join(", "));
  return html`
    <div class="head"><h1>Agents</h1><div class="actions"><${Link} class="button primary" needs="define"
      path=${["agents", NEW]}>New agent<//></div></div>
    <form class="filters" onSubmit=${(e) => e.preventDefault()}><label class="grow">Name or description <input
      type="search" value=${query.text ?? ""} onInput=${(e) => go(["agents"], { text: e.target.value },
        { replace: true })} /></label></form>
    <${Panel}><${Pages} path="/v1/agents" what="agents">${(items) => html`<${Rows} label="Agents"
      items=${items.filter(fits)} id=${({ name }) => name}
      empty=${text ? "No agent is like that." : "There is no agent yet."}
      hint=${html`<p>An agent is a model with a system message, and perhaps tools.</p>`}
      head=${["Agent", "Model", "Sub-agents", "Memory", "#Version", "Changed", ""]} cells=${(each) => [
        html`<${Link} path=${["agents", each.name]}>${each.name}<//> <span class="small soft">${
          excerpt(each.description, 90)}</span>`, models(each.model), each.subagents?.names?.join(", ") || "–",
        each.memory, each.version, html`<${Time} at=${each.created_at} />`, html`<${Link} class="small"
          path=${["health"]} query=${{ agent: each.name }}>Figures<//>`]} />`}<//><//>`;
}

/** `wanted`: the name that it shall have. */
function New({ wanted = "" }) {
  const [postOnce] = usePostOnce();
  const [known, failed] = useKnown();
  const [name, setName] = useState(wanted);
  const make = (content) => follow(postOnce("/v1/agents", { ...content, name }), () => ["agents",
    name]).then(() => keep(NEW, null));
  if (failed) return html`<${Failure} error=${failed} />`;
  if (!known) return html`<${Loading} what="the form" />`;
  return html`<div class="head"><h1>New agent</h1></div>
    <${Editor} known=${known} name=${name} content=${{ system_message: "" }} label="Create" save=${make}
      left=${unsaved(NEW)} onDraft=${(draft) => keep(NEW, draft)}>
      <div class="body"><label>Name <input value=${name} autofocus required pattern="[a-z][a-z0-9_\\-]{0,63}"
        placeholder="lower-case letters, digits, _ and -" onInput=${(e) => setName(e.target.value.trim())} /></label>
        </div><//>`;
}

const Stored = ({ name, query }) => html`<${Read} path=${url`/v1/agents/${name}`} what="the agent">
  ${(agent) => html`<${One} stored=${agent} query=${query} />`}<//>`;

function One({ stored, query }) {
  const [known, failed] = useKnown();
  const { agent, base, path, put, begin, form } = useEdited(stored, known);
  const tab = chosenOf(TABS, query.tab);
  const show = (next) => go(["agents", agent.name], { tab: next === "edit" ? "" : next }, { replace: true });
  const takeBack = (old) => {
    begin(old, agent);
    show("edit");
  };
  const restore = async (old) => begin(null, await put(withNote(contentOf(old, known.schemas.AgentContent),
    `Version ${old.version} again`)));
  const remove = async () => {
    await follow(call("DELETE", path), () => ["agents"]);
    form.onDraft(null);
  };
  return html`
    <div class="head"><div><h1>${agent.name}</h1><p class="small soft">Version ${agent.version}, stored <${Time}
      at=${agent.created_at} />${base && ` · edited from version ${base.version}`}</p></div>
      <div class="actions"><${Link} class="button" needs="run" path=${["chat"]} query=${{ agent: agent.name }}>Chat<//>
        <${Link} class="button" path=${["health"]} query=${{ agent: agent.name }}>Figures<//>
        <${Link} class="button" path=${["runs"]} query=${{ agent: agent.name }}>Its runs<//>
        <${Confirmed} needs="define" label="Delete" question="Runs under way keep it." act=${remove} /></div></div>
    <${Tabs} tabs=${permitted(TABS)} chosen=${tab} onChoose=${show} label="Parts of the agent" />
    <div role="tabpanel" aria-label=${tab} class="stacked">
      <div hidden=${tab !== "edit"}>${failed ? html`<${Failure} error=${failed} />` : known
        ? html`<${Editor} ...${form} label="Save" />`
        : html`<${Loading} what="the form" />`}</div>
      ${tab === "versions" && html`<${Versions} key=${agent.version} agent=${agent} onTakeBack=${takeBack}
        onRestore=${restore} />`}
    </div>`;
}

const LIMIT = 50;

/** `onTakeBack` gets a version to edit, `onRestore` one to store again as the newest. */
function Versions({ agent, onTakeBack, onRestore }) {
  const read = (number) => useData(url`/v1/agents/${agent.name}/versions/${number}`);
  const [pair, setPair] = useState([Math.max(1, agent.version - 1), agent.version]);
  const before = read(pair[0]);
  const after = read(pair[1]);
  const numbers = Array.from({ length: agent.version }, (_, i) => agent.version - i);
  const choice = (label, at) => html`<${Select} label=${label} value=${pair[at]}
    options=${numbers.map((each) => [each, `version ${each}`])}
    onChange=${(number) => setPair(pair.with(at, Number(number)))} />`;
  return html`<${AllVersions} agent=${agent} onRestore=${onRestore} />
    <${Panel} title="Two versions compared">
    <form class="filters body" onSubmit=${(e) => e.preventDefault()}>${choice("From", 0)} ${choice("To", 1)}
      ${before.data && pair[0] !== agent.version && html`<${Button} needs="define"
        onClick=${() => onTakeBack(before.data)}>Edit from version ${pair[0]}<//>`}</form>
    <${Loaded} from=${before} what="the version">${(old) => html`<${Loaded} from=${after} what="the version">
      ${(next) => html`<${Diff} before=${asText(old)} after=${asText(next)} />`}<//>`}<//>
  <//>`;
}

const AllVersions = ({ agent, onRestore }) => html`<${Panel} title="Versions"><${Read} what="versions"
  path=${url`/v1/agents/${agent.name}/versions?order=desc&view=full&limit=${LIMIT}`}>${({ items, next_cursor }) => html`
    <ol class="rows">${items.map((each) => html`<li key=${each.version}><strong>Version ${each.version}</strong>
      <span class="small soft"> <${Time} at=${each.created_at} /></span>
      ${each.version === agent.version ? html` <span class="status ok">current</span>` : html` <${Confirmed}
        needs="define" label="Restore" question=${`Store version ${each.version} again, as the newest?`}
        act=${() => onRestore(each)} />`}
      ${noteOf(each) && html`<div>${noteOf(each)}</div>`}</li>`)}</ol>
    ${next_cursor && html`<p class="small soft">Older ones: <code>GET /v1/agents/${agent.name}/versions</code></p>`}`}
    <//><//>`;
