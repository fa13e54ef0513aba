/** Runs that start by themselves. */
import { useState } from "preact/hooks";

import { call, get, post, url } from "../api.js";
import { Known } from "../forms/parts.js";
import { useSchemas } from "../forms/schemas.js";
import { Fields } from "../forms/typed.js";
import { exact } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { usePostOnce } from "../once.js";
import { Button, Empty, Failure, Link, Loaded, Panel, Time } from "../parts/basics.js";
import { Act, Confirmed, Pages, Sending, Table } from "../parts/lists.js";
import { instead, useWork } from "../parts/work.js";
import { follow } from "../router.js";

export function Schedules() {
  const [postOnce] = usePostOnce();
  const [version, setVersion] = useState(0);
  const [edited, setEdited] = useState(null);
  const make = async (form) => {
    const { name, cron, timezone, agent, input } = Object.fromEntries(form);
    await postOnce("/v1/schedules", { name, cron, timezone: timezone || "UTC", run: { agent, input } });
    setVersion((n) => n + 1);
  };
  const path = (each) => url`/v1/schedules/${each.name}`;
  return html`<${Panel} title="Schedules"><${Pages} key=${version} path="/v1/schedules" what="schedules"
    everyMs=${10_000}>${(schedules, reload) => schedules.length
      ? html`<${Table} label="Schedules" head=${["Name", "When", "Starts", "Next", "Last", ""]}>
        ${schedules.map((each) => html`<tr key=${each.name}><td>${each.name}</td><td><code>${each.cron}</code> <span
          class="small soft">${each.timezone}</span></td>
        <td>${each.run.agent ?? each.run.graph}</td><td>${each.paused ? "paused" : html`<${Starts} key=${each.next_at}
          schedule=${each} />`}</td>
        <td>${each.last_run_id ? html`<${Link} path=${["runs", each.last_run_id]}><${Time} at=${each.last_at} />
          <//>` : "–"}${each.last_error && html`<p class="small bad-text">${each.last_error.message}</p>`}</td>
        <td class="actions"><${Act} needs="run" kind="small" label="Run now"
          act=${() => follow(get(path(each)).then(({ run }) => post("/v1/runs", run)), ({ id }) => ["runs", id])} />
          <${Act} needs="define" kind="small" label="Edit" act=${async () => setEdited(await get(path(each)))} />
          <${Act} needs="define" kind="small" label=${each.paused ? "Go on" : "Pause"}
          act=${async () => (await call("PATCH", path(each), { paused: !each.paused }), reload())} />
          <${Confirmed} needs="define" label="Delete" question=${`Delete ${each.name}?`}
            act=${async () => (await call("DELETE", path(each)), reload())} /></td></tr>`)}<//>`
      : html`<${Empty} title="No run is scheduled." />`}<//><//>
    ${edited && html`<${Change} key=${edited.name} schedule=${edited} onDone=${() => {
      setEdited(null);
      setVersion((n) => n + 1);
    }} />`}
    <${Panel} title="Make a schedule" needs="define"><${Sending} label="Create" send=${make}>
      <label>Name <input name="name" required /></label>
      <label>Cron: minute, hour, day, month, weekday <input name="cron" required placeholder="0 8 * * 1-5" class="mono"
        /></label>
      <label>Time zone <input name="timezone" placeholder="UTC" /></label>
      <label>Agent <input name="agent" required /></label>
      <label>Question <textarea name="input" rows="3" required></textarea></label><//><//>`;
}

/** The next start; unfolded, the next five. */
function Starts({ schedule }) {
  const [isOpen, setOpen] = useState(false);
  const found = useData(isOpen ? url`/v1/schedules/${schedule.name}` : null);
  return html`<details onToggle=${(e) => setOpen(e.currentTarget.open)}><summary><${Time} at=${schedule.next_at} />
    </summary>${isOpen && html`<${Loaded} from=${found} what="its next starts">${({ next_starts: starts }) => html`
      <ol class="small" aria-label=${`Next starts of ${schedule.name}`}>${starts.map((at) => html`<li key=${at}>
        ${exact(at)}</li>`)}</ol>`}<//>`}</details>`;
}

/** Change a schedule, in the fields that the API has for it. */
function Change({ schedule, onDone }) {
  const [schemas, failed] = useSchemas();
  const { cron, timezone, paused, run } = schedule;
  const [draft, setDraft] = useState({ cron, timezone, paused, run });
  const { busy, error, work } = useWork();
  const send = instead(() => work(() => call("PUT", url`/v1/schedules/${schedule.name}`, draft).then(onDone)));
  if (failed) return html`<${Failure} error=${failed} />`;
  return schemas && html`<${Panel} title=${`Change ${schedule.name}`}><form class="form body" onSubmit=${send}>
    <${Known.Provider} value=${{ schemas, problems: error?.problem?.errors ?? [] }}>
      <${Fields} schema=${schemas.ScheduleContent} value=${draft} at="" onChange=${setDraft} /><//>
    ${error && html`<${Failure} error=${error} />`}
    <div class="actions"><${Button} type="submit" kind="primary" busy=${busy}>Save<//><${Button} onClick=${onDone}>
      Cancel<//></div></form><//>`;
}
