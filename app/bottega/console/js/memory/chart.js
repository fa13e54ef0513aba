/** A chart of the evidence about a pattern, and the same as a table. */
import { count } from "../format.js";
import { html } from "../html.js";
import { Empty, Time } from "../parts/basics.js";
import { Table } from "../parts/lists.js";

const WIDTH = 640, HEIGHT = 160, LEFT = 40, BOTTOM = 20;
const PROMOTES = 20; // unless BOTTEGA_LEARNING_PROMOTION_E is set

/** The e-value's place, from 0 to 1: logarithmic, from 1/100 to at least 100. */
const scaleOf = (points) => {
  const most = Math.max(2, ...points.map((each) => Math.log10(Math.max(each.e_value, 0.01))));
  return (value) => (Math.log10(Math.min(Math.max(value, 0.01), 1e300)) + 2) / (most + 2);
};

export function EvidenceChart({ points, more }) {
  if (!points.length) return html`<${Empty} title="No application has been judged yet." />`;
  const scale = scaleOf(points);
  const x = (i) => LEFT + ((WIDTH - LEFT - 8) * (i + 1)) / points.length;
  const y = (value) => 6 + (HEIGHT - BOTTOM - 6) * (1 - scale(value));
  const last = points.at(-1);
  const line = points.map((each, i) => `${x(i)},${y(each.e_value)}`).join(" ");
  const rate = (good, n) => (n ? `${count(good)} of ${count(n)}` : "–");
  return html`<div class="body">
    <svg class="chart" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`The e-value over ${count(last.given + last.others)} judged applications; it is ${last.e_value.toPrecision(3)} now. The table below says the same.`}>
      ${[0.01, 1, PROMOTES].map((value) => html`<line x1=${LEFT} x2=${WIDTH} y1=${y(value)} y2=${y(value)} class=${value === PROMOTES ? "goal" : "grid"} /><text x="0" y=${y(value) + 4}>${value}</text>`)}
      <polyline points=${`${LEFT},${y(1)} ${line}`} />
      ${points.map((each, i) => html`<circle cx=${x(i)} cy=${y(each.e_value)} r="2.5"><title>${`${each.e_value.toPrecision(3)} after ${each.given + each.others}`}</title></circle>`)}
      <text x=${WIDTH} y=${HEIGHT - 4} text-anchor="end">${`${count(last.given + last.others)} applications`}</text>
    </svg>
    <p class="small soft">At ${PROMOTES} (dashed) a candidate is promoted, unless the operator set another value.${more ? " Older applications than the 500 counted are left out." : ""}</p>
    <details class="tool"><summary>As a table</summary><${Table} label="Evidence over time" head=${["When", "#Went well with it", "#Without it (control)", "#E-value"]}>
      ${points.map((each, i) => html`<tr key=${i}><td><${Time} at=${each.at} /></td><td class="right">${rate(each.given_good, each.given)}</td><td class="right">${rate(each.others_good, each.others)}</td><td class="right">${each.e_value.toPrecision(3)}</td></tr>`)}<//></details>
  </div>`;
}
