/** One agent in two runs. */
import { html } from "../html.js";
import { Empty, Panel } from "../parts/basics.js";
import { Source } from "../parts/source.js";
import { Differences } from "./figures.js";
import { rowsOf } from "./rows.js";
import { Sides } from "./sides.js";
import { Talk } from "./talk.js";

const version = ({ before, after }) =>
  before === after ? `version ${after ?? "–"}` : `version ${before ?? "–"} → ${after ?? "–"}`;

/** `before` and `after`: ids of the runs; `isAsked`: the runs' first agent. */
export const AgentDifference = ({ of, before, after, isAsked }) =>
  html`<${Panel} title=${of.agent} actions=${html`<span class="small soft">${version(of.version)}</span>`}>
  <div class="compared">
    <div><${Differences} of=${of} label=${`Figures of ${of.agent}`} />
      <${Received} agent=${of.agent} items=${of.received} more=${of.received_more} /></div>
    <div class="body"><${Output} agent=${of.agent} output=${of.output} /></div>
  </div>
  <${Talk} agent=${of.agent} before=${before} after=${after} isOpen=${isAsked} />
<//>`;

function Output({ agent, output }) {
  const { before, after, diff, truncated } = output;
  if (before === null && after === null) return html`<${Empty} title="No answer in either run." />`;
  return html`
    <h3>Answer ${before === after && !truncated && html`<span class="small soft">the same in both</span>`}</h3>
    ${truncated && html`<p class="note small">Only its beginning is shown and compared.</p>`}
    ${diff
      ? html`<${Sides} rows=${rowsOf(diff)} label=${`Difference of the answers of ${agent}`} />`
      : html`<pre class="value" tabindex="0" role="region" aria-label=${`Answer of ${agent} in both runs`}>
        ${after ?? before}</pre>`}
    ${diff && html`<details><summary class="small">Both answers in full</summary>
      <div class="sides"><${Whole} name="Before" agent=${agent} text=${before} />
        <${Whole} name="After" agent=${agent} text=${after} /></div></details>`}`;
}

const Whole = ({ name, agent, text }) => html`<div><h4 class="small soft">${name}</h4>
  <pre class="value" tabindex="0" role="region" aria-label=${`${name}: the answer of ${agent}`}>${text ?? "–"}</pre>
    </div>`;

const at = ({ version: number, times }) => (side) =>
  number[side] === null ? "–" : `version ${number[side]}${times[side] > 1 ? `, ${times[side]} times` : ""}`;

const compared = ({ is_same, version: { before, after } }) =>
  is_same ? "same" : before === null ? "only after" : after === null ? "only before" : "differs";

const Received = ({ agent, items, more }) => items.length === 0 ? null : html`
  <div class="scroll" tabindex="0" role="region" aria-label=${`What ${agent} received`}><table class="table">
    <thead><tr><th scope="col">Received from</th><th scope="col">Before</th><th scope="col">After</th>
      <th scope="col">Text</th></tr></thead>
    <tbody>${items.map((each) =>
      html`<tr key=${each.source}><th scope="row"><${Source} of=${each.source} /></th><td>${at(each)("before")}</td>
        <td>${at(each)("after")}</td>
      <td>${compared(each)}</td></tr>`)}</tbody></table></div>
  ${more && html`<p class="small soft">There are more than 100 sources.</p>`}`;
