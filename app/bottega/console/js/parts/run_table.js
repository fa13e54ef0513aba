/** Runs as a table. */
import { duration, money, shortId, tokens } from "../format.js";
import { html } from "../html.js";
import { Link, RunStatus, Time } from "./basics.js";

const lasted = (run) =>
  run.started_at && duration((run.ended_at ? Date.parse(run.ended_at) : Date.now()) - Date.parse(run.started_at));

export const RunTable = ({ runs }) => html`<div class="scroll" tabindex="0" role="region" aria-label="Runs"><table class="table">
  <thead><tr><th scope="col">Run</th><th scope="col">Agent</th><th scope="col">Status</th><th scope="col">Session</th>
    <th scope="col" class="right">Time</th><th scope="col" class="right">Tokens</th><th scope="col" class="right">Cost</th><th scope="col">Made</th></tr></thead>
  <tbody>${runs.map((run) => html`<tr key=${run.id}>
    <td><${Link} path=${["runs", run.id]} class="mono" title=${run.id}>${shortId(run.id)}<//></td>
    <td>${run.agent ?? run.graph}${run.agent && run.graph && html` <span class="soft small">in ${run.graph}</span>`}</td>
    <td><${RunStatus} status=${run.status} waitsFor=${run.waiting?.reason} /></td>
    <td class="small">${run.session_id ?? "–"}</td>
    <td class="right">${lasted(run) ?? "–"}</td>
    <td class="right">${run.usage ? tokens(run.usage.input + run.usage.output) : "–"}</td>
    <td class="right">${money(run.usage?.cost)}</td>
    <td><${Time} at=${run.created_at} /></td>
  </tr>`)}</tbody></table></div>`;
