/** What agents received from each other and from memory: who got which version, and each text in order. */
import { duration } from "../format.js";
import { html } from "../html.js";
import { Empty, Value } from "../parts/basics.js";

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

export function Flows({ state }) {
  const all = [...state.flows, ...state.recalled].sort((a, b) => a.seq - b.seq);
  const published = publicationsOf(state);
  const since = (at) => duration(at - (state.startedAt ?? at));
  if (!all.length && !published.length) return html`<${Empty} title="Nothing has flowed between agents yet." />`;
  return html`
    ${published.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Publications"><table class="table">
      <thead><tr><th scope="col">Answer of</th><th scope="col">Version</th><th scope="col">Published</th><th scope="col">Received by</th></tr></thead>
      <tbody>${published.map((each) => html`<tr key=${each.key}><th scope="row">${each.source}</th><td>${each.version}</td>
        <td>${each.at === null ? "in an earlier run" : `after ${since(each.at)}`}</td><td>${[...each.receivers].map(times).join(", ") || "nobody"}</td></tr>`)}</tbody></table></div>`}
    <ol class="flows">${all.map((flow) => html`<li key=${flow.seq}><details>
      <summary><span class="numbers soft small">${since(flow.at)}</span> <strong>${flow.source}</strong> → <strong>${flow.target}</strong>
        <span class="small soft">${flow.isRecalled ? "recalled" : `version ${flow.version}`}</span></summary>
      <${Value} value=${state.textOf(flow.data)} /></details></li>`)}</ol>`;
}
