/** The agents: a list, and one of them to edit, compare and try. */
import { useEffect, useState } from "preact/hooks";

import { DraftChat, TrialForm } from "../agents/draft_chat.js";
import { AgentForm } from "../agents/form.js";
import { useKnown } from "../forms/schemas.js";
import { asText, contentOf, noteOf, withNote } from "../agents/schema.js";
import { call, get, url } from "../api.js";
import { excerpt } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { usePostOnce } from "../once.js";
import { Button, chosenOf, Empty, Failure, Link, Loaded, Loading, Panel, permitted, Tabs,
  Time } from "../parts/basics.js";
import { Diff } from "../parts/diff.js";
import { Confirmed, Pages, Table } from "../parts/lists.js";
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
    <${Panel}><${Pages} path="/v1/agents" what="agents">${(items) => items.filter(fits).length
      ? html`<${Table} label="Agents" head=${["Agent", "Model", "Sub-agents", "Memory", "#Version", "Changed", ""]}>
        ${items.filter(fits).map((each) => html`<tr key=${each.name}><td><${Link} path=${["agents", each.name]}>
          ${each.name}<//> <span class="small soft">${excerpt(each.description, 90)}</span></td>
        <td class="small">${models(each.model)}</td><td class="small">${each.subagents?.names?.join(", ") || "–"}</td>
          <td>${each.memory}</td><td class="right">${each.version}</td><td><${Time} at=${each.created_at} /></td>
          <td><${Link} class="small" path=${["health"]} query=${{ agent: each.name }}>Figures<//></td></tr>`)}<//>`
      : html`<${Empty} title=${text ? "No agent is like that." : "There is no agent yet."}>
        <p>An agent is a model with a system message, and perhaps tools.</p><//>`}<//><//>`;
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

function Stored({ name, query }) {
  const stored = useData(url`/v1/agents/${name}`);
  return html`<${Loaded} from=${stored} what="the agent">${(agent) => html`<${One} stored=${agent} query=${query} />`}
    <//>`;
}

/** `stored`: the agent when the page was opened; a later version that somebody else stores is not taken unasked. */
function One({ stored, query }) {
  const [known, failed] = useKnown();
  const place = `agents/${stored.name}`;
  const left = unsaved(place); // when the page was left
  const [agent, setAgent] = useState(left?.agent ?? stored);
  const [base, setBase] = useState(left?.base ?? null);
  const [turn, setTurn] = useState(0); // counts what the form began with
  const tab = chosenOf(TABS, query.tab);
  const show = (next) => go(["agents", agent.name], { tab: next === "edit" ? "" : next }, { replace: true });
  const path = url`/v1/agents/${agent.name}`;
  const schema = known?.schemas.AgentContent;
  const put = (content) => call("PUT", path, content, { headers: { "If-Match": `"${agent.version}"` } });
  const save = async (content, draft) => {
    const now = await put(content);
    if (unsaved(place)?.draft === draft) keep(place, null); // also if the page was left
    setBase(null);
    setAgent(now);
    return contentOf(now, schema);
  };
  const begin = (old, now) => {
    keep(place, null);
    setBase(old);
    setAgent(now);
    setTurn(turn + 1);
  };
  const takeBack = (old) => {
    begin(old, agent);
    show("edit");
  };
  const restore = async (old) => begin(null, await put(withNote(contentOf(old, schema),
    `Version ${old.version} again`)));
  const remove = async () => {
    await follow(call("DELETE", path), () => ["agents"]);
    keep(place, null);
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
        ? html`<${Editor} key=${turn} known=${known} name=${agent.name} content=${contentOf(base ?? agent, schema)}
          label="Save" save=${save} again=${async () => begin(null, await get(path))} isChanged=${base !== null}
          stored=${agent} left=${left?.draft} onDraft=${(draft) => keep(place, draft && { agent, base, draft })} />`
        : html`<${Loading} what="the form" />`}</div>
      ${tab === "versions" && html`<${Versions} key=${agent.version} agent=${agent} onTakeBack=${takeBack}
        onRestore=${restore} />`}
    </div>`;
}

/**
 * `left`: the draft when the page was left; `onDraft` gets each draft, or null if it is what is stored. `stored`: the
 * agent that a draft is compared with.
 */
function Editor({ known, name, content, label, save, again, stored, isChanged = false, left, onDraft, children }) {
  const [draft, setDraft] = useState(left ?? content);
  const [note, setNote] = useState("");
  const [error, setError] = useState(null);
  const [problems, setProblems] = useState([]);
  const [busy, setBusy] = useState(false);
  const [turn, setTurn] = useState(0); // counts how often all was undone
  const [asked, setAsked] = useState(null);
  const [tried, setTried] = useState(null); // a tool, for which arguments are typed
  const [isWrong, setIsWrong] = useState(false); // a field has a text that is no JSON yet
  const touched = isChanged || isWrong || JSON.stringify(draft) !== JSON.stringify(content);
  useEffect(() => onDraft(touched ? draft : null));
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    setProblems([]);
    try {
      const now = await save(withNote(draft, note), draft);
      setNote("");
      if (now) setDraft((other) => (other === draft ? now : other)); // what was typed meanwhile stays
    } catch (problem) {
      setError(problem);
      setProblems(problem.problem?.errors ?? []);
    }
    setBusy(false);
  };
  const undo = () => {
    setDraft(content);
    setError(null);
    setProblems([]);
    setIsWrong(false);
    setTurn(turn + 1);
  };
  return html`<div class="build"><form onSubmit=${submit}
    onInput=${(e) => setIsWrong([...e.currentTarget.elements].some((each) => each.validity.customError))}
      class="stacked"><${Panel}>${children}
      <${AgentForm} known=${{ ...known, problems, onTry: setTried }} draft=${draft}
        turn=${turn} onChange=${setDraft} />
    <//>
    ${error && html`<${Failure} error=${error} />`}
    ${error?.status === 412 && html`<p class="note bad">Somebody stored another version meanwhile. <${Button}
      kind="small" onClick=${() => again().catch(setError)}>Show theirs, and drop this change<//></p>`}
    ${stored && touched && html`<details class="panel"><summary>What differs from version ${stored.version}</summary>
      <${Diff} before=${asText(contentOf(stored, known.schemas.AgentContent))} after=${asText(draft)} /></details>`}
    <div class="composer"><${Button} needs="define" type="submit" kind="primary" busy=${busy} disabled=${!touched}>
      ${label}<//>${touched && html`<${Button} onClick=${undo}>Undo all<//>
      <label class="grow">Note on this version <input value=${note} maxlength="500"
        onInput=${(e) => setNote(e.target.value)} /></label>`}</div></form>
    <div class="stacked">${tried && html`<${TrialForm} key=${JSON.stringify(tried)} definition=${tried}
        parameters=${tried.parameters} onAsk=${setAsked} onCancel=${() => setTried(null)} />`}
      <${DraftChat} name=${name} draft=${draft} asked=${asked} onProblems=${setProblems} /></div></div>`;
}

