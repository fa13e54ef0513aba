/** All runs, newest first; the address holds the filters, so that a view is a link. */
import { useState } from "preact/hooks";

import { withQuery } from "../api.js";
import { OUTCOME_WORDS, WAITS_FOR } from "../en.js";
import { html } from "../html.js";
import { Button, Empty, Panel } from "../parts/basics.js";
import { Bulk } from "../parts/bulk.js";
import { Choices, Filter, Pages, severalOf } from "../parts/lists.js";
import { RunTable } from "../parts/run_table.js";
import { go } from "../router.js";

const STATUSES = ["queued", "running", "waiting", "completed", "failed", "timeout", "cancelled"];
const OUTCOMES = [...Object.entries(OUTCOME_WORDS), ["PARTIAL,FAILURE", "not good: partly or bad"]];
const MORE = ["outcome", "error_code", "version", "waiting_for", "retrying", "rated"];
const FILTERS = ["q", "status", "agent", "user", "session_id", ...MORE];

/** Filters that take several values. */
const SEVERAL = ["status", "agent", "outcome"];

export function Runs({ query }) {
  const wanted = Object.fromEntries(FILTERS.map((name) => [name, SEVERAL.includes(name) ? severalOf(query[name])
    : query[name]]));
  const path = withQuery("/v1/runs", { ...wanted, order: "desc" });
  const set = (change) => go(["runs"], { ...query, ...change }, { replace: true });
  const field = (name, label, rest = {}) => html`<${Filter} label=${label} value=${query[name] ?? ""} ...${rest}
    onChange=${(text) => set({ [name]: text })} />`;
  const choice = (name, label, values) => html`<label>${label}
    <select value=${query[name] ?? ""} onChange=${(e) => set({ [name]: e.target.value })}>
      <option value="">any</option>${values.map(([value, text = value]) => html`<option value=${value}
        title=${value}>${text}</option>`)}
    </select></label>`;
  return html`
    <div class="head"><h1>Runs</h1></div>
    <form class="filters" onSubmit=${(e) => e.preventDefault()}>
      ${field("q", "Question contains", { kind: "grow", type: "search", maxlength: 500 })}
      <${Choices} label="Status" values=${STATUSES} chosen=${wanted.status}
        onChange=${(text) => set({ status: text })} />
      ${field("agent", "Agents", { placeholder: "any; commas between" })} ${field("user", "User")}
      ${field("session_id", "Session")}
    </form>
    <details open=${MORE.some((name) => query[name])}>
      <summary>More filters</summary>
      <form class="filters" onSubmit=${(e) => e.preventDefault()}>
        ${choice("outcome", "Outcome", OUTCOMES)}
        ${choice("rated", "Rated by a person", [["true", "yes"], ["false", "no"]])}
        ${choice("waiting_for", "Waits for", Object.entries(WAITS_FOR))}
        ${choice("retrying", "Tries a model again", [["true", "yes"], ["false", "no"]])}
        ${field("error_code", "Code of the error")} ${field("version", "Version")}
      </form>
    </details>
    <${Panel}><${Pages} key=${path} path=${path} what="runs" everyMs=${5000}>${(runs, reload) => runs.length
      ? html`<${Chosen} path=${path} runs=${runs} reload=${reload} />`
      : html`<${Empty} title="No run is like that."><${Button} onClick=${() => go(["runs"])}>Show all runs<//><//>`}<//>
        <//>`;
}

/** The runs of a list, of which some can be chosen. */
function Chosen({ path, runs, reload }) {
  const [chosen, setChosen] = useState(new Set());
  const onDone = () => {
    setChosen(new Set());
    reload();
  };
  return html`<${Bulk} path=${path} runs=${runs.filter(({ id }) => chosen.has(id))} onDone=${onDone} />
    <${RunTable} runs=${runs} chosen=${chosen} onChoose=${setChosen} />`;
}
