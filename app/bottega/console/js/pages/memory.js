/** What runs remember and learn: episodes, lessons, patterns with their evidence, whether it helped, reports. */
import { post, url } from "../api.js";
import { MemoryFigures } from "../figures/outcomes.js";
import { duration } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Episode, Episodes } from "../memory/episodes.js";
import { Given } from "../memory/given.js";
import { Lessons } from "../memory/lessons.js";
import { Pattern, Patterns } from "../memory/patterns.js";
import { Empty, Link, Loaded, Panel, Status, Tabs, Time, Value } from "../parts/basics.js";
import { Confirmed, Pages, Table } from "../parts/lists.js";
import { follow, go } from "../router.js";

const VIEWS = { episodes: [Episodes, Episode], lessons: [Lessons, Lessons], patterns: [Patterns, Pattern],
  runs: [Episodes, Given],
  figures: [MemoryFigures, MemoryFigures], reports: [Reports, Report] };
const TABS = [["episodes", "Episodes"], ["lessons", "Lessons"], ["patterns", "Patterns"], ["figures", "Did it help?"],
  ["reports", "Reports"]];

export function Memory({ rest: [part = "episodes", id], query }) {
  const [all, one] = VIEWS[part] ?? VIEWS.episodes;
  const chosen = part === "runs" || !(part in VIEWS) ? "episodes" : part;
  return html`<div class="head"><h1>Memory</h1></div>
    <${Tabs} tabs=${TABS} chosen=${chosen} onChoose=${(name) => go(["memory", name])} label="Parts of memory" />
    <div role="tabpanel" aria-label=${chosen} class="stacked"><${id ? one : all} key=${id} id=${id} query=${query} />
      </div>`;
}

const SHOWN = { done: "completed", pending: "queued" };
const took = (job) => duration(job.started_at && job.ended_at ? Date.parse(job.ended_at) - Date.parse(job.started_at)
  : null);

function Reports() {
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

function Report({ id }) {
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
