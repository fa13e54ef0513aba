/** The versions of an agent, any two of them compared. */
import { useState } from "preact/hooks";

import { url } from "../api.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Loaded, Panel } from "../parts/basics.js";
import { Diff } from "../parts/diff.js";
import { asText } from "./schema.js";

export function Versions({ agent, onTakeBack }) {
  const read = (number) => useData(url`/v1/agents/${agent.name}/versions/${number}`);
  const [pair, setPair] = useState([Math.max(1, agent.version - 1), agent.version]);
  const before = read(pair[0]);
  const after = read(pair[1]);
  const numbers = Array.from({ length: agent.version }, (_, i) => agent.version - i);
  const choice = (label, at) => html`<label>${label} <select value=${pair[at]}
    onChange=${(e) => setPair(pair.with(at, Number(e.target.value)))}>
    ${numbers.map((each) => html`<option value=${each}>version ${each}</option>`)}</select></label>`;
  return html`<${Panel} title="Two versions compared">
    <form class="filters body" onSubmit=${(e) => e.preventDefault()}>${choice("From", 0)} ${choice("To", 1)}
      ${before.data && pair[0] !== agent.version && html`<${Button} needs="define"
        onClick=${() => onTakeBack(before.data)}>Edit from version ${pair[0]}<//>`}</form>
    <${Loaded} from=${before} what="the version">${(old) => html`<${Loaded} from=${after} what="the version">
      ${(next) => html`<${Diff} before=${asText(old)} after=${asText(next)} />`}<//>`}<//>
  <//>`;
}
