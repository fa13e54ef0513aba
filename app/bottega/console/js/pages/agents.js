/** The agents: a list, and one of them to edit, compare and try. */
import { useEffect, useState } from "preact/hooks";

import { AgentForm } from "../agents/form.js";
import { DraftChat } from "../agents/draft_chat.js";
import { useKnown } from "../agents/known.js";
import { asText, contentOf, trialOf, withNote } from "../agents/schema.js";
import { Versions } from "../agents/versions.js";
import { call, get, url } from "../api.js";
import { AgentFigures } from "../figures/outcomes.js";
import { excerpt } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { usePostOnce } from "../once.js";
import { Button, Empty, Failure, Link, Loaded, Loading, Panel, Tabs, Time, chosenOf,
  permitted } from "../parts/basics.js";
import { Diff } from "../parts/diff.js";
import { Confirmed, Pages, Table } from "../parts/lists.js";
import { RunTable } from "../parts/run_table.js";
import { SpanChoice, spanOf } from "../parts/series.js";
import { follow, go } from "../router.js";
import { keep, unsaved } from "../unsaved.js";

const NEW = "+new";
const TABS = [["edit", "Settings"], ["versions", "Versions"], ["figures", "Figures"],
  ["runs", "Runs"]];

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
      ${tab === "figures" && html`<${Figures} agent=${agent.name} query=${query} />`}
      ${tab === "runs" && html`<${Latest} name=${agent.name} />`}
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
      <${AgentForm} known=${{ ...known, problems, onTry: (tool) => setAsked(trialOf(tool)) }} draft=${draft}
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
    <${DraftChat} name=${name} draft=${draft} asked=${asked} onProblems=${setProblems} /></div>`;
}

function Figures({ agent, query }) {
  const span = spanOf(query, "30d");
  return html`<div class="actions"><${SpanChoice} span=${span} onChange=${(value) => go(["agents", agent],
    { tab: "figures", span: value }, { replace: true })} />
    <${Link} path=${["health"]} query=${{ agent, span }}>Its charts<//></div>
    <${AgentFigures} key=${span} agent=${agent} span=${span} />`;
}

function Latest({ name }) {
  const found = useData(url`/v1/runs?agent=${name}&limit=20&order=desc`, { everyMs: 4000 });
  return html`<${Panel}><${Loaded} from=${found} what="runs">${({ items }) => items.length ? html`<${RunTable}
    runs=${items} />` : html`<${Empty} title="It has not run yet." />`}<//><//>`;
}
