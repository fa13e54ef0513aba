/** Runs as a table: what was asked, by whom, how it ended and why. */
import { OUTCOME_WORDS } from "../en.js";
import { duration, excerpt, money } from "../format.js";
import { html } from "../html.js";
import { causeOf } from "../run/diagnosis.js";
import { Link, RunStatus, Time } from "./basics.js";

const lasted = (run) =>
  run.started_at && duration((run.ended_at ? Date.parse(run.ended_at) : Date.now()) - Date.parse(run.started_at));

/** @typedef {import("../api.js").Schemas["RunSummary"]} RunSummary */

/** What a run was worth, and what says so: a judgement, or its status. */
export const worth = ({ value, source }) => (source || value === "FAILURE"
  ? `${OUTCOME_WORDS[value]} (${source ?? "status"})` : "–");

/** The same with the reason, which its title has as a whole. */
export const Worth = ({ of }) => html`<span title=${[of.value, of.reason].filter(Boolean).join(": ")}>${worth(of)}
  ${of.reason && html` <span class="why small">${excerpt(of.reason, 60)}</span>`}</span>`;

/**
 * A run by what was asked; its id, which nobody remembers, only where nothing was.
 *
 * @param {RunSummary} run
 */
export const titleOf = (run, most = 90) => excerpt(run.question, most) || `${run.agent ?? run.graph}, without a text`;

/**
 * `chosen`: a set of ids, and `onChoose` gets another one, where rows can be chosen.
 *
 * @param {{runs: RunSummary[], chosen?: Set<string>, onChoose?: (chosen: Set<string>) => void}} properties
 */
export function RunTable({ runs, chosen, onChoose }) {
  const isAll = runs.every(({ id }) => chosen?.has(id));
  const turn = (ids, isOn) => {
    const next = new Set(chosen);
    for (const id of ids) next[isOn ? "add" : "delete"](id);
    onChoose(next);
  };
  const box = (label, isOn, ids) => html`<input type="checkbox" aria-label=${label} checked=${isOn}
    onChange=${(e) => turn(ids, e.target.checked)} />`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Runs">
  <table class="table">
    <thead><tr>${chosen && html`<td>${box("Choose all shown", isAll, runs.map(({ id }) => id))}</td>`}
      <th scope="col">Question</th><th scope="col">Agent</th><th scope="col">User</th>
      <th scope="col">Status</th><th scope="col">Outcome</th><th scope="col" class="right">Time</th>
      <th scope="col" class="right">Cost</th><th scope="col">Made</th></tr></thead>
    <tbody>${runs.map((run) => html`<tr key=${run.id}>
      ${chosen && html`<td>${box(`Choose ${titleOf(run, 60)}`, chosen.has(run.id), [run.id])}</td>`}
      <td class="asks"><${Link} path=${["runs", run.id]} title=${run.id}>${titleOf(run)}<//></td>
      <td class="name">${run.agent ?? run.graph}
        ${run.agent && run.graph && html` <span class="soft small">in ${run.graph}</span>`}</td>
      <td class="name">${run.user ?? "–"}</td>
      <td><${RunStatus} status=${run.status} waitsFor=${run.waiting?.reason} />
        ${run.error && html` <span class="why small bad-text" title=${run.error.message}>${causeOf(run.error)}
          </span>`}</td>
      <td><${Worth} of=${run.outcome} /></td>
      <td class="right">${lasted(run) ?? "–"}</td>
      <td class="right">${money(run.usage?.cost)}</td>
      <td><${Time} at=${run.created_at} /></td>
    </tr>`)}</tbody></table></div>`;
}
