/** Runs that start by themselves. */
import { useState } from "preact/hooks";

import { call, url } from "../api.js";
import { html } from "../html.js";
import { usePostOnce } from "../once.js";
import { Empty, Link, Panel, Time } from "../parts/basics.js";
import { Act, Confirmed, Pages, Sending, Table } from "../parts/lists.js";

export function Schedules() {
  const [postOnce] = usePostOnce();
  const [version, setVersion] = useState(0);
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
        <td>${each.run.agent ?? each.run.graph}</td><td>${each.paused ? "paused" : html`<${Time} at=${each.next_at} />`}
          </td>
        <td>${each.last_run_id ? html`<${Link} path=${["runs", each.last_run_id]}><${Time} at=${each.last_at} />
          <//>` : "–"}${each.last_error && html`<p class="small bad-text">${each.last_error.message}</p>`}</td>
        <td class="actions"><${Act} needs="define" kind="small" label=${each.paused ? "Go on" : "Pause"}
          act=${async () => (await call("PATCH", path(each), { paused: !each.paused }), reload())} />
          <${Confirmed} needs="define" label="Delete" question=${`Delete ${each.name}?`}
            act=${async () => (await call("DELETE", path(each)), reload())} /></td></tr>`)}<//>`
      : html`<${Empty} title="No run is scheduled." />`}<//><//>
    <${Panel} title="Make a schedule" needs="define"><${Sending} label="Create" send=${make}>
      <label>Name <input name="name" required /></label>
      <label>Cron: minute, hour, day, month, weekday <input name="cron" required placeholder="0 8 * * 1-5" class="mono"
        /></label>
      <label>Time zone <input name="timezone" placeholder="UTC" /></label>
      <label>Agent <input name="agent" required /></label>
      <label>Question <textarea name="input" rows="3" required></textarea></label><//><//>`;
}
