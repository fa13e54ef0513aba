/** Two runs side by side: figures, outputs, and the input of each agent. */
import { useState } from "preact/hooks";

import { get, url, withQuery } from "../api.js";
import { parts, rowsOf, rowsOfTexts } from "../compare/rows.js";
import { linesOf } from "../compare/talk_lines.js";
import { count, duration, knownAmount, money, plain, shortId, tokens } from "../format.js";
import { html } from "../html.js";
import { getAll, useData } from "../load.js";
import { Button, Copy, Empty, Folded, Link, Loaded, NoRun, Panel, Read, Status, Time } from "../parts/basics.js";
import { Pages, Rows, usePages } from "../parts/lists.js";
import { titleOf, worth } from "../parts/run_table.js";
import { Source } from "../parts/source.js";
import { instead } from "../parts/work.js";
import { go } from "../router.js";
import { isFinal } from "../run/state.js";

export function Compare({ id, query }) {
  const other = query.with ?? "";
  const [chooses, setChooses] = useState(false);
  const run = useData(url`/v1/runs/${id}`);
  if (run.error?.status === 404) return html`<${NoRun} />`;
  // The older run is `before`; ids begin with their time.
  const choose = (chosen) => {
    setChooses(false);
    const [before, after] = chosen < id ? [chosen, id] : [id, chosen];
    go(["runs", before, "compare"], { with: after });
  };
  return html`
    <div class="head"><h1>Compare two runs</h1>
      ${other && html`<div class="actions">
        <${Button} onClick=${() => go(["runs", other, "compare"], { with: id })}>Swap<//>
        <${Button} onClick=${() => setChooses(!chooses)} aria-expanded=${chooses}>Choose another run<//></div>`}
    </div>
    ${(!other || chooses) && html`<${Loaded} from=${run} what="the run">
      ${(found) => html`<${Choice} run=${found} onChoose=${choose} />`}<//>`}
    ${other && html`<${Both} key=${`${id} ${other}`} id=${id} other=${other} />`}`;
}

/** The agent of the run, which is shown first; null: the run has a graph. */
const asked = ({ before, after }) => after.agent ?? before.agent;
const isOver = ({ before, after }) => isFinal(before.status) && isFinal(after.status);
const hasAsked = (found) => asked(found) === null || found.agents.some((each) => each.agent === asked(found));

function Both({ id, other }) {
  const found = usePages(withQuery(url`/v1/runs/${id}/diff`, { with: other }),
    { of: "agents", isEnough: hasAsked, everyMs: 3000, ended: isOver });
  return html`<${Loaded} from=${found} what="the comparison">${(both) => {
    const { before, after, total, agents, next_cursor: cursor } = both;
    const all = [...agents].sort((a, b) => Number(b.agent === asked(both)) - Number(a.agent === asked(both)));
    return html`
      <div class="sides"><${Side} name="Before" run=${before} /><${Side} name="After" run=${after} /></div>
      <${Questions} before=${before.id} after=${after.id} />
      <${Panel} title="In all"><${Differences} of=${total} label="Figures of the runs" /><//>
      ${all.length === 0 && html`<${Panel}><${Empty} title="No agent has begun in these runs." /><//>`}
      ${all.map((each) => html`<${AgentDifference} key=${each.agent} of=${each} before=${before.id} after=${after.id}
        isAsked=${each.agent === asked(both)} />`)}
      ${cursor && html`<div><${Button} onClick=${found.more}>Show more agents<//></div>`}`;
  }}<//>`;
}

/** The questions of both runs. */
const Questions = ({ before, after }) => html`<${Panel} title="Question">
  <${Read} path=${url`/v1/runs/${before} /v1/runs/${after}`} from=${getAll} what="the question">
    ${([first, second]) => plain(first.input) === plain(second.input)
      ? html`<div class="body"><p class="small soft">The same in both.</p>
        <pre class="text story" tabindex="0">${plain(first.input)}</pre></div>`
      : html`<${Sides} rows=${rowsOfTexts(plain(first.input), plain(second.input))}
        label="Difference of the questions" />`}<//><//>`;

/** The outcome and the version of a run. */
function Worth({ id }) {
  const { data } = useData(url`/v1/runs/${id}`);
  return data && html`<span class="small">${data.judged_by ? worth(data) : "not judged"}
    ${data.version && ` · version ${data.version}`}</span>`;
}

const Side = ({ name, run }) => html`<section class="panel side" aria-label=${name}>
  <p class="small soft">${name}</p>
  <p><${Link} path=${["runs", run.id]}>${run.agent ?? run.graph}<//> <${Status} value=${run.status} /> <${Worth}
    id=${run.id} /></p>
  <p class="small soft"><span class="mono">${run.id}</span> <${Copy} text=${run.id} label="Copy id" /> made <${Time}
    at=${run.created_at} /></p>
</section>`;

const version = ({ before, after }) =>
  before === after ? `version ${after ?? "–"}` : `version ${before ?? "–"} → ${after ?? "–"}`;

/** `before` and `after`: ids of the runs; `isAsked`: the runs' first agent. */
const AgentDifference = ({ of, before, after, isAsked }) =>
  html`<${Panel} title=${of.agent} actions=${html`<span class="small soft">${version(of.version)}</span>`}>
  <div class="compared">
    <div><${Differences} of=${of} label=${`Figures of ${of.agent}`} />
      <${Received} agent=${of.agent} items=${of.received} more=${of.received_more} /></div>
    <div class="body"><${Output} agent=${of.agent} output=${of.output} /></div>
  </div>
  <${Talk} agent=${of.agent} before=${before} after=${after} isOpen=${isAsked} />
<//>`;

function Output({ agent, output }) {
  const { before, after, diff, truncated } = output;
  if (before === null && after === null) return html`<${Empty} title="No answer in either run." />`;
  return html`
    <h3>Answer ${before === after && !truncated && html`<span class="small soft">the same in both</span>`}</h3>
    ${truncated && html`<p class="note small">Only its beginning is shown and compared.</p>`}
    ${diff
      ? html`<${Sides} rows=${rowsOf(diff)} label=${`Difference of the answers of ${agent}`} />`
      : html`<pre class="value" tabindex="0" role="region" aria-label=${`Answer of ${agent} in both runs`}>
        ${after ?? before}</pre>`}`;
}

const at = ({ version: number, times }) => (side) =>
  number[side] === null ? "–" : `version ${number[side]}${times[side] > 1 ? `, ${times[side]} times` : ""}`;

const compared = ({ is_same, version: { before, after } }) =>
  is_same ? "same" : before === null ? "only after" : after === null ? "only before" : "differs";

const Received = ({ agent, items, more }) => items.length === 0 ? null : html`
  <${Rows} label=${`What ${agent} received`} items=${items} id=${({ source }) => source}
    head=${["Received from", "Before", "After", "Text"]} cells=${(each) => [html`<${Source} of=${each.source} />`,
      at(each)("before"), at(each)("after"), compared(each)]} />
  ${more && html`<p class="small soft">There are more than 100 sources.</p>`}`;

/** The server adds a run's end and waits to the answers of models, with any filter. */
const LATEST = { types: "llm.completed", order: "desc", limit: 20 };

/** Prompt and answer of an agent's last model call, as lines; "": the agent made no call. */
async function readTalk(id, agent) {
  const { items } = await get(withQuery(url`/v1/runs/${id}/events`, { agents: agent, ...LATEST }));
  const last = items.find(({ type }) => type === "llm.completed");
  if (!last) return "";
  const about = { task_id: last.task_id, call: last.data.call };
  const prompt = await get(withQuery(url`/v1/runs/${id}/prompt`, about));
  return linesOf([...prompt.messages, { role: "assistant", origin: "model", ...last.data.message }]);
}

/** `before` and `after`: ids of the runs. The data are read when the user opens the part; `isOpen`: open at first. */
const Talk = ({ agent, before, after, isOpen }) => html`<${Folded} class="talk" isOpen=${isOpen}
  summary=${`Prompts, tool calls and arguments of ${agent}`}>${() => html`<${Read} path=${`${before} ${after} ${agent}`}
    what="what was said" from=${() => Promise.all([before, after].map((id) => readTalk(id, agent)))}>
    ${([old, now]) => old || now
      ? html`${old === now && html`<p class="small soft">The same in both.</p>`}<${Sides} rows=${rowsOfTexts(old, now)}
        label=${`What ${agent} was told, called and said`} />`
      : html`<${Empty} title="It called no model in either run." />`}<//>`}<//>`;

const UUID = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/;

/** Relations of other runs to this run; runs that repeat each other come first. */
const relation = (run, each) =>
  each.id === run.retry_of ? "this run repeats it" : each.retry_of === run.id ? "repeats this run" : "";

function Choice({ run, onChoose }) {
  const source = useData(run.retry_of && url`/v1/runs/${run.retry_of}`);
  const [id, setId] = useState("");
  const choose = instead(() => onChoose(id));
  const alike = (each) => each.id !== run.id && each.id !== run.retry_of && each.agent === run.agent
    && each.graph === run.graph;
  return html`<${Panel} title=${`Compare ${shortId(run.id)} with`}>
    <${Pages} path=${withQuery("/v1/runs", { agent: run.agent, order: "desc" })} what="runs">${(items) => {
      const others = items.filter(alike).sort((a, b) => Number(!!relation(run, b)) - Number(!!relation(run, a)));
      const all = [...(source.data ? [source.data] : []), ...others];
      return all.length === 0
        ? html`<${Empty} title="There is no other run of it among the latest.">
          <p>Run it again, or enter the id of any run.</p><//>`
        : html`<ul class="rows">${all.map((each) => html`<li key=${each.id}><div class="actions">
            <${Button} kind="small" onClick=${() => onChoose(each.id)}
              aria-label=${`Compare with ${each.id}`}>Compare<//>
            <span>${titleOf(each, 80)}</span> <${Status} value=${each.status} /> <span class="small soft">
              ${[worth(each), each.version && `version ${each.version}`].filter(Boolean).join(" · ")} · made
              ${" "}<${Time} at=${each.created_at} /></span>
            ${relation(run, each) && html`<strong class="small">${relation(run, each)}</strong>`}</div></li>`)}</ul>`;
    }}<//>
    <form class="body filters" onSubmit=${choose}>
      <label class="grow">Id of a
        run <input class="mono" value=${id} onInput=${(e) => setId(e.target.value.trim().toLowerCase())} /></label>
      <button class="button" disabled=${!UUID.test(id) || id === run.id}>Compare</button>
    </form>
  <//>`;
}

