/** The tenant's limits, with what is used of them. */
import { count } from "../format.js";
import { html } from "../html.js";
import { Table } from "../parts/lists.js";

const QUOTAS = { concurrent_runs: "Runs at once", queued_runs: "Queued runs", tokens_per_day: "Tokens today (UTC)",
  cost_per_day: "Cost today (UTC), USD", storage_bytes: "Stored, in bytes" };

export const Limits = ({ quotas }) => html`<${Table} label="Limits" head=${["Limit", "Used", "#Number"]}>
  ${quotas.map((each) => html`<tr key=${each.name}><td>${QUOTAS[each.name] ?? each.name}</td>
    <td class="wide-cell">${each.limit && html`<${Meter} of=${Number(each.used)} most=${Number(each.limit)} />`}</td>
    <td class="right">${each.limit == null ? `${Number(each.used) ? `${amount(each, each.used)}, ` : ""}no limit`
      : `${amount(each, each.used)} of ${amount(each, each.limit)}`}</td>
      </tr>`)}<//>`;

const amount = (quota, value) => (quota.name === "cost_per_day" ? Number(value).toFixed(2) : count(Number(value)));

export const Meter = ({ of, most }) =>
  html`<span class="stack" aria-hidden="true">
    <i class="bar model" style=${{ width: `${Math.min(100, (100 * of) / Math.max(1e-9, most))}%` }}></i></span>`;
