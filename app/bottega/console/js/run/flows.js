/** What agents received from each other and from memory: who got which version, and each text in order. */
import { useMemo, useState } from "preact/hooks";

import { duration } from "../format.js";
import { html } from "../html.js";
import { Empty, Value } from "../parts/basics.js";
import { Windowed } from "../parts/windowed.js";

const ROW = 34;
const kindOf = (flow) => (flow.isRecalled ? "recalled" : `version ${flow.version}`);

/** The publications of a run, and those of earlier runs that were received: who got them, and how often. Pure. */
export function publicationsOf(state) {
  const found = new Map();
  const of = (source, version, at) => {
    const key = `${source} ${version}`;
    if (!found.has(key)) found.set(key, { key, source, version, at, receivers: new Map() });
    return found.get(key);
  };
  for (const each of state.published) of(each.agent, each.version, each.at);
  const agents = new Set([...found.values(), ...state.flows].map((each) => each.source));
  for (const flow of [...state.flows, ...state.recalled.filter((each) => agents.has(each.source))]) {
    const { receivers } = of(flow.source, flow.version, null);
    receivers.set(flow.target, (receivers.get(flow.target) ?? 0) + 1);
  }
  return [...found.values()];
}

const times = ([agent, number]) => `${agent}${number > 1 ? ` (${number} times)` : ""}`;

/** `state` grows in place: `last`, the number of its last event, says so. */
export function Flows({ state, last }) {
  const [open, setOpen] = useState(null);
  const number = state.flows.length + state.recalled.length;
  const all = useMemo(() => [...state.flows, ...state.recalled].sort((a, b) => a.seq - b.seq), [state, last]);
  const published = useMemo(() => publicationsOf(state), [state, last]);
  if (!number && !published.length) return html`<${Empty} title="Nothing has flowed between agents yet." />`;
  const row = (flow) => html`<div key=${flow.seq} class=${`event-row ${open?.seq === flow.seq ? "chosen" : ""}`}
    style=${{ height: `${ROW}px` }} role="listitem">
    <button type="button" aria-pressed=${open?.seq === flow.seq} onClick=${() => setOpen(flow)}>
      <span class="numbers soft small">${duration(flow.at - (state.startedAt ?? flow.at))}</span>
        <span><strong>${flow.source}</strong> → <strong>${flow.target}</strong></span>
      <span class="small soft">${kindOf(flow)}</span></button></div>`;
  const publication = (each) =>
    html`<div key=${each.key} class="event-row" style=${{ height: `${ROW}px` }} role="listitem">
    <p class="line"><strong>${each.source}</strong> <span
      class="small soft">version ${each.version}, ${each.at === null ? "of an earlier run"
        : `after ${duration(each.at - state.startedAt)}`}</span> received by ${[...each.receivers].map(times).join(", ")
          || "nobody"}</p></div>`;
  return html`<div class="events">
    ${published.length > 0 && html`<div class="published">
      <${Windowed} items=${published} rowHeight=${ROW} row=${publication} label="Publications" /></div>`}
    <${Windowed} items=${all} rowHeight=${ROW} row=${row} label="What flowed" />
    ${open
      ? html`<div class="body"><h3>${open.source} → ${open.target} <span
        class="small soft">${kindOf(open)}</span></h3>
        <${Value} value=${state.textOf(open.data)} /></div>`
      : html`<p class="body small soft">Choose one to read its text.</p>`}
  </div>`;
}
