/** Batches: how far each is, and the items of one. */
import { post, url } from "../api.js";
import { count, duration, money, shortId, tokens } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Empty, Link, Loaded, Panel, Status, Time } from "../parts/basics.js";
import { Confirmed, Pages, Rows } from "../parts/lists.js";
import { RunTable } from "../parts/run_table.js";
import { isFinal } from "../run/state.js";

const isOver = (batch) => batch.ended_at !== null;
const OPEN = ["queued", "running", "waiting"];
const HEAD = ["Batch", "Of", "Status", "Progress", "#Completed", "#Failed", "#Time left", "#Tokens", "#Cost", "Made",
  ""];

const Listed = ({ batches, reload }) => html`<${Rows} label="Batches" head=${HEAD} items=${batches}
  empty="There is no batch." hint=${html`<p>Start one with <code>bottega batch FILE.jsonl --agent NAME</code>.</p>`}
  cells=${(batch) => {
    const { counts, usage } = batch;
    const failed = counts.failed + counts.timeout;
    const over = batch.total - OPEN.reduce((sum, status) => sum + counts[status], 0);
    const act = (what) => () => post(url`/v1/batches/${batch.id}/${what}`).then(reload);
    return [html`<${Link} path=${["batches", batch.id]} class="mono" title=${batch.id}>${shortId(batch.id)}<//>`,
      batch.agent ?? batch.graph, html`<${Status} value=${batch.status} />`, html`<progress value=${over}
        max=${batch.total} aria-label="Items that are over"></progress> ${count(over)} of ${count(batch.total)}`,
      count(counts.completed), count(failed), batch.seconds_left == null ? "–" : duration(batch.seconds_left * 1000),
      usage ? tokens(usage.input + usage.output) : "–", money(usage?.cost), html`<${Time} at=${batch.created_at} />`,
      batch.ended_at ? failed > 0 && html`<${Confirmed} needs="run" kind="small" label="Retry"
        question="Repeat the failed items?" act=${act("retry")} />`
        : html`<${Confirmed} needs="run" label="Cancel" question="Cancel all open items?" act=${act("cancel")} />`];
  }} />`;

function Items({ id }) {
  const found = useData(url`/v1/batches/${id}`, { everyMs: 2000, ended: isOver });
  const isLast = ({ status }) => isFinal(status) && found.data !== null && isOver(found.data);
  return html`<div class="head"><h1>Batch</h1></div>
    <${Panel}><${Loaded} from=${found} what="the batch">${(batch) => html`
      <${Listed} batches=${[batch]} reload=${found.reload} />
      ${batch.error && html`<p class="note bad">${batch.error.message}</p>`}`}<//><//>
    <${Panel} title="Items that have begun"><${Pages} path=${url`/v1/runs?parent_run_id=${id}`} what="items"
      everyMs=${5000} isOver=${isLast}>${(runs) => runs.length
      ? html`<${RunTable} runs=${runs} />` : html`<${Empty} title="None has begun." />`}<//><//>`;
}

export function Batches({ id }) {
  if (id) return html`<${Items} id=${id} key=${id} />`;
  return html`<div class="head"><h1>Batches</h1></div>
    <${Panel}><${Pages} path="/v1/batches?order=desc" what="batches" isSaved everyMs=${2000}
      isOver=${isOver}>${(batches, reload) => html`<${Listed} ...${{ batches, reload }} />`}<//><//>`;
}
