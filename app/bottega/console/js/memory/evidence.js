/** How the evidence about a pattern grew. */
import { count } from "../format.js";
import { html } from "../html.js";
import { Empty, Time } from "../parts/basics.js";
import { Table } from "../parts/lists.js";

export function EvidenceTable({ points, more }) {
  if (!points.length) return html`<${Empty} title="No application has been judged yet." />`;
  const rate = (good, n) => (n ? `${count(good)} of ${count(n)}` : "–");
  return html`<div class="body">
    <${Table} label="Evidence over time" head=${["When", "#Went well with it", "#Without it (control)", "#p-value"]}>
      ${points.map((each, i) =>
        html`<tr key=${i}><td><${Time} at=${each.at} /></td><td class="right">${rate(each.given_good, each.given)}</td>
          <td class="right">${rate(each.others_good, each.others)}</td>
          <td class="right">${each.p_value.toPrecision(2)}</td></tr>`)}<//>
    ${more && html`<p class="small soft">Older applications than the 500 counted are left out.</p>`}
  </div>`;
}
