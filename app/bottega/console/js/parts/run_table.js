/** Runs as a table: question, user, end and reason. */
import { OUTCOME_WORDS } from "../en.js";
import { duration, excerpt, money } from "../format.js";
import { html } from "../html.js";
import { causeOf, judgeOf, memoryOf } from "../run/diagnosis.js";
import { Link, RunStatus, Time } from "./basics.js";
import { Rows } from "./lists.js";

const lasted = (run) =>
  run.started_at && duration((run.ended_at ? Date.parse(run.ended_at) : Date.now()) - Date.parse(run.started_at));

/** @typedef {import("../api.js").Schemas["RunSummary"]} RunSummary */

/** The outcome of a run with its source: "bad by checks". */
export const worth = (run) => (run.judged_by ? `${OUTCOME_WORDS[run.outcome.value]} by ${judgeOf(run)}` : "–");

/** The outcome with the reason; the tooltip has the whole reason. */
export const Worth = ({ of }) => html`<span title=${of.outcome.reason ?? ""}>${worth(of)}
  ${of.outcome.reason && html` <span class="why small">${excerpt(of.outcome.reason, 60)}</span>`}</span>`;

/**
 * The name of a run: its question; the id only if there is no question.
 *
 * @param {RunSummary} run
 */
export const titleOf = (run, most = 90) => excerpt(run.question, most) || `${run.agent ?? run.graph}, without a text`;

/**
 * `chosen`: a set of ids, if the user can choose rows; `onChoose` gets the changed set.
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
  const boxes = (cell) => (chosen ? [cell()] : []);
  return html`<${Rows} label="Runs" items=${runs} head=${[
    ...boxes(() => box("Choose all shown", isAll, runs.map(({ id }) => id))), "Question", "Agent", "Version", "Memory",
    "User", "Status", "Outcome", "#Time", "#Cost", "Made"]} cells=${(run) => [
    ...boxes(() => box(`Choose ${titleOf(run, 60)}`, chosen.has(run.id), [run.id])),
    html`<span class="asks"><${Link} path=${["runs", run.id]} title=${run.id}>${titleOf(run)}<//></span>`,
    html`<span class="name">${run.agent ?? run.graph}</span>
      ${run.agent && run.graph && html` <span class="soft small">in ${run.graph}</span>`}`,
    run.version ?? "–", memoryOf(run), html`<span class="name">${run.user ?? "–"}</span>`,
    html`<${RunStatus} status=${run.status} waitsFor=${run.waiting?.reason} />${run.error && html` <span
      class="why small bad-text" title=${run.error.message}>${causeOf(run.error)}</span>`}`,
    html`<${Worth} of=${run} />`, lasted(run) ?? "–", money(run.usage?.cost),
    html`<${Time} at=${run.created_at} />`]} />`;
}
