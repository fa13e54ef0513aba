/** Workers, their slots, and the tasks that wait for one. */
import { WAITS_FOR } from "../en.js";
import { count, duration } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Empty, Figure, Figures, Link, Loaded, Panel, Time } from "../parts/basics.js";
import { Table } from "../parts/lists.js";
import { causeOf } from "../run/diagnosis.js";
import { Limits, Meter } from "./limits.js";

const EVERY_MS = 2000;
const sum = (items, of) => items.reduce((total, each) => total + of(each), 0);

export function Scheduler() {
  const found = useData("/v1/scheduler", { everyMs: EVERY_MS });
  return html`<${Loaded} from=${found} what="workers">${({ workers, runs, waiting, quotas }) => html`
    <${Figures}>
      <${Figure} name="Workers" value=${count(workers.length)} />
      <${Figure} name="Runs under way" value=${count(sum(workers, (each) => each.pool.runs))} />
      <${Figure} name="Task slots busy" value=${count(sum(workers, (each) => each.pool.busy))}
        note=${`of ${count(sum(workers, (each) => each.pool.size))}`} />
      <${Figure} name="Tasks waiting for a slot" value=${count(sum(workers, (each) => each.pool.queued))}
        note=${`${count(sum(workers, (each) => each.tenant.queued))} of them yours`} />
      <${Figure} name="Parked tasks" value=${count(sum(workers, (each) => each.pool.parked))}
        note="they wait for other tasks" />
    <//>
    <div class="columns"><${Panel} title="Queued runs"><${Queue} rows=${runs} /><//>
      <${Panel} title="Limits"><${Limits} quotas=${quotas} /><//></div>
    <${Panel} title="Waiting runs"><${Waiting} rows=${waiting} /><//>
    <${Panel} title="Workers">${workers.length
      ? html`<${Table} label="Workers"
        head=${["Worker", "Up since", "Last seen", "#Runs", "#Slots busy", "#Waiting", "#Parked",
          "Your sub-agents held back"]}>
        ${workers.map((each) => html`<tr key=${each.id}><td class="mono small">${each.id}</td>
          <td><${Time} at=${each.started_at} /></td><td><${Time} at=${each.seen_at} /></td>
          <td class="right">${count(each.pool.runs)}</td>
            <td class="right">${count(each.pool.busy)} of ${count(each.pool.size)}</td>
          <td class="right">${count(each.pool.queued)}</td><td class="right">${count(each.pool.parked)}</td>
          <td>${each.tenant.breakers.length
            ? each.tenant.breakers.map(
              (breaker) => html`<p class="small bad-text">
                ${breaker.agent} in run <span class="mono">${breaker.run_id}
                  </span>: no task starts after ${count(breaker.failures)} failures in a row${
                  breaker.retry_after_ms == null ? "; one is tried now"
                    : `; one is tried in ${duration(breaker.retry_after_ms)}`}</p>`) : "–"}</td></tr>`)}<//>`
      : html`<${Empty} title="No worker is up: runs wait."><p>Start one with <code>bottega worker</code>.</p><//>`}
        <//>`}<//>`;
}

function Waiting({ rows }) {
  if (!rows.length) return html`<${Empty} title="No run waits for a model, people or other runs." />`;
  return html`<${Table} label="Waiting runs" head=${["For", "Agent", "#Runs", "The first since", "Why"]}>
    ${rows.map((each) => html`<tr key=${`${each.reason} ${each.agent}`}><td><${Link} path=${["runs"]}
      query=${{ waiting_for: each.reason }}>${WAITS_FOR[each.reason]}<//></td><td>${each.agent}</td>
      <td class="right">${count(each.runs)}</td><td><${Time} at=${each.oldest_at} /></td>
      <td class="small">${causeOf(each.error) || "–"}</td></tr>`)}<//>`;
}

function Queue({ rows }) {
  if (!rows.length) return html`<${Empty} title="No run is queued." />`;
  const most = Math.max(...rows.map((each) => each.queued));
  return html`<${Table} label="Queued runs by priority"
    head=${["Priority", "Runs", "#Number", "The oldest waits since"]}>
    ${rows.map((each) => html`<tr key=${each.priority}><td>${each.priority}</td>
      <td class="wide-cell"><${Meter} of=${each.queued} most=${most} /></td>
      <td class="right">${count(each.queued)}</td><td><${Time} at=${each.oldest_at} /></td></tr>`)}<//>`;
}
