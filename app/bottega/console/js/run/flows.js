/** What agents received from each other and from memory, in order. */
import { useMemo, useState } from "preact/hooks";

import { duration } from "../format.js";
import { html } from "../html.js";
import { Empty, Value } from "../parts/basics.js";
import { Windowed } from "../parts/windowed.js";

const ROW = 34;
const kindOf = (flow) => (flow.isRecalled ? "recalled" : `version ${flow.version}`);

/** `state` grows in place: `last`, the number of its last event, says so. */
export function Flows({ state, last }) {
  const [open, setOpen] = useState(null);
  const number = state.flows.length + state.recalled.length;
  const all = useMemo(() => [...state.flows, ...state.recalled].sort((a, b) => a.seq - b.seq), [state, last]);
  if (!number) return html`<${Empty} title="Nothing has flowed between agents yet." />`;
  const row = (flow) => html`<div key=${flow.seq} class=${`event-row ${open?.seq === flow.seq ? "chosen" : ""}`} style=${{ height: `${ROW}px` }} role="listitem">
    <button type="button" aria-pressed=${open?.seq === flow.seq} onClick=${() => setOpen(flow)}>
      <span class="numbers soft small">${duration(flow.at - (state.startedAt ?? flow.at))}</span><span><strong>${flow.source}</strong> → <strong>${flow.target}</strong></span>
      <span class="small soft">${kindOf(flow)}</span></button></div>`;
  return html`<div class="events">
    <${Windowed} items=${all} rowHeight=${ROW} row=${row} label="What flowed" />
    ${open
      ? html`<div class="body"><h3>${open.source} → ${open.target} <span class="small soft">${kindOf(open)}</span></h3><${Value} value=${state.textOf(open.data)} /></div>`
      : html`<p class="body small soft">Choose one to read its text.</p>`}
  </div>`;
}
