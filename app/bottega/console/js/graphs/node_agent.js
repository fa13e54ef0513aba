/** The agent of a node, edited in the panel of the node. */
import { useState } from "preact/hooks";

import { AgentForm } from "../agents/form.js";
import { useKnown } from "../agents/known.js";
import { contentOf } from "../agents/schema.js";
import { call, get, url } from "../api.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { usePostOnce } from "../once.js";
import { Button, Failure, Link, Loaded, Loading } from "../parts/basics.js";
import { instead, useWork } from "../parts/work.js";
import { keep, unsaved } from "../unsaved.js";

export function NodeAgent({ name }) {
  const [known, failed] = useKnown();
  const stored = useData(url`/v1/agents/${name}`);
  if (failed) return html`<${Failure} error=${failed} />`;
  if (!known) return html`<${Loading} what="the form" />`;
  return html`<${Loaded} from=${stored} what="the agent">${(agent) => html`<${Form} ...${{ known, stored: agent }} />`}
    <//>`;
}

/** A node's agent that does not exist yet: its instructions make it, all else is set later. */
export function NewAgent({ name, onMade }) {
  const [text, setText] = useState("");
  const [postOnce] = usePostOnce();
  const { busy, error, work } = useWork();
  const make = instead(() => work(() => postOnce("/v1/agents", { name, system_message: text }).then(onMade)));
  return html`<form class="form body" aria-label=${`New agent ${name}`} onSubmit=${make}>
    <p>There is no agent ${name} yet.</p>
    <label>Instructions <textarea rows="3" required value=${text} onInput=${(e) => setText(e.target.value)}></textarea>
      </label>
    ${error && html`<${Failure} error=${error} />`}
    <div class="actions"><${Button} type="submit" kind="primary" busy=${busy}>Create ${name}<//>
      <${Link} path=${["agents", "+new"]} query=${{ name }}>With tools and all else<//></div></form>`;
}

/** What is changed and not stored is the same on the agent's own page. */
function Form({ known, stored }) {
  const place = `agents/${stored.name}`;
  const [agent, setAgent] = useState(unsaved(place)?.agent ?? stored);
  const content = contentOf(agent, known.schemas.AgentContent);
  const [draft, setDraft] = useState(unsaved(place)?.draft ?? content);
  const { busy, error, work, setError } = useWork();
  const [turn, setTurn] = useState(0);
  const isChanged = JSON.stringify(draft) !== JSON.stringify(content);
  const change = (next) => {
    setDraft(next);
    keep(place, JSON.stringify(next) === JSON.stringify(content) ? null : { agent,
      base: unsaved(place)?.base ?? null, draft: next });
  };
  const path = url`/v1/agents/${agent.name}`;
  const save = instead(() => work(async () => {
    const now = await call("PUT", path, draft, { headers: { "If-Match": `"${agent.version}"` } });
    const left = unsaved(place);
    if (left) keep(place, left.draft === draft ? null : { ...left, agent: now });
    setAgent(now);
    setDraft((other) => (other === draft ? contentOf(now, known.schemas.AgentContent) : other));
  }));
  /** Drop what was changed here, for what somebody else has stored. */
  const readAgain = () => work(async () => {
    const now = await get(path);
    keep(place, null);
    setAgent(now);
    setDraft(contentOf(now, known.schemas.AgentContent));
    setTurn(turn + 1);
  });
  const undo = () => {
    change(content);
    setError(null);
    setTurn(turn + 1);
  };
  return html`<form class="stacked node-agent" aria-label=${`Agent ${agent.name}`} onSubmit=${save}>
    <p class="small soft">Version ${agent.version} of ${agent.name}. What is saved is its next version, for the next
      runs of all graphs that name it. <${Link} path=${["agents", agent.name]}>Its page, to try it<//></p>
    <${AgentForm} known=${{ ...known, problems: error?.problem?.errors ?? [] }} draft=${draft} turn=${turn}
      onChange=${change} />
    ${error && html`<${Failure} error=${error} />`}
    ${error?.status === 412 && html`<p class="note bad">Somebody stored another version meanwhile. <${Button}
      kind="small" onClick=${readAgain}>Show theirs, and drop this change<//></p>`}
    <div class="actions"><${Button} needs="define" type="submit" kind="primary" busy=${busy} disabled=${!isChanged}>
      Save ${agent.name}<//>${isChanged && html`<${Button} onClick=${undo}>Undo its changes<//>`}</div></form>`;
}
