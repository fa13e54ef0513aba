/** All runs, newest first, by status, agent, session or user. */
import { useState } from "preact/hooks";

import { get, withQuery } from "../api.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Empty, Loaded, Panel } from "../parts/basics.js";
import { RunTable } from "../parts/run_table.js";
import { go } from "../router.js";

const STATUSES = ["queued", "running", "waiting", "completed", "failed", "timeout", "cancelled"];
const LIMIT = 50;

export function Runs({ query }) {
  const { status = "", agent = "", session_id = "", user = "" } = query;
  const path = withQuery("/v1/runs", { status, agent, session_id, user, limit: LIMIT, order: "desc" });
  const first = useData(path, { everyMs: 5000 });
  const [more, setMore] = useState({ path, items: [], cursor: undefined, error: null });
  const older = more.path === path ? more : { path, items: [], cursor: undefined, error: null };
  const cursor = older.cursor === undefined ? first.data?.next_cursor : older.cursor;
  const set = (change) => go(["runs"], { ...query, ...change }, { replace: true });
  const readMore = async () => {
    try {
      const page = await get(`${path}&cursor=${encodeURIComponent(cursor)}`);
      setMore({ path, items: [...older.items, ...page.items], cursor: page.next_cursor, error: null });
    } catch (error) {
      setMore({ ...older, error });
    }
  };
  const field = (name, label, value) => html`<label>${label}
    <input value=${value} placeholder="any" onChange=${(e) => set({ [name]: e.target.value.trim() })} /></label>`;
  return html`
    <div class="head"><h1>Runs</h1></div>
    <form class="filters" onSubmit=${(e) => e.preventDefault()}>
      <label>Status <select value=${status} onChange=${(e) => set({ status: e.target.value })}>
        <option value="">any</option>${STATUSES.map((each) => html`<option value=${each}>${each}</option>`)}</select></label>
      ${field("agent", "Agent", agent)} ${field("session_id", "Session", session_id)} ${field("user", "User", user)}
    </form>
    <${Panel}>
      <${Loaded} from=${first} what="runs">${(page) => {
        const seen = new Set(page.items.map((run) => run.id));
        const runs = [...page.items, ...older.items.filter((run) => !seen.has(run.id))];
        return runs.length
          ? html`<${RunTable} runs=${runs} />`
          : html`<${Empty} title="No run is like that."><${Button} onClick=${() => go(["runs"])}>Show all runs<//><//>`;
      }}<//>
      ${older.error && html`<p class="note bad" role="alert">${older.error.message}</p>`}
      ${cursor && html`<div class="body"><${Button} onClick=${readMore}>Show older ones<//></div>`}
    <//>`;
}
