/** Figures of two runs beside each other, with their change. */
import { count, duration, knownAmount, money, tokens } from "../format.js";
import { html } from "../html.js";

/** @type {[string, string, (value: any) => string][]} */
const ROWS = [
  ["tokens", "Tokens", tokens], ["cost", "Cost", money], ["duration_ms", "Time", duration],
  ["model_calls", "Model calls", count], ["tool_calls", "Tool calls", count], ["queries", "Times asked", count],
];

/** The number of a figure; null if it is unknown, such as a cost without any price. */
function amount(value) {
  if (value === null || typeof value === "number") return value;
  const known = knownAmount(value);
  return known === null ? null : Number(known);
}

/** The change from one number to another, such as "+25 %". */
export function change(before, after) {
  if (before === null || after === null) return "–";
  if (before === after) return "same";
  if (before === 0) return "new";
  const percent = ((after - before) / before) * 100;
  const digits = Math.abs(percent) < 10 ? 1 : 0;
  return `${percent > 0 ? "+" : "−"}${Math.abs(percent).toFixed(digits)} %`;
}

/** A row for each figure that `of` has as `{before, after}`; `label`: for screen readers. */
export const Differences = ({ of, label }) =>
  html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table class="table">
  <thead><tr><th scope="col">Figure</th><th scope="col" class="right">Before</th>
    <th scope="col" class="right">After</th><th scope="col" class="right">Change</th></tr></thead>
  <tbody>${ROWS.filter(([name]) => of[name]).map(([name, label, shown]) => {
    const changed = change(amount(of[name].before), amount(of[name].after));
    return html`<tr key=${name}><th scope="row">${label}</th>
      <td class="right">${shown(of[name].before)}</td><td class="right">${shown(of[name].after)}</td>
      <td class="right">${["same", "–"].includes(changed) ? changed : html`<mark>${changed}</mark>`}</td></tr>`;
  })}</tbody></table></div>`;
