/** All runs, newest first; the address holds the filters, so that a view is a link. */
import { useMemo, useState } from "preact/hooks";

import { newId, post, url, withQuery } from "../api.js";
import { JUDGES, MEMORY_DRAWS, NOT_GOOD, OUTCOME_WORDS, WAITS_FOR } from "../en.js";
import { count, money, tokens } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Empty, Link, Panel, } from "../parts/basics.js";
import { RUN_COLUMNS } from "../parts/csv.js";
import { Export } from "../parts/export.js";
import { Choices, Confirmed, filtersOf, Pages, severalOf } from "../parts/lists.js";
import { RunTable } from "../parts/run_table.js";
import { createdIn, PeriodChoice, spanOf } from "../parts/series.js";
import { forAll } from "../parts/work.js";
import { go } from "../router.js";
import { isFinal } from "../run/state.js";

const STATUSES = ["queued", "running", "waiting", "completed", "failed", "timeout", "cancelled"];
const OUTCOMES = [...Object.entries(OUTCOME_WORDS), [NOT_GOOD, "not good: partly or bad"]];
const MORE = ["judged_by", "outcome_reason", "memory_draw", "error_code", "waiting_for", "retrying", "rated"];
const FILTERS = ["q", "status", "agent", "version", "outcome", "user", "session_id", ...MORE];
const COUNT_EVERY_MS = 60_000;

/** Filters that take several values. */
const SEVERAL = ["status", "agent", "outcome"];

export function Runs({ query }) {
  const wanted = Object.fromEntries(FILTERS.map((name) => [name, SEVERAL.includes(name) ? severalOf(query[name])
    : query[name]]));
  const period = spanOf(query, "");
  const times = useMemo(() => (period ? createdIn(period) : {}), [query.span, query.from, query.to]);
  const path = withQuery("/v1/runs", { ...wanted, ...times, order: "desc" });
  const { set, field, choice } = filtersOf(["runs"], query);
  const asked = Object.keys(OUTCOME_WORDS).filter((each) => wanted.outcome.includes(each)), value = asked.join(",");
  const outcomes = asked.length < 2 || value === NOT_GOOD ? OUTCOMES
    : [...OUTCOMES, [value, asked.map((each) => OUTCOME_WORDS[each]).join(" or ")]];
  return html`
    <div class="head"><h1>Runs</h1></div>
    <form class="filters" onSubmit=${(e) => e.preventDefault()}>
      ${field("q", "Question contains", { kind: "grow", type: "search", maxlength: 500 })}
      <${Choices} label="Status" values=${STATUSES} chosen=${wanted.status}
        onChange=${(text) => set({ status: text })} />
      ${field("agent", "Agents", { placeholder: "any; commas between" })} ${field("version", "Version")}
      ${choice("outcome", "Outcome", outcomes, { value })} ${field("user", "User")} ${field("session_id", "Session")}
      <${PeriodChoice} query=${query} set=${set} usual="" kind="" />
    </form>
    <details open=${MORE.some((name) => query[name])}>
      <summary>More filters</summary>
      <form class="filters" onSubmit=${(e) => e.preventDefault()}>
        ${choice("judged_by", "Judged by", Object.entries(JUDGES))} ${field("outcome_reason", "Reason contains")}
        ${choice("memory_draw", "Memory", Object.entries(MEMORY_DRAWS))}
        ${choice("rated", "Rated by people", [["true", "yes"], ["false", "no"]])}
        ${choice("waiting_for", "Waits for", Object.entries(WAITS_FOR))}
        ${choice("retrying", "Tries a model again", [["true", "yes"], ["false", "no"]])}
        ${field("error_code", "Code of the error")}
      </form>
    </details>
    <${Sums} key=${`sums ${path}`} path=${withQuery("/v1/runs/totals", { ...wanted, ...times })} />
    <${Panel}><${Pages} key=${path} path=${path} what="runs" everyMs=${5000}>${(runs, reload) => runs.length
      ? html`<${Chosen} path=${path} runs=${runs} reload=${reload} />`
      : html`<${Empty} title="No run is like that."><${Button} onClick=${() => go(["runs"])}>Show all runs<//><//>`}<//>
        <//>`;
}

/** How many runs the filters find, and what they spent. */
function Sums({ path }) {
  const { data } = useData(path, { everyMs: COUNT_EVERY_MS });
  return html`<p class="small soft" role="status">${data && `${data.complete ? "" : "Among the newest 20,000: "}${
    count(data.runs)} ${data.runs === 1 ? "run" : "runs"}, ${count(data.failed)} failed; ${
    tokens(data.usage.input + data.usage.output)} tokens, ${money(data.usage.cost)}`}</p>`;
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

/** The ids of runs, the oldest first: they begin with their time. */
const idsOf = (runs) => runs.map(({ id }) => id).sort();

/** `path`: of the list; `runs`: those that are chosen; `onDone` is called after something was done with them. */
function Bulk({ path, runs, onDone }) {
  const [said, setSaid] = useState("");
  const open = runs.filter((each) => !isFinal(each.status)), over = runs.filter((each) => isFinal(each.status));
  const all = (chosen, what, act) => async () => {
    const { done, reason } = await forAll(chosen, act);
    setSaid(`${count(done)} of ${count(chosen.length)} ${what}${reason ? `; not: ${reason}` : ""}`);
    onDone();
  };
  const cancel = (run) => post(url`/v1/runs/${run.id}/cancel`);
  const retry = (run) => post(url`/v1/runs/${run.id}/retry`, { from: "start" },
    { headers: { "Idempotency-Key": newId() } });
  const asked = (chosen, label, question, act) => chosen.length > 0 && html`<${Confirmed} key=${label} needs="run"
    label=${`${label} ${count(chosen.length)}`} question=${question} kind="small" act=${act} />`;
  return html`<div class="actions body" role="group" aria-label="All of them">
    ${asked(open, "Cancel", "Cancel them?", all(open, "cancelled", cancel))}
    ${asked(over, "Retry", "Run them again?", all(over, "started again", retry))}
    ${runs.length === 2 && html`<${Link} class="button small" path=${["runs", ...idsOf(runs).slice(0, 1), "compare"]}
      query=${{ with: idsOf(runs)[1] }}>Compare<//>`}
    <${Export} name="runs" columns=${RUN_COLUMNS} ...${runs.length ? { key: "chosen", items: runs,
      label: `Export ${count(runs.length)}` } : { key: "all", path: withQuery(path, { view: "full" }) }} />
    <span class="small soft" role="status">${said}</span></div>`;
}
