/** All runs, newest first, by status, agent, session or user; the address holds the filters. */
import { withQuery } from "../api.js";
import { html } from "../html.js";
import { Button, Empty, Panel } from "../parts/basics.js";
import { Pages } from "../parts/lists.js";
import { RunTable } from "../parts/run_table.js";
import { go } from "../router.js";

const STATUSES = ["queued", "running", "waiting", "completed", "failed", "timeout", "cancelled"];

export function Runs({ query }) {
  const { status = "", agent = "", session_id = "", user = "" } = query;
  const path = withQuery("/v1/runs", { status, agent, session_id, user, order: "desc" });
  const set = (change) => go(["runs"], { ...query, ...change }, { replace: true });
  const field = (name, label, value) => html`<label>${label}
    <input value=${value} placeholder="any" onChange=${(e) => set({ [name]: e.target.value.trim() })} /></label>`;
  return html`
    <div class="head"><h1>Runs</h1></div>
    <form class="filters" onSubmit=${(e) => e.preventDefault()}>
      <label>Status <select value=${status} onChange=${(e) => set({ status: e.target.value })}>
        <option value="">any</option>${STATUSES.map((each) => html`<option value=${each}>${each}</option>`)}</select></label>
      ${field("agent", "Agent", agent)} ${field("session_id", "Session", session_id)} ${field("user", "User", user)}
    </form>
    <${Panel}><${Pages} key=${path} path=${path} what="runs" everyMs=${5000}>${(runs) => runs.length
      ? html`<${RunTable} runs=${runs} />`
      : html`<${Empty} title="No run is like that."><${Button} onClick=${() => go(["runs"])}>Show all runs<//><//>`}<//><//>`;
}
