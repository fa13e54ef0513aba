/** What is done with many runs at once: cancel, retry, save as a file. */
import { useState } from "preact/hooks";

import { newId, post, url, withQuery } from "../api.js";
import { count } from "../format.js";
import { html } from "../html.js";
import { isFinal } from "../run/state.js";
import { Link } from "./basics.js";
import { RUN_COLUMNS } from "./csv.js";
import { Export } from "./export.js";
import { Confirmed } from "./lists.js";

const AT_ONCE = 4;
/** The ids of runs, the oldest first: they begin with their time. */
const idsOf = (runs) => runs.map(({ id }) => id).sort();

/** Do `act` with each run, a few at once; return how many it worked for, and the first reason why not. */
async function forAll(runs, act) {
  const left = [...runs];
  let done = 0, reason = "";
  const work = async () => {
    for (let run = left.shift(); run; run = left.shift()) {
      await act(run).then(() => done++, (problem) => (reason ||= problem.message));
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  return { done, reason };
}

/** `path`: of the list; `runs`: those that are chosen; `onDone` is called after something was done with them. */
export function Bulk({ path, runs, onDone }) {
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