const LIMIT = 50;

/** `onTakeBack` gets a version to edit, `onRestore` one to store again as the newest. */
function Versions({ agent, onTakeBack, onRestore }) {
  const read = (number) => useData(url`/v1/agents/${agent.name}/versions/${number}`);
  const [pair, setPair] = useState([Math.max(1, agent.version - 1), agent.version]);
  const before = read(pair[0]);
  const after = read(pair[1]);
  const numbers = Array.from({ length: agent.version }, (_, i) => agent.version - i);
  const choice = (label, at) => html`<label>${label} <select value=${pair[at]}
    onChange=${(e) => setPair(pair.with(at, Number(e.target.value)))}>
    ${numbers.map((each) => html`<option value=${each}>version ${each}</option>`)}</select></label>`;
  return html`<${AllVersions} agent=${agent} onRestore=${onRestore} />
    <${Panel} title="Two versions compared">
    <form class="filters body" onSubmit=${(e) => e.preventDefault()}>${choice("From", 0)} ${choice("To", 1)}
      ${before.data && pair[0] !== agent.version && html`<${Button} needs="define"
        onClick=${() => onTakeBack(before.data)}>Edit from version ${pair[0]}<//>`}</form>
    <${Loaded} from=${before} what="the version">${(old) => html`<${Loaded} from=${after} what="the version">
      ${(next) => html`<${Diff} before=${asText(old)} after=${asText(next)} />`}<//>`}<//>
  <//>`;
}

function AllVersions({ agent, onRestore }) {
  const versions = useData(url`/v1/agents/${agent.name}/versions?order=desc&view=full&limit=${LIMIT}`);
  return html`<${Panel} title="Versions"><${Loaded} from=${versions} what="versions">${({ items, next_cursor }) => html`
    <ol class="rows">${items.map((each) => html`<li key=${each.version}><strong>Version ${each.version}</strong>
      <span class="small soft"> <${Time} at=${each.created_at} /></span>
      ${each.version === agent.version ? html` <span class="status ok">current</span>` : html` <${Confirmed}
        needs="define" label="Restore" question=${`Store version ${each.version} again, as the newest?`}
        act=${() => onRestore(each)} />`}
      ${noteOf(each) && html`<div>${noteOf(each)}</div>`}</li>`)}</ol>
    ${next_cursor && html`<p class="small soft">Older ones: <code>GET /v1/agents/${agent.name}/versions</code></p>`}`}
    <//><//>`;
}
