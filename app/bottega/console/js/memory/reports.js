/** What memory did at night: merged, aged, learnt, judged. */
import { post, url } from "../api.js";
import { duration } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Empty, Link, Loaded, Panel, Status, Time, Value } from "../parts/basics.js";
import { Confirmed, Pages, Table } from "../parts/lists.js";
import { follow } from "../router.js";

const SHOWN = { done: "completed", pending: "queued" };
const took = (job) => duration(job.started_at && job.ended_at ? Date.parse(job.ended_at) - Date.parse(job.started_at)
  : null);

export function Reports() {
  const start = () => follow(post("/v1/memory/maintenance"), ({ id }) => ["memory", "reports", id]);
  return html`<${Panel} title="Reports" actions=${html`<${Confirmed} needs="admin" label="Run it now" kind="small"
    question="Merge, age and judge now?" act=${start} />`}>
    <${Pages} path="/v1/memory/reports?order=desc" what="reports" everyMs=${5000}>${(items) => items.length
      ? html`<${Table} label="Reports of memory's maintenance" head=${["Began", "Why", "State", "#Took"]}>
        ${items.map((each) => html`<tr key=${each.id}><td><${Link} path=${["memory", "reports", each.id]}><${Time}
          at=${each.created_at} /><//></td><td>${each.cause}</td><td><${Status}
            value=${SHOWN[each.status] ?? each.status} />${each.error && html` <span class="bad-text small">
              ${each.error}</span>`}</td><td class="right">${took(each)}</td></tr>`)}<//>`
      : html`<${Empty} title="There is no report yet."><p>Maintenance runs each night.</p><//>`}<//><//>`;
}

export function Report({ id }) {
  const found = useData(url`/v1/memory/reports/${id}`, { everyMs: 3000, ended: (job) => job.ended_at !== null });
  return html`<${Loaded} from=${found} what="the report">${(job) => html`
    <div class="head"><div><h2>Report of <${Time} at=${job.created_at} /></h2><p class="small soft"><${Status}
      value=${SHOWN[job.status] ?? job.status} /> ${job.cause}, took ${took(job)}</p></div></div>
    ${job.error && html`<p class="note bad" role="alert">${job.error}</p>`}
    <${Panel} title="What was done"><${Done} job=${job} /><//>`}<//>`;
}

/** The report; of a job that is not over, or failed, the stages that it ended. */
function Done({ job }) {
  const parts = Object.entries(job.report ?? job.progress);
  const told = job.report ? null : job.ended_at
    ? "It failed. These stages were done before; the next job goes on after them."
      : `It is not over: ${job.stage} of 6 stages are done.`;
  return html`<div class="body">${told && html`<p role="status">${told}</p>`}${parts.map(([part, value]) => html`<h3>
    ${part.replaceAll("_", " ")}</h3><${Value} value=${value} />`)}</div>`;
}
