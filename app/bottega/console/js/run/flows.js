/** What agents received from each other and from memory, in order. */
import { duration } from "../format.js";
import { html } from "../html.js";
import { Empty, Value } from "../parts/basics.js";

export function Flows({ state }) {
  const all = [...state.flows, ...state.recalled].sort((a, b) => a.seq - b.seq);
  if (!all.length) return html`<${Empty} title="Nothing has flowed between agents yet." />`;
  return html`<ol class="flows">${all.map((flow) => html`<li key=${flow.seq}><details>
    <summary><span class="numbers soft small">${duration(flow.at - (state.startedAt ?? flow.at))}</span> <strong>${flow.source}</strong> → <strong>${flow.target}</strong>
      <span class="small soft">${flow.isRecalled ? "recalled" : `version ${flow.version}`}</span></summary>
    <${Value} value=${state.textOf(flow.data)} /></details></li>`)}</ol>`;
}