/** @type {[string, string, (value: any) => string][]} */
const ROWS = [
  ["tokens", "Tokens", tokens], ["cost", "Cost", money], ["duration_ms", "Time", duration],
  ["model_calls", "Model calls", count], ["tool_calls", "Tool calls", count], ["queries", "Times asked", count],
];

/** The number of a figure; null: not known, such as a cost without a price. */
function amount(value) {
  if (value === null || typeof value === "number") return value;
  const known = knownAmount(value);
  return known === null ? null : Number(known);
}

/** The change from one number to another, such as "+25 %". */
function change(before, after) {
  if (before === null || after === null) return "–";
  if (before === after) return "same";
  if (before === 0) return "new";
  const percent = ((after - before) / before) * 100;
  const digits = Math.abs(percent) < 10 ? 1 : 0;
  return `${percent > 0 ? "+" : "−"}${Math.abs(percent).toFixed(digits)} %`;
}

/** A row for each figure in `of` (`{before, after}`); `label`: for screen readers. */
const Differences = ({ of, label }) => html`<${Rows} label=${label} items=${ROWS.filter(([name]) => of[name])}
  id=${([name]) => name} head=${["Figure", "#Before", "#After", "#Change"]} cells=${([name, label, shown]) => {
    const changed = change(amount(of[name].before), amount(of[name].after));
    return [label, shown(of[name].before), shown(of[name].after),
      ["same", "–"].includes(changed) ? changed : html`<mark>${changed}</mark>`];
  }} />`;

/** A line of a column; the element `tag` (`del` or `ins`) marks the part that only this line has. */
function Line({ row, side, tag }) {
  const text = row[side];
  if (row.kind === "gap") return html`<span class="soft">⋯</span>`;
  if (text === null) return null;
  if (row.kind === "same") return text;
  if (row.before === null || row.after === null) return html`<${tag}>${text}</${tag}>`;
  const [start, middle, end] = parts(row.before, row.after)[side === "before" ? 0 : 1];
  return html`${start}<${tag}>${middle}</${tag}>${end}`;
}

/** `rows`: result of `rowsOf` or `rowsOfTexts`; `label`: for screen readers. */
const Sides = ({ rows, label }) =>
  html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table class="differs">
  <thead><tr><th scope="col">Before</th><th scope="col">After</th></tr></thead>
  <tbody>${rows.map((row, i) => html`<tr key=${i} class=${row.kind}>
    <td class=${row.before === null ? "none" : ""}><${Line} row=${row} side="before" tag="del" /></td>
    <td class=${row.after === null ? "none" : ""}><${Line} row=${row} side="after" tag="ins" /></td></tr>`)}</tbody>
      </table></div>`;
