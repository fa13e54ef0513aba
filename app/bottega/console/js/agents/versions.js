/** The versions of an agent: a list with their notes, and any two of them compared. */
import { useState } from "preact/hooks";

import { url } from "../api.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Loaded, Panel, Time } from "../parts/basics.js";
import { Diff } from "../parts/diff.js";
import { Confirmed } from "../parts/lists.js";
import { asText, noteOf } from "./schema.js";

const LIMIT = 50;

/** `onTakeBack` gets a version to edit, `onRestore` one to store again as the newest. */
export function Versions({ agent, onTakeBack, onRestore }) {
  const read = (number) => useData(url`/v1/agents/${agent.name}/versions/${number}`);
  const [pair, setPair] = useState([Math.max(1, agent.version - 1), agent.version]);
  const before = read(pair[0]);
  const after = read(pair[1]);
  const numbers = Array.from({ length: agent.version }, (_, i) => agent.version - i);
  const choice = (label, at) => html`<label>${label} <select value=${pair[at]}
    onChange=${(e) => setPair(pair.with(at, Number(e.target.value)))}>
    ${numbers.map((each) => html`<option value=${each}>version ${each}</option>`)}</select></label>`;
  return html`<${All} agent=${agent} onRestore=${onRestore} />
    <${Panel} title="Two versions compared">
    <form class="filters body" onSubmit=${(e) => e.preventDefault()}>${choice("From", 0)} ${choice("To", 1)}
      ${before.data && pair[0] !== agent.version && html`<${Button} needs="define"
        onClick=${() => onTakeBack(before.data)}>Edit from version ${pair[0]}<//>`}</form>
    <${Loaded} from=${before} what="the version">${(old) => html`<${Loaded} from=${after} what="the version">
      ${(next) => html`<${Diff} before=${asText(old)} after=${asText(next)} />`}<//>`}<//>
  <//>`;
}

function All({ agent, onRestore }) {
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
